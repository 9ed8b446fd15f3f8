"""A real `tailrace serve` process on a free port of 127.0.0.1, and its output."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from tests.api.forks import start
from tests.http.wire import Wire
from tests.waiting import LONG_S, until

__all__ = ["TAILRACE", "Server", "environment"]

TAILRACE = str(Path(sys.executable).parent / "tailrace")


_numbers = itertools.count()
_records = tempfile.TemporaryDirectory(prefix="tailrace-records-")


def environment() -> dict[str, str]:
    """Return this process's environment without settings of tailrace, except for where its models are. The user's own
    database is not used."""
    kept = {name: value for name, value in os.environ.items() if not re.match("TAILRACE_(?!HOME$)", name)}
    return (
        kept if "TAILRACE_HOME" in kept else kept | {"TAILRACE_DATABASE": f"sqlite:///{_records.name}/records.sqlite"}
    )


def _environment_of(flags: tuple[str, ...], *, has_database: bool) -> dict[str, str]:
    """Return the environment of a server with its own database, so that tests do not share records, or without one."""
    variables = environment()
    if "TAILRACE_DATABASE" in variables and ("--data-dir" in flags or not has_database):
        del variables["TAILRACE_DATABASE"]
    elif "TAILRACE_DATABASE" in variables:
        variables["TAILRACE_DATABASE"] = f"sqlite:///{_records.name}/{next(_numbers)}.sqlite"
    return variables


class Server:
    """Starts a server in its own process group. It accepts requests after `wait_ready`."""

    command: tuple[str, ...] = (TAILRACE,)
    verb = "serve"
    usual_flags: tuple[str, ...] = ("--port", "0", "--drain-s", "0.2")
    has_database = True
    patience_s = 15.0
    listening = r"Listening on http://127\.0\.0\.1:([0-9]+)"

    def __init__(self, source: str, *flags: str, directory: Path | None = None) -> None:
        self.process = start(
            [*self.command, self.verb, source, *self.usual_flags, *flags],
            _environment_of(flags, has_database=self.has_database),
            directory,
        )
        self.port = 0
        self._lines: list[str] = []
        self._said = threading.Condition()
        self._is_silent = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._client: httpx.Client | None = None

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self._lines.append(line)
                self._said.notify_all()
        with self._said:
            self._is_silent = True
            self._said.notify_all()

    @property
    def log(self) -> str:
        """Return its stderr so far."""
        return "".join(self._lines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_line(self, pattern: str, *, timeout_s: float = LONG_S) -> re.Match[str]:
        """Return the first line that matches a pattern. Raises: AssertionError if the server ends or takes too long."""
        found: list[re.Match[str]] = []

        def is_there() -> bool:
            found.extend(filter(None, (re.search(pattern, line) for line in self._lines)))
            return bool(found) or self._is_silent

        with self._said:
            self._said.wait_for(is_there, timeout_s)
        assert found, f"no line with {pattern!r} in:\n{self.log}"
        return found[0]

    def wait_ready(self, *, timeout_s: float = LONG_S) -> Self:
        self.port = int(self.wait_line(self.listening, timeout_s=timeout_s)[1])
        return self

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, *, timeout_s: float = LONG_S) -> int:
        """Return the exit status when the process has ended and its output is complete."""
        status = self.process.wait(timeout_s)
        self._listener.join(timeout_s)
        return status

    def worker(self) -> psutil.Process:
        """Return the process of the engine. Waits while the process is replaced."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            children = psutil.Process(self.process.pid).children()
            with contextlib.suppress(psutil.NoSuchProcess):
                found[:] = [child for child in children if "tailrace.engines.worker" in child.cmdline()]
            return bool(found)

        until(is_there)
        (worker,) = found
        return worker

    def wire(self, *, receive_bytes: int = 0) -> Wire:
        """Return a raw connection to the server."""
        return Wire(self.port, receive_bytes=receive_bytes)

    @property
    def http(self) -> httpx.Client:
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, timeout=LONG_S, trust_env=False)
        return self._client

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Send JSON. Underscores in the names of headers stand for hyphens."""
        return self.http.post(path, json=body, headers={name.replace("_", "-"): text for name, text in headers.items()})

    def create(self, body: dict[str, Any], **headers: str) -> str:  # Any: bodies are what JSON can be
        """Create a stream of /v1/streams, and return its id."""
        answer = self.post("/v1/streams", body, **headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def state(self, stream_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/streams/{stream_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait_state(self, stream_id: str, *statuses: str, timeout_s: float = LONG_S) -> dict[str, Any]:
        """Poll a stream until it has one of these statuses."""
        deadline_s, pause_s = time.monotonic() + timeout_s, 0.01
        while (state := self.state(stream_id))["status"] not in statuses:
            assert time.monotonic() < deadline_s, state
            time.sleep(pause_s)  # there is nothing to wait on: it is this question that is under test
            pause_s = min(pause_s * 1.5, 0.05)
        return state

    def close(self) -> None:
        """End the process if it still runs. Streams that continue delay this by at most `patience_s`.

        Raises: AssertionError if there is a traceback in its log.
        """
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.patience_s)
        if self.process.poll() is None:
            self.process.terminate()  # the second one ends the drain
            try:
                self.process.wait(LONG_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert "Traceback" not in self.log, self.log
