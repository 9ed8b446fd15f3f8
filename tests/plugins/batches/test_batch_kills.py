"""Batches after the death of servers and engines: each row has one result, and the answer that it had to have."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.plugins.batches.chat_rows import answers_of, chat_file, client_of, expected, run_batch, wait_ended
from tests.waiting import until


class House:
    """A server that is killed and started again over the same data."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self.server = self._start()

    def _start(self) -> Server:
        return Server(self._source, "--data-dir", str(self._path), "--stall-s", "60").wait_ready()

    def kill(self) -> None:
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        self.server.close()
        self.server = self._start()

    def stop(self) -> None:
        self.server.close()
        self.server = self._start()


@contextlib.contextmanager
def _house(path: Path, source: str) -> Iterator[House]:
    house = House(path, source)
    try:
        yield house
    finally:
        house.server.close()


def _run(path: Path, *, num_rows: int, num_kills: int, max_tokens: int, source: str) -> None:
    with _house(path, source) as house:
        batch = run_batch(client_of(house.server), chat_file(num_rows, max_tokens=max_tokens))
        for number in range(1, num_kills + 1):
            least = num_rows * number // (num_kills + 1)

            def has_come_so_far(least: int = least) -> bool:
                counts = client_of(house.server).batches.retrieve(batch.id).request_counts
                return counts is not None and counts.completed >= least

            until(has_come_so_far)
            if number % 2:
                house.kill()
            else:
                house.server.worker().kill()
            if number == num_kills // 2:
                house.stop()  # once besides
        client = client_of(house.server)
        ended = wait_ended(client, batch)
        assert ended.status == "completed"
        assert ended.error_file_id is None
        lines = answers_of(client, ended.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"row-{number}" for number in range(num_rows)]
        for number, line in enumerate(lines):
            text = line["response"]["body"]["choices"][0]["message"]["content"]
            assert text == expected(number, max_tokens=max_tokens)
        assert not house.server.http.get("/v1/streams").json()["data"]


def test_a_batch_goes_on_after_kills(tmp_path: Path) -> None:
    _run(tmp_path, num_rows=240, num_kills=3, max_tokens=20, source="scripted:tokens_per_s=150")


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_ten_thousand_rows_and_twenty_kills(tmp_path: Path) -> None:
    _run(tmp_path, num_rows=10_000, num_kills=20, max_tokens=16, source="scripted:tokens_per_s=0")
