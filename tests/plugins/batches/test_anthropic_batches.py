"""Anthropic's client runs batches of messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types.messages import MessageBatch
from tests.api.process import Server
from tests.waiting import LONG_S, until

from tailrace_outer.scripted.scripted_engine import TEXTS

TEXT = TEXTS["emoji"]
PROMPT = f"Recite text {list(TEXTS).index('emoji')}."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:text=-1", "--batch-rows", "50", "--body-bytes", "4000")) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="unused", timeout=LONG_S, max_retries=0) as client:
        yield client


def _request(number: int, *, max_tokens: int = 500) -> Any:  # Any: the client's own type
    messages = [{"role": "user", "content": PROMPT}]
    return {
        "custom_id": f"row-{number}",
        "params": {"model": "scripted", "max_tokens": max_tokens, "messages": messages},
    }


def _wait_ended(client: Anthropic, batch: MessageBatch) -> MessageBatch:
    until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    return client.messages.batches.retrieve(batch.id)


def test_a_batch(client: Anthropic) -> None:
    requests = [*(_request(number) for number in range(20)), _request(20, max_tokens=0)]
    batch = client.messages.batches.create(requests=requests)
    assert batch.processing_status == "in_progress"
    assert batch.results_url is None
    batch = _wait_ended(client, batch)
    assert batch.request_counts.model_dump() == {
        "processing": 0, "succeeded": 20, "errored": 1, "canceled": 0, "expired": 0,
    }  # fmt: skip
    assert batch.ended_at is not None
    results = list(client.messages.batches.results(batch.id))
    assert [one.custom_id for one in results] == [f"row-{number}" for number in range(21)]
    *good, bad = (one.result for one in results)
    for result in good:
        assert result.type == "succeeded"
        (block,) = result.message.content
        assert block.type == "text"
        assert block.text == TEXT
    assert bad.type == "errored"
    assert bad.error.error.type == "invalid_request_error"
    assert batch.id in [one.id for one in client.messages.batches.list(limit=2)]
    assert client.messages.batches.delete(batch.id).id == batch.id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_a_request_as_long_as_a_body_may_be_has_a_result(client: Anthropic) -> None:
    request = _request(0)
    request["params"]["system"] = ""
    room = 4_000 - len(json.dumps(request["params"], separators=(",", ":")))
    request["params"]["system"] = "x" * room
    batch = _wait_ended(client, client.messages.batches.create(requests=[request]))
    assert [one.custom_id for one in client.messages.batches.results(batch.id)] == ["row-0"]
    assert batch.request_counts.processing == 0


def test_pages(client: Anthropic) -> None:
    ids = [_wait_ended(client, client.messages.batches.create(requests=[_request(0)])).id for _ in range(3)]
    newest = client.messages.batches.list(limit=1)
    assert [one.id for one in newest.data] == [ids[2]]
    assert newest.has_more
    assert [one.id for one in client.messages.batches.list(after_id=ids[2], limit=1).data] == [ids[1]]
    assert [one.id for one in client.messages.batches.list(before_id=ids[0], limit=1).data] == [ids[1]]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.batches.list(after_id="msgbatch_unknown")


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "from 1 to 50 items"),
        ([_request(number) for number in range(51)], "from 1 to 50 items"),
        ([_request(0), _request(0)], r"requests\[1\]\.custom_id"),
        ([{"custom_id": "a b", "params": {}}], r"requests\[0\]\.custom_id"),
        ([{"custom_id": "a", "params": []}], r"requests\[0\]\.params"),
        ([{"custom_id": "a"}], "custom_id, which is text, and params"),
        ("no list", "must be a list"),
    ],
)
def test_bad_requests(client: Anthropic, requests: Any, message: str) -> None:  # Any: not what the client's types allow
    with pytest.raises(anthropic.BadRequestError, match=message):
        client.messages.batches.create(requests=requests)


def test_bodies_that_are_no_json(server: Server) -> None:
    for body in (b"", b"{", b'{"requests": ' + b"[" * 5000, b"\xff"):
        answer = server.http.post("/v1/messages/batches", content=body)
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"


def test_a_batch_in_progress_has_no_results_and_is_not_deleted(client: Anthropic) -> None:
    batch = client.messages.batches.create(requests=[_request(number) for number in range(50)])
    cancelled = client.messages.batches.cancel(batch.id)
    assert cancelled.processing_status in ("canceling", "ended")
    batch = _wait_ended(client, batch)
    counts = batch.request_counts
    assert counts.succeeded + counts.canceled == 50
    kinds = [one.result.type for one in client.messages.batches.results(batch.id)]
    assert kinds.count("canceled") == counts.canceled
