"""OpenAI's client uploads files and runs batches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from tests.api.process import Server
from tests.plugins.batches.chat_rows import (
    CHAT,
    answers_of,
    chat_file,
    chat_row,
    client_of,
    expected,
    run_batch,
    wait_ended,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--body-bytes", "20000", "--batch-rows", "300", "--batch-file-bytes", "200000")
    with contextlib.closing(Server("scripted:tokens_per_s=0", *flags)) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def test_a_batch_has_an_answer_for_each_row_in_order(client: OpenAI) -> None:
    batch = run_batch(client, chat_file(150))
    assert batch.status == "validating"
    batch = wait_ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 150, "completed": 150, "failed": 0}
    assert batch.error_file_id is None
    lines = answers_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"row-{number}" for number in range(150)]
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in lines)
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
    assert texts == [expected(number) for number in range(150)]
    assert len({line["id"] for line in lines}) == len({line["response"]["request_id"] for line in lines}) == 150


def test_a_file_is_listed_shown_read_and_deleted(client: OpenAI) -> None:
    content = chat_file(3)
    file = client.files.create(
        file=("my rows.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (file.filename, file.bytes, file.purpose) == ("my rows.jsonl", len(content), "batch")
    assert file.expires_at == file.created_at + 7200
    assert client.files.retrieve(file.id) == file
    assert file.id in [one.id for one in client.files.list()]
    assert next(iter(client.files.list(limit=1))).id == file.id  # the newest first
    assert client.files.content(file.id).content == content
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_pages_of_batches_and_files(client: OpenAI) -> None:
    ids = [wait_ended(client, run_batch(client, chat_file(1))).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [one.id for one in page.data] == [ids[2], ids[1]]
    assert page.has_more
    assert ids[0] in [one.id for one in page.get_next_page().data]
    assert [one.id for one in client.batches.list(after=ids[1], limit=1).data] == [ids[0]]
    inputs = [one.id for one in client.files.list(purpose="batch")]
    oldest_first = [one.id for one in client.files.list(purpose="batch", order="asc")]
    assert inputs == oldest_first[::-1]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_unknown")


def test_a_row_that_is_refused_is_in_the_error_file(client: OpenAI) -> None:
    rows = [chat_row(0), chat_row(1, temperature=-1), chat_row(2, model="gpt-9"), chat_row(3, stream=True)]
    rows[1]["body"]["temperature"] = -1
    rows[2]["body"]["model"] = "gpt-9"
    batch = wait_ended(client, run_batch(client, b"\n".join(json.dumps(row).encode() for row in rows)))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    good, bad = answers_of(client, batch.output_file_id), answers_of(client, batch.error_file_id)
    assert [line["custom_id"] for line in good] == ["row-0", "row-3"]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in bad] == [("row-1", 400), ("row-2", 404)]
    assert bad[0]["response"]["body"]["error"]["param"] == "temperature"


def test_stream_is_left_out_however_it_is_written(client: OpenAI) -> None:
    content = json.dumps(chat_row(0, stream=True)).replace("stream", "str\\u0065am")
    batch = wait_ended(client, run_batch(client, content.encode()))
    (line,) = answers_of(client, batch.output_file_id)
    assert line["response"]["body"]["choices"][0]["message"]["content"] == expected(0)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Rivers", "max_tokens": 5}),
        ("/v1/responses", {"input": "Rivers", "max_output_tokens": 5, "background": True}),
    ],
)
def test_other_endpoints(client: OpenAI, endpoint: str, body: dict[str, object]) -> None:
    row = {"custom_id": "one", "method": "POST", "url": endpoint, "body": {"model": "scripted", **body}}
    batch = wait_ended(client, run_batch(client, json.dumps(row).encode(), endpoint=endpoint))
    (line,) = answers_of(client, batch.output_file_id)
    assert line["response"]["body"]["object"] == ("text_completion" if "prompt" in body else "response")
    assert line["response"]["body"].get("status") in (None, "incomplete")  # as it is cut off


def _line(**changed: object) -> bytes:
    row = {**chat_row(1), **changed}
    return json.dumps({name: value for name, value in row.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{nothing", "invalid_json_line", None),
        (b"[1, 2]", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b"[" * 5_000, "invalid_json_line", None),
        (b'{"custom_id": "a", "method": "POST", "body": ' + b"[" * 9_000, "invalid_json_line", None),
        (b'{"a": "' + b"x" * 30_000 + b'"}', "line_too_long", None),
        (_line(custom_id=None), "missing_required_parameter", "custom_id"),
        (_line(custom_id=3), "invalid_type", "custom_id"),
        (_line(custom_id=""), "invalid_custom_id", "custom_id"),
        (_line(custom_id="row-0"), "duplicate_custom_id", "custom_id"),
        (_line(method="GET"), "invalid_method", "method"),
        (_line(url="/v1/completions"), "url_mismatch", "url"),
        (_line(url="/v1/admin/keys"), "url_mismatch", "url"),
        (_line(body=None), "missing_required_parameter", "body"),
        (_line(body=[]), "invalid_type", "body"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_row_fails_the_batch(client: OpenAI, line: bytes, code: str, param: str | None) -> None:
    content = json.dumps(chat_row(0)).encode() + b"\n\n" + line + b"\n"
    batch = wait_ended(client, run_batch(client, content))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    (error,) = batch.errors.data
    assert (error.code, error.line, error.param) == (code, 3, param)
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0
    assert batch.output_file_id is None


def test_deeply_nested_bodies_are_refused_by_their_row(client: OpenAI) -> None:
    nested = b'{"custom_id": "deep", "method": "POST", "url": "%b", "body": {"messages": %b%b}}'
    content = nested % (CHAT.encode(), b"[" * 600, b"]" * 600)
    batch = wait_ended(client, run_batch(client, content))
    (line,) = answers_of(client, batch.error_file_id)
    assert line["response"]["status_code"] == 400


def test_files_without_rows_or_with_too_many(client: OpenAI) -> None:
    for content, code in ((b"\n \n", "empty_file"), (chat_file(301), "too_many_tasks")):
        batch = wait_ended(client, run_batch(client, content))
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == [code]


def test_at_most_fifty_errors_are_named(client: OpenAI) -> None:
    batch = wait_ended(client, run_batch(client, b"{\n" * 200))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == list(range(1, 51))


def test_bad_uploads(client: OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"a"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.files.create(file=("a", b""), purpose="batch")
    with pytest.raises(openai.APIStatusError) as too_large:
        client.files.create(file=("a", b"a" * 300_000), purpose="batch")
    assert too_large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(file=("a", b"a"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x\r\n", b"nothing", b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc'):
        assert server.http.post("/v1/files", content=body, headers=form).status_code == 400
    long = {"content-type": f"multipart/form-data; boundary={'x' * 300}"}
    assert server.http.post("/v1/files", content=b"", headers=long).status_code == 400
    assert server.http.post("/v1/files", json={}).status_code == 415
    assert len(list(client.files.list())) == len({one.id for one in client.files.list()})


def test_bad_batches(client: OpenAI) -> None:
    file = client.files.create(file=("a", chat_file(1)), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for bad, param in (
        ({"endpoint": "/v1/admin/keys"}, "endpoint"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "999999d"}, "completion_window"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/batches", cast_to=object, body={**good, **bad})
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.post("/batches", cast_to=object, body={**good, "input_file_id": "file-unknown"})
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_unknown")
