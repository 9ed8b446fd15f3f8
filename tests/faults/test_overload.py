"""More requests than the server can serve, or fewer resources: admitted streams are exact, others are refused with
Retry-After, and afterwards everything is as before.

Requests that come while an engine is replaced are in `test_engine.py` too; slow heads and bodies, and readers that do
not read, in `tests/transport/test_http_edge.py` and `test_edge_readers.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.api.test_server_metrics import scrape
from tests.api.unaffected import STEADY, unaffected_stream
from tests.dialects.sse import whole_events
from tests.faults.house import House
from tests.faults.laws import Seen, check, status_of
from tests.http.wire import as_json, sse_ids
from tests.missing import skip_missing
from tests.processes import freeze, is_alive
from tests.waiting import LONG_S, until

from tailrace.dialects.wire import HEARTBEAT
from tailrace_outer.measure.bench.load import percentile

SMALL = Answer("Overload.", 40, seed=1)

logger = logging.getLogger(__name__)  # figures, for whoever asks: --log-cli-level=INFO


# Clients without number


class Crowd:
    """Clients of one server that ask for `SMALL`, each on a connection of its own, and what they saw."""

    def __init__(self, port: int) -> None:
        self.bodies: list[bytes] = []
        self.done_s: list[float] = []  # when each answer was there, and
        self.refused_s: list[float] = []  # how long each refusal took
        self._port = port
        body = json.dumps({"prompt": SMALL.prompt, "max_tokens": SMALL.count, "seed": SMALL.seed}).encode()
        head = "POST /v1/streams HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n"
        self._request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def hammer(self, num_clients: int, duration_s: float) -> None:
        """Each client sends its next request at once after an answer or a refusal."""
        over_s = time.monotonic() + duration_s
        await asyncio.gather(*(self._ask_on(over_s) for _ in range(num_clients)))

    async def arrive(self, per_s: float, duration_s: float) -> None:
        """Clients arrive one after the other, independently of earlier ones."""
        loop = asyncio.get_running_loop()
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        begun_s = loop.time()

        async def come() -> None:
            line = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", self._port)
            await self._ask(*line)
            idle.append(line)

        async with asyncio.TaskGroup() as clients:
            for number in range(int(per_s * duration_s)):
                await asyncio.sleep(begun_s + number / per_s - loop.time())
                clients.create_task(come())
        for _, writer in idle:
            await _hang_up(writer)

    def check(self, house: House) -> None:
        """All admitted clients have complete answers, and so has the journal. The server must be stopped."""
        kept = house.kept()
        for answer in self.bodies:
            body = answer.replace(HEARTBEAT, b"")  # starting an engine may take longer than the pause between two
            check(sse_ids(body)[0].rpartition("-")[0], SMALL, [Seen(whole_events(body))], kept)

    async def _ask_on(self, over_s: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while time.monotonic() < over_s:
            await self._ask(reader, writer)
        await _hang_up(writer)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_s = time.monotonic()
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        if head.startswith("http/1.1 200 "):
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
            self.bodies.append(body)
            self.done_s.append(asyncio.get_running_loop().time())
        else:
            body = await reader.readexactly(int(headers["content-length"]))
            self.refused_s.append(time.monotonic() - asked_s)
            assert head.split(" ")[1] in ("429", "503"), body
            assert int(headers["retry-after"]) >= 1
            assert as_json(body)["error"]["code"] in ("overloaded", "engine_unavailable"), body


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


def _wait_normal(server: Server) -> float:
    """Until nothing runs and nothing waits, and the next one is served; how long that took."""
    begun_s = time.monotonic()

    def is_idle() -> bool:
        gauges = scrape(server)
        return gauges["tgi_queue_size"] == gauges["tgi_batch_current_size"] == 0

    until(is_idle)
    body = {"prompt": SMALL.prompt, "max_tokens": SMALL.count, "seed": SMALL.seed}
    answer = server.post("/v1/streams", body, accept="text/event-stream")
    assert status_of(whole_events(answer.content)[-1]) == "done"
    return time.monotonic() - begun_s


PACED = "scripted:tokens_per_s=200"
_EIGHT = ("--max-sequences", "8", "--max-concurrent-requests", "16", "--keep-alive-s", "120")  # lines lie idle


@pytest.mark.deep
@pytest.mark.parametrize("duration_s", [2, pytest.param(60, marks=pytest.mark.timeout(300))])
@pytest.mark.parametrize("kind", ["arrivals", "retries"])
def test_ten_times_what_it_can_carry(tmp_path: Path, kind: str, duration_s: float) -> None:
    """Clients arrive independently, or retry at once, ignoring Retry-After."""
    with House(tmp_path, PACED, *_EIGHT) as house:
        calm, crowd = Crowd(house.server.port), Crowd(house.server.port)
        calm_s = min(duration_s / 2, 10)
        asyncio.run(calm.hammer(8, calm_s))
        assert not calm.refused_s
        calm_per_s = len(calm.bodies) / calm_s
        over_s = time.monotonic() + duration_s
        asyncio.run(crowd.arrive(10 * calm_per_s, duration_s) if kind == "arrivals" else crowd.hammer(80, duration_s))
        ratio = sum(done_s <= over_s for done_s in crowd.done_s) / duration_s / calm_per_s
        normal_s = _wait_normal(house.server)
        house.baseline.check_back(house.server)
        house.stop()
        for one in (calm, crowd):
            one.check(house)
    logger.info(
        "%s, %d s: goodput %.3f of %.1f/s; %d refusals, p50 %.1f ms, p99 %.1f ms; normal after %.2f s",
        kind, duration_s, ratio, calm_per_s, len(crowd.refused_s),
        *(1000 * percentile(crowd.refused_s, q) for q in (0.5, 0.99)), normal_s,
    )  # fmt: skip
    assert len(crowd.refused_s) > len(crowd.bodies)
    assert ratio >= 0.5, "it collapses; how well it holds is a matter for bench"


@pytest.mark.deep
@pytest.mark.parametrize("duration_s", [2, pytest.param(30, marks=pytest.mark.timeout(300))])
def test_the_engine_dies_repeatedly_under_load(tmp_path: Path, duration_s: float) -> None:
    """Admitted requests wait for the next engine; others wait for a limited time."""
    with House(tmp_path, PACED, *_EIGHT) as house:
        crowd = Crowd(house.server.port)
        with _killing(house, every_s=0.7):
            asyncio.run(crowd.hammer(40, duration_s))
        _wait_normal(house.server)
        house.stop()
        crowd.check(house)
    assert crowd.bodies
    assert crowd.refused_s


@contextlib.contextmanager
def _killing(house: House, *, every_s: float) -> Iterator[None]:
    """Each engine is killed `every_s` after it was ready: on a loaded machine it may take longer than that to start."""
    is_over = threading.Event()

    def kill() -> None:
        with httpx.Client(base_url=house.server.url, timeout=LONG_S, trust_env=False) as client:
            while not is_over.wait(every_s):
                if client.get("/readyz").is_success:
                    house.kill_engine()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        is_over.set()
        killer.join()


# Less to carry it with


def test_requests_beyond_the_engines_memory_wait(tmp_path: Path) -> None:
    """Twenty streams where there is room for two."""
    with House(tmp_path, "scripted:tokens_per_s=1000", "--kv-tokens", "512") as house:
        engine = house.server.worker()
        freeze(engine)  # so that none has ended before all have come
        streams = [house.begin(Answer(f"Room {seed}.", 180, seed)) for seed in range(20)]
        gauges = scrape(house.server)
        assert (gauges["tgi_queue_size"], gauges["tgi_batch_current_size"]) == (18, 2)
        engine.resume()
        for stream in streams:
            stream.wait()


@contextlib.contextmanager
def _without_descriptors(server: Server) -> Iterator[None]:
    """The server gets no more than it has."""
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    numbers = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    first_free = next(number for number in itertools.count() if number not in numbers)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.deep
def test_without_descriptors_the_journal_is_written_and_an_engine_is_waited_for(tmp_path: Path) -> None:
    """A new engine needs descriptors, too. The server survives."""
    with House(tmp_path, PACED) as house:
        stream = house.begin(Answer("Descriptors.", 120, seed=1)).seen(40)
        with _without_descriptors(house.server):
            stream.seen(80)
            house.kill_engine()
            body = {"prompt": "New.", "max_tokens": 1}
            until(lambda: house.server.post("/v1/streams", body).status_code == 503)
        stream.wait()
        assert stream.followers[0].num_connections == 1


def test_the_first_stream_without_a_free_descriptor() -> None:
    """The files for keeping it were opened at the start."""
    with contextlib.closing(Server(PACED)) as server:
        server.wait_ready()
        assert server.http.get("/livez").status_code == 200  # over a connection that stays
        with _without_descriptors(server):
            stream_id = server.create({"prompt": "First.", "max_tokens": 60, "seed": 1})
            assert server.wait_state(stream_id, "done", "error")["status"] == "done"
        server.wait_state(server.create({"prompt": "Second.", "max_tokens": 2}), "done")


_HOG = """
import os, resource, signal, sys
if "tailrace.engines.worker" in sys.orig_argv:
    def hog(*_):
        kept = []
        while True:
            kept.append(b"x" * 2**22)
    signal.signal(signal.SIGUSR1, hog)
"""


@pytest.fixture
def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A house whose engines use all memory at SIGUSR1."""
    (tmp_path / "sitecustomize.py").write_text(_HOG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with House(tmp_path / "data", PACED) as house:
        yield house


@contextlib.contextmanager
def memory_group(*processes: psutil.Process, room_bytes: int) -> Iterator[None]:
    """The processes share their present memory and so much more; whoever wants more is killed by the kernel."""
    group = Path("/sys/fs/cgroup/memory") / f"tailrace-{processes[0].pid}"
    try:
        group.mkdir()
    except OSError as error:
        skip_missing("a memory cgroup", str(error.strerror))
    used_bytes = sum(process.memory_info().rss for process in processes)
    (group / "memory.limit_in_bytes").write_text(str(used_bytes + room_bytes))
    for process in processes:
        (group / "cgroup.procs").write_text(str(process.pid))
    try:
        yield
    finally:
        (group / "memory.limit_in_bytes").write_text("-1")
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(pid)
        until(lambda: _removed(group))


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_an_engine_that_gets_no_more_memory_is_replaced(hungry: House) -> None:
    streams = [hungry.begin(Answer(f"Refused {seed}.", 300, seed)).seen(10) for seed in range(4)]
    engine = hungry.server.worker()
    most_bytes = engine.memory_info().vms + 2**27
    resource.prlimit(engine.pid, resource.RLIMIT_AS, (most_bytes, most_bytes))
    hungry.kill_engine(signal.SIGUSR1)
    for stream in streams:
        stream.wait()
        assert b'"continuity":"replayed"' in stream.end
    assert not is_alive(engine)


def test_without_memory_the_engine_dies_and_the_server_survives(hungry: House) -> None:
    streams = [hungry.begin(Answer(f"Killed {seed}.", 300, seed)).seen(10) for seed in range(4)]
    engine = hungry.server.worker()
    with memory_group(psutil.Process(hungry.server.process.pid), engine, room_bytes=2**27):
        hungry.kill_engine(signal.SIGUSR1)
        for stream in streams:
            stream.wait()
            assert stream.followers[0].num_connections == 1
    hungry.server.wait_line("killed by SIGKILL")


# One takes the time of all


_LONG_PROMPTS = ("words " * 1_700_000, "x" * 10_000_000, "🌊" * 2_500_000)


@pytest.mark.deep
@pytest.mark.parametrize(
    "content",
    ["words " * 500_000, *(pytest.param(content, marks=pytest.mark.deep) for content in _LONG_PROMPTS)],
    ids=["three-of-words", "ten-of-words", "ten-of-a-word", "ten-of-emoji"],
)
def test_a_prompt_of_megabytes_delays_no_other(content: str) -> None:
    with (
        contextlib.closing(Server(STEADY, "--body-bytes", "12000000").wait_ready()) as server,
        unaffected_stream(server) as other,
    ):
        before = other.num_events
        refusal = server.post("/v1/streams", {"prompt": content, "max_tokens": 1})
        assert refusal.json()["error"]["code"] == "context_length_exceeded"
        assert len(refusal.content) < 1000
        assert other.num_events > before + 4


# It ends twice


@pytest.mark.parametrize("num_races", [200, pytest.param(1000, marks=pytest.mark.deep)])
def test_a_cancellation_at_the_end_gives_one_end(tmp_path: Path, num_races: int) -> None:
    with House(tmp_path, "scripted:tokens_per_s=500") as house:

        def race(number: int) -> tuple[str, Answer, list[bytes]]:
            answer = Answer(f"Race {number}.", 12, seed=number)
            with house.server.wire() as wire, house.server.wire() as other:
                body = {"prompt": answer.prompt, "max_tokens": answer.count, "seed": answer.seed}
                wire.send("POST", "/v1/streams", body, {"accept": "text/event-stream"})
                assert wire.head() == 200
                path = wire.headers["content-location"]
                # The answer takes 24 ms, and the cancellation up to 15 ms on a busy machine.
                time.sleep(random.Random(number).uniform(0, 0.032))
                assert other.request("POST", f"{path}/cancel", {})[0] == 200
                seen = whole_events(wire.body())
                assert other.request("GET", f"{path}/events") == (200, b"".join(seen))
            return path.rpartition("/")[2], answer, seen

        with ThreadPoolExecutor(8) as threads:
            races = [*threads.map(race, range(num_races))]
        house.baseline.check_back(house.server)
        house.stop()
        kept = house.kept()
    for stream_id, answer, seen in races:
        check(stream_id, answer, [Seen(seen)], kept, ends=("done", "cancelled"))
    ends = Counter(status_of(seen[-1]) for _, _, seen in races)
    assert min(ends["done"], ends["cancelled"]) > num_races // 20, ends
