"""Starts servers and commands as forks of a process that has imported what they import.

Imports are half of the processor time of a start, and the tests start servers several hundred times. A fork runs the
same command from its first line on, with its own arguments, environment, directory, session and descriptors, and is a
child of the process of tests. So are the engine workers that tests start in their own process. A server's first worker
is a fork that waits until it is needed. The program itself is started by tests of its start, by tests that change what
the interpreter or a library reads at its start, and with TESTS_FORK=0, as in `make test-deep`.
"""

from __future__ import annotations

import asyncio
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
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import walk_packages
from tempfile import TemporaryFile
from typing import Any, NoReturn, TextIO

import psutil

__all__ = ["Fork", "children", "fork_workers", "run", "run_text", "start"]

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 2**17  # of a command and its environment
_PYTHON, _WORKER = sys.executable, "tailrace.engines.worker"  # tests start other programs in their places
_READ_AT_THE_START = re.compile(
    "PYTHON|LD_|GLIBC_|MALLOC_|OMP_|HF_|FAKETIME|FAULT_"
)  # by the interpreter and by libraries
_MODULES = (
    "platformdirs.unix", "sqlalchemy.dialects.sqlite", "tailrace.api.lifecycle",
    "tailrace.cli.pull", "tailrace.cli.serve", "tailrace.cli.windows", "tailrace.engines.worker",
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


def fork_workers() -> None:
    """Let the engine workers of this process be forks."""

    def fork(command: list[str], environment: Mapping[str, str]) -> int | None:
        if (origin := _origin_of(command, environment)) is None:
            return None
        with open(os.devnull, "rb") as empty:
            return origin.fork(command, environment, None, (empty.fileno(), 2, 2, int(command[3])))

    import_module("tailrace")  # which sets variables
    _Origin.environment = dict(os.environ)  # not what tests change in it
    _start_workers_with(fork)


def children() -> set[psutil.Process]:
    """Return the child processes of this process without the one that is forked."""
    ours = {_origin(os.getpid()).pid} if _origin.cache_info().currsize else set()
    return {child for child in psutil.Process().children() if child.pid not in ours}


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

    environment: Mapping[str, str] = os.environ

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
        self._asking = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), _room_for_a_name()], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, env=self.environment,
            )  # fmt: skip
        self.pid = self._process.pid

    def fits(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        is_ours = command[0] == str(Path(sys.executable).parent / "tailrace") or _is_worker(command)
        return is_ours and _read_at_the_start(environment) == _read_at_the_start(self.environment)

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | None,
        descriptors: tuple[int, ...],
    ) -> int:
        """Return the process id of a fork. The descriptors become its stdin, stdout and stderr; a worker has a fourth,
        its socket."""
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
    # What is kept once it is known: that wires are sound, the regular expressions of their paths, a vocabulary.
    for wire in import_module("tailrace.http.wires").ServedWires().all:
        for operation in wire.operations:
            import_module("starlette.routing").compile_path(operation.path)
    import_module("tailrace_outer.scripted.scripted_engine").tokenizer_json()


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
        message, descriptors, *_ = socket.recv_fds(control, _MOST_BYTES, 4)
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
    _begin_session(environment)
    os.chdir(directory)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = command
    if _is_worker(command):
        _wait_for_parent(int(command[4]))
        _become_worker(descriptors[3], command)
    if command[1:2] == ["serve"]:
        _keep_a_worker()


def _begin_session(environment: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)


def _keep_a_worker() -> None:
    """Let this process's first engine worker be a fork that already waits: half of the processor time of a server's
    start is the start of a worker. Later workers are started."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        control.close()
        message, descriptors, *_ = socket.recv_fds(theirs, _MOST_BYTES, 1)
        theirs.close()
        if not message:  # the server has ended
            os._exit(0)
        command, environment = json.loads(message)
        _begin_session(environment)
        os.dup2(2, 1)
        _become_worker(descriptors[0], command)
    theirs.close()

    def tell(command: list[str], environment: Mapping[str, str]) -> int | None:
        if control.fileno() == -1:
            return None
        with control:
            socket.send_fds(control, [json.dumps([command, dict(environment)]).encode()], [int(command[3])])
        return pid

    _start_workers_with(tell)


def _is_worker(command: Sequence[str]) -> bool:
    return list(command[:3]) == [_PYTHON, "-m", _WORKER]


def _start_workers_with(fork: Callable[[list[str], Mapping[str, str]], int | None]) -> None:
    """Let `fork` start the engine workers of this process. It gets the command and the environment of a worker, and
    returns a process id, or None if the program has to be started."""
    started = asyncio.create_subprocess_exec

    async def create(*command: str, **options: Any) -> Any:  # Any: as of the function that it replaces
        pid = fork(list(command), options["env"]) if _is_worker(command) else None
        return await started(*command, **options) if pid is None else _Worker(pid)

    asyncio.create_subprocess_exec = create  # type: ignore[assignment]


def _wait_for_parent(pid: int) -> None:
    """Wait until the process that asked for this fork is its parent: workers end without it."""
    deadline_s = time.monotonic() + 10.0
    while os.getppid() != pid and time.monotonic() < deadline_s:
        time.sleep(0.001)  # no event says so


def _become_worker(descriptor: int, command: list[str]) -> NoReturn:
    command[3] = str(descriptor)
    _rename(command)
    try:
        os._exit(import_module(_WORKER).main(command[3:]))
    except BaseException:  # with the exit status of an interpreter that ends so
        traceback.print_exc()
        os._exit(1)


class _Worker:
    """What servers use of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._ended = os.pidfd_open(pid)
        self._loop.add_reader(self._ended, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._ended)
        os.close(self._ended)
        self._status.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    def kill(self) -> None:
        if self._status.done():
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await asyncio.shield(self._status)


def _room_for_a_name() -> str:
    return "-" * (len(sys.executable) + 100)


def _rename(command: list[str]) -> None:
    """Show this command for this process, in the place of that of the process that was forked."""
    fields = Path("/proc/self/stat").read_text("utf-8").rpartition(") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, numbers 48 and 49 in proc(5)
    ctypes.memmove(start, b"\0".join(part.encode() for part in command).ljust(end - start, b"\0"), end - start)


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
    sys.path[0] = str(Path(__file__).parents[2])
    import_module("tests.trust").read_certificates_late()
    sys.path[0] = str(Path(sys.executable).parent)  # as for the program `tailrace`
    try:
        _end(_main())
    except SystemExit as end:
        _end(end.code)
