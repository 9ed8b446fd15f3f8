"""A WebSocket of a wire with several streams at once, in lanes (`dialects.wire.SocketLanes`).

A lane answers one command after the other; lanes run beside each other. Each stream continues for its linger time when
the connection is lost, so that the client can follow it on another one. When the client closes the socket because it
needs nothing more, the streams that it began here are cancelled, unless they were meant to outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import partial

from msgspec.structs import replace
from starlette.requests import HTTPConnection

from tailrace.access.audit import note_refusal
from tailrace.access.principal import caller_of, trace_of
from tailrace.api.followed_streams import FollowedStream, FollowedStreams, FrameSource
from tailrace.api.stream_starts import BegunStream, OverflownPrompt, StreamStarts, claim_of, num_image_bytes
from tailrace.assembly.models import Models
from tailrace.dialects import Encoder, Wire
from tailrace.dialects.queries import read_query
from tailrace.dialects.wire import (
    FrameEncoder,
    Generate,
    GenerateCall,
    LaneAnswer,
    LaneCancel,
    LaneCreate,
    LaneFollow,
    OnSocket,
    ParsedRequest,
    SocketLanes,
)
from tailrace.errors import QueueFull, SeqOutOfRange, TailraceError, TooManyLanes, Unauthenticated, UnknownStream
from tailrace.http.accepted_websocket import UNAUTHENTICATED, Over, Socket
from tailrace.http.lane_streams import LaneStream, LaneTake
from tailrace.server import Server
from tailrace.streams import Reader, StreamLog
from tailrace.transport.websocket_parts import LargeMessages
from tailrace.types import End, GenerateRequest, Released, TextDelta

__all__ = ["LaneSocket"]

logger = logging.getLogger("tailrace.server")

_MAX_AT_ONCE = 16  # streams; more wait
_MAX_WAITING = 64  # commands
_MAX_BEGUN = 256  # streams that are not kept, and can be continued on this socket
_MAX_BEGUN_BYTES = 2**22  # of what they need for it; the last one may need more
_NOTHING_LEFT = "This stream has no events after this one."


class _Frames(FrameSource):
    def __init__(self, encoder: FrameEncoder) -> None:
        self.encoder = encoder
        self.has_sent = False

    def of_events(self, first_seq: int, events: Sequence[TextDelta]) -> list[bytes]:
        frames = [frame for seq, event in enumerate(events, first_seq) for frame in self.encoder.frames(seq, event)]
        self.has_sent |= bool(frames)
        return frames

    def of_ending(self, seq: int, ending: End | Released) -> list[bytes]:
        frames = self.encoder.frames(seq, ending)
        self.has_sent |= bool(frames)
        return frames

    def of_silence(self) -> list[bytes]:
        return self.encoder.beat_frames()


@dataclass(slots=True)
class _Lane:
    waiting: deque[tuple[LaneCreate | LaneFollow, int]] = field(default_factory=deque)  # with their bytes
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A stream to send."""

    log: StreamLog
    encoder: Encoder
    notes: Sequence[str] = ()
    is_followed: bool = False  # it has begun earlier


class LaneSocket:
    """Reads the commands of one socket, and answers them in their lanes."""

    def __init__(
        self,
        wire: Wire,
        lanes: SocketLanes,
        models: Models,
        server: Server,
        starts: StreamStarts,
        socket: Socket,
        take: LaneTake | None = None,
    ) -> None:
        assert isinstance(lanes.operation.act, Generate)
        self._wire = wire
        self._table = lanes
        self._act = lanes.operation.act
        self._models = models
        self._streams = server.streams
        self._starts = starts
        self._bodies = server.bodies
        self._caller = caller_of(socket.scope)
        self._settings = settings = server.settings
        self._socket = socket
        self._sender = HTTPConnection(socket.scope)
        self._take = take
        self._taken: dict[str | None, LaneStream] = {}  # streams of an extension that are followed, by their lanes
        self._group = asyncio.TaskGroup()
        most = min(_MAX_AT_ONCE, settings.ws_streams)
        self._room = asyncio.Semaphore(most)
        self._followed = FollowedStreams(socket)
        self._lanes: dict[str | None, _Lane] = {}
        self._most_bytes = settings.ws_message_bytes
        self._num_pending_bytes = 0  # of commands that have not begun
        self._begun: dict[str, bytes] = {}  # what streams that are not kept need to be continued here
        self._own: dict[str, StreamLog] = {}  # running streams that end when the client is done with the socket

    async def run(self) -> None:
        """Answer until the socket ends. Raises: Over or ConnectionError, in groups."""
        self._allow_bodies()
        try:
            async with self._group:
                await self._resume()
                while True:
                    await self._say_now(*self._accept(await self._socket.text()))
        finally:
            self._give_back(self._num_pending_bytes)

    def _allow_bodies(self) -> None:
        """Let commands be as large as bodies may be over HTTP. They share the memory of bodies as they arrive."""
        if self._socket.principal.has("generate"):
            has_images = self._table.operation.has_images and self._models.read_images
            self._most_bytes = max(self._most_bytes, self._bodies.largest(has_images=has_images))
            take, give_back = partial(self._bodies.take, self._caller), partial(self._bodies.give_back, self._caller)
            self._socket.allow_larger(self._most_bytes, LargeMessages(take, give_back))

    async def _resume(self) -> None:
        try:
            command = self._table.resumed(read_query(self._socket.scope["query_string"]))
            if command is not None:
                self._enqueue(command, 0)
        except TailraceError as error:
            await self._refuse(error, None)

    def _accept(self, text: str) -> tuple[LaneCancel | LaneAnswer | TailraceError | None, str | None]:
        """Read a command, which waits in its lane then. Returns what is to be done at once, and the lane. Nothing of
        this is the text: the client may be slow to read an answer, and its memory does not count any more."""
        lane = None
        try:
            raw = text.encode()
            self._bodies.check_images(raw)
            body = self._socket.read_json(raw)
            lane = self._table.lane_of(body)
            self._socket.authenticate()
            command = self._table.read(body)
            if isinstance(command, LaneCancel | LaneAnswer):
                return command, lane
            self._enqueue(command, len(raw))
        except TailraceError as error:
            return _without_frames(error), lane
        return None, lane

    async def _say_now(self, asked: LaneCancel | LaneAnswer | TailraceError | None, lane: str | None) -> None:
        try:
            match asked:
                case LaneCancel(stream_id):
                    await self._cancel(stream_id)
                case LaneAnswer(frame):
                    await self._socket.say(frame)
                case TailraceError():
                    raise asked
        except TailraceError as error:
            await self._refuse(error, lane)
            if isinstance(error, Unauthenticated):
                raise Over(UNAUTHENTICATED) from None

    async def _refuse(self, error: TailraceError, lane: str | None) -> None:
        note_refusal(error, self._socket.scope)
        await self._socket.say(self._table.encode_error(_without_frames(error), lane))

    def _enqueue(self, command: LaneCreate | LaneFollow, num_bytes: int) -> None:
        """Raises: Forbidden; TooManyLanes; QueueFull for too many waiting commands; AdmissionError for too many bodies
        on this server."""
        self._require("generate" if isinstance(command, LaneCreate) else "read")
        lane = self._lanes.get(command.lane)
        if lane is None:
            if len(self._lanes.keys() - {None}) >= self._table.max_lanes and command.lane is not None:
                raise TooManyLanes(f"A socket has at most {self._table.max_lanes} names.", param="stream_id")
            lane = self._lanes[command.lane] = _Lane()
        num_waiting = sum(len(one.waiting) for one in self._lanes.values())
        is_long = self._num_pending_bytes + num_bytes > self._most_bytes
        if num_waiting >= _MAX_WAITING or (num_waiting and is_long):
            raise QueueFull("Too many commands wait on this socket.", retry_after_s=1.0)
        self._bodies.take(self._caller, num_bytes, 0)
        self._num_pending_bytes += num_bytes
        lane.waiting.append((command, num_bytes))
        self._socket.busy()
        if lane.task is None:
            lane.task = self._group.create_task(self._answer_all(lane))

    async def _answer_all(self, lane: _Lane) -> None:
        while lane.waiting:
            async with self._room:
                await self._answer(*lane.waiting.popleft())
        lane.task = None

    async def _answer(self, command: LaneCreate | LaneFollow, num_bytes: int) -> None:
        lane, is_followed = command.lane, isinstance(command, LaneFollow)
        try:
            try:
                self._socket.authenticate()  # the command may have waited for long
                found = await (
                    self._create(command, num_bytes) if isinstance(command, LaneCreate) else self._follow(command)
                )
            finally:
                del command  # it may be large, and the answer may take long
                self._give_back(num_bytes)
            if isinstance(found, LaneStream):
                await self._pass(lane, found, is_followed=is_followed)
            elif found is not None:
                await self._send(lane, found)
        except TailraceError as error:
            await self._refuse(error, lane)
        except ConnectionError:
            raise
        except Exception:  # other lanes go on
            logger.exception("a command on a WebSocket failed")
            await self._refuse(TailraceError("Internal server error. See the server's log."), lane)
        finally:
            self._socket.free()

    def _give_back(self, num_bytes: int) -> None:
        self._num_pending_bytes -= num_bytes
        self._bodies.give_back(self._caller, num_bytes)

    async def _create(self, command: LaneCreate, num_bytes: int) -> _Found | LaneStream | None:
        """Return the stream; None if the answer is sent already. Raises: TailraceError."""
        sender, operation, socket = self._sender, self._table.operation, OnSocket(command.lane, self._begun)
        claim = None if command.key is None else claim_of(command.key, command.body)
        parsed, meant = self._starts.addressed(self._wire, operation, sender, command.body, {}, socket=socket)
        if self._take is not None:
            taken = await self._take.create(sender, command.body, command.key, self._begun.keys())
            if taken is not None:
                self._remember(taken.stream_id, taken.stream_id.encode())  # the extension keeps what it needs
                return taken
        if claim is not None:  # before the command is read: on another socket, its past may not be there any more
            log = await self._starts.recalled(self._socket.principal.owner, claim)
            if log is not None:
                self._socket.principal.require_within("model", log.record.model)
                return _Found(log, self._starts.open(command.view, log))
        act = replaced(self._act, parse=partial(self._parse, num_bytes))
        started = await self._starts.start(self._wire, act, sender, parsed, meant, lambda: claim)
        match started:
            case BegunStream(call, log, facts, notes):
                self._remember(log.stream_id, call.unkept)
                if _ends_with_socket(call.request) and "x-tailrace-linger" not in sender.headers:
                    self._own[log.stream_id] = log
                return _Found(log, call.view.open(facts), notes)
            case OverflownPrompt(call, facts, end, notes):
                frames = _frames_of(call.view.open(facts))
                await self._socket.say_all([*self._opening(frames, notes), *frames.of_ending(1, end)])
                return None
        raise AssertionError("the operation of a socket begins streams")

    def _parse(self, num_bytes: int, request: ParsedRequest) -> GenerateCall:
        """Return the call of a stream that continues when its connection is lost. Raises: RequestError."""
        call = self._act.parse(request)
        assert isinstance(call, GenerateCall)
        self._bodies.check_text(num_bytes, num_image_bytes(call.request))
        return replaced(call, request=replace(call.request, on_disconnect="detach"))

    def _remember(self, stream_id: str, unkept: bytes) -> None:
        if not unkept:
            return
        self._begun[stream_id] = unkept
        num_bytes = sum(map(len, self._begun.values()))
        while len(self._begun) > 1 and (num_bytes > _MAX_BEGUN_BYTES or len(self._begun) > _MAX_BEGUN):
            num_bytes -= len(self._begun.pop(next(iter(self._begun))))

    async def _follow(self, command: LaneFollow) -> _Found | LaneStream:
        """Raises: TailraceError."""
        principal, following = self._socket.principal, command.following
        principal.require_stream(following.stream_id)
        if self._take is not None:
            taken = await self._take.follow(self._sender, following.stream_id, command.number)
            if taken is not None:
                return taken
        log, encoder = await self._starts.follow(principal.owner, following)
        return _Found(log, encoder, is_followed=True)

    async def _send(self, lane: str | None, found: _Found) -> None:
        """Send a stream up to its end. Raises: SeqOutOfRange if there was nothing to send."""
        log, frames = found.log, _frames_of(found.encoder)
        begun_s = time.monotonic()
        try:
            first = self._opening(frames, found.notes)
            stream = FollowedStream(log, Reader(log), frames, heartbeat_s=self._settings.heartbeat_s)
            with self._followed.following(lane or "", stream):
                await self._socket.say_all(first)
                await stream.send_all(self._socket)
        finally:
            if log.end is not None:
                self._own.pop(log.stream_id, None)
            if found.is_followed:
                observers = self._models.observers
                observers.on_read(log.record, 0, time.monotonic() - begun_s, trace_of(self._socket.scope))
        if found.is_followed and not (first or frames.has_sent):
            raise SeqOutOfRange(_NOTHING_LEFT, param="starting_after")

    async def _pass(self, lane: str | None, taken: LaneStream, *, is_followed: bool) -> None:
        """Send a stream of an extension up to its end. Raises: SeqOutOfRange if there was nothing to send."""
        has_sent = False
        with taken.reading():
            self._taken[lane] = taken
            try:
                while (events := await taken.next(self._settings.heartbeat_s)) is not None:
                    frames = [self._table.in_lane(event, lane) for event in events]
                    if taken.notes and frames and not has_sent:
                        frames[0] = self._table.noted(frames[0], taken.notes)
                    await self._socket.say_all(frames)
                    has_sent |= bool(frames)
                    await asyncio.sleep(0)  # a client that reads fast does not keep others waiting
            finally:
                del self._taken[lane]
        if is_followed and not has_sent:
            raise SeqOutOfRange(_NOTHING_LEFT, param="starting_after")

    def _opening(self, frames: _Frames, notes: Sequence[str]) -> list[bytes]:
        first = frames.encoder.opening()
        if first and notes:
            first[0] = self._table.noted(first[0], notes)
        return first

    async def _cancel(self, stream_id: str) -> None:
        self._require("generate")
        taken = next((one for one in self._taken.values() if one.stream_id == stream_id), None)
        if taken is not None:
            await taken.cancel()
            return
        log = next((one.log for one in self._followed.by_name.values() if one.log.stream_id == stream_id), None)
        if log is None:
            raise UnknownStream("This socket follows no response with this id.", param="response_id")
        await self._streams.cancel(self._socket.scope, log)

    async def cancel_own(self) -> None:
        """Cancel the streams that nobody reads and that were not meant to outlive the socket, which has ended."""
        for log in self._own.values():
            if not log.num_readers:
                with contextlib.suppress(TailraceError):
                    await self._streams.cancel(self._socket.scope, log)
        if self._take is not None:
            with contextlib.suppress(TailraceError):
                await self._take.leave(self._sender, self._begun.keys())

    def _require(self, action: str) -> None:
        """Raises: Forbidden."""
        self._socket.principal.require(action)
        self._socket.principal.require_within("wire", self._wire.name)


def _ends_with_socket(request: GenerateRequest) -> bool:
    """Return whether nobody needs the answer when the client needs nothing more: not if it was asked for in the
    background, or for a conversation."""
    return request.linger_s is None and not request.turn


def _without_frames(error: TailraceError) -> TailraceError:
    """Return an error without the calls that raised it: they would keep the memory of a command."""
    error.__traceback__ = error.__context__ = None
    return error


def _frames_of(encoder: Encoder) -> _Frames:
    assert isinstance(encoder, FrameEncoder)
    return _Frames(encoder)
