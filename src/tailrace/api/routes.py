"""The routes: the operations of all wires.

Dialects parse the requests. Starting, following, cancelling and answering are the same for all wires, and are here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import assert_never

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.access.principal import arrival_of, owner_of, principal_of, sent_by, trace_of
from tailrace.api.fitting import cut_inputs, fitted_inputs
from tailrace.api.request_headers import (
    ignored_header,
    is_background,
    with_priority,
)
from tailrace.api.stream_starts import BegunStream, OverflownPrompt, StreamStarts, claim_of, num_image_bytes
from tailrace.assembly.models import Models
from tailrace.assembly.served import NamedModel
from tailrace.dialects import ParsedRequest, Wire
from tailrace.dialects.bodies import JsonBody, printable, require_plain_utf8
from tailrace.dialects.queries import read_query
from tailrace.dialects.wire import (
    Follow,
    Following,
    Generate,
    GenerateCall,
    MakeVectors,
    OnStream,
    Operation,
    Reply,
    Show,
    name_on_wire,
    with_wire_names,
)
from tailrace.errors import (
    QueueFull,
    RequestError,
)
from tailrace.http.asgi_answers import JsonAnswer, WholeAnswer, WithHeaders, unless_left
from tailrace.http.body_budget import BodyReader
from tailrace.http.wires import ServedWires, is_meant
from tailrace.images.owner_turns import OwnerTurns
from tailrace.server import Server, Take
from tailrace.types import Claim

__all__ = ["Routes", "route"]

_SLOW_AT_ONCE = 3  # operations in threads; more wait
_SLOW_OF_OWNER = 2
_SLOW_WAITING = 32
_INLINE_BYTES = 65_536  # of vectors, written as JSON in a few milliseconds

Handler = Callable[[Request], Awaitable[ASGIApp]]


class Routes:
    """All operations of all wires."""

    def __init__(
        self,
        wires: ServedWires,
        models: Models,
        server: Server,
        starts: StreamStarts,
        takes: Mapping[tuple[str, str], Take] | None = None,
    ) -> None:
        self._takes = takes or {}
        self._wires = wires
        self._models = models
        self._server = server
        self._starts = starts
        self._slow = OwnerTurns(_SLOW_AT_ONCE, _SLOW_OF_OWNER)
        self._num_slow = 0

    def table(self) -> list[Route]:
        """Return a route for each method and path. Wires that share one are distinguished by the query or a header."""

        def route_key(entry: tuple[Wire, Operation]) -> tuple[str, str]:
            return entry[1].path, entry[1].method

        entries = [(wire, operation) for wire in self._wires.all for operation in wire.operations]
        entries.sort(key=route_key)
        routes = [
            route(method, path, self._handler(list(shared)))
            for (path, method), shared in groupby(entries, key=route_key)
        ]
        return sorted(routes, key=lambda one: ":path}" in one.path)  # those that match any path come last

    def _handler(self, shared: Sequence[tuple[Wire, Operation]]) -> Handler:
        candidates = sorted(shared, key=lambda entry: not entry[1].is_conditional)
        headers = {one.only_with_header for _, one in shared if one.only_with_header is not None}
        vary = {"vary": ", ".join(sorted(headers))} if headers else {}
        return partial(self._answer, candidates, vary)

    async def _answer(
        self, candidates: Sequence[tuple[Wire, Operation]], vary: dict[str, str], request: Request
    ) -> ASGIApp:
        """Run the operation that the request means, of those that share the path."""
        matching = (entry for entry in candidates if is_meant(entry[1], request.query_params, request.headers))
        wire, operation = next(matching, (None, None))
        if wire is None or operation is None:
            wanted = sorted({one.only_with for _, one in candidates if one.only_with is not None})
            raise RequestError(f"This path needs one of these query parameters: {', '.join(wanted)}.")
        principal = principal_of(request.scope)
        principal.require(_action_of(operation))
        principal.require_within("wire", wire.name)
        has_images = operation.has_images and self._models.read_images
        with self._server.bodies.reader(request.scope, has_images=has_images) as reader:
            parsed, meant = await self._parse(wire, operation, request, reader)
            known = [name.rstrip("!") for name in operation.query]
            unknown = [printable(name) for name in parsed.query if name not in known]
            headers = ignored_header(unknown, is_strict=self._server.settings.strict) | vary
            take = self._takes.get((operation.method, operation.path))
            if take is not None and (taken := await take(request, parsed.body)) is not None:
                return WithHeaders(taken, headers) if headers else taken
            match operation.act:
                case Generate(parse) as act:
                    act = replace(act, parse=partial(_parsed, parse, reader))
                    answer = await self._generate(wire, act, request, parsed, meant)
                case MakeVectors() as act:
                    answer = await self._make_vectors(wire, act, request, parsed, meant)
                case Follow(parse, topic, may_have_ended):
                    owner, has_ended = owner_of(request.scope), may_have_ended(parsed)
                    found = parse(await self._starts.with_newest(wire, owner, parsed, topic, has_ended=has_ended))
                    if isinstance(found, Reply):
                        answer = self._reply(found)
                    else:
                        answer = await self._follow(request.scope, found)
                case OnStream(find, verb, topic):
                    owner = owner_of(request.scope)
                    stream_id, view = find(await self._starts.with_newest(wire, owner, parsed, topic))
                    opened = partial(self._starts.open, view)
                    answer = await self._server.streams.act(request.scope, stream_id, verb, opened)
                case Show(render, is_slow):
                    answer = self._reply(
                        await self._show_slowly(owner_of(request.scope), render, parsed) if is_slow else render(parsed)
                    )
        return WithHeaders(answer, headers) if headers else answer

    async def _show_slowly(self, owner: str, render: Callable[[ParsedRequest], Reply], parsed: ParsedRequest) -> Reply:
        if self._num_slow >= _SLOW_WAITING:
            raise QueueFull("Too many requests of this kind are waiting.", retry_after_s=1.0)
        self._num_slow += 1
        try:
            async with self._slow.turn(owner):
                return await asyncio.to_thread(render, parsed)
        finally:
            self._num_slow -= 1

    async def _parse(
        self, wire: Wire, operation: Operation, request: Request, reader: BodyReader
    ) -> tuple[ParsedRequest, NamedModel | None]:
        """Return the parsed request, and the model that it names. If a server of one model has no such model, this is
        None, and what needs a model refuses the request. Raises: RequestError."""
        query = read_query(request.scope["query_string"])
        if operation.query_in_body:
            query = await reader.with_fields(query, request.headers, request.receive)
        body: JsonBody = {}
        if operation.body is not None:
            operation.check(request.headers)
            require_plain_utf8(request.headers)
            body = operation.read(await reader.read_json(request.headers, request.receive), request.headers)
        return self._starts.addressed(wire, operation, request, body, query, reader=reader)

    def _reply(self, reply: Reply) -> Response:
        headers = ignored_header(reply.ignored, is_strict=self._server.settings.strict)
        if reply.retry_after_s is not None:
            headers["retry-after"] = f"{reply.retry_after_s:.0f}"
        return Response(reply.body, reply.status, headers, reply.media_type)

    async def _make_vectors(
        self, wire: Wire, act: MakeVectors, request: Request, parsed: ParsedRequest, meant: NamedModel | None
    ) -> ASGIApp:
        named = meant or self._models.first.names[0]
        served = named.served
        with served.arriving(arrival_of(request.scope, wire=wire.name, model=named.model)):
            if meant is None:
                raise self._models.unknown()
            served.generator.check_task(act.task)
            call = act.parse(parsed)
            if isinstance(call, Reply):
                return self._reply(call)
            ignored_header(call.ignored, is_strict=self._server.settings.strict)
            if not served.is_loaded:
                await self._models.load(served, is_background=is_background(request))
            wanted = with_priority(fitted_inputs(call.request, is_strict=self._server.settings.strict), request)
            try:
                run = await served.embedder.begin(sent_by(request.scope, wanted, wire=wire.name, model=named.model))
            except RequestError as error:
                raise with_wire_names(error, wire, parsed) from None
        vectors = await unless_left(request.receive, run.result())
        is_long = sum(map(len, vectors.vectors)) > _INLINE_BYTES
        body = await asyncio.to_thread(call.view.encode, vectors) if is_long else call.view.encode(vectors)
        notes = [*call.ignored, *cut_inputs(wanted, run, name_on_wire("input", wire, parsed))]
        return JsonAnswer(body, headers=ignored_header(notes, is_strict=False))

    # Streams

    async def _generate(
        self, wire: Wire, act: Generate, request: Request, parsed: ParsedRequest, meant: NamedModel | None
    ) -> ASGIApp:
        """Begin a stream, and return its answer."""
        started = await self._starts.start(wire, act, request, parsed, meant, partial(_claim_of, request, parsed))
        match started:
            case Reply():
                return self._reply(started)
            case Following():
                return await self._follow(request.scope, started)
            case GenerateCall(_, view):
                return Response(headers={"content-type": view.media_type})
            case OverflownPrompt(call, facts, end, notes):
                body = call.view.open(facts).encode(1, end)
                return Response(body, 200, ignored_header(notes, is_strict=False), call.view.media_type)
            case BegunStream(call, log, facts, notes):
                encoder = call.view.open(facts)
                headers = self._server.streams.headers_of(log) | ignored_header(notes, is_strict=False)
                if call.stream:
                    return self._server.streams.follow(log, encoder, call.view, headers=headers.items())
                if call.at_once:
                    headers["location"] = self._server.streams.path_of(log)
                    return JsonAnswer(encoder.whole(log.events), call.status, headers)
                return WholeAnswer(log, encoder, wire, headers)
            case never:
                assert_never(never)

    async def _follow(self, scope: Scope, following: Following) -> ASGIApp:
        log, encoder = await self._starts.follow(owner_of(scope), following)
        answer = self._server.streams.follow(log, encoder, following.view, following.after)
        observers = self._models.observers
        if not observers.hear_of_reads:
            return answer
        return _Read(answer, partial(observers.on_read, log.record, following.after), trace_of(scope))


def _parsed(
    parse: Callable[[ParsedRequest], GenerateCall | Following | Reply], reader: BodyReader, parsed: ParsedRequest
) -> GenerateCall | Following | Reply:
    """Raises: RequestError; BodyTooLarge for too much text beside the images."""
    call = parse(parsed)
    if isinstance(call, GenerateCall):
        reader.check_text(num_image_bytes(call.request))
    return call


def _claim_of(request: Request, parsed: ParsedRequest) -> Claim | None:
    """Return the idempotency key of a request. Raises: RequestError."""
    key = request.headers.get("idempotency-key")
    return None if key is None else claim_of(key, [request.scope["path"], dict(parsed.query), parsed.body])


def _action_of(operation: Operation) -> str:
    """Return the scope that a key needs for an operation."""
    match operation.act:
        case Generate() | MakeVectors():
            return "generate"
        case OnStream(_, verb):
            return "read" if verb == "show" else "generate"
        case Follow() | Show():
            return "read"


class _Read:
    """The answer to a client that follows a stream: an ASGI application. `on_end` gets the seconds that it took."""

    def __init__(self, answer: ASGIApp, on_end: Callable[[float, str], None], trace: str) -> None:
        self._answer = answer
        self._on_end = on_end
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun_s = time.monotonic()
        try:
            await self._answer(scope, receive, send)
        finally:
            self._on_end(time.monotonic() - begun_s, self._trace)


class _Endpoint:
    """A handler as an ASGI application. The edge answers its exceptions.

    It is a class because Starlette wraps functions in two more calls, which stay on the stack while a stream runs.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive))
        await answer(scope, receive, send)


def route(method: str, path: str, handler: Handler) -> Route:
    """Return a route. Its handler returns the ASGI application that answers."""
    return Route(path, _Endpoint(handler), methods=[method])
