"""A PostgreSQL server for one test, which may kill it."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from tests.missing import skip_missing

__all__ = ["OwnPostgresql", "free_port"]

_USER = "postgres"


def _programs() -> Path:
    """Return the directory of initdb and postgres. Skips the test without them."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for folder in reversed(folders):
        if (folder / "initdb").exists():
            return folder
    skip_missing("initdb", "it makes a PostgreSQL server that can be killed")
    raise AssertionError


def free_port() -> int:
    """Return a free port below those of outgoing connections. Otherwise a client that connects while the server is
    down could get the server's port as its own, and connect to itself."""
    for port in random.sample(range(15_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class OwnPostgresql:
    """A PostgreSQL server. Leaving the context stops it and removes its data. It runs as `postgres` if the tests run as
    root; pytest's directories are closed to that user."""

    def __init__(self) -> None:
        self._programs = _programs()
        self._user = _USER if os.geteuid() == 0 else None
        self._port = free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="postgresql-"))
        self._data = self._directory / "data"
        if self._user is not None:
            shutil.chown(self._directory, self._user)
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-U", _USER, "--no-sync")

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://{_USER}@127.0.0.1:{self._port}/postgres"

    def __enter__(self) -> OwnPostgresql:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        self._run(
            "pg_ctl", "-D", str(self._data), "-w", "-l", str(self._data / "log"), "-o",
            f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories=''", "start",
        )  # fmt: skip

    def kill(self) -> None:
        """Stop the server at once, as in a power cut."""
        if (self._data / "postmaster.pid").exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # it has gone meanwhile
                self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def freeze(self) -> None:
        """Suspend the server: it answers no client, and closes no connection."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):  # a child that has ended meanwhile
                os.kill(pid, number)

    def _pids(self) -> list[int]:
        import psutil

        first = psutil.Process(int((self._data / "postmaster.pid").read_text().split("\n")[0]))
        return [first.pid, *(child.pid for child in first.children(recursive=True))]

    def _run(self, program: str, *words: str) -> None:
        group = pwd.getpwnam(self._user).pw_gid if self._user is not None else None
        subprocess.run(
            [str(self._programs / program), *words], check=True, user=self._user, group=group, extra_groups=[],
            cwd=self._directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=120,
        )  # fmt: skip
