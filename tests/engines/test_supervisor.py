"""The supervisor with real worker processes: what receivers get when the worker runs, fails or dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop
from tests.api.forks import children
from tests.engines.sequences import expected_ids, make_sequence
from tests.processes import wait_ended
from tests.waiting import LONG_S, turn, until

from tailrace.engines import EngineSpec
from tailrace.engines.interface import Delta, Prefill, Sequence
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import EngineError, EngineLost, EngineStalled


class Listener:
    """A receiver that records all calls."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.progress: list[Prefill] = []
        self.error: EngineError | None = None
        self.heard_s = 0.0  # the end
        self._has_begun = asyncio.Event()
        self._has_ended = asyncio.Event()

    def push(self, delta: Delta) -> None:
        assert not self._has_ended.is_set(), f"{delta} after the end"
        self.deltas.append(delta)
        self._has_begun.set()
        if delta.finish_reason is not None:
            self._end()

    def report(self, progress: Prefill) -> None:
        assert not self.deltas, f"{progress} after the first token"
        self.progress.append(progress)

    def lost(self, error: EngineError) -> None:
        assert not self._has_ended.is_set(), f"{error} after the end"
        self.error = error
        self._end()

    def _end(self) -> None:
        self.heard_s = time.monotonic()
        self._has_ended.set()

    async def begun(self) -> Listener:
        await self._has_begun.wait()
        return self

    async def ended(self) -> Listener:
        await self._has_ended.wait()
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.token_ids)

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason


class Engine:
    """A supervisor, and a record of its changes."""

    def __init__(self, spec: EngineSpec, stall_s: float, load_s: float) -> None:
        self.supervisor = Supervisor(spec, on_change=self._note, stall_s=stall_s, load_s=load_s)
        self.changed_s: list[float] = []
        self._change = asyncio.Event()

    def _note(self) -> None:
        self.changed_s.append(time.monotonic())
        self._change.set()

    async def until(self, condition: Callable[[Supervisor], object]) -> Supervisor:
        while not condition(self.supervisor):
            self._change.clear()
            await self._change.wait()
        return self.supervisor

    async def ready(self, *, after_pid: int | None = None) -> Supervisor:
        return await self.until(lambda supervisor: supervisor.is_ready and supervisor.pid != after_pid)

    def submit(self, sequence: Sequence) -> Listener:
        listener = Listener()
        self.supervisor.submit(sequence, listener)
        return listener

    async def answers(self, sequence: Sequence) -> bool:
        return (await self.submit(sequence).ended()).ids == expected_ids(sequence)


@asynccontextmanager
async def supervised(
    spec: EngineSpec | None = None, *, stall_s: float = 10, load_s: float = 10, **options: float
) -> AsyncIterator[Engine]:
    """Run a supervisor. At the end of the block, no process may remain."""
    spec = spec or EngineSpec(engine="scripted", context_tokens=512, options=options)
    engine = Engine(spec, stall_s, load_s)
    before = children()
    running = asyncio.create_task(engine.supervisor.run())
    try:
        yield engine
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert not children() - before, "a worker outlived its supervisor"


@pytest.fixture
def imposter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the worker by a script, which can use the names `sock`, `start` and those of the protocol."""

    def install(body: str) -> None:
        script = tmp_path / "worker"
        script.write_text(f"#!{sys.executable}\n{_IMPOSTER}{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


_IMPOSTER = """
import os, signal, socket, sys
from tailrace.engines.interface import Capabilities, Delta
from tailrace.engines.protocol import *
from tailrace.system.frames import FrameBuffer

sock = socket.socket(fileno=int(sys.argv[3]))
frames = FrameBuffer()
def receive():
    while not (bodies := frames.feed(sock.recv(65536))):
        pass
    return decode_to_worker(bodies[0])
start = receive()
capabilities = Capabilities("imposter", 100, 100, 1, 1, frozenset(), True)
ready = Ready(start.version, start.epoch, capabilities)
"""


async def test_deltas_reach_their_receivers() -> None:
    async with supervised() as engine:
        supervisor = await engine.ready()
        assert supervisor.capabilities is not None
        assert supervisor.capabilities.engine == "scripted 1"
        sequences = [make_sequence(number, 3 + number) for number in range(1, 20)]
        listeners = [engine.submit(sequence) for sequence in sequences]
        assert supervisor.num_sequences == 19
        for sequence, listener in zip(sequences, listeners, strict=True):
            assert (await listener.ended()).ids == expected_ids(sequence)
            assert [delta.start for delta in listener.deltas] == list(range(len(listener.ids)))
            assert listener.finish_reason == "length"
        assert supervisor.num_sequences == 0


async def test_submit_before_ready_is_refused() -> None:
    async with supervised() as engine:
        with pytest.raises(EngineLost) as caught:
            engine.submit(make_sequence(1))
        assert caught.value.retry_after_s == 0.5
        assert engine.supervisor.num_sequences == 0
        await engine.ready()
        assert await engine.answers(make_sequence(1))


async def test_abort_ends_one_sequence() -> None:
    async with supervised(tokens_per_s=100) as engine:
        supervisor = await engine.ready()
        victim, spared = engine.submit(make_sequence(1, 400)), engine.submit(make_sequence(2, 20))
        await victim.begun()
        for sequence_id in (1, 1, 77):
            supervisor.abort(sequence_id)
        assert (await victim.ended()).finish_reason == "cancelled"
        assert (await spared.ended()).ids == expected_ids(make_sequence(2, 20))
        supervisor.abort(1)
        assert await engine.answers(make_sequence(3))


async def _kill_and_go_on() -> None:
    async with supervised(tokens_per_s=100) as engine:
        pid = (await engine.ready()).pid
        assert pid is not None
        listeners = [engine.submit(make_sequence(number, 400)) for number in (1, 2)]
        for listener in listeners:
            await listener.begun()
        os.kill(pid, signal.SIGKILL)
        for listener in listeners:
            assert isinstance((await listener.ended()).error, EngineLost)
            assert listener.ids == expected_ids(make_sequence(listeners.index(listener) + 1), len(listener.ids))
        assert "killed by SIGKILL" in engine.supervisor.last_reason
        supervisor = await engine.ready(after_pid=pid)
        assert (supervisor.restarts, supervisor.failures, supervisor.num_sequences) == (1, 0, 0)  # it has worked
        assert not psutil.pid_exists(pid)
        assert await engine.answers(make_sequence(3))


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_killed_worker_ends_its_sequences_and_is_replaced(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_kill_and_go_on())


async def test_capabilities_stay_known_without_an_engine() -> None:
    async with supervised() as engine:
        supervisor = await engine.ready()
        lost = engine.submit(make_sequence(1, fault="crash"))
        assert isinstance((await lost.ended()).error, EngineLost)
        assert supervisor.capabilities is not None
        assert not supervisor.is_ready
        with pytest.raises(EngineLost):
            engine.submit(make_sequence(2))


@pytest.mark.parametrize(("fault", "reason"), [("crash", "killed by SIGSEGV"), ("garbage", "RuntimeError: the script")])
async def test_a_lost_engine_has_a_reason(fault: str, reason: str) -> None:
    async with supervised(fault_after=2) as engine:
        pid = (await engine.ready()).pid
        # The poison is last: a write to an engine that is already dead would lose its output.
        neighbour, poison = engine.submit(make_sequence(2, 400)), engine.submit(make_sequence(1, 400, fault=fault))
        for listener in (poison, neighbour):
            error = (await listener.ended()).error
            assert isinstance(error, EngineLost)
            assert reason in error.message
        assert poison.ids == expected_ids(make_sequence(1, fault=fault), 2)
        await engine.ready(after_pid=pid)
        assert await engine.answers(make_sequence(3))


async def test_stall_is_noticed_and_the_worker_replaced() -> None:
    async with supervised(stall_s=0.4, fault_after=2) as engine:
        pid = (await engine.ready()).pid
        assert pid is not None
        stalled, neighbour = engine.submit(make_sequence(1, 40, fault="stall")), engine.submit(make_sequence(2, 400))
        began_s = time.monotonic()
        for listener in (stalled, neighbour):
            assert isinstance((await listener.ended()).error, EngineStalled)
            assert listener.heard_s - began_s >= 0.4
        assert not psutil.pid_exists(pid)
        await engine.ready(after_pid=pid)
        assert await engine.answers(make_sequence(3))


async def test_a_shorter_stall_timeout_is_in_use_at_once() -> None:
    async with supervised(stall_s=1000, fault_after=2) as engine:
        await engine.ready()
        stalled = engine.submit(make_sequence(1, 40, fault="stall"))
        engine.supervisor.stall_s = 0.4
        assert isinstance((await stalled.ended()).error, EngineStalled)


async def test_slow_engine_and_idle_engine_are_not_stalled() -> None:
    async with supervised(stall_s=1.5, tokens_per_s=0.8) as engine:
        pid = (await engine.ready()).pid
        assert await engine.answers(make_sequence(1, 3)), "more than a second between tokens, but steps all the while"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.until(lambda supervisor: not supervisor.is_ready), 2)
        assert await engine.answers(make_sequence(2, 1))
        assert engine.supervisor.pid == pid


async def test_failed_sequence_spares_its_neighbours() -> None:
    async with supervised(fault_after=2) as engine:
        pid = (await engine.ready()).pid
        failing, refused, spared = (
            make_sequence(1, fault="fail"),
            make_sequence(2, prompt=b"x" * 600),
            make_sequence(3, 30),
        )
        listeners = [engine.submit(sequence) for sequence in (failing, refused, spared)]
        for listener in listeners:
            assert (await listener.ended()).error is None
        assert [listener.finish_reason for listener in listeners] == ["error", "error", "length"]
        assert [listener.ids for listener in listeners] == [expected_ids(failing, 2), (), expected_ids(spared)]
        assert "too long" in listeners[1].deltas[-1].failure
        assert engine.supervisor.pid == pid


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sock.sendall(os.urandom(3) + b'\\xff' * 60); receive()", "sent invalid data"),
        ("sock.sendall(b'\\x05\\x00\\x00\\x00hello'); receive()", "sent invalid data"),
        ("sock.sendall(encode(Submit(None))); receive()", "sent invalid data"),
        ("ready.version += 1; sock.sendall(encode(ready)); receive()", "has another version"),
        ("ready.epoch -= 1; sock.sendall(encode(ready)); receive()", "has another version"),
        ("sock.sendall(encode(Fatal('no such file'))); receive()", "did not load: no such file"),
        ("sys.exit(3)", "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("receive()", "did not load within 0.7 s"),
    ],
    ids=["absurd length", "no msgpack", "the other way", "version", "epoch", "fatal", "exit", "crash", "silence"],
)
async def test_worker_that_does_not_start(imposter: Callable[[str], None], body: str, reason: str) -> None:
    imposter(body)
    async with supervised(load_s=0.7 if reason.endswith("0.7 s") else LONG_S) as engine:
        supervisor = await engine.until(lambda supervisor: supervisor.last_reason)
        assert reason in supervisor.last_reason
        assert (supervisor.failures, supervisor.is_ready, supervisor.capabilities) == (1, False, None)


async def test_missing_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    async with supervised() as engine:
        supervisor = await engine.until(lambda supervisor: supervisor.last_reason)
        assert "could not be started" in supervisor.last_reason
        assert supervisor.failures == 1


async def test_garbage_after_valid_frames(imposter: Callable[[str], None]) -> None:
    imposter(
        "sock.sendall(encode(ready))\n"
        "number = receive().sequence.sequence_id\n"
        "frame = encode(Frame(start.epoch, 1, [Delta(number, 0, (5,)), Delta(99, 0, (6,), (), 'stop')]))\n"
        "sock.sendall(frame + b'\\x05\\x00\\x00\\x00hello')\n"
        "receive()"
    )
    async with supervised() as engine:
        await engine.ready()
        listener = await engine.submit(make_sequence(1)).ended()
        assert listener.ids == (5,), "what came before the garbage counts"
        assert isinstance(listener.error, EngineLost)
        assert "sent invalid data" in listener.error.message


async def test_late_frames_of_an_earlier_epoch_are_ignored(imposter: Callable[[str], None]) -> None:
    imposter(
        "sock.sendall(encode(ready))\n"
        "number = receive().sequence.sequence_id\n"
        "late = encode(Frame(start.epoch - 1, 9, [Delta(number, 0, (4,), (), 'stop')]))\n"
        "sock.sendall(late + encode(Frame(start.epoch, 1, [Delta(number, 0, (5,), (), 'length')])))\n"
        "receive()"
    )
    async with supervised() as engine:
        await engine.ready()
        listener = await engine.submit(make_sequence(1)).ended()
        assert (listener.ids, listener.finish_reason) == ((5,), "length")


async def test_a_model_that_cannot_be_loaded_is_retried_with_backoff() -> None:
    async with supervised(EngineSpec(engine="nonsense")) as engine:
        assert engine.supervisor.retry_after_s == 0.5
        supervisor = await engine.until(lambda supervisor: supervisor.failures == 1)
        assert "no engine named 'nonsense'" in supervisor.last_reason
        assert supervisor.retry_after_s == 1
        with pytest.raises(EngineLost) as caught:
            engine.submit(make_sequence(1))
        assert caught.value.retry_after_s == 1
        await engine.until(lambda supervisor: supervisor.failures == 2)
        assert engine.changed_s[1] - engine.changed_s[0] >= 1
        assert supervisor.retry_after_s == 2
        assert not supervisor.is_ready


async def test_once_returns_at_the_first_loss() -> None:
    supervisor = Supervisor(EngineSpec(engine="nonsense"))
    await supervisor.run(once=True)
    assert (supervisor.failures, supervisor.restarts, supervisor.pid) == (1, 0, None)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8])
async def test_cancelled_while_starting_leaves_nothing(num_turns: int) -> None:
    async with supervised():
        await turn(num_turns)  # how far it got


async def test_worker_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET", "DB_PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "hush-hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    async with supervised() as engine:
        pid = (await engine.ready()).pid
        environment = psutil.Process(pid).environ()
        assert "hush-hush" not in environment.values()
        assert environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_of_the_terminal_end_no_stream(number: signal.Signals) -> None:
    async with supervised(tokens_per_s=100) as engine:
        pid = (await engine.ready()).pid
        assert pid is not None
        listener = await engine.submit(make_sequence(1, 20)).begun()
        os.kill(pid, number)
        assert (await listener.ended()).ids == expected_ids(make_sequence(1, 20))
        assert await engine.answers(make_sequence(2))
        assert engine.supervisor.pid == pid


def _is_blocked(process: psutil.Process) -> bool:
    used = process.cpu_times()
    is_sleeping = all(process.status() == psutil.STATUS_SLEEPING for _ in range(20))
    return is_sleeping and process.cpu_times() == used


async def test_engine_does_not_run_ahead_of_a_server_that_is_busy() -> None:
    async with supervised(EngineSpec(engine="scripted", context_tokens=20_512)) as engine:
        supervisor = await engine.ready()
        worker = psutil.Process(supervisor.pid)
        listener = await engine.submit(make_sequence(1, 20_000)).begun()
        until(lambda: _is_blocked(worker))  # the loop is held up here, and reads nothing
        supervisor.abort(1)
        assert (await listener.ended()).finish_reason == "cancelled"
        assert listener.ids == expected_ids(make_sequence(1), len(listener.ids))
        assert len(listener.ids) < 5_000  # what a socket holds is some 300, and a busy machine may be late


_PARENT = """
import asyncio, sys
from tailrace.engines import EngineSpec
from tailrace.engines.supervisor import Supervisor
from tests.engines.sequences import make_sequence

class Listener:
    def push(self, delta):
        if delta.start == 1:
            print(supervisor.pid, flush=True)
    def lost(self, error):
        print(error, flush=True)

def begin():
    if supervisor.is_ready:
        fault = sys.argv[1]
        if fault == "idle":
            print(supervisor.pid, flush=True)
        else:
            supervisor.submit(make_sequence(1, 400, fault=fault.removesuffix("running")), Listener())

spec = EngineSpec(engine="scripted", options={"fault_after": 2, "tokens_per_s": 50})
supervisor = Supervisor(spec, on_change=begin)
asyncio.run(supervisor.run())
"""


@pytest.mark.parametrize("state", ["idle", "running", "stall"])
def test_no_worker_outlives_its_parent(state: str) -> None:
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, state], stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.ppid() == parent.pid
    finally:
        parent.kill()
        parent.communicate()
    wait_ended([worker])
