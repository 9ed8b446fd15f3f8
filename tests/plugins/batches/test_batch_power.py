"""Batches after a power cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from tests.api.keyed import serving_with_keys
from tests.api.process import Server
from tests.plugins.batches.chat_rows import CHAT, answers_of, chat_row, client_of, expected, wait_ended
from tests.waiting import LONG_S

from tailrace.server import LocalNotes
from tailrace.streams.disk import DiskJournal
from tailrace_plugins.batches.batch_keys import RESULTS
from tailrace_plugins.batches.extension import EXTENSION

_SOURCE = "scripted:tokens_per_s=200"
_NUM_ROWS = 400
_NUM_CUTS = 3
_SYNCS_BETWEEN = 2


def _max_tokens(number: int) -> int:
    """Rows end in another order than they begin."""
    return 5 + number * 37 % 71


def _rows() -> bytes:
    rows = (chat_row(number, max_tokens=_max_tokens(number)) for number in range(_NUM_ROWS))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _copy(directory: Path, into: Path, *, log_bytes: int | None = None) -> Path:
    """Copy a journal, whose log has lost what is behind `log_bytes`."""
    into.mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        shutil.copy(directory / name, into)
    if log_bytes is not None:
        os.truncate(into / "journal.sqlite-wal", log_bytes)
    return into


def _num_results(directory: Path, scratch: Path) -> int:
    """Return the number of rows of which a journal has the result. It is read from a copy."""
    journal = DiskJournal(_copy(directory, scratch))
    try:
        return len(LocalNotes(EXTENSION.name, journal).sizes(RESULTS + b"/"))
    finally:
        journal.close()


class _Machine:
    """The disk of a server's machine. At some syncs of the journal it keeps what a power cut would leave: the log up to
    where the sync before had found it."""

    def __init__(self, live: Path, kept: Path) -> None:
        self.lost: list[tuple[Path, Path]] = []  # what was written, and what is left of it
        self.is_watching = False
        self._live = live
        self._kept = kept
        self._sync = os.fdatasync
        self._num_syncs = 0
        self._synced = (b"", 0)  # salt of the log, which changes when it begins anew, and bytes

    def sync(self, descriptor: int) -> None:
        """As `os.fdatasync`. Only the journal's thread calls it, which also moves its log into the database: so the
        database does not change meanwhile."""
        found = (os.pread(descriptor, 8, 16), os.fstat(descriptor).st_size)
        if self.is_watching and len(self.lost) < _NUM_CUTS:
            self._num_syncs += 1
            if self._num_syncs % _SYNCS_BETWEEN == 0:
                name = f"{len(self.lost)}"
                whole = _copy(self._live, self._kept / f"{name}-whole")
                log_bytes = self._synced[1] if self._synced[0] == found[0] else 0
                self.lost.append((whole, _copy(whole, self._kept / name, log_bytes=log_bytes)))
        self._sync(descriptor)
        self._synced = found


async def _run(machine: _Machine, directory: Path) -> str:
    """Run a batch in a server of this process. Returns its id."""
    async with serving_with_keys(directory, _SOURCE) as house, house.client() as client, asyncio.timeout(LONG_S):
        file = {"file": ("rows.jsonl", _rows())}
        uploaded = (await client.post("/v1/files", data={"purpose": "batch"}, files=file)).json()
        body = {"input_file_id": uploaded["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch_id = str((await client.post("/v1/batches", json=body)).json()["id"])

        async def num_done() -> int:
            return int((await client.get(f"/v1/batches/{batch_id}")).json()["request_counts"]["completed"])

        while not await num_done():
            await asyncio.sleep(0.01)
        machine.is_watching = True
        while await num_done() < _NUM_ROWS:
            await asyncio.sleep(0.01)
        machine.is_watching = False
    return batch_id


@pytest.mark.deep
def test_each_row_has_one_result_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system has not been told to sync is gone, the rest is there."""
    machine = _Machine(tmp_path / "live", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", machine.sync)
        batch_id = asyncio.run(_run(machine, tmp_path / "live"))
    assert len(machine.lost) == _NUM_CUTS
    num_lost = 0
    for whole, left in machine.lost:
        num_written, num_left = (_num_results(one, one.with_suffix(".read")) for one in (whole, left))
        assert 0 < num_left <= num_written < _NUM_ROWS
        num_lost += num_written - num_left
        with contextlib.closing(Server(_SOURCE, "--data-dir", str(left))) as server:
            client = client_of(server.wait_ready())
            ended = wait_ended(client, client.batches.retrieve(batch_id))
            assert (ended.status, ended.error_file_id) == ("completed", None)
            assert ended.request_counts is not None
            assert (ended.request_counts.completed, ended.request_counts.total) == (_NUM_ROWS, _NUM_ROWS)
            lines = answers_of(client, ended.output_file_id)
            assert [line["custom_id"] for line in lines] == [f"row-{number}" for number in range(_NUM_ROWS)]
            texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
            assert texts == [expected(number, max_tokens=_max_tokens(number)) for number in range(_NUM_ROWS)]
            assert not server.http.get("/v1/streams").json()["data"]
    assert num_lost, "no power cut has lost a result"
