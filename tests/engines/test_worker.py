"""The worker process, tested byte by byte over its socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from tests.engines.sequences import expected_ids, make_sequence
from tests.waiting import LONG_S, until

from tailrace.engines.interface import Capabilities, Delta, Engine, Prefill, Sequence
from tailrace.engines.protocol import (
    PROTOCOL_VERSION,
    Abort,
    EngineSpec,
    Fatal,
    Frame,
    FromWorker,
    Ready,
    Start,
    Submit,
    ToWorker,
    decode_from_worker,
    encode,
)
from tailrace.engines.worker import WorkerLink, run
from tailrace.engines.worker_process import WorkerProcess
from tailrace.system.frames import FrameBuffer

_AHEAD_BYTES = 32 * 1024


class Worker:
    """A worker process and its socket."""

    def __init__(self, parent_pid: int | None = None) -> None:
        self.socket, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _AHEAD_BYTES)
        self.socket.settimeout(LONG_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.engines.worker", str(theirs.fileno()), str(parent_pid or os.getpid())],
                stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._buffer = FrameBuffer()
        self._bodies: deque[bytes] = deque()

    def start(self, epoch: int = 1, **options: float) -> Worker:
        self.send(Start(PROTOCOL_VERSION, epoch, EngineSpec(engine="scripted", context_tokens=512, options=options)))
        assert isinstance(self.receive(), Ready)
        return self

    def send(self, *messages: ToWorker) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def receive(self) -> FromWorker | None:
        """Return the next message, or None if the worker has closed its end."""
        while not self._bodies:
            chunk = self.socket.recv(65536)
            if not chunk:
                return None
            self._bodies.extend(self._buffer.feed(chunk))
        message: FromWorker = decode_from_worker(self._bodies.popleft())
        return message

    def frames(self, num_ends: int) -> list[Frame]:
        """Return frames until this number of sequences has ended."""
        frames: list[Frame] = []
        while num_ends:
            frame = self.receive()
            assert isinstance(frame, Frame), frame
            frames.append(frame)
            num_ends -= sum(delta.finish_reason is not None for delta in frame.deltas)
        return frames

    def wait(self) -> tuple[int, str]:
        """Return the exit status and stderr of the process."""
        _, errors = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, errors.decode()

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with contextlib.closing(Worker()) as worker:
        yield worker


def _deltas(frames: list[Frame], sequence_id: int) -> list[Delta]:
    return [delta for frame in frames for delta in frame.deltas if delta.sequence_id == sequence_id]


def _ids(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def test_ready_says_version_epoch_and_capabilities(worker: Worker) -> None:
    worker.send(Start(PROTOCOL_VERSION, 41, EngineSpec(engine="scripted", context_tokens=512, max_sequences=3)))
    ready = worker.receive()
    assert isinstance(ready, Ready)
    assert (ready.version, ready.epoch) == (PROTOCOL_VERSION, 41)
    assert (ready.capabilities.engine, ready.capabilities.context_tokens) == ("scripted 1", 512)
    assert "seed" in ready.capabilities.parameters


def test_one_frame_a_step_until_all_have_ended(worker: Worker) -> None:
    sequences = [make_sequence(1, 3), make_sequence(2, 9), make_sequence(3, 6)]
    worker.start(epoch=5).send(*map(Submit, sequences))
    frames = worker.frames(3)
    assert [frame.step for frame in frames] == list(range(1, 10))
    assert {frame.epoch for frame in frames} == {5}
    for sequence in sequences:
        assert _ids(_deltas(frames, sequence.sequence_id)) == expected_ids(sequence)


def test_messages_may_come_in_any_pieces(worker: Worker) -> None:
    sequence = make_sequence(1)
    start = Start(PROTOCOL_VERSION, 1, EngineSpec(engine="scripted"))
    for message in (start, Submit(sequence)):
        for byte in encode(message):
            worker.socket.sendall(bytes((byte,)))
    assert isinstance(worker.receive(), Ready)
    assert _ids(_deltas(worker.frames(1), 1)) == expected_ids(sequence)


def test_abort_ends_a_sequence_and_no_other(worker: Worker) -> None:
    worker.start(tokens_per_s=50).send(Submit(make_sequence(1, 400)), Submit(make_sequence(2, 12)), Abort(77))
    assert isinstance(worker.receive(), Frame)
    worker.send(Abort(1), Abort(1))
    frames = worker.frames(2)
    assert [delta.finish_reason for delta in _deltas(frames, 1)][-1] == "cancelled"
    assert _deltas(frames, 2)[-1].finish_reason == "length"
    worker.send(Abort(1), Abort(2), Submit(make_sequence(3)))
    assert _ids(_deltas(worker.frames(1), 3)) == expected_ids(make_sequence(3))


@pytest.mark.parametrize("with_neighbour", [False, True])
def test_refused_sequence_ends_in_a_frame(worker: Worker, with_neighbour: bool) -> None:
    neighbours = [make_sequence(1)] if with_neighbour else []
    worker.start().send(*map(Submit, [*neighbours, make_sequence(2, prompt=b"x" * 600)]))
    frames = worker.frames(1 + len(neighbours))
    (refused,) = _deltas(frames, 2)
    assert (refused.start, refused.token_ids, refused.finish_reason) == (0, (), "error")
    assert "too long" in refused.failure
    assert _ids(_deltas(frames, 1)) == (expected_ids(make_sequence(1)) if with_neighbour else ())


def test_empty_frames_are_sent(worker: Worker) -> None:
    worker.start(tokens_per_s=10).send(Submit(make_sequence(1, 2)))
    assert [] in [frame.deltas for frame in worker.frames(1)]


def test_an_exception_of_the_engine_is_the_last_frame(worker: Worker) -> None:
    worker.start(fault_after=1).send(Submit(make_sequence(1, fault="garbage")))
    assert isinstance(worker.receive(), Frame)
    assert worker.receive() == Fatal("RuntimeError: the script says so")
    assert worker.receive() is None
    assert worker.wait() == (1, "")


def test_a_load_error_is_the_last_frame(worker: Worker) -> None:
    worker.send(Start(PROTOCOL_VERSION, 1, EngineSpec(engine="nonsense")))
    fatal = worker.receive()
    assert isinstance(fatal, Fatal)
    assert "no engine named 'nonsense'" in fatal.message
    assert worker.wait() == (1, "")


_SCRIPTED = "tailrace_outer.scripted.scripted_engine:ScriptedEngine"
_NOT_NEEDED = {
    "asyncio", "hashlib", "importlib.metadata", "logging", "random", "subprocess",
    "tailrace.models", "tailrace.schemas.plain",
}  # fmt: skip


def test_a_worker_loads_the_class_that_the_server_names(worker: Worker) -> None:
    worker.send(Start(PROTOCOL_VERSION, 1, EngineSpec(engine="nonsense", context_tokens=512), _SCRIPTED))
    assert isinstance(worker.receive(), Ready)


def test_processes_that_an_engine_starts_end_with_it(worker: Worker) -> None:
    worker.send(Start(PROTOCOL_VERSION, 1, EngineSpec(engine="scripted"), _SCRIPTED, starts_processes=True))
    assert isinstance(worker.receive(), Ready)
    assert os.getpgid(worker.process.pid) == worker.process.pid
    (watchdog,) = psutil.Process(worker.process.pid).children()
    worker.process.kill()
    watchdog.wait(LONG_S)


async def test_a_worker_imports_only_what_its_engine_needs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server waits for these imports after each crash of an engine."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    worker = await WorkerProcess.start(EngineSpec(engine="scripted", context_tokens=512), 1)
    try:
        await asyncio.wait_for(worker.ready, LONG_S)
    finally:
        await worker.stop()
    imported = set(re.findall(r"\| +([\w.]+)$", capfd.readouterr().err, re.MULTILINE))
    assert "tailrace_outer.scripted.script" in imported
    assert imported & _NOT_NEEDED == set()


@pytest.mark.parametrize("first", [Start(PROTOCOL_VERSION + 1, 1, EngineSpec(engine="scripted")), Abort(1)])
def test_other_version_is_refused(worker: Worker, first: ToWorker) -> None:
    worker.send(first)
    assert worker.receive() == Fatal("server and worker have different versions")
    assert worker.wait() == (1, "")


_GARBAGE = [b"\xff" * 64, b"\x03\x00\x00\x00abc", b"\x00\x00\x00\x00", encode(Fatal("not for you"))]


@pytest.mark.parametrize("garbage", _GARBAGE)
def test_garbage_at_first_ends_the_worker(worker: Worker, garbage: bytes) -> None:
    worker.socket.sendall(garbage)
    assert worker.receive() is None
    assert worker.wait()[0] == 1


@pytest.mark.parametrize("garbage", _GARBAGE)
@pytest.mark.parametrize("busy", [False, True])
def test_garbage_later_is_named_and_ends_the_worker(worker: Worker, garbage: bytes, busy: bool) -> None:
    worker.start(tokens_per_s=50)
    if busy:
        worker.send(Submit(make_sequence(1, 400)))
        assert isinstance(worker.receive(), Frame)
    worker.socket.sendall(garbage)
    while isinstance(last := worker.receive(), Frame):
        pass
    assert isinstance(last, Fatal)
    assert last.message.startswith(("ValueError:", "DecodeError:", "ValidationError:"))
    assert worker.wait() == (1, "")


@pytest.mark.parametrize("moment", ["before the start", "idle", "running"])
def test_closed_socket_ends_the_worker(worker: Worker, moment: str) -> None:
    if moment != "before the start":
        worker.start(tokens_per_s=50)
    if moment == "running":
        worker.send(Submit(make_sequence(1, 400)))
        assert isinstance(worker.receive(), Frame)
    worker.socket.close()
    assert worker.wait() == (0, "")


def _is_blocked(worker: Worker) -> bool:
    """Return whether a process waits in a system call and uses no processor time."""
    process = psutil.Process(worker.process.pid)
    used = process.cpu_times()
    is_sleeping = all(process.status() == psutil.STATUS_SLEEPING for _ in range(20))
    return is_sleeping and process.cpu_times() == used


def test_engine_does_not_run_ahead_of_a_server_that_does_not_read(worker: Worker) -> None:
    worker.start().send(Submit(make_sequence(1, 500)))
    until(lambda: _is_blocked(worker))
    worker.send(Abort(1))
    deltas = _deltas(worker.frames(1), 1)
    assert deltas[-1].finish_reason == "cancelled", "it ran to the end although nobody read"
    assert 1 <= deltas[-1].start <= 200
    assert _ids(deltas) == expected_ids(make_sequence(1), deltas[-1].start)


def test_closed_socket_ends_a_worker_that_waits_to_write(worker: Worker) -> None:
    worker.start().send(Submit(make_sequence(1, 500)))
    until(lambda: _is_blocked(worker))
    worker.socket.close()
    assert worker.wait() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_of_the_terminal_are_ignored(worker: Worker, number: signal.Signals) -> None:
    worker.start(tokens_per_s=100).send(Submit(make_sequence(1, 20)))
    assert isinstance(worker.receive(), Frame)
    worker.process.send_signal(number)
    deltas = _deltas(worker.frames(1), 1)
    assert deltas[-1].finish_reason == "length"
    worker.process.send_signal(number)
    worker.send(Submit(make_sequence(2)))
    assert _ids(_deltas(worker.frames(1), 2)) == expected_ids(make_sequence(2))


def test_a_worker_without_its_parent_does_not_start() -> None:
    with contextlib.closing(Worker(parent_pid=1)) as worker:
        assert worker.receive() is None
        assert worker.wait() == (0, "")


def test_large_prompts_and_many_at_once(worker: Worker) -> None:
    spec = EngineSpec(engine="scripted", context_tokens=1_000_000, max_sequences=500)
    worker.send(Start(PROTOCOL_VERSION, 1, spec))
    assert isinstance(worker.receive(), Ready)
    large = make_sequence(1, 2, prompt=bytes(range(256)) * 2000)
    worker.send(Submit(large), *(Submit(make_sequence(number, 2)) for number in range(2, 300)))
    frames = worker.frames(299)
    assert _ids(_deltas(frames, 1)) == expected_ids(large)
    assert _ids(_deltas(frames, 299)) == expected_ids(make_sequence(299, 2))


def test_frames_have_the_documented_format(worker: Worker) -> None:
    worker.start().send(Submit(make_sequence(1, 1)))
    until(lambda: bool(worker.socket.recv(4, socket.MSG_PEEK)))
    raw = worker.socket.recv(65536)
    assert int.from_bytes(raw[:4], "little") == len(raw) - 4
    assert msgspec.msgpack.decode(raw[4:]) == [
        "frame",
        1,
        1,
        [[1, 0, [*expected_ids(make_sequence(1, 1))], [], "length", "", [], None, False, False, False, None, [], b""]],
        [],
    ]


class _Hanging:
    """An engine that reads a prompt in two steps, and then hangs in the middle."""

    capabilities = Capabilities("hanging", 100, 100, 1, 1, frozenset(), True, reports_progress=True)

    def __init__(self) -> None:
        self._num_read = 0

    def submit(self, sequence: Sequence) -> None: ...
    def abort(self, sequence_id: int) -> None: ...
    def close(self) -> None: ...

    def step(self) -> list[Delta]:
        self._num_read = min(self._num_read + 4, 8)
        return []

    def progress(self) -> list[Prefill]:
        return [Prefill(1, self._num_read)]


def test_an_engine_that_hangs_does_not_seem_to_make_progress() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        running = threading.Thread(target=_run_until_closed, args=(_Hanging(), theirs))
        running.start()
        ours.settimeout(LONG_S)
        ours.sendall(encode(Submit(make_sequence(1))))
        buffer, frames = FrameBuffer(), list[FromWorker]()
        while len(frames) < 5:
            frames += [decode_from_worker(body) for body in buffer.feed(ours.recv(1 << 16))]
        ours.shutdown(socket.SHUT_RDWR)
        running.join(LONG_S)
    said = [frame.progress for frame in frames[:5] if isinstance(frame, Frame)]
    assert said == [[Prefill(1, 4)], [Prefill(1, 8)], [], [], []]


class _Patient:
    """An engine that waits for what never comes."""

    capabilities = Capabilities("patient", 100, 100, 1, 1, frozenset(), True, waits=True)

    def __init__(self) -> None:
        self.waits = threading.Event()
        self._descriptor = -1
        self._got: list[int] = []

    def return_for(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def submit(self, sequence: Sequence) -> None:
        self._got.append(sequence.sequence_id)

    def abort(self, sequence_id: int) -> None: ...
    def close(self) -> None: ...

    def step(self) -> list[Delta]:
        self.waits.set()
        select.select([self._descriptor], [], [], 2 * LONG_S)
        deltas = [Delta(sequence_id, 0, (7,)) for sequence_id in self._got]
        self._got.clear()
        return deltas


def test_a_step_that_waits_returns_for_new_work() -> None:
    ours, theirs = socket.socketpair()
    engine = _Patient()
    with ours, theirs:
        running = threading.Thread(target=_run_until_closed, args=(engine, theirs))
        running.start()
        ours.settimeout(LONG_S)
        ours.sendall(encode(Submit(make_sequence(1))))
        assert engine.waits.wait(LONG_S)
        ours.sendall(encode(Submit(make_sequence(2))))
        frame = next(decode_from_worker(body) for body in FrameBuffer().feed(ours.recv(1 << 16)))
        ours.shutdown(socket.SHUT_RDWR)
        running.join(LONG_S)
    assert isinstance(frame, Frame)
    assert frame.deltas[0].sequence_id == 1


def _run_until_closed(engine: Engine, ours: socket.socket) -> None:
    with contextlib.suppress(EOFError):
        run(engine, WorkerLink(ours), 1)
