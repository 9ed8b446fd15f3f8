"""The built-in server on one, two and three replicas of Ray Serve, beside one plain server and beside plain Ray Serve.

    python bench/ray_serve.py [--ray-python PATH] [--checkpoint DIRECTORY] [--turns 2] [--output JSON]

PATH is a Python that has tailrace, Ray Serve and redis; with --checkpoint also torch and transformers. Without it, this
Python is used. This program starts one Redis, in which all servers of tailrace keep their streams, and one Ray. In each
turn every server starts, is measured, and stops. The engine is scripted, so that only the cost of serving remains:

- full: 16 clients at once, each reads answers of 200 tokens as server-sent events, as fast as they come. Events a
  second, and processor time per event of all processes of the server and of Ray, without Redis.
- paced: 16 clients that start one after the other, 50 tokens a second each. The time to the first event: median and
  99th percentile.
- alone: one client, answers of one token: the time to the first event, whose difference is the cost of the hop.

Plain Ray Serve runs a deployment of the tutorial's shape, whose generator yields words. With --checkpoint (as for
bench/deployments.py) the tutorial's Textbot is measured after the last turn on plain Ray Serve, and the built-in engine
with the same model, plain and on Ray, with four clients and answers of 40 tokens; `--turns 0` measures nothing else.
Numbers are medians over the turns. JSON is written after each measurement, so that an interrupted run keeps what it
has. A turn takes less than three minutes on a machine with little other work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from machine import this_machine
from servers import redis_server
from tailrace_outer.measure.bench.load import percentile

ROOT = Path(__file__).parent.parent
PORT = 8978  # of the server that is measured
REDIS_PORT = 8979
RAY_PORT = 8980
URL = f"http://127.0.0.1:{PORT}"
JOURNAL = ("--journal", f"redis://127.0.0.1:{REDIS_PORT}/0", "--port", str(PORT))
MODELS = ("--model", "full=scripted", "--model", "paced=scripted:tokens_per_s=50")
NUM_CLIENTS = 16
NUM_TOKENS = 200
READY_S = 240
# The priority of a plain server, no token of Ray's in the home directory, and patience on a busy machine.
RAY = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
NUM_CPUS = 4  # three replicas on two processors, each of which reserves one

# A deployment of the tutorial's shape. Each word is an event, as one token is.
WORDS = """
import asyncio

from fastapi import FastAPI
from ray import serve
from starlette.responses import StreamingResponse

web = FastAPI()


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.3})
@serve.ingress(web)
class Words:
    @web.post("/")
    async def answer(self, count: int, pause_s: float):
        return StreamingResponse(self.words(count, pause_s), media_type="text/event-stream")

    async def words(self, count: int, pause_s: float):
        for number in range(count):
            yield f"data: word {number}\\n\\n"
            await asyncio.sleep(pause_s)


app = Words.bind()
"""


Row = tuple[str, dict[str, float]]  # a kind of load, and its numbers by name


@dataclass
class Target:
    """A server, and how a client asks it for events."""

    name: str
    command: list[str]
    request: Callable[[int, float], httpx.Request]  # of so many tokens, with so many seconds between two
    is_on_ray: bool = True


def ask_tailrace(count: int, pause_s: float) -> httpx.Request:
    return _ask({"model": "paced" if pause_s else "full", "max_tokens": count})


def ask_model(count: int, pause_s: float) -> httpx.Request:
    del pause_s
    return _ask({"max_tokens": count})


def _ask(body: dict[str, object]) -> httpx.Request:
    body["prompt"] = f"Once upon a time, {time.monotonic()} years ago,"
    return httpx.Request("POST", f"{URL}/v1/streams", json=body, headers={"accept": "text/event-stream"})


def ask_words(count: int, pause_s: float) -> httpx.Request:
    return httpx.Request("POST", f"{URL}/", params={"count": count, "pause_s": pause_s})


def ask_bot(count: int, pause_s: float) -> httpx.Request:
    del count, pause_s  # the checkpoint limits them
    return httpx.Request("POST", f"{URL}/", params={"prompt": f"Once upon a time, {time.monotonic()} years ago,"})


async def read(http: httpx.AsyncClient, request: httpx.Request, num_tokens: int) -> tuple[float, int]:
    """Return the time to the first event, and the number of events: of tokens if they are not in events."""
    begun_s = time.perf_counter()
    first_s, pieces = 0.0, []
    answer = await http.send(request, stream=True)
    answer.raise_for_status()
    async for piece in answer.aiter_bytes():
        first_s = first_s or time.perf_counter() - begun_s
        pieces.append(piece)
    await answer.aclose()
    return first_s, b"".join(pieces).count(b"data: ") or num_tokens


async def load(target: Target, *, num_clients: int, num_each: int, num_tokens: int, pause_s: float) -> dict[str, float]:
    async def client(http: httpx.AsyncClient, index: int) -> list[tuple[float, int]]:
        await asyncio.sleep(index * num_tokens * pause_s / num_clients)
        return [await read(http, target.request(num_tokens, pause_s), num_tokens) for _ in range(num_each)]

    async with contextlib.AsyncExitStack() as running:
        clients = [httpx.AsyncClient(timeout=600, trust_env=False, verify=False) for _ in range(num_clients)]
        for http in clients:
            await running.enter_async_context(http)
        begun_s = time.perf_counter()
        answers = await asyncio.gather(*(client(http, index) for index, http in enumerate(clients)))
        seconds = time.perf_counter() - begun_s
    found = [row for rows in answers for row in rows]
    firsts = [first_s for first_s, _ in found]
    num_events = sum(count for _, count in found)
    return {
        "num_events": num_events,
        "events_per_s": num_events / seconds,
        "ttft_p50_ms": 1000 * statistics.median(firsts),
        "ttft_p99_ms": 1000 * percentile(firsts, 0.99),
    }


def processor_s(roots: list[psutil.Process]) -> float:
    """The processor time of processes and all below them."""
    total = 0.0
    for process in [one for root in roots for one in [root, *root.children(recursive=True)]]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def running(command: list[str], directory: Path, ready: str) -> Iterator[psutil.Process]:
    """A process, which ends with all below it. It is ready when it has written this."""
    log = directory / "log"
    environment = os.environ | RAY | {"PYTHONPATH": str(directory), "RAY_ADDRESS": f"127.0.0.1:{RAY_PORT}"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)
    root = psutil.Process(process.pid)
    try:
        deadline_s = time.monotonic() + READY_S
        while ready not in log.read_text():
            assert process.poll() is None, f"the server has ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline_s, f"the server is not ready: {log.read_text()[-2000:]}"
            time.sleep(0.5)
        yield root
    finally:
        below = root.children(recursive=True) if root.is_running() else []
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        for one in [*below, root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def measure(target: Target, cluster: psutil.Process, directory: Path, *, kinds: tuple[str, ...]) -> Iterator[Row]:
    """Start a server, and yield what each kind of load shows."""

    def loaded(num_clients: int, num_each: int, num_tokens: int, pause_s: float = 0.0) -> dict[str, float]:
        kind = {"num_clients": num_clients, "num_each": num_each, "num_tokens": num_tokens}
        return asyncio.run(load(target, pause_s=pause_s, **kind))

    with running(target.command, directory, "Listening on") as process:
        roots = [process, cluster] if target.is_on_ray else [process]
        for pause_s in (0.0, 0.02) if "paced" in kinds else (0.0,):  # warm up, each of the models
            loaded(NUM_CLIENTS if "paced" in kinds else 1, 1, 20, pause_s)
        for kind in kinds:
            before_s = processor_s(roots)
            if kind == "full":
                row = loaded(NUM_CLIENTS, 6, NUM_TOKENS)
            elif kind == "paced":
                row = loaded(NUM_CLIENTS, 6, 50, 0.02)
            elif kind == "alone":
                row = loaded(1, 100, 1)
            else:
                row = loaded(4, 2, 40)
            row["cpu_us_per_event"] = 1e6 * (processor_s(roots) - before_s) / row["num_events"]
            yield kind, row


def targets(ray_python: Path, directory: Path) -> list[Target]:
    """The servers with a scripted engine."""
    (directory / "words.py").write_text(WORDS)
    on_ray = [str(ray_python), "-m", "tailrace", "serve", *MODELS, *JOURNAL, "--on", "ray", "--replicas"]
    replicas = ((1, "1 replica"), (2, "2 replicas"), (3, "3 replicas"))
    return [
        Target("one plain server", plain_server(directory, *MODELS), ask_tailrace, is_on_ray=False),
        *(Target(f"on Ray, {name}", [*on_ray, str(count)], ask_tailrace) for count, name in replicas),
        Target("plain Ray Serve, a generator", run_app(ray_python, "words"), ask_words),
    ]


def plain_server(directory: Path, *flags: str) -> list[str]:
    program = str(Path(sys.executable).with_name("tailrace"))
    return [program, "serve", *flags, *JOURNAL, "--data-dir", str(directory / "data")]


def run_app(ray_python: Path, module: str) -> list[str]:
    script = (
        "import importlib, signal, threading, ray; from ray import serve; ray.init(); "
        f"serve.start(http_options={{'host': '127.0.0.1', 'port': {PORT}}}); "
        f"serve.run(importlib.import_module('{module}').app); leaving = threading.Event(); "
        "signal.signal(signal.SIGINT, lambda *_: leaving.set()); print('Listening on', flush=True); "
        "leaving.wait(); serve.shutdown()"
    )
    return [str(ray_python), "-c", script]


def models(ray_python: Path, directory: Path) -> list[Target]:
    """The same model under each."""
    source = (ROOT / "tests" / "apps" / "bots" / "textbot.py").read_text()
    (directory / "textbot.py").write_text(source.replace("from tailrace import serve", "from ray import serve"))
    flags = ("smollm2", "--default-max-tokens", "40", "--threads", "1")
    serve = [str(ray_python), "-m", "tailrace", "serve", *flags, *JOURNAL, "--on", "ray"]
    return [
        Target("plain Ray Serve, the tutorial's Textbot", run_app(ray_python, "textbot"), ask_bot),
        Target("one plain server, the same model", plain_server(directory, *flags), ask_model, is_on_ray=False),
        Target("on Ray, 1 replica, the same model", serve, ask_model),
    ]


class Results:
    """Medians of what was measured. They are written to `path` after each measurement."""

    def __init__(self, num_turns: int, path: Path | None) -> None:
        self._num_turns = num_turns
        self._path = path
        self._loads: list[float] = []
        self._found: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, server: str, kind: str, row: dict[str, float]) -> None:
        self._loads.append(os.getloadavg()[0])
        for name, value in row.items():
            self._found[server, kind, name].append(value)
        if self._path is not None:
            self._path.write_text(self.json() + "\n")

    def json(self) -> str:
        rows: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for (server, kind, name), values in self._found.items():
            rows[server][kind][name] = round(statistics.median(values), 2)
        load = {"load_average": statistics.median(self._loads)} if self._loads else {}
        return json.dumps({"machine": this_machine(), **load, "turns": self._num_turns, "servers": rows}, indent=1)


@contextlib.contextmanager
def own_ray(ray_python: Path, directory: Path) -> Iterator[psutil.Process]:
    """A Ray without dashboard. Yields the process above all others."""
    start = [str(ray_python), "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={RAY_PORT}"]
    own = ["--include-dashboard=false", f"--num-cpus={NUM_CPUS}", "--node-ip-address=127.0.0.1"]
    (directory / "ray").mkdir()
    with running([*start, *own, f"--temp-dir={directory}/t"], directory / "ray", "Ray runtime started") as process:
        yield process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left
    if options.checkpoint:  # before Ray starts, whose replicas import the bot
        os.environ["CHECKPOINT"] = str(options.checkpoint.resolve())
    results = Results(options.turns, options.output)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        directory = Path(folder)
        usual = [(one, ("full", "paced", "alone")) for one in targets(options.ray_python, directory)]
        runs: list[tuple[str, Target, tuple[str, ...]]] = [
            (f"turn {turn}", *one) for turn in range(1, options.turns + 1) for one in usual
        ]
        if options.checkpoint:
            runs += [("models", one, ("model",)) for one in models(options.ray_python, directory)]
        with redis_server(directory, REDIS_PORT), own_ray(options.ray_python, directory) as cluster:
            for part, target, kinds in runs:
                print(f"{time.monotonic() - begun_s:4.0f} s  {part}: {target.name}", flush=True)
                for kind, row in measure(target, cluster, directory, kinds=kinds):
                    shown = ", ".join(f"{name} {value:.1f}" for name, value in row.items())
                    print(f"        {kind}: {shown}", flush=True)
                    results.add(target.name, kind, row)
    print(results.json())


if __name__ == "__main__":
    main()
