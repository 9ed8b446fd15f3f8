"""The libraries of which tailrace uses more than their documented names, and the versions in which that was checked.

Each release may change such a name. So pyproject.toml bounds these libraries, and the tests here fail for a release
that is newer than the checked one.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread
import psycopg
import pytest
from anyio._backends._asyncio import AsyncIOBackend
from packaging.requirements import Requirement
from packaging.version import Version
from psycopg import waiting
from psycopg.waiting import Ready
from starlette.concurrency import iterate_in_threadpool
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server
from websockets.server import ServerProtocol

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]


@dataclass(frozen=True, slots=True)
class _Library:
    """A library with bounds."""

    name: str
    lowest: str  # the tests below `tests` pass with it
    checked: str  # the newest release with which they pass
    tests: str


_LIBRARIES = (
    _Library("uvicorn", "0.50", "0.54", "tests/http"),
    _Library("websockets", "17", "17.4", "tests/http"),
    _Library("starlette", "0.51", "1.10", "tests/http tests/api tests/serve tests/apps"),
    _Library("anyio", "4.6.2", "4.16", "tests/serve tests/apps"),
    _Library("psycopg", "3.2.13", "3.3", "tests/records"),
)


@pytest.mark.parametrize("library", _LIBRARIES, ids=lambda library: library.name)
def test_the_installed_release_was_checked(library: _Library) -> None:
    installed, checked = Version(version(library.name)), Version(library.checked)
    assert installed.release[:2] <= checked.release[:2], (
        f"{library.name} {installed} is newer than {checked}, with which its private names were checked. Run "
        f"`pytest {library.tests}` and this file. If they pass, write {installed} here, and raise the bound in "
        "pyproject.toml if it excludes this release."
    )


@pytest.mark.parametrize("library", _LIBRARIES, ids=lambda library: library.name)
def test_the_project_asks_for_what_was_checked(library: _Library) -> None:
    required = [*_PROJECT["dependencies"], *_PROJECT["optional-dependencies"]["postgresql"]]
    declared = {found.name: found for found in map(Requirement, required)}[library.name].specifier
    lower = {bound.version for bound in declared if bound.operator == ">="}
    assert lower == {library.lowest}
    assert declared.contains(library.checked)
    major, minor, *_ = (*Version(library.checked).release, 0)
    following = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}"  # releases of 0.x may change anything
    assert not declared.contains(following), f"pyproject.toml needs an upper bound of {library.name}"


def _parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_uvicorn() -> None:
    """`http/protocol.py` overrides the first three. The attributes are those that it reads of a connection and of a
    request."""
    assert _parameters(HttpToolsProtocol._start_asgi_task) == ["self", "cycle", "app"]
    assert _parameters(HttpToolsProtocol._should_upgrade) == ["self"]
    assert _parameters(HttpToolsProtocol.timeout_keep_alive_handler) == ["self"]
    assert _parameters(HttpToolsProtocol._unset_keepalive_if_required) == ["self"]
    assert _parameters(HttpToolsProtocol.handle_websocket_upgrade) == ["self"]
    assert {200, 503} <= STATUS_LINE.keys()
    of_connection = inspect.getsource(HttpToolsProtocol)
    for name in (
        "client", "cycle", "flow", "headers", "loop", "parser", "pipeline", "server_state", "timeout_keep_alive",
        "timeout_keep_alive_task", "transport", "url",
    ):  # fmt: skip
        assert f"self.{name}" in of_connection, name
    of_request = inspect.getsource(RequestResponseCycle)
    for name in ("disconnected", "message_event", "more_body", "response_complete", "response_started"):
        assert f"self.{name}" in of_request, name
    assert inspect.isgeneratorfunction(inspect.unwrap(Server.capture_signals))  # listening.py replaces it


def test_websockets() -> None:
    """`http/flow.py` learns from `reader.at_eof` where a frame begins, and `http/websocket_protocol.py` sets the
    state."""
    core = ServerProtocol()
    assert inspect.isgeneratorfunction(core.reader.at_eof)
    assert "reader.at_eof()" in inspect.getsource(ServerProtocol.parse) + inspect.getsource(ServerProtocol.__mro__[1])
    for name in ("close_rcvd", "close_sent", "current_size", "debug", "parser_exc", "state"):
        assert hasattr(core, name), name


def test_anyio() -> None:
    """`serve/calling.py` finds a task that waits for a thread by the name of this coroutine."""
    assert inspect.iscoroutinefunction(AsyncIOBackend.run_sync_in_worker_thread)
    assert "run_sync_in_worker_thread(" in inspect.getsource(anyio.to_thread.run_sync)


def test_starlette() -> None:
    """`serve/closing.py` finds the plain generator in a local variable of this function."""
    assert inspect.isasyncgenfunction(iterate_in_threadpool)
    assert "iterator" in iterate_in_threadpool.__code__.co_varnames


def test_psycopg() -> None:
    """`records/postgresql.py` puts a limit around each exchange. A quiet socket has to wake it: `Ready.NONE`."""
    assert _parameters(psycopg.Connection.wait)[:2] == ["self", "gen"]
    assert not Ready.NONE
    assert "READY_NONE" in inspect.getsource(waiting.wait_selector)
