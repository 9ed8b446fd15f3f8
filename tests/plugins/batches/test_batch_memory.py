"""What a large batch takes of the server's memory and of the disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.api.process import Server
from tests.plugins.batches.chat_rows import chat_file, client_of, run_batch, wait_ended

_MIB = 2**20


@dataclass
class Largest:
    """The most that a server and its directory had at a time, in bytes."""

    memory: int = 0
    disk: int = 0


@contextlib.contextmanager
def _watched(server: Server, directory: Path) -> Iterator[Largest]:
    found, is_over = Largest(), threading.Event()

    def watch() -> None:
        process = psutil.Process(server.process.pid)
        while not is_over.wait(0.05):
            found.memory = max(found.memory, process.memory_info().rss)
            found.disk = max(found.disk, _size_of(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def _size_of(directory: Path) -> int:
    sizes = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            sizes.append(path.stat().st_blocks * 512)
    return sum(sizes)


def _run(server: Server, directory: Path, num_rows: int) -> tuple[Largest, int]:
    """Run a batch, and delete it. Returns what it took, and the bytes of its two files."""
    client = client_of(server)
    with _watched(server, directory) as largest:
        ended = wait_ended(client, run_batch(client, chat_file(num_rows, max_tokens=16)))
    assert ended.status == "completed"
    files = [ended.input_file_id, ended.output_file_id or ""]
    num_bytes = sum(client.files.retrieve(file_id).bytes for file_id in files)
    for file_id in files:
        client.files.delete(file_id)
    return largest, num_bytes


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_memory_and_disk_of_a_large_batch(tmp_path: Path) -> None:
    """Only the rows that run are in memory. The space of deleted files is used again."""
    database = tmp_path / "journal.sqlite"
    with contextlib.closing(Server("scripted:tokens_per_s=0", "--data-dir", str(tmp_path))) as server:
        server.wait_ready()
        small, _ = _run(server, tmp_path, 1_000)
        first, num_bytes = _run(server, tmp_path, 10_000)
        first_bytes = database.stat().st_size
        for _ in range(2):
            last, _ = _run(server, tmp_path, 10_000)
        last_bytes = database.stat().st_size
    print(  # noqa: T201 - for docs/batches.md
        f"\n10,000 rows, {num_bytes / 1e6:.1f} MB of files: at most {first.memory / 1e6:.0f} MB of memory and"
        f" {first.disk / 1e6:.0f} MB on the disk, the third time {last.memory / 1e6:.0f} and {last.disk / 1e6:.0f} MB;"
        f" 1,000 rows: {small.memory / 1e6:.0f} and {small.disk / 1e6:.0f} MB"
    )
    assert last.memory < small.memory + 32 * _MIB
    assert last.disk < 2 * num_bytes + 80 * _MIB  # the journal's log has up to 32 MiB, and grows until it is synced
    assert last_bytes < 2 * first_bytes
