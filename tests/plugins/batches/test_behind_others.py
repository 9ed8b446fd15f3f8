"""Rows leave the engine to other requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.plugins.batches.chat_rows import answers_of, chat_file, client_of, expected, run_batch, wait_ended
from tests.waiting import until


@pytest.fixture
def server() -> Iterator[Server]:
    flags = ("--max-sequences", "4", "--max-concurrent-requests", "4", "--queue-s", "1000")
    with contextlib.closing(Server("scripted:tokens_per_s=100", *flags)) as running:
        yield running.wait_ready()


@pytest.mark.deep
def test_others_begin_although_rows_fill_the_engine(server: Server) -> None:
    """A row needs longer than all of these requests together, so that they must have run before any row ended."""
    with client_of(server) as client:
        batch = run_batch(client, chat_file(6, max_tokens=600))
        until(lambda: _num_running(server) == 4)
        for number in range(5):
            answer = client.completions.create(model="scripted", prompt=f"Live {number}", max_tokens=4, seed=number)
            assert answer.choices[0].text == Answer(f"Live {number}", 4, number).text
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        assert counts.completed == 0
        ended = wait_ended(client, batch)
        lines = answers_of(client, ended.output_file_id)
        texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
        assert texts == [expected(number, max_tokens=600) for number in range(6)]


def _num_running(server: Server) -> int:
    return sum(one["status"] == "running" for one in server.http.get("/v1/streams").json()["data"])


def test_the_header(server: Server) -> None:
    body = {"prompt": "Hi", "max_tokens": 3}
    for path in ("/v1/completions", "/v1/streams"):
        assert server.post(path, body, x_tailrace_priority="background").status_code in (200, 201)
        refused = server.post(path, body, x_tailrace_priority="high")
        assert refused.status_code == 400
        assert "X-Tailrace-Priority" in refused.text
