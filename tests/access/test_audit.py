"""The audit log's file, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LONG_S, until, wait_until

from tailrace.access.audit import AUDIT, AuditLog, note, note_refusal, noting, open_audit_log
from tailrace.access.principal import PRINCIPAL, Principal
from tailrace.errors import Forbidden, ModelError, RequestError, Unauthenticated, UnknownStream
from tailrace.settings import Settings

ROOT = Path(__file__).parents[2]
_STREAM = "A" * 22


def _scope(
    log: AuditLog, client: str = "10.0.0.1", principal: Principal | None = None
) -> dict[str, Any]:  # Any: as ASGI has it
    who = {} if principal is None else {PRINCIPAL: principal}
    return {"type": "http", "method": "GET", "path": "/secret", "client": (client, 1), AUDIT: log, **who}


def _lines(path: Path) -> list[dict[str, Any]]:  # Any: what JSON can be
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def _open(path: Path) -> AbstractContextManager[AuditLog]:
    return open_audit_log(Settings(audit_log=str(path)))


def test_a_line_has_sender_action_time_and_result(path: Path) -> None:
    with _open(path) as log:
        scope = _scope(log, principal=Principal("alice", "k1"))
        note("stream.begin", "done", scope, stream=_STREAM, model="m", wire="")
        log.add_command("key.create", of_key="k2")
    first, second = _lines(path)
    assert first.pop("time").endswith("Z")
    assert first == {
        "event": "stream.begin", "outcome": "done", "owner": "alice", "key": "k1", "client": "10.0.0.1",
        "stream": _STREAM, "model": "m",
    }  # fmt: skip
    assert second["user"]
    assert path.stat().st_mode & 0o777 == 0o600
    note("stream.begin", "done", scope)  # the log is closed
    assert len(_lines(path)) == 2


def test_without_a_path_nothing_is_written() -> None:
    with open_audit_log(Settings()) as log:
        log.add_command("key.create")
        note("stream.begin", "done", _scope(log))
        note_refusal(Unauthenticated("This key is not valid here."), _scope(log))


def test_the_result_is_the_error_of_the_block(path: Path) -> None:
    with _open(path) as log:
        scope = _scope(log, principal=Principal("alice", "k1"))
        with noting("stream.delete", scope, stream=_STREAM):
            pass
        with pytest.raises(UnknownStream), noting("stream.delete", scope, stream=_STREAM):
            raise UnknownStream("There is no such stream.")
    assert [(line["outcome"], line.get("stream")) for line in _lines(path)] == [
        ("done", _STREAM), ("unknown_stream", _STREAM),
    ]  # fmt: skip


async def test_a_flood_of_refusals_is_a_few_lines(path: Path) -> None:
    with _open(path) as log:
        for _ in range(1000):
            note_refusal(Unauthenticated("This key is not valid here."), _scope(log))
        note_refusal(
            Forbidden("This key does not have the scope admin."), _scope(log, principal=Principal("bob", "k2"))
        )
        note_refusal(RequestError("Something else."), _scope(log))
        begun = _lines(path)
        await wait_until(lambda: len(_lines(path)) == 3)
        note_refusal(Unauthenticated("This key is not valid here."), _scope(log))
        again = _lines(path)
    assert [(line["event"], line["outcome"]) for line in begun] == [
        ("authenticate", "invalid_api_key"), ("authorize", "forbidden"),
    ]  # fmt: skip
    assert "owner" not in begun[0]
    assert (begun[1]["owner"], begun[1]["reason"]) == ("bob", "This key does not have the scope admin.")
    assert again[2] == begun[0] | {"time": again[2]["time"], "repeated": 999}
    assert len(again) == 4
    assert "secret" not in path.read_text()


async def test_a_flood_from_many_addresses_is_a_few_lines(path: Path) -> None:
    with _open(path) as log:
        for number in range(1000):
            note_refusal(Unauthenticated("no"), _scope(log, f"10.0.{number // 250}.{number % 250}"))
    lines = _lines(path)
    assert len(lines) == 12
    assert sum(line.get("repeated", 1) for line in lines) == 1000
    assert lines[-1]["client"] == "others"


_AFTER_SIGHUP = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.waiting import wait_until
from tailrace.access.audit import open_audit_log
from tailrace.settings import Settings

async def main(path: Path) -> None:
    with open_audit_log(Settings(audit_log=str(path))) as log:
        log.add("one", "done")
        path.rename(path.with_suffix(".1"))
        log.add("two", "done")
        os.kill(os.getpid(), signal.SIGHUP)
        await wait_until(path.exists)
        log.add("three", "done")

asyncio.run(main(Path(sys.argv[1])))
"""


def test_sighup_opens_a_new_file(path: Path) -> None:
    # In a process of its own: the signal ends a process that does not handle it, here with all tests that follow.
    child = subprocess.run([sys.executable, "-c", _AFTER_SIGHUP, str(path)], cwd=ROOT, timeout=LONG_S, check=False)
    assert child.returncode == 0
    assert [line["event"] for line in _lines(path.with_suffix(".1"))] == ["one", "two"]
    assert [line["event"] for line in _lines(path)] == ["three"]


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="cannot be written"), _open(tmp_path / "missing" / "audit.jsonl"):
        pass
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is missing")
    with _open(Path("/dev/full")) as log:
        for _ in range(3):
            log.add("one", "done")
    assert [record.message for record in caplog.records] == ["the audit log cannot be written: No space left on device"]


def test_lines_of_several_processes_do_not_mix(path: Path) -> None:
    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            with _open(path) as log:
                for _ in range(200):
                    log.add(f"event {number}", "done", what="x" * 300)
            os._exit(0)
        children.append(pid)
    until(lambda: all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in children))
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert len(_lines(path)) == 800
