"""Servers that a benchmark starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tailrace.system.child import stop

__all__ = ["RunningServer", "redis_server", "serving"]

_START_S = 600.0  # a model may have to be fetched and converted
_STOP_S = 60.0


class RunningServer:
    def __init__(self, process: psutil.Process, port: int) -> None:
        self.process = process
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_s(self) -> float:
        """Return the processor time of the server's own process, without its engines."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def serving(source: str, *flags: str, sources: Path | None = None) -> Iterator[RunningServer]:
    """Run `tailrace serve` on a free port, with a data directory of its own. `sources` is the folder `src` of another
    version.

    Raises: SystemExit if it does not start.
    """
    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "log").open("w+") as log:
        command = [sys.executable, "-m", "tailrace", "serve", source, "--port", "0", "--data-dir", directory, *flags]
        environment = os.environ | ({"PYTHONPATH": str(sources)} if sources is not None else {})
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            yield RunningServer(psutil.Process(process.pid), _port(process, Path(log.name)))
        finally:
            stop(process, within_s=_STOP_S)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until the server listens; returns its port."""
    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        if found := re.search(r"^Listening on \S+:([0-9]+)", log.read_text(), re.MULTILINE):
            return int(found[1])
        time.sleep(0.05)
    raise SystemExit(f"The server did not start:\n{log.read_text()[-3000:]}")


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[str]:
    """Start a Redis, and return its address."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if not program:
        raise SystemExit("redis-server is not installed")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
