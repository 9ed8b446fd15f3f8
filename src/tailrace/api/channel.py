"""A WebSocket of `/v1/ws`: many streams at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from tailrace.access.audit import note_refusal
from tailrace.access.principal import arrival_of, sent_by, trace_of
from tailrace.api.fitting import fitted, left_open, shortened
from tailrace.api.followed_streams import FollowedStream, FollowedStreams, FrameSource
from tailrace.api.stream_facts import facts_of
from tailrace.assembly.models import Models
from tailrace.dialects import websocket
from tailrace.dialects.wire import shows_progress
from tailrace.errors import QueueFull, RequestError, SeqOutOfRange, TailraceError, Unauthenticated
from tailrace.http.accepted_websocket import UNAUTHENTICATED, Over, Socket
from tailrace.server import Server
from tailrace.streams import Reader, StreamLog
from tailrace.types import End, PromptProgress, Released, TextDelta

__all__ = ["StreamChannel"]


class _Frames(FrameSource):
    """The frames of one stream on `/v1/ws`."""

    def __init__(self, frames: websocket.Frames) -> None:
        self.format = frames

    def of_events(self, first_seq: int, events: Sequence[TextDelta]) -> list[bytes]:
        return [self.format.event(seq, event) for seq, event in enumerate(events, first_seq)]

    def of_ending(self, seq: int, ending: End | Released) -> list[bytes]:
        return [self.format.event(seq, ending)]

    def of_progress(self, progress: PromptProgress) -> list[bytes]:
        return [self.format.progress(progress)]


class StreamChannel:
    """A WebSocket of `/v1/ws`: receives commands, sends the frames of many streams. Commands are executed in order."""

    def __init__(self, models: Models, server: Server, socket: Socket, group: asyncio.TaskGroup) -> None:
        self._models = models
        self._streams = server.streams
        self._socket = socket
        self._is_strict = server.settings.strict
        self._group = group
        self._most = server.settings.ws_streams
        self._followed = FollowedStreams(socket)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the names of the streams

    async def run(self) -> None:
        while True:
            await self._execute(await self._socket.text())

    async def _execute(self, text: str) -> None:
        name = None
        try:
            body = self._socket.read_json(text.encode())
            name = websocket.name_of(body)
            if body.get("type") == "create":
                await self._create(body)
                return
            match websocket.parse(body):
                case websocket.FollowCommand() as follow:
                    await self._follow(follow)
                case websocket.Unfollow(wanted):
                    await self._unfollow(wanted)
                case websocket.Cancel() as cancel:
                    await self._cancel(cancel)
                case websocket.Ping(wanted):
                    await self._socket.say(websocket.encode_pong(wanted))
        except TailraceError as error:
            note_refusal(error, self._socket.scope)
            await self._socket.say(websocket.encode_refusal(name, error))
            if isinstance(error, Unauthenticated):
                raise Over(UNAUTHENTICATED) from None

    async def _create(self, body: dict[str, object]) -> None:
        self._socket.authenticate()
        model = body.get("model")
        found = self._models.find(model if isinstance(model, str) else None)  # another type is refused below
        if found is None and len(self._models.by_name) > 1:
            raise self._models.unknown()
        named = found or self._models.first.names[0]  # the only one: its log of requests has the refusal
        served = named.served
        with served.arriving(arrival_of(self._socket.scope, wire="websocket", model=named.model)):
            if found is None:
                raise self._models.unknown()
            self._socket.principal.require_generation(wire="websocket", model=named.model)
            self._check_free(websocket.name_of(body))
            await self._models.load(served)
            self._socket.authenticate()  # loading may take long
            create = websocket.parse_create(body, named)
            request = sent_by(self._socket.scope, create.request, wire="websocket", model=named.model)
            request, notes = fitted(request, served.generator, is_strict=self._is_strict)
            run = await served.generator.create(request)
        notes += [*shortened(create.request, run.record, "max_tokens"), *left_open(run.record)]
        shown = shows_progress(named, notes, wanted=create.return_progress, is_streamed=True)
        frames = self._frames_of(run.log, create.name)
        reader = Reader(run.log, shows_progress=shown)
        await self._begin(create.name, FollowedStream(run.log, reader, frames), frames.format.created(notes))

    async def _follow(self, follow: websocket.FollowCommand) -> None:
        self._socket.authenticate()
        self._check_free(follow.name or follow.stream_id)
        after = follow.after
        principal = self._socket.principal
        principal.require("read")
        principal.require_stream(follow.stream_id)
        try:
            log = await self._streams.find(principal.owner, follow.stream_id, after)
        except SeqOutOfRange as error:
            error.param = "after"
            raise
        observers = self._models.observers
        observers.on_followed(log.record, after)
        frames = self._frames_of(log, follow.name)
        if log.is_over(after):
            await self._socket.say(frames.format.ended(after))
            return
        stream = FollowedStream(log, Reader(log, after, shows_progress=follow.return_progress), frames)
        task = await self._begin(follow.name, stream, frames.format.following(after))
        begun_s, trace = time.monotonic(), trace_of(self._socket.scope)
        task.add_done_callback(lambda _: observers.on_read(log.record, after, time.monotonic() - begun_s, trace))

    async def _unfollow(self, name: str) -> None:
        stream, task = self._find(name), self._tasks[name]
        task.cancel()
        await asyncio.wait([task])
        await self._socket.say(self._frames_of(stream.log, name).format.unfollowed(stream.seq))

    async def _cancel(self, cancel: websocket.Cancel) -> None:
        self._socket.authenticate()
        principal = self._socket.principal
        principal.require("generate")
        if cancel.stream_id is not None:
            log = await self._streams.find(principal.owner, cancel.stream_id)
        else:
            assert cancel.name is not None
            log = self._find(cancel.name).log
        await self._streams.cancel(self._socket.scope, log)
        await self._socket.say(websocket.encode_status(cancel.name, log.stream_id, log.status))

    def _check_free(self, name: str | None) -> None:
        """Raises: RequestError if the name is used, QueueFull if the socket follows as many streams as allowed."""
        if name in self._followed.by_name:
            raise RequestError("This socket already follows a stream with this id.", param="id")
        if len(self._followed.by_name) >= self._most:
            raise QueueFull(f"A socket follows at most {self._most} streams.")

    def _find(self, name: str) -> FollowedStream:
        stream = self._followed.by_name.get(name)
        if stream is None:
            raise RequestError("This socket follows no stream with this id.", param="id")
        return stream

    def _frames_of(self, log: StreamLog, name: str | None) -> _Frames:
        return _Frames(websocket.Frames(name, facts_of(self._models.of(log), log)))

    async def _begin(self, name: str | None, stream: FollowedStream, first_frame: bytes) -> asyncio.Task[None]:
        """Send the first frame, and return a task that sends the rest. The reader is registered before both."""
        name = name or stream.log.stream_id
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(self._followed.following(name, stream))
            await self._socket.say(first_frame)
            task = self._tasks[name] = self._group.create_task(stream.send_all(self._socket))
            cleanup.callback(self._tasks.pop, name)
            leave = cleanup.pop_all().close
            task.add_done_callback(lambda _: leave())
            return task
