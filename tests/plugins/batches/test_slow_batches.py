"""Batches that take long: cancelled, expired, and used while they run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from tests.api.process import Server
from tests.plugins.batches.chat_rows import CHAT, answers_of, chat_file, client_of, expected, run_batch, wait_ended
from tests.waiting import until

_EMBEDDINGS = "/v1/embeddings"


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


def test_an_owner_has_a_limit_of_open_batches_and_those_that_wait_can_be_cancelled(client: OpenAI) -> None:
    batches = [run_batch(client, chat_file(20, max_tokens=2_000))]
    file_id = batches[0].input_file_id
    given = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    while len(batches) < 100:
        batches.append(client.batches.create(**given))  # type: ignore[arg-type]  # as its types have it
    with pytest.raises(openai.RateLimitError) as refused:
        client.batches.create(**given)  # type: ignore[arg-type]
    assert refused.value.code == "too_many_batches"
    for batch in reversed(batches):
        client.batches.cancel(batch.id)
    assert {wait_ended(client, batch).status for batch in batches} == {"cancelled"}


@pytest.mark.deep
def test_rows_of_embeddings_go_on_after_the_loss_of_the_engine() -> None:
    """The engine dies while it reads."""
    with contextlib.closing(Server("scripted:embeds=4,prefill_tokens_per_s=2000")) as server:
        client = client_of(server.wait_ready())
        rows = [
            {"custom_id": str(number), "method": "POST", "url": _EMBEDDINGS, "body": {"input": f"{number} " * 40}}
            for number in range(40)
        ]
        batch = run_batch(client, b"\n".join(json.dumps(row).encode() for row in rows), endpoint=_EMBEDDINGS)

        def has_begun() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed > 3

        until(has_begun)
        server.worker().kill()
        ended = wait_ended(client, batch)
        assert ended.status == "completed"
        lines = answers_of(client, ended.output_file_id)
        assert [line["custom_id"] for line in lines] == [str(number) for number in range(40)]
        vectors = [line["response"]["body"]["data"][0]["embedding"] for line in lines]
        live = client.embeddings.create(model="scripted", input=f"{39} " * 40, encoding_format="float")
        assert vectors[39] == live.data[0].embedding
