"""A WebSocket of `/v1/ws`: many streams at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import assert_never

from tailrace.access.audit import note_refusal
from tailrace.access.principal import arrival_of, sent_by, trace_of
from tailrace.api.fitting import fitted, left_open, shortened
from tailrace.api.stream_facts import facts_of
from tailrace.assembly.models import Models
from tailrace.dialects import websocket
from tailrace.dialects.websocket import Close
from tailrace.dialects.wire import shows_progress
from tailrace.errors import QueueFull, RequestError, SeqOutOfRange, TailraceError
from tailrace.http.accepted_websocket import Over, Socket
from tailrace.http.stream_actions import StreamActions
from tailrace.settings import Settings
from tailrace.streams import Reader, StreamLog
from tailrace.types import End, Released

__all__ = ["StreamChannel"]

_MAX_UNREADABLE = 10  # frames in a row


class _FollowedStream:
    """A stream that a socket follows."""

    def __init__(self, log: StreamLog, after: int, frames: websocket.Frames, *, shows_progress: bool) -> None:
        self.log = log
        self.frames = frames
        self.reader = Reader(log, after, shows_progress=shows_progress)
        self.seq = after  # of the last frame that was sent
        self.task: asyncio.Task[None] | None = None

    async def send_all(self, socket: Socket) -> None:
        reader, frames = self.reader, self.frames
        while True:
            match await reader.next():
                case list() as events:
                    if (progress := reader.take_progress()) is not None:
                        await socket.say(frames.progress(progress))
                    for start in range(0, len(events), socket.max_frames):
                        some = events[start : start + socket.max_frames]
                        await socket.say(*[frames.event(seq, event) for seq, event in enumerate(some, self.seq + 1)])
                        self.seq += len(some)
                case End() | Released() as ending:
                    await socket.say(frames.event(reader.cursor, ending))
                    self.seq = reader.cursor
                    return
                case never:
                    assert_never(never)


class StreamChannel:
    """A WebSocket of `/v1/ws`: receives commands, sends the frames of many streams. Commands are executed in order."""

    def __init__(
        self, models: Models, streams: StreamActions, settings: Settings, socket: Socket, group: asyncio.TaskGroup
    ) -> None:
        self._models = models
        self._streams = streams
        self._socket = socket
        self._group = group
        self._max_streams = settings.ws_streams
        self._is_strict = settings.strict
        self._following: dict[str, _FollowedStream] = {}
        self._num_unreadable = 0

    async def run(self) -> None:
        while True:
            await self._execute(await self._socket.text())

    async def _execute(self, text: str) -> None:
        name = None
        try:
            body = self._read(text)
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

    def _read(self, text: str) -> dict[str, object]:
        try:
            body = websocket.read(text)
        except RequestError:
            self._num_unreadable += 1
            if self._num_unreadable > _MAX_UNREADABLE:
                raise Over(Close(1008, "Too many frames are not JSON objects.")) from None
            raise
        self._num_unreadable = 0
        return body

    async def _create(self, body: dict[str, object]) -> None:
        model = body.get("model")
        found = self._models.find(model if isinstance(model, str) else None)  # another type is refused below
        if found is None and len(self._models.names) > 1:
            raise self._models.unknown()
        named = found or self._models.names[0]  # the only one: its log of requests has the refusal
        served = named.served
        with served.arriving(arrival_of(self._socket.scope, wire="websocket", model=named.model)):
            if found is None:
                raise self._models.unknown()
            self._socket.principal.require_generation(wire="websocket", model=named.model)
            self._check_free(websocket.name_of(body))
            await self._models.load(served)
            create = websocket.parse_create(body, named)
            request = sent_by(self._socket.scope, create.request, wire="websocket", model=named.model)
            request, notes = fitted(request, served.generator, is_strict=self._is_strict)
            run = await served.generator.create(request)
        notes += [*shortened(create.request, run.record, "max_tokens"), *left_open(run.record)]
        shown = shows_progress(named, notes, wanted=create.return_progress, is_streamed=True)
        following = self._frames_of(create.name, run.log, 0, shows_progress=shown)
        await self._begin(create.name, following, following.frames.created(notes))

    async def _follow(self, follow: websocket.FollowCommand) -> None:
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
        observers = self._models.of(log).generator.observers
        observers.on_followed(log.record, after)
        following = self._frames_of(follow.name, log, after, shows_progress=follow.return_progress)
        if log.is_over(after):
            await self._socket.say(following.frames.ended(after))
        else:
            await self._begin(follow.name, following, following.frames.following(after))
            assert following.task is not None
            begun_s, trace = time.monotonic(), trace_of(self._socket.scope)
            following.task.add_done_callback(
                lambda _: observers.on_read(log.record, after, time.monotonic() - begun_s, trace)
            )

    async def _unfollow(self, name: str) -> None:
        following = self._find(name)
        assert following.task is not None
        following.task.cancel()
        await asyncio.wait([following.task])
        await self._socket.say(following.frames.unfollowed(following.seq))

    async def _cancel(self, cancel: websocket.Cancel) -> None:
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
        if name in self._following:
            raise RequestError("This socket already follows a stream with this id.", param="id")
        if len(self._following) >= self._max_streams:
            raise QueueFull(f"A socket follows at most {self._max_streams} streams.")

    def _find(self, name: str) -> _FollowedStream:
        following = self._following.get(name)
        if following is None:
            raise RequestError("This socket follows no stream with this id.", param="id")
        return following

    def _frames_of(self, name: str | None, log: StreamLog, after: int, *, shows_progress: bool) -> _FollowedStream:
        frames = websocket.Frames(name, facts_of(self._models.of(log), log))
        return _FollowedStream(log, after, frames, shows_progress=shows_progress)

    async def _begin(self, name: str | None, following: _FollowedStream, first_frame: bytes) -> None:
        """Send the first frame, and start a task for the rest. The reader is registered before both."""
        name = name or following.log.stream_id
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(following.reader)
            self._following[name] = following
            cleanup.callback(self._following.pop, name)
            self._socket.busy()
            cleanup.callback(self._socket.free)
            await self._socket.say(first_frame)
            following.task = self._group.create_task(following.send_all(self._socket))
            leave = cleanup.pop_all().close
            following.task.add_done_callback(lambda _: leave())
