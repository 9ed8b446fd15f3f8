from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tailrace.server import LocalNotes, Opened, Options, Server, owner_of, principal_of


@asynccontextmanager
async def open_memory(server: Server, options: Options) -> AsyncIterator[Opened]:
    notes = await server.notes_of("parrot")
    if not isinstance(notes, LocalNotes):
        yield Opened()  # servers that share a Redis have no memory
        return
    phrases: dict[str, list[str]] = {}
    for note in notes.read():
        if note.body is not None:
            phrases.setdefault(note.key.decode(), []).append(note.body.decode())

    async def remember(request: Request) -> JSONResponse:
        principal_of(request.scope).require("generate")
        with server.bodies.reader(request.scope) as reader:
            phrase = await reader.read(request.headers, request.receive)
        owner = owner_of(request.scope)
        known = phrases.setdefault(owner, [])
        if len(known) < options["parrot_phrases"]:
            notes.add(owner.encode(), phrase)
            known.append(phrase.decode("utf-8", "replace"))
        return JSONResponse(known)

    async def forget(owner: str) -> Mapping[str, int]:
        notes.erase(owner.encode())
        return {"parrot_phrases": len(phrases.pop(owner, ()))}

    yield Opened([Route("/phrases", remember, methods=["POST"])], forget=forget)
