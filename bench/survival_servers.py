"""The servers of bench/survival.py, each under a supervisor, with its own best settings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil

__all__ = ["START_S", "ServerFailed", "Supervised", "free_port"]

START_S = 900.0  # some need minutes on a busy machine
RESTART_S = 0.1  # systemd's RestartSec
STOP_S = 30.0  # after SIGTERM; then SIGKILL


class ServerFailed(Exception):
    """A server does not start, or does not answer."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Supervised:
    """A server that is started again as soon as it ends, as systemd does with Restart=always: what is left of its
    processes is killed first."""

    def __init__(self, command: list[str], port: int, log: Path, *, ready: str, environment: dict[str, str]) -> None:
        self.port = port
        self._command = command
        self._environment = os.environ | environment
        self._ready = ready
        self._log = log
        self._cpu_s: dict[int, float] = {}
        self.revive()

    def revive(self) -> None:
        """Start it, also after it was lost: a new machine at the same address."""
        self._is_gone = threading.Event()
        self._start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_lost(self) -> bool:
        return self._is_gone.is_set()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                cwd=self._log.parent, start_new_session=True,
            )  # fmt: skip
        self.family = [psutil.Process(self.process.pid)]

    def _watch(self) -> None:
        while True:
            while self.process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.family = [self.family[0], *self.family[0].children(recursive=True)]
                time.sleep(0.05)
            self._kill_rest()
            if self._is_gone.wait(RESTART_S):
                return
            self._start()

    def _kill_rest(self) -> None:
        """Kill what the first process has left, and wait for its end: it may listen on the port."""
        found = list(self.family[1:])
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=10)

    def wait_ready(self) -> None:
        """Raises: ServerFailed if it does not answer in time."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + self._ready, timeout=2, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise ServerFailed(f"{self._command[:4]} did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def remember_work(self) -> None:
        """Note the processor time of each process, to know later which one generates."""
        self._cpu_s = self._times()

    def _times(self) -> dict[int, float]:
        found = {}
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found

    def work_s(self) -> float:
        """Return the processor time since `remember_work`."""
        return sum(self._grown().values())

    def _grown(self) -> dict[int, float]:
        return {pid: cpu_s - self._cpu_s.get(pid, 0.0) for pid, cpu_s in self._times().items()}

    def kill(self) -> None:
        """Kill the server's first process; its supervisor kills the others and starts it again."""
        self.process.kill()

    def kill_engine(self) -> str:
        """Kill the process that generates. Returns which one it is."""
        grown = self._grown()
        pid = max(grown, key=lambda one: grown[one])
        os.kill(pid, signal.SIGKILL)
        return "the server's own process" if pid == self.process.pid else "a process of its own"

    def stop(self) -> float:
        """Ask the server to stop, as `systemctl restart` does. Returns the seconds until it had ended."""
        process, start_s = self.process, time.monotonic()
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return time.monotonic() - start_s

    def remove(self) -> None:
        """Kill everything at once, for good: the machine is gone."""
        self._is_gone.set()
        while self._watcher.is_alive():  # it may just have started the server again
            self.process.kill()
            self._watcher.join(0.1)

    close = remove
