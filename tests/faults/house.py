"""A directory with successive servers, and readers that reconnect to the current one."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.faults.laws import Kept, Resources, Seen, check, read_journal, status_of
from tests.http.wire import Wire
from tests.processes import wait_ended
from tests.waiting import LONG_S, until

from tailrace.dialects.wire import HEARTBEAT

__all__ = ["Follower", "House", "Stream"]

_AGAIN_S = 0.02


class House:
    """A directory for the journal, and a server with it, which a test may kill and restart.

    Leaving it stops the server and holds the laws for every stream that `begin` began.
    """

    def __init__(self, directory: Path, source: str = "scripted:tokens_per_s=200", *flags: str) -> None:
        self.directory = directory
        self.source = source
        self.flags = flags
        self.streams: list[Stream] = []
        self.key: bytes | None = None  # that its journal is sealed with
        self.engines_killed = 0  # of the server that there is
        self.server: Server
        self.baseline: Resources
        self._moved = threading.Condition()
        self._is_open = True
        self._logs: list[str] = []
        self.start()
        self.server.post("/v1/completions", {"prompt": "Warm up.", "max_tokens": 1})  # some things are opened late
        self.baseline = Resources.at_rest(self.server)

    def __enter__(self) -> House:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check()
        finally:
            self._is_open = False
            with self._moved:
                self._moved.notify_all()
            self.server.close()

    def launch(self, *flags: str) -> Server:
        """Start another server with the same directory. It may fail to start."""
        return Server(self.source, "--data-dir", str(self.directory), *self.flags, *flags)

    def start(self, *flags: str) -> Server:
        """Start the next server. Readers reconnect to it by themselves."""
        server = self.launch(*flags)
        try:
            server.wait_ready()
        except AssertionError:
            server.process.kill()
            raise
        self.server, self.engines_killed = server, 0
        with self._moved:
            self._moved.notify_all()
        return server

    def kill(self) -> None:
        """kill -9 of the server. Its engine must end, too."""
        children = psutil.Process(self.server.process.pid).children()
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        self._logs.append(self.server.log)
        self.server.close()
        wait_ended(children)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """SIGTERM, and wait for the end."""
        self.server.send_signal(number)
        status = self.server.wait()
        self._logs.append(self.server.log)
        self.server.close()
        return status

    def restart(self, *flags: str) -> Server:
        self.kill()
        return self.start(*flags)

    @property
    def num_streams(self) -> int:
        """The number of streams of the server."""
        found = re.search(r"^tailrace_streams (\d+)", self.server.http.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    @property
    def log(self) -> str:
        """The logs of all servers so far."""
        return "".join([*self._logs, self.server.log])

    def kill_engine(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the engine; wait for it if there is none."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = psutil.Process(self.server.process.pid).children()
            return bool(found)

        until(is_there)  # one that is killed again and again is started ever later
        with contextlib.suppress(psutil.NoSuchProcess):  # it may be going at this moment
            found[0].send_signal(number)
            self.engines_killed += 1

    def begin(
        self, answer: Answer, *, prompt: str = "", num_readers: int = 1, key: str = "", **fields: object
    ) -> Stream:
        """A stream, and readers that follow it wherever it goes. `prompt` is what to ask where the answer has ids."""
        body = {"prompt": prompt or answer.prompt, "max_tokens": answer.count, "seed": answer.seed, **fields}
        stream_id = self.server.create(body, **({"idempotency_key": key} if key else {}))
        stream = Stream(stream_id, answer, [Follower(self, stream_id) for _ in range(num_readers)])
        self.streams.append(stream)
        return stream

    def wait_moved(self) -> None:
        """Until there is another server, or it is time to try again."""
        with self._moved:
            self._moved.wait(_AGAIN_S)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def kept(self) -> Kept:
        """Return the content of the journal. The server must be stopped."""
        return read_journal(self.directory, key=self.key)

    def check(self) -> None:
        """Wait for all streams, check law 5, stop the server, and check the other laws."""
        for stream in self.streams:
            stream.wait()
        if self.server.process.poll() is None:
            self.baseline.check_back(self.server)
            self.stop()
        kept = self.kept()
        for stream in self.streams:
            stream.check(kept)


class Stream:
    """A stream of a test, its expected answer, and its readers."""

    def __init__(self, stream_id: str, answer: Answer, followers: Sequence[Follower]) -> None:
        self.stream_id = stream_id
        self.answer = answer
        self.followers = [*followers]
        self.ends: tuple[str, ...] = ("done",)
        self.is_kept = True
        self.is_deleted = False  # so that a reader may come too late for its end

    @property
    def path(self) -> str:
        return f"/v1/streams/{self.stream_id}"

    def seen(self, num_events: int) -> Stream:
        """Wait until every reader has this many events."""
        for follower in self.followers:
            follower.wait_events(num_events)
        return self

    def wait(self) -> None:
        for follower in self.followers:
            follower.wait(may_miss=self.is_deleted)

    @property
    def end(self) -> bytes:
        """The terminal event, as the first reader saw it."""
        self.followers[0].wait()
        return self.followers[0].events[-1]

    def check(self, kept: Kept | None) -> None:
        seen = [Seen(follower.events) for follower in self.followers]
        if not self.is_deleted:
            assert all(status_of(reading.events[-1]) for reading in seen), "a reader without an end"
        is_kept = self.is_kept and not self.is_deleted
        check(self.stream_id, self.answer, seen, kept if is_kept else None, ends=self.ends)


class Door(Protocol):
    """Where a reader connects to on 127.0.0.1."""

    @property
    def port(self) -> int: ...


class Servers(Protocol):
    """What a reader needs to know of the servers."""

    @property
    def server(self) -> Door:
        """What to connect to next."""

    @property
    def is_open(self) -> bool: ...

    @property
    def log(self) -> str: ...

    def wait_moved(self) -> None:
        """Until there is another server, or it is time to try again."""


class Follower:
    """One reader in a thread of its own. Whenever it is cut off it comes back with Last-Event-ID, as browsers do, and
    forgets half an event."""

    def __init__(self, house: Servers, stream_id: str) -> None:
        self.events: list[bytes] = []
        self.num_connections = 0
        self.num_releases = 0
        self.refusals: list[int] = []
        self._wire: Wire | None = None
        self._house = house
        self._id = stream_id
        self._said = threading.Condition()
        self._failure: BaseException | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_events(self, num_events: int, *, timeout_s: float = LONG_S) -> None:
        with self._said:
            self._said.wait_for(lambda: len(self.events) >= num_events or self._has_ended, timeout_s)
        assert len(self.events) >= num_events, self._state()

    def wait(self, *, timeout_s: float = LONG_S, may_miss: bool = False) -> None:
        """Until its end, or, where it `may_miss` that, until the stream is no more."""
        with self._said:
            self._said.wait_for(lambda: self._has_ended, timeout_s)
        assert self._has_ended, self._state()
        assert self._failure is None, repr(self._failure)
        if may_miss:
            return
        assert self.events, self._state()
        assert status_of(self.events[-1]), self._state()

    def cut(self) -> None:
        """Break its connection."""
        wire = self._wire
        if wire is not None:
            wire.cut()

    def _state(self) -> str:
        return f"{len(self.events)} events, refusals {self.refusals[-3:]}, {self._failure!r}\n{self._house.log}"

    def _run(self) -> None:
        try:
            while self._house.is_open and not self._follow():
                self._house.wait_moved()
        except BaseException as error:  # shown by whoever waits
            self._failure = error
        with self._said:
            self._has_ended = True
            self._said.notify_all()

    def _follow(self) -> bool:
        """Read until the connection ends. Returns whether the stream has ended."""
        try:
            with Wire(self._house.server.port) as wire:
                self._wire = wire
                headers = {"last-event-id": f"{self._id}-{len(self.events)}"} if self.events else {}
                wire.send("GET", f"/v1/streams/{self._id}/events", headers=headers)
                if wire.head() != 200:
                    self.refusals.append(wire.status)
                    return wire.status in (404, 410)
                self.num_connections += 1
                for event in self._whole(wire):
                    with self._said:
                        self.events.append(event)
                        self._said.notify_all()
                    if status_of(event):
                        assert wire.event() == b"", "something after the end"
                        return True
        except (EOFError, OSError):  # which may come right behind the end
            return bool(self.events) and bool(status_of(self.events[-1]))
        return False

    def _whole(self, wire: Wire) -> Iterator[bytes]:
        for block in wire.events():
            while block.startswith(HEARTBEAT):
                block = block[len(HEARTBEAT) :]
            if block.startswith(b"event: released\n"):
                self.num_releases += 1
            else:
                yield block
