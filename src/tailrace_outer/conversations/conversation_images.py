"""The images of conversations over HTTP: what clients send is decoded, what they get are pixels."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.access.principal import arrival_of, owner_of, principal_of
from tailrace.api.routes import route
from tailrace.conversations.item_images import ID_PREFIX, MAX_BYTES, digest_in
from tailrace.dialects.bodies import to_json
from tailrace.errors import RequestError, UnknownConversation, UnsupportedMediaType
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.http.body_budget import BodyBudget
from tailrace.images.owner_turns import OwnerTurns
from tailrace.images.reader import ImageReader
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.records.records_service import Records
from tailrace.types import Image, KeptImage

__all__ = ["ConversationImageRoutes", "ImageIntake"]

_AT_ONCE = 4  # requests whose images are in memory
_SHOWN_AT_ONCE = 12  # browsers ask for six at once
_WAIT_S = 60.0  # for the turn of a request
_BUSY = "Too many images are in use. Try again later."
_HEADERS = {
    "cache-control": "private, no-cache",  # kept by the browser, which asks each time whether it may still show it
    "content-disposition": "inline",
    "content-security-policy": "default-src 'none'; sandbox",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


class ImageIntake:
    """Reads the images that are added to conversations, a few requests at a time. A request with images counts against
    the limits of its key, and gets a row in the records."""

    def __init__(self, records: Records, reader: ImageReader, is_wanted: Callable[[], bool]) -> None:
        """`is_wanted`: whether a model reads images, so that larger bodies are taken."""
        self.is_wanted = is_wanted
        self._records = records
        self._reader = reader
        self._turns = OwnerTurns(_AT_ONCE, _AT_ONCE // 2)

    @contextlib.asynccontextmanager
    async def reading(self, scope: Scope, images: Sequence[Image]) -> AsyncIterator[list[tuple[KeptImage, bytes]]]:
        """Read the images of a request in the form in which they are kept. They are in memory until this context ends.

        Raises: RequestError if one cannot be used, or the owner has none of this id; AdmissionError, StorageError.
        """
        if not images:
            yield []
            return
        async with self._turn(scope) as owner:
            images = await self._reader.fetch(tuple(images), _WAIT_S, owner=owner)
            own = await self._records.conversations.find_images(owner, images)
            new = [one for one in own if not one.kept]
            rest = iter(await self._reader.read(new, as_sent=False, owner=owner))
            whole = [one if one.kept else next(rest) for one in own]
            yield [(one.kept or _as_kept(one), one.content) for one in whole]

    @contextlib.asynccontextmanager
    async def reading_file(
        self, scope: Scope, contents: Mapping[str, bytes]
    ) -> AsyncIterator[dict[str, tuple[KeptImage, bytes]]]:
        """As `reading`, for the images of a file, by their names in it."""
        if not contents:
            yield {}
            return
        async with self._turn(scope) as owner:
            images = [Image(content, "images") for content in contents.values()]
            read = await self._reader.read(images, as_sent=False, owner=owner, most_bytes=MAX_BYTES)
            yield {name: (_as_kept(one), one.content) for name, one in zip(contents, read, strict=True)}

    @contextlib.asynccontextmanager
    async def _turn(self, scope: Scope) -> AsyncIterator[str]:
        """Count a request, wait for its owner's turn, and yield the owner. Raises: AdmissionError, StorageError."""
        log, owner = self._records.request_log, owner_of(scope)
        arrival = arrival_of(scope, wire="conversations", model="")
        with contextlib.nullcontext() if log is None else log.counted(arrival):
            async with self._turns.turn_or_refusal(owner, _WAIT_S, _BUSY):
                yield owner


def _as_kept(image: Image) -> KeptImage:
    return KeptImage(image.digest, image.media_type, len(image.content))


class ConversationImageRoutes:
    """Showing an image needs the scope `read`, adding one needs `generate`."""

    def __init__(self, conversations: ConversationKeeper, bodies: BodyBudget, intake: ImageIntake) -> None:
        self._conversations = conversations
        self._bodies = bodies
        self._intake = intake
        self._showing = OwnerTurns(_SHOWN_AT_ONCE, _SHOWN_AT_ONCE // 2)

    def table(self) -> list[Route]:
        path = "/v1/conversations/{conversation_id}/images"
        return [route("POST", path, self._add), route("GET", path + "/{image_id}", self._show)]

    async def _add(self, request: Request) -> ASGIApp:
        principal_of(request.scope).require("generate")
        owner, conversation_id = owner_of(request.scope), request.path_params["conversation_id"]
        if not request.headers.get("content-type", "").lower().startswith("image/"):
            raise UnsupportedMediaType("Send the image with its type, such as image/png.", param="content-type")
        await self._conversations.ask(lambda store: store.get(owner, conversation_id))
        with self._bodies.reader(request.scope, has_images=self._intake.is_wanted()) as reader:
            content = await reader.read(request.headers, request.receive)
            if not content:
                raise RequestError("The image is empty.", param="image")
            async with self._intake.reading(request.scope, [Image(content, "image")]) as ((image, canonical),):
                key_id = principal_of(request.scope).key_id
                await self._conversations.put_images(owner, conversation_id, {image: canonical}, key_id=key_id)
        body = {
            "id": ID_PREFIX + image.digest,
            "object": "conversation.image",
            "media_type": image.media_type,
            "bytes": image.num_bytes,
        }
        return JsonAnswer(to_json(body))

    async def _show(self, request: Request) -> ASGIApp:
        principal_of(request.scope).require("read")
        path = request.path_params
        digest = digest_in(path["image_id"])
        if not digest:
            raise UnknownConversation("The conversation has no image with this id.", param="image_id")
        headers = {**_HEADERS, "etag": f'"{digest}"'}
        find = partial(self._conversations.image, owner_of(request.scope), path["conversation_id"], digest)
        if f'"{digest}"' in request.headers.get("if-none-match", ""):
            await find()
            return Response(status_code=304, headers=headers)
        return _File(find, self._showing, owner_of(request.scope), headers)


class _File:
    """The answer with an image. Few are in memory at once, also if their readers are slow."""

    def __init__(
        self,
        find: Callable[[], Awaitable[tuple[KeptImage, bytes]]],
        turns: OwnerTurns,
        owner: str,
        headers: Mapping[str, str],
    ) -> None:
        self._find = find
        self._turns = turns
        self._owner = owner
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._turns.turn_or_refusal(self._owner, _WAIT_S, _BUSY):
            image, content = await self._find()
            await Response(content, headers=self._headers, media_type=image.media_type)(scope, receive, send)
