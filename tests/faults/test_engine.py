"""The engine dies, hangs, sends garbage or is killed by a request: its streams continue exactly."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.api.test_server_metrics import scrape
from tests.faults.house import House, Stream
from tests.faults.laws import Resources
from tests.generation.harness import Harness, end_of, greedy, oracle, prompt_ids_of, text_of
from tests.http.wire import as_json, sse_data
from tests.processes import freeze, is_alive
from tests.waiting import until

from tailrace.engines.interface import Capabilities, Delta, Prefill
from tailrace.engines.protocol import PROTOCOL_VERSION, Frame, FromWorker, Ready, encode
from tailrace.engines.worker_process import WorkerProcess
from tailrace.errors import EngineError, EngineLost
from tailrace.testing import CONTROL_TOKENS
from tailrace.types import TextDelta

PACED = "scripted:tokens_per_s=200"
CRASH = EngineLost("The engine stopped: killed by SIGSEGV.", is_crash=True)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path / "data", PACED, "--stall-s", "1.5") as house:
        yield house


def num_deaths(house: House) -> int:
    """The number of running engines that died."""
    return house.log.count("Starting another engine.")


def in_engine(house: House, count: int) -> None:
    """Wait until the engine has this many streams."""
    until(lambda: scrape(house.server)["tgi_batch_current_size"] == count)


# It dies


def test_killed_anywhere_the_streams_continue_exactly(house: House) -> None:
    streams = [house.begin(Answer("Place 0.", 60, seed=0), num_readers=2)]
    for number in range(1, 8):
        streams[0].seen(5 * number)
        streams.append(house.begin(Answer(f"Place {number}.", 30, seed=number), num_readers=2))
    house.kill_engine()
    for stream in streams:
        stream.wait()
        for follower in stream.followers:
            assert follower.num_connections == 1, "the reader was disconnected"


def test_a_request_during_the_death_is_served(house: House) -> None:
    """For a moment the engine is gone, but the server has not noticed."""
    for death in range(2):
        house.kill_engine()
        streams = [house.begin(Answer(f"Dying {death} {seed}.", 5, seed)) for seed in range(5)]
        for stream in streams:
            stream.wait()


def test_killed_before_the_first_token(house: House) -> None:
    with house.server.wire() as wire:
        wire.send("GET", "/livez")
        engine = house.server.worker()
        freeze(engine)  # so that the engine has not begun the next requests when it dies
        streams = [house.begin(Answer(f"Prefill {number}.", 30, seed=number)) for number in range(4)]
        in_engine(house, 4)
        engine.kill()
        assert wire.head() == 200
    for stream in streams:
        stream.wait()
        assert b"continuity" not in stream.end  # nothing had been seen


@pytest.mark.parametrize(
    "number", [signal.SIGSEGV, pytest.param(signal.SIGABRT, marks=pytest.mark.deep)], ids=lambda one: one.name
)
def test_whatever_kills_it(house: House, number: signal.Signals) -> None:
    # 3 s of tokens: on a busy machine, the first stream must not end before the last one has begun.
    streams = [house.begin(Answer(f"All {seed}.", 600, seed)) for seed in range(8)]
    for stream in streams:
        stream.seen(5)
    house.kill_engine(number)
    for stream in streams:
        stream.wait()
        assert b'"continuity":"replayed"' in stream.end
    house.server.wait_line(f"killed by {number.name}")
    assert num_deaths(house) == 1


@pytest.mark.parametrize("num_kills", [2, pytest.param(5, marks=pytest.mark.deep)])
def test_killed_again_and_again(house: House, num_kills: int) -> None:
    """Also during replays, and while it loads."""
    chance = random.Random(16)
    streams = [house.begin(Answer(f"Again {seed}.", 120, seed)) for seed in range(4)]
    for _ in range(num_kills):
        streams[0].seen(1)
        time.sleep(chance.uniform(0, 0.25))  # any moment will do: that is what is under test
        house.kill_engine()
    for stream in streams:
        stream.wait()


@pytest.mark.deep
def test_a_slow_reader_misses_nothing(house: House) -> None:
    """The engine dies while the reader has fewer events than the log."""
    answer = Answer("Slow.", 300, seed=5)
    stream = house.begin(answer)
    with house.server.wire(receive_bytes=2048) as wire:
        wire.send("GET", f"{stream.path}/events")
        assert wire.head() == 200
        stream.seen(150)
        house.kill_engine()
        stream.wait()
        body = wire.body()
    assert body == b"".join(stream.followers[0].events)


# It hangs


def test_an_engine_that_hangs_is_replaced(house: House) -> None:
    stream = house.begin(Answer("Hang.", 60, seed=1)).seen(9)
    engine = house.server.worker()
    engine.suspend()
    stream.wait()
    assert not is_alive(engine)
    house.server.wait_line("no progress")


# It says what makes no sense

_CUSTOM = """
import os, signal, sys
if "tailrace.engines.worker" in sys.orig_argv:
    link = int(sys.orig_argv[-2])
    def ends(*_):
        os._exit(0)
    def talks(*_):
        os.write(link, {garbage!r})
    signal.signal(signal.SIGUSR1, ends)
    signal.signal(signal.SIGUSR2, talks)
"""


@pytest.fixture
def customised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], House]:
    """A house whose engines exit with status 0 at SIGUSR1, and say the given bytes at SIGUSR2."""

    def build(garbage: bytes) -> House:
        (tmp_path / "sitecustomize.py").write_text(_CUSTOM.format(garbage=garbage))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return House(tmp_path / "data", PACED)

    return build


def test_an_engine_that_exits_is_replaced(customised: Callable[[bytes], House]) -> None:
    with customised(b"") as house:
        stream = house.begin(Answer("Ends.", 50, seed=1)).seen(5)
        house.kill_engine(signal.SIGUSR1)
        stream.wait()
        house.server.wait_line("exit status 0")


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, pytest.param(b"\x03\0\0\0abc", marks=pytest.mark.deep)],
    ids=["length", "no-message"],
)
def test_an_engine_that_sends_garbage_is_replaced(customised: Callable[[bytes], House], garbage: bytes) -> None:
    with customised(garbage) as house:
        stream = house.begin(Answer("Garbage.", 50, seed=1)).seen(5)
        house.kill_engine(signal.SIGUSR2)
        stream.wait()
        house.server.wait_line("sent invalid data")


class Ear:
    """A receiver that records all calls."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def push(self, delta: Delta) -> None:
        self.ids += delta.token_ids

    def report(self, progress: Prefill) -> None:
        raise AssertionError(progress)

    def lost(self, error: EngineError) -> None:
        raise AssertionError(error)


async def _hears(messages: list[FromWorker]) -> tuple[WorkerProcess, Ear]:
    """A worker's socket, epoch 2, on which these are said."""
    worker, ear = WorkerProcess(2), Ear()
    worker.receivers[1] = ear
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
    with theirs:
        theirs.sendall(b"".join(map(encode, messages)))
    await worker.gone  # its end of the socket is closed, so all has been heard
    return worker, ear


async def test_late_frames_of_a_replaced_engine_are_ignored() -> None:
    _, ear = await _hears([Frame(epoch, 1, [Delta(1, 0, (epoch,))]) for epoch in (1, 2, 3, 0)])
    assert ear.ids == [2]


@pytest.mark.parametrize(("version", "epoch"), [(PROTOCOL_VERSION + 1, 2), (PROTOCOL_VERSION - 1, 2), (1, 1)])
async def test_an_engine_of_another_version_is_refused(version: int, epoch: int) -> None:
    capabilities = Capabilities("other", 100, 100, 1, 1, frozenset(), True)
    worker, _ = await _hears([Ready(version, epoch, capabilities), Frame(2, 1, [Delta(1, 0, (5,))])])
    assert not worker.ready.done()
    assert await worker.gone == "has another version"
    worker.ready.cancel()


@pytest.mark.parametrize("start", [0, 4, 6, 40], ids=["all-again", "double", "gap", "far"])
async def test_repeated_or_missing_tokens_are_never_shown(start: int) -> None:
    harness = Harness()
    run, neighbour = await harness.create("Hi", greedy(20)), await harness.create("Ho", greedy(20))
    harness.engine.step(5)
    harness.engine.deliver([Delta(run.choices[0].sequence.sequence_id, start, (65,))])
    harness.finish(run, neighbour)
    failure = end_of(run.log).failure
    assert failure is not None
    assert failure.code == "engine_error"
    ids = [i for event in run.log.events if isinstance(event, TextDelta) for i in event.token_ids]
    assert len(ids) == 5
    assert text_of(neighbour.log) == oracle(prompt_ids_of(neighbour), 1, 20)
    harness.check_idle()


# A request takes it down


def _poison(house: House, control: str) -> Stream:
    """Return a stream that kills its engine after three tokens."""
    answer = Answer((*b"Now ", 256 + CONTROL_TOKENS.index(control)), 50, seed=1)
    stream = house.begin(answer, prompt=f"Now {control}")
    stream.ends = ("error",)
    return stream


@pytest.mark.parametrize(
    "control",
    [
        pytest.param("<|crash|>", id="crash"),
        pytest.param("<|garbage|>", id="raise", marks=pytest.mark.deep),
        pytest.param("<|stall|>", id="stall"),
    ],
)
def test_a_request_that_crashes_the_engine_is_ended(house: House, control: str) -> None:
    poison = _poison(house, control)
    assert as_json(sse_data(poison.end)[0])["error"]["code"] == "poison_request"
    until(lambda: num_deaths(house) == 2)  # the log may be a moment later
    again = house.server.post("/v1/streams", {"prompt": f"Now {control}", "max_tokens": 50, "seed": 77})
    assert (again.status_code, again.json()["error"]["code"]) == (422, "poison_request")
    house.begin(Answer("Harmless.", 20, seed=1)).wait()
    assert num_deaths(house) == 2


@pytest.mark.parametrize(
    ("control", "order"),
    [
        ("<|crash|>", "together"),
        ("<|crash|>", "between"),
        pytest.param("<|crash|>", "last", marks=pytest.mark.deep),
        ("<|stall|>", "first"),
        *(
            pytest.param(control, order, marks=pytest.mark.deep)
            for control in ("<|garbage|>", "<|stall|>")
            for order in ("together", "last", "between")
        ),
    ],
)
def test_neighbours_of_a_poison_are_exact(house: House, control: str, order: str) -> None:
    def neighbours(count: int) -> list[Stream]:
        return [house.begin(Answer(f"Neighbour {len(house.streams)}.", 60, seed=count)) for _ in range(count)]

    before = {"together": 0, "first": 0, "last": 4, "between": 2}[order]
    streams = neighbours(before)
    for stream in streams:
        stream.seen(1)
    poison = _poison(house, control)
    if order != "together":
        poison.seen(1)
    streams += neighbours(4 - before)
    for stream in streams:
        stream.wait()
    assert as_json(sse_data(poison.end)[0])["error"]["code"] == "poison_request"
    assert num_deaths(house) <= 3


@pytest.mark.parametrize("poison_first", [False, True])
async def test_a_poison_that_needs_another_one(poison_first: bool) -> None:
    """One of the two alone is harmless. Engines die at most three times, and whoever is not of the pair is exact."""
    harness = Harness(max_sequences=8)
    runs = [await harness.create(f"Hi {number}", greedy(30)) for number in range(4)]
    pair = [runs[1], runs[2]] if poison_first else [runs[0], runs[3]]
    deaths = 0
    for _ in range(600):
        if all(run.log.end is not None for run in runs):
            break
        harness.engine.step()
        if all(harness.engine.progress_of(f"Hi {runs.index(run)}") == [7] for run in pair):
            deaths += 1
            harness.engine.fail(CRASH)
            harness.engine.restart()
    assert 1 <= deaths <= 3
    for run in runs:
        if run not in pair or end_of(run.log).status == "done":
            assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 30)
    harness.finish()
    harness.check_idle()


# It cannot come back


@contextmanager
def hunted(house: House) -> Iterator[None]:
    """Every engine is killed at once."""
    is_over = threading.Event()

    def hunt() -> None:
        process = psutil.Process(house.server.process.pid)
        while not is_over.wait(0.01):
            for child in process.children():
                child.kill()

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        yield
    finally:
        is_over.set()
        hunter.join()


@pytest.mark.deep
def test_streams_wait_for_an_engine_for_a_limited_time(tmp_path: Path) -> None:
    with House(tmp_path, PACED, "--recover-s", "2") as house:
        stream = house.begin(Answer("Gone.", 400, seed=1)).seen(9)
        stream.ends = ("error",)
        with hunted(house):
            refused: list[httpx.Response] = []

            def is_refused() -> bool:
                answer = house.server.post("/v1/streams", {"prompt": "New.", "max_tokens": 1})
                if answer.status_code == 503:
                    refused.append(answer)
                return bool(refused)

            stream.wait()
            until(is_refused)
            assert house.server.http.get("/livez").status_code == 503
            assert house.server.http.get("/readyz").status_code == 503
            assert house.server.http.get(stream.path).json()["status"] == "error"  # what is there can be read
        assert as_json(sse_data(stream.end)[0])["error"]["code"] == "engine_unavailable"
        assert refused[0].json()["error"]["code"] == "engine_unavailable"
        assert int(refused[0].headers["retry-after"]) >= 1
        until(lambda: house.server.http.get("/readyz").status_code == 200)
        assert house.server.http.get("/livez").status_code == 200
        house.begin(Answer("After.", 20, seed=1)).wait()


def test_streams_wait_for_an_engine_that_returns_in_time(tmp_path: Path) -> None:
    with House(tmp_path, PACED, "--recover-s", "60") as house:
        stream = house.begin(Answer("Gone.", 60, seed=1)).seen(9)
        with hunted(house):
            until(lambda: house.log.count("did not load") + num_deaths(house) >= 1)
            status = house.server.http.get(stream.path).json()["status"]
            assert status == "running"
        stream.wait()


# A second one stands by


_MORE = ("spare-then-first", "both")


def _engines(server: Server) -> list[psutil.Process]:
    return sorted(psutil.Process(server.process.pid).children(), key=lambda child: child.create_time())


@pytest.mark.deep
@pytest.mark.parametrize("victims", ["first", *_MORE])
def test_with_a_spare_the_stream_continues(tmp_path: Path, victims: str) -> None:
    with House(tmp_path, PACED, "--spare-engine") as house:
        until(lambda: len(_engines(house.server)) == 2)
        house.baseline = Resources.of(house.server)
        stream = house.begin(Answer("Spare.", 100, seed=1)).seen(9)
        first, spare = _engines(house.server)
        if victims != "first":
            spare.kill()
        if victims == "spare-then-first":
            stream.seen(20)
        first.kill()
        stream.wait()
        until(lambda: len(_engines(house.server)) == 2)
