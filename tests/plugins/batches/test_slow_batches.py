"""Batches that take long: cancelled, expired, and used while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from tests.api.process import Server
from tests.plugins.batches.chat_rows import answers_of, chat_file, client_of, expected, run_batch, wait_ended
from tests.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Each row takes a while; eight run at once."""
    with contextlib.closing(Server("scripted:tokens_per_s=100", "--batch-rows-at-once", "8")) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def test_a_cancelled_batch_keeps_what_is_done(client: OpenAI, server: Server) -> None:
    batch = run_batch(client, chat_file(600, max_tokens=20))
    with pytest.raises(openai.BadRequestError, match="in progress"):
        client.files.delete(batch.input_file_id)

    def has_begun() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 3

    until(has_begun)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = wait_ended(client, batch)
    assert ended.status == "cancelled"
    good, rest = answers_of(client, ended.output_file_id), answers_of(client, ended.error_file_id)
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 600, "completed": len(good), "failed": len(rest)}
    assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
    done = [line["custom_id"] for line in (*good, *rest)]
    assert sorted(done) == sorted(f"row-{number}" for number in range(600))
    for line in good:
        number = int(line["custom_id"].removeprefix("row-"))
        assert line["response"]["body"]["choices"][0]["message"]["content"] == expected(number, max_tokens=20)
    until(lambda: not server.http.get("/v1/streams").json()["data"])  # no row runs on
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_expires(client: OpenAI) -> None:
    ended = wait_ended(client, run_batch(client, chat_file(400, max_tokens=50), window="1s"))
    assert ended.status == "expired"
    good, rest = answers_of(client, ended.output_file_id), answers_of(client, ended.error_file_id)
    assert len(good) + len(rest) == 400
    assert {line["error"]["code"] for line in rest} == {"batch_expired"}
    assert ended.expired_at is not None
