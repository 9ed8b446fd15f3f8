"""Starts servers and commands as forks of a process that has imported what they import.

Imports are half of the processor time of a start, and the tests start servers several hundred times. A fork runs the
same command from its first line on, with its own arguments, environment, directory, session and descriptors, and is a
child of the process of tests. The program itself is started by tests of its start, by tests that change what the
interpreter or a library reads at its start, and with TESTS_FORK=0, as in `make test-deep`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import walk_packages
from tempfile import TemporaryFile
from typing import Any, TextIO

__all__ = ["Fork", "run", "run_text", "start"]

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 2**17  # of a command and its environment
_READ_AT_THE_START = re.compile(
    "PYTHON|LD_|GLIBC_|MALLOC_|OMP_|HF_|FAKETIME|FAULT_"
)  # by the interpreter and by libraries
_MODULES = (
    "platformdirs.unix", "sqlalchemy.dialects.sqlite", "tailrace.api.lifecycle",
    "tailrace.cli.pull", "tailrace.cli.serve", "tailrace.cli.windows",
    "tailrace.records.conversation_store",
    "tailrace.records.kept_images", "tailrace.records.kept_streams", "tailrace.records.key_store",
    "tailrace.records.request_log", "tailrace.records.records_service", "tailrace.records.session_store",
    "tailrace_outer.admin.keys_command", "tailrace_outer.admin.opening",
    "tailrace_outer.admin.usage", "tailrace_outer.apps.command",
    "tailrace_outer.apps.front", "tailrace_outer.apps.host", "tailrace_outer.apps.on_ray.spec",
    "tailrace_outer.apps.targets", "tailrace_outer.foreign_metrics.opening",
    "tailrace_plugins.otlp.exporting", "tailrace_plugins.tool_loop.opening",
    "uvicorn.lifespan.off", "uvloop", "yaml",
)  # fmt: skip
_PACKAGES = (
    "tailrace_outer.conversations", "tailrace_outer.scripted", "tailrace_plugins.batches",
    "tailrace_plugins.durable_streams", "tailrace_plugins.terminal_chat", "tailrace_plugins.top",
)  # fmt: skip
# What some commands import as well, by a word in them. It is imported when the first such command comes.
_SOMETIMES = {b"redis://": "tailrace_outer.redis", b"--mcp-servers": "tailrace_plugins.tool_loop"}
_GROUPS = ("app_folders", "conversation_formats", "engines", "extensions", "places", "wires")


def start(
    command: Sequence[str], environment: Mapping[str, str], directory: Path | None
) -> subprocess.Popen[str] | Fork:
    """Start a command of tailrace in its own session, with a pipe for its stderr. Its stdin and stdout are empty."""
    if origin := _origin_of(command, environment):
        reading, writing = os.pipe()
        with open(os.devnull, "r+b") as empty:
            pid = origin.fork(command, environment, directory, (empty.fileno(), empty.fileno(), writing))
        os.close(writing)
        return Fork(pid, command, open(reading, encoding="utf-8"))
    return subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    directory: Path | None = None,
    stdin: bytes = b"",
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of tailrace to its end. Raises: subprocess.TimeoutExpired."""
    origin = _origin_of(command, environment)
    if origin is None:
        return subprocess.run(
            command, cwd=directory, env=environment, input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        pid = origin.fork(command, environment, directory, (given.fileno(), out.fileno(), err.fileno()))
        fork = Fork(pid, command)
        try:
            status = fork.wait(timeout_s)
        finally:
            fork.kill()
            fork.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(command), status, out.read(), err.read())


def run_text(
    command: Sequence[str], environment: Mapping[str, str], *, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `run`, with text."""
    done = run(command, environment, directory=directory)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class Fork:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str], stderr: TextIO | None = None) -> None:
        self.pid = pid
        self.args = args
        self.stderr = stderr
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with self._waiting:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        while (status := self.poll()) is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Origin:
    """The process that is forked."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
        self._environment = _read_at_the_start(os.environ)
        self._asking = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def fits(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        program = Path(sys.executable).parent / "tailrace"
        return command[0] == str(program) and _read_at_the_start(environment) == self._environment

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | None,
        descriptors: tuple[int, int, int],
    ) -> int:
        """Return the process id of a fork. The descriptors become its stdin, stdout and stderr."""
        wanted = [list(command), dict(environment), str((directory or Path()).absolute())]
        with self._asking:
            # A fork's parent ends at once. So this process becomes the parent, and can wait for the fork. Processes
            # that lose their parents later are not for this process to wait for.
            _adopt_orphans(True)
            socket.send_fds(self._socket, [json.dumps(wanted).encode()], descriptors)
            pid = self._socket.recv(100)
            _adopt_orphans(False)
        assert pid, f"the process that is forked ended with {self._process.wait()}"
        return int(pid)


def _origin_of(command: Sequence[str], environment: Mapping[str, str]) -> _Origin | None:
    """Return the process to fork; None if the program has to be started."""
    if sys.platform != "linux" or os.environ.get("TESTS_FORK") == "0":
        return None
    origin = _origin(os.getpid())
    return origin if origin.fits(command, environment) else None


@cache
def _origin(_pid: int) -> _Origin:
    return _Origin()


def _adopt_orphans(is_on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def _read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if _READ_AT_THE_START.match(name)}


def _import() -> None:
    for name in _MODULES:
        import_module(name)
    for package in _PACKAGES:
        _import_package(package)
    for group in _GROUPS:
        for point in entry_points(group=f"tailrace.{group}"):
            with contextlib.suppress(Exception, SystemExit):  # faulty plugins, which a test installs first
                point.load()
    assert import_module("tailrace.http.wires").ServedWires().all  # which are then known to be sound


def _import_package(package: str) -> None:
    for module in walk_packages(import_module(package).__path__, f"{package}."):
        import_module(module.name)


def _import_for(message: bytes, imported: set[str]) -> None:
    wanted = {package for word, package in _SOMETIMES.items() if word in message} - imported
    for package in wanted:
        _import_package(package)
    if wanted:
        imported |= wanted
        _freeze()


def _freeze() -> None:
    assert threading.active_count() == 1, "a fork would have no other thread"
    gc.freeze()  # so that forks do not copy pages to look for garbage


def _next_fork(control: socket.socket) -> None:
    """Return in each fork, which then has its command in `sys.argv`. The process itself ends with `control`."""
    imported: set[str] = set()
    while True:
        message, descriptors, *_ = socket.recv_fds(control, _MOST_BYTES, 3)
        if not message:
            os._exit(0)
        _import_for(message, imported)
        reading, writing = os.pipe()
        if (parent := os.fork()) == 0:
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            for descriptor in (reading, writing, control.detach()):
                os.close(descriptor)
            return _begin(descriptors, *json.loads(message))
        os.waitpid(parent, 0)
        control.send(os.read(reading, 100))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _begin(descriptors: list[int], command: list[str], environment: dict[str, str], directory: str) -> None:
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = command


def _main() -> Any:  # what the command returns
    from tailrace.__main__ import main

    _import()
    _freeze()
    _next_fork(socket.socket(fileno=int(sys.argv[1])))
    return main()


def _end(status: object) -> None:
    """End as an interpreter does, except that it does not take apart what the fork shares with all others: this touches
    each object, which copies all pages, and takes as long as the rest of a server's life in most tests."""
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at the end of each interpreter
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.executable).parent)  # as for the program `tailrace`
    try:
        _end(_main())
    except SystemExit as end:
        _end(end.code)
