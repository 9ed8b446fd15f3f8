"""tailrace on a local Ray, which has its own environment: processes, and readers that come back through Ray's proxy."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import httpx
import psutil
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.clients.installed import environment
from tests.faults.house import Follower, Stream
from tests.processes import is_alive
from tests.testing.redis_server import own_redis
from tests.waiting import until

__all__ = [
    "LEASE_S", "PACED", "REPLICA", "START_S", "RayHouse", "RayRun", "RayServer", "ServeRun", "free_port", "kill_tree",
    "processes", "ray_house", "ray_python", "two_machines",
]  # fmt: skip

ROOT = Path(__file__).parents[3]
PACED = "scripted:tokens_per_s=50"
REPLICA = "ray::ServeReplica:tailrace"
LEASE_S = 3
START_S = 240.0


def ray_python(*packages: str) -> Path:
    """The interpreter of an environment with tailrace, Ray and Redis's client."""
    return environment("ray", "-e", f"{ROOT}[ray,redis]", *packages)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes(name: str, above: int) -> list[psutil.Process]:
    """Processes of Ray with this title, below a process."""
    found = []
    for process in psutil.Process(above).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(name) and is_alive(process):
                found.append(process)
    return found


def kill_tree(pid: int) -> None:
    """kill -9 of a process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[str, int, int]]:
    """Two raylets with a CPU each. Yields the address of the cluster, and the process above all others of each: of the
    head, which has the controller, and of the other one."""
    port = free_port()
    start = [str(ray_python()), "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    with tempfile.TemporaryDirectory(prefix="ray-") as directory, contextlib.ExitStack() as running:
        head = [*start, "--node-ip-address=127.0.0.2", "--head", f"--port={port}", "--include-dashboard=false"]
        other = [*start, "--node-ip-address=127.0.0.3", f"--address=127.0.0.2:{port}"]
        pids = []
        for command in ([*head, f"--temp-dir={directory}"], other):
            process = running.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env=os.environ | {"RAY_worker_niceness": "0"},
                )
            )  # fmt: skip
            running.callback(kill_tree, process.pid)
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if "Ray runtime started" in line:
                    break
            else:
                raise AssertionError("".join(lines))
            pids.append(process.pid)
        yield f"127.0.0.2:{port}", pids[0], pids[1]


class RayServer(Server):
    """`tailrace serve … --on ray`."""

    listening = r"127\.0\.0\.1:([0-9]+)\S* \(.*on Ray"
    packages: tuple[str, ...] = ()

    def __init__(self, source: str, *flags: str, directory: Path | None = None, port: int = 0) -> None:
        self.command = (str(ray_python(*self.packages)), "-m", "tailrace")
        super().__init__(source, *flags, "--port", str(port or free_port()), "--on", "ray", directory=directory)

    def close(self) -> None:
        with contextlib.suppress(AssertionError):  # Ray's own log has tracebacks of its own
            super().close()


class RayRun(RayServer):
    """`tailrace run … --on ray`."""

    verb = "run"
    usual_flags = ()
    has_database = False


class ServeRun(RayServer):
    """Ray's own `serve run`, with a config file."""

    verb = "run"
    usual_flags = ()
    listening = r"HTTP port: ([0-9]+)"

    def __init__(self, config: Path, *, ready_path: str = "/readyz") -> None:
        self.command = (str(ray_python(*self.packages)), "-m", "ray.serve.scripts")
        self._ready_path = ready_path
        Server.__init__(self, str(config), directory=config.parent)

    def wait_ready(self, *, timeout_s: float = START_S) -> Self:
        super().wait_ready(timeout_s=timeout_s)

        def is_ready() -> bool:  # Ray's proxy is there first
            with contextlib.suppress(httpx.HTTPError):
                return self.http.get(self._ready_path).status_code == 200
            return False

        until(is_ready, timeout_s=timeout_s)
        return self


class RayHouse:
    """Replicas over a Redis of their own, and streams with readers. Every reader connects through Ray's proxy."""

    def __init__(self, server: Server, above: Sequence[int] = (), journal: str = "") -> None:
        self.server = server
        self.journal = journal
        self._above = above or (server.process.pid,)
        self.is_open = True
        self.streams: list[Stream] = []
        self._moved = threading.Condition()

    @property
    def log(self) -> str:
        return self.server.log

    def wait_moved(self) -> None:
        with self._moved:
            self._moved.wait(0.05)

    def replicas(self) -> list[psutil.Process]:
        return [process for one in self._above for process in processes(REPLICA, one)]

    def wait_replicas(self, count: int) -> None:
        until(lambda: len(self.replicas()) == count)

    def begin(self, prompt: str, num_tokens: int, *, count: int = 4, num_readers: int = 2) -> list[Stream]:
        """Begin streams, and wait until their readers have seen some events."""
        begun = []
        for seed in range(count):
            text = f"{prompt} {seed}."
            answer = Answer(text, num_tokens, seed)
            body = {"prompt": text, "max_tokens": num_tokens, "seed": seed}
            stream_id = self.server.create(body, x_session_id=text)  # which spreads them
            begun.append(Stream(stream_id, answer, [Follower(self, stream_id) for _ in range(num_readers)]))
        self.streams += begun
        for stream in begun:
            stream.seen(5)
        return begun

    def check(self) -> None:
        """Wait for all streams, and hold the laws for them: no reader saw a gap, another text, or two ends."""
        for stream in self.streams:
            stream.wait()
            stream.check(None)


@contextlib.contextmanager
def ray_house(
    directory: Path, *flags: str, model: str = PACED, replicas: int = 2, above: Sequence[int] = ()
) -> Iterator[RayHouse]:
    """`tailrace serve --on ray` over a Redis, with a scripted engine by default. Its replicas are below the processes
    `above`, or below its own process, which starts a Ray."""
    (directory / "redis").mkdir()
    with own_redis(directory / "redis") as (url, _):
        common = ("--replicas", str(replicas), "--journal", url, "--lease-s", str(LEASE_S), *flags)
        with contextlib.closing(RayServer(model, *common)) as server:
            house = RayHouse(server.wait_ready(timeout_s=START_S), above, url)
            house.wait_replicas(replicas)
            try:
                yield house
                house.check()
            finally:
                house.is_open = False
