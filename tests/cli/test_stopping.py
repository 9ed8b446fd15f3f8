"""Ctrl-C in every phase of every command: a quick end, exit status 130, and no traceback.

A terminal sends the signal to all processes of the command, so these tests send it to the process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.api.process import TAILRACE, environment
from tests.apps.process import write
from tests.waiting import LONG_S

_APP = """
    import sys, time
    from tailrace import serve

    def wait(what):
        print(what, file=sys.stderr, flush=True)
        time.sleep(60)

    @serve.deployment
    class Slow:
        def __init__(self):
            wait("constructing")

    app = Slow.bind()
"""


class _Command:
    """A `tailrace` command in its own process group. Its stderr goes to a file."""

    def __init__(
        self, arguments: list[str], directory: Path, *, program: tuple[str, ...] = (TAILRACE,), **variables: str
    ) -> None:
        self._log = directory / "stderr"
        with self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*program, *arguments], cwd=directory, env=environment() | variables, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
            )  # fmt: skip

    @property
    def errors(self) -> str:
        return self._log.read_text()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll, because nothing reports that a phase begins."""
        deadline_s = time.monotonic() + LONG_S
        while not condition():
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline_s, self.errors
            time.sleep(0.005)

    def wait_line(self, text: str) -> None:
        self.wait_until(lambda: text in self.errors)

    def wait_child(self, module: str) -> psutil.Process:
        """Wait for a process that runs a module of tailrace."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if module in child.cmdline():
                        found.append(child)
            return bool(found)

        self.wait_until(is_there)
        return found[0]

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Send Ctrl-C or another signal, wait for the end, and return the exit status."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, number)
        status = self.process.wait(LONG_S)
        _, alive = psutil.wait_procs(children, timeout=LONG_S)
        assert not alive, "processes were left behind"
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., _Command]]:
    with contextlib.ExitStack() as ending:

        def begin(arguments: str, *, program: tuple[str, ...] = (TAILRACE,), **variables: str) -> _Command:
            command = _Command(arguments.split(), tmp_path, program=program, **variables)
            ending.callback(command.process.wait)
            ending.callback(command.process.kill)
            return command

        yield begin


def _check(command: _Command) -> None:
    status = command.interrupt()
    assert "Traceback" not in command.errors
    assert "KeyboardInterrupt" not in command.errors
    assert command.errors.rstrip().splitlines()[-1].startswith("Stopped."), command.errors
    assert status == 130


@pytest.mark.parametrize(
    "verb",
    [
        "serve",
        "pull",
        *(pytest.param(one, marks=pytest.mark.deep) for one in ("doctor smollm2", "certify", "bench --streams 1")),
    ],
)
def test_while_a_model_is_fetched(verb: str, start: Callable[..., _Command], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts a connection and never answers
        silent.settimeout(LONG_S)
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        command = start(
            verb, PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL=index, NO_PROXY="127.0.0.1", TAILRACE_HOME=str(tmp_path),
            **({"TAILRACE_PORT": "0"} if verb == "serve" else {}),
        )  # fmt: skip
        connection, _ = silent.accept()
        with connection:
            _check(command)


@pytest.mark.parametrize("verb", ["serve", pytest.param("pull", marks=pytest.mark.deep)])
def test_while_the_hub_is_asked(verb: str, start: Callable[..., _Command], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LONG_S)
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = start(f"{verb} hf:some/model:file.gguf", HF_ENDPOINT=hub, HF_HOME=str(tmp_path), TAILRACE_PORT="0")
        connection, _ = silent.accept()
        with connection:
            _check(command)


def test_while_the_server_of_a_chat_starts(start: Callable[..., _Command]) -> None:
    with socket.socket() as nobody:  # whose port is free, and stays so
        nobody.bind(("127.0.0.1", 0))
        command = start("chat scripted Hi.", TAILRACE_PORT=str(nobody.getsockname()[1]))
        command.wait_child("serve")
        _check(command)


def test_while_a_worker_starts(start: Callable[..., _Command]) -> None:
    command = start("serve scripted --port 0")
    command.wait_child("tailrace.engines.worker")
    _check(command)


def test_while_the_engine_loads_its_model(start: Callable[..., _Command]) -> None:
    command = start("serve scripted --port 0")
    worker = command.wait_child("tailrace.engines.worker")
    worker.suspend()  # it never becomes ready
    server = psutil.Process(command.process.pid)
    command.wait_until(lambda: server.status() == psutil.STATUS_SLEEPING)
    _check(command)


# Until here Python itself answers a Ctrl-C.
_BEGIN = "import sys; from tailrace.__main__ import main; print('It begins.', file=sys.stderr, flush=True); main()"


@pytest.mark.deep
@pytest.mark.parametrize("after_s", [0.05 * number for number in range(24)])
def test_at_any_moment_of_a_start(after_s: float, start: Callable[..., _Command]) -> None:
    command = start("serve scripted --port 0", program=(sys.executable, "-c", _BEGIN))
    command.wait_line("It begins.")
    time.sleep(after_s)  # the moment is the parameter of this test
    status = command.interrupt()
    assert "Traceback" not in command.errors
    assert status in (130, 0)  # 0 when it has started


@pytest.mark.parametrize(
    "module",
    [
        "tailrace_outer.measure.bench.roofline",
        pytest.param("tailrace_outer.measure.bench.inprocess", marks=pytest.mark.deep),
    ],
)
def test_while_doctor_measures(module: str, start: Callable[..., _Command]) -> None:
    command = start("doctor scripted:tokens_per_s=2")
    command.wait_child(module)
    _check(command)


@pytest.mark.deep
def test_while_bench_measures(start: Callable[..., _Command]) -> None:
    command = start("bench scripted:tokens_per_s=2 --streams 1 --server-streams 0")
    command.wait_child("tailrace_outer.measure.bench.inprocess")
    _check(command)


def test_while_the_server_of_bench_starts(start: Callable[..., _Command]) -> None:
    command = start("bench scripted --streams 1 --rounds 1 --server-streams 0")
    command.wait_child("serve")
    _check(command)


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.deep)])
def test_bench_leaves_no_server_after_a_signal(number: int, start: Callable[..., _Command]) -> None:
    command = start("bench scripted:tokens_per_s=2 --streams 1 --rounds 1 --server-streams 0")
    # The server listens then: nothing that it writes fails from now on.
    command.wait_child("tailrace_outer.measure.bench.inprocess")
    assert command.interrupt(number) == 130


@pytest.mark.deep
def test_while_certify_kills_workers(start: Callable[..., _Command]) -> None:
    command = start("certify scripted:tokens_per_s=2 --runs 100")
    command.wait_child("tailrace.engines.worker")
    _check(command)


@pytest.mark.parametrize("phase", [pytest.param("importing", marks=pytest.mark.deep), "constructing"])
def test_while_an_app_starts(phase: str, start: Callable[..., _Command], tmp_path: Path) -> None:
    write(tmp_path, "slow.py", _APP + ("\n    wait('importing')\n" if phase == "importing" else ""))
    command = start("run slow:app --port 0")
    command.wait_line(phase)
    _check(command)
