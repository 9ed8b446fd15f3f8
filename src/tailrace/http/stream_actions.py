"""What clients do with a stream that has begun, of a model or of an app: follow it, show it, cancel it, delete it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Literal, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from tailrace.access.audit import noting
from tailrace.access.principal import owner_of
from tailrace.dialects import Encoder
from tailrace.dialects.wire import Presentation
from tailrace.errors import StreamExpired, UnknownStream
from tailrace.http.asgi_answers import JsonAnswer, StreamAnswer
from tailrace.settings import Settings
from tailrace.streams import LogStore, StreamLog
from tailrace.types import ContentT, Record, is_stream_id

__all__ = ["KeptLonger", "StreamActions"]


class KeptLonger(Protocol[ContentT]):
    """Ended streams that are kept for longer than the log store keeps them."""

    async def kept(self, owner: str, stream_id: str) -> StreamLog[ContentT] | None: ...
    async def forget(self, owner: str, stream_id: str) -> None: ...


class StreamActions(Generic[ContentT]):
    """The actions on the streams of a log store. All doors of a server use them: HTTP, WebSockets, extensions."""

    def __init__(
        self, store: LogStore[ContentT], settings: Settings, kept_longer: KeptLonger[ContentT] | None = None
    ) -> None:
        self._store = store
        self._settings = settings
        self._kept_longer = kept_longer
        self.more_headers: list[Callable[[Record], Mapping[str, str]]] = []  # of answers with a stream

    def use(self, settings: Settings) -> None:
        """Use other settings from now on."""
        self._settings = settings

    async def find(self, owner: str, stream_id: str, after: int = 0) -> StreamLog[ContentT]:
        """Find a stream in the log store, or among those that are kept longer. Raises: as `LogStore.read`."""
        try:
            return await self._store.read(owner, stream_id, after)
        except (UnknownStream, StreamExpired):
            kept = await self._kept_longer.kept(owner, stream_id) if self._kept_longer is not None else None
            if kept is None:
                raise
        kept.check_position(after)
        return kept

    def follow(
        self,
        log: StreamLog[ContentT],
        encoder: Encoder[ContentT],
        presentation: Presentation,
        after: int = 0,
        headers: Iterable[tuple[str, str]] = (),
    ) -> ASGIApp:
        """Return the events after `after`. If there is none any more, this is 204, which stops an EventSource."""
        if log.is_over(after):
            return Response(status_code=204, headers=self.headers_of(log))
        path = self.path_of(log)
        ours = {**self.headers_of(log), "location": path + "/events", "content-location": path}
        return StreamAnswer(
            log,
            encoder,
            presentation,
            after=after,
            headers=[*(one for one in headers if one[0] not in ours), *ours.items()],
            heartbeat_s=self._settings.heartbeat_s,
        )

    async def act(
        self,
        scope: Scope,
        stream_id: str,
        verb: Literal["show", "cancel", "delete"],
        open_encoder: Callable[[StreamLog[ContentT]], Encoder[ContentT]],
    ) -> ASGIApp:
        """Do it, and show the stream: 204 if the encoder has no body for it. To delete a stream cancels it, too.
        `open_encoder` refuses streams that its wire cannot show; they are left as they are.

        Raises: StreamError, RequestError, StorageError.
        """
        owner = owner_of(scope)
        noted = stream_id if is_stream_id(stream_id) else ""  # it may be any text
        with contextlib.nullcontext() if verb == "show" else noting(f"stream.{verb}", scope, stream=noted):
            log = await self.find(owner, stream_id)
            if verb != "show" and log.end is None:
                open_encoder(log)
                await self._store.stop(owner, stream_id)
            body = open_encoder(log).whole(log.events)
            if verb == "delete":
                with contextlib.suppress(UnknownStream, StreamExpired):
                    await self._store.delete(owner, stream_id)
                if log.record.keep and self._kept_longer is not None:
                    await self._kept_longer.forget(owner, stream_id)
        headers = self.headers_of(log)
        return JsonAnswer(body, 200, headers) if body else Response(status_code=204, headers=headers)

    async def cancel(self, scope: Scope, log: StreamLog[ContentT]) -> None:
        """End a stream as cancelled, if it has not ended. Raises: StreamError, StorageError."""
        with noting("stream.cancel", scope, stream=log.stream_id):
            if log.end is None:
                await self._store.stop(owner_of(scope), log.stream_id)

    def headers_of(self, log: StreamLog[Any]) -> dict[str, str]:  # Any: of a model or of an app
        """Return the headers of answers with this stream: its id, and those of extensions."""
        more = (headers(log.record).items() for headers in self.more_headers)
        return {"x-stream-id": log.stream_id, **dict(itertools.chain(*more))}

    def path_of(self, log: StreamLog[ContentT]) -> str:
        """Return the path that has the streams of all wires."""
        return f"{self._settings.root_path}/v1/streams/{log.stream_id}"
