"""The built-in server on one, two and three replicas of Ray Serve, beside one plain server and beside plain Ray Serve.

    python bench/ray_serve.py --ray-python PATH [--checkpoint DIRECTORY] [--turns 3] [--output JSON]

PATH is a Python that has tailrace, Ray Serve and redis; with --checkpoint also torch and transformers. All servers of
tailrace keep their streams in one Redis, which this program starts. In each turn every server starts, is measured, and
stops. The engine is scripted, so that only the cost of serving remains:

- full: 16 clients at once, each reads answers of 200 tokens as server-sent events, as fast as they come. Events a
  second, and processor time per event of all processes of the server, without Redis.
- paced: 16 clients, 50 tokens a second each. The time to the first event: median and 99th percentile.
- alone: one client, answers of one token: the time to the first event, whose difference is the cost of the hop.

Plain Ray Serve runs a deployment of the tutorial's shape, whose generator yields words. With --checkpoint (as for
bench/deployments.py) it also runs the tutorial's Textbot, beside the built-in engine on Ray, with four clients.
Numbers are medians over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parent.parent
PORT = 8978
REDIS_PORT = 8979
URL = f"http://127.0.0.1:{PORT}"
NUM_CLIENTS = 16
NUM_TOKENS = 200
READY_S = 240
# Three replicas on two processors, each of which reserves one; and the priority of a plain server.
RESOURCES = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 4}', "RAY_worker_niceness": "0"}

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


@dataclass
class Target:
    """A server, and how a client asks it for events."""

    name: str
    command: list[str]
    request: Callable[[int, float], httpx.Request]  # of so many tokens, with so many seconds between two


def ask_tailrace(count: int, pause_s: float) -> httpx.Request:
    body = {"prompt": f"{pause_s} {time.monotonic()}", "max_tokens": count}
    return httpx.Request("POST", f"{URL}/v1/streams", json=body, headers={"accept": "text/event-stream"})


def ask_words(count: int, pause_s: float) -> httpx.Request:
    return httpx.Request("POST", f"{URL}/", params={"count": count, "pause_s": pause_s})


def ask_bot(count: int, pause_s: float) -> httpx.Request:
    return httpx.Request("POST", f"{URL}/", params={"prompt": f"Once upon a time, {time.monotonic()} years ago,"})


async def read(http: httpx.AsyncClient, request: httpx.Request) -> tuple[float, int]:
    """Return the time to the first event, and the number of events."""
    begun_s = time.perf_counter()
    first_s, num_events = 0.0, 0
    answer = await http.send(request, stream=True)
    answer.raise_for_status()
    async for piece in answer.aiter_bytes():
        first_s = first_s or time.perf_counter() - begun_s
        num_events += piece.count(b"data: ") or 1
    await answer.aclose()
    return first_s, num_events


async def load(target: Target, *, num_clients: int, num_each: int, num_tokens: int, pause_s: float) -> dict[str, float]:
    async def client() -> AsyncIterator[tuple[float, int]]:
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            for _ in range(num_each):
                yield await read(http, target.request(num_tokens, pause_s))

    async def all_of(one: AsyncIterator[tuple[float, int]]) -> list[tuple[float, int]]:
        return [found async for found in one]

    begun_s = time.perf_counter()
    found = [row for rows in await asyncio.gather(*(all_of(client()) for _ in range(num_clients))) for row in rows]
    seconds = time.perf_counter() - begun_s
    firsts = sorted(first_s for first_s, _ in found)
    num_events = sum(count for _, count in found)
    return {
        "num_events": num_events,
        "events_per_s": num_events / seconds,
        "ttft_p50_ms": 1000 * statistics.median(firsts),
        "ttft_p99_ms": 1000 * firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))],
    }


def processor_s(root: psutil.Process) -> float:
    """The processor time of a process and all below it."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def running(command: list[str], directory: Path, probe: httpx.Request) -> Iterator[psutil.Process]:
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(directory), **RESOURCES}
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, f"the server has ended: {(directory / 'log').read_text()[-2000:]}"
            assert time.monotonic() < deadline_s, "the server does not answer"
            with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=30, trust_env=False) as http:
                if http.send(probe).status_code < 300:
                    break
            time.sleep(0.5)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            root = psutil.Process(process.pid)
            for one in [*root.children(recursive=True), root]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def measure(target: Target, directory: Path, *, kind: str) -> dict[str, dict[str, float]]:
    with running(target.command, directory, target.request(1, 0.0)) as process:
        asyncio.run(load(target, num_clients=4, num_each=4, num_tokens=20, pause_s=0.0))  # warm up
        if kind == "model":
            return {"model": asyncio.run(load(target, num_clients=4, num_each=4, num_tokens=40, pause_s=0.0))}
        if kind == "paced":
            return {
                "paced": asyncio.run(load(target, num_clients=NUM_CLIENTS, num_each=10, num_tokens=50, pause_s=0.02))
            }
        before_s = processor_s(process)
        full = asyncio.run(load(target, num_clients=NUM_CLIENTS, num_each=6, num_tokens=NUM_TOKENS, pause_s=0.0))
        full["cpu_us_per_event"] = 1e6 * (processor_s(process) - before_s) / full["num_events"]
        alone = asyncio.run(load(target, num_clients=1, num_each=100, num_tokens=1, pause_s=0.0))
        return {"full": full, "alone": alone}


def targets(ray_python: Path, directory: Path, *, engine: str) -> list[Target]:
    """The servers with a scripted engine."""
    journal = ["--journal", f"redis://127.0.0.1:{REDIS_PORT}/0", "--port", str(PORT)]
    plain = [str(Path(sys.executable).with_name("tailrace")), "serve", engine, *journal, "--data-dir", str(directory)]
    on_ray = [str(ray_python), "-m", "tailrace", "serve", engine, *journal, "--on", "ray"]
    found = [Target("one plain server", plain, ask_tailrace)]
    for count in (1, 2, 3):
        name = f"on Ray, {count} replica{'s' * (count > 1)}"
        found.append(Target(name, [*on_ray, "--replicas", str(count)], ask_tailrace))
    (directory / "words.py").write_text(WORDS)
    found.append(Target("plain Ray Serve, a generator", run_app(ray_python, "words"), ask_words))
    return found


def run_app(ray_python: Path, module: str) -> list[str]:
    script = (
        "import signal, threading, importlib, ray; from ray import serve; ray.init(address='local', num_cpus=4); "
        f"serve.start(http_options={{'host': '127.0.0.1', 'port': {PORT}}}); "
        f"serve.run(importlib.import_module('{module}').app); leaving = threading.Event(); "
        "signal.signal(signal.SIGINT, lambda *_: leaving.set()); leaving.wait(); serve.shutdown()"
    )
    return [str(ray_python), "-c", script]


def models(ray_python: Path, directory: Path, checkpoint: Path) -> list[Target]:
    """The same model under both."""
    source = (ROOT / "tests" / "apps" / "bots" / "textbot.py").read_text()
    (directory / "textbot.py").write_text(source.replace("from tailrace import serve", "from ray import serve"))
    os.environ["CHECKPOINT"] = str(checkpoint.resolve())
    journal = ["--journal", f"redis://127.0.0.1:{REDIS_PORT}/0", "--port", str(PORT)]
    limits = ["--default-max-tokens", "40", "--threads", "1"]
    serve = [str(ray_python), "-m", "tailrace", "serve", "smollm2", *journal, *limits, "--on", "ray"]
    return [
        Target("plain Ray Serve, the tutorial's Textbot", run_app(ray_python, "textbot"), ask_bot),
        Target("on Ray, 1 replica, the same model", serve, ask_bot),
    ]


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[None]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    assert program, "redis-server is not installed"
    command = [program, "--port", str(REDIS_PORT), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray-python", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        runs = [(one, "full") for one in targets(options.ray_python, directory, engine="scripted")]
        paced = targets(options.ray_python, directory, engine="scripted:tokens_per_s=50")
        runs += [(one, "paced") for one in paced]
        if options.checkpoint:
            runs += [(one, "model") for one in models(options.ray_python, directory, options.checkpoint)]
        with redis_server(directory):
            for turn in range(options.turns):
                for target, kind in runs:
                    loads.append(os.getloadavg()[0])
                    for load_name, row in measure(target, directory, kind=kind).items():
                        print(json.dumps({"turn": turn, "server": target.name, "load": load_name, **row}), flush=True)
                        for name, value in row.items():
                            found[target.name, load_name, name].append(value)
    rows: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (server, load_name, name), values in found.items():
        rows[server][load_name][name] = round(statistics.median(values), 2)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    machine = {"cpus": os.cpu_count(), "commit": commit.stdout.strip(), "load_average": statistics.median(loads)}
    result = json.dumps({**machine, "turns": options.turns, "servers": rows}, indent=1)
    print(result)
    if options.output:
        options.output.write_text(result + "\n")


if __name__ == "__main__":
    main()
