"""Anthropic's client with only the server's address. Its API has no seed, so the engine recites a text."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, ModelInfo
from tests.api.oracle import chat_ids
from tests.api.process import Server
from tests.http.wire import as_json
from tests.waiting import LONG_S

from tailrace_outer.scripted.scripted_engine import TEXTS, recited_tokens

NUMBER = list(TEXTS).index("emoji")
TEXT = TEXTS["emoji"]
PROMPT = f"Recite text {NUMBER}."
MESSAGES: list[MessageParam] = [{"role": "user", "content": PROMPT}]
INPUT_TOKENS, OUTPUT_TOKENS = len(chat_ids(PROMPT)), len(recited_tokens(NUMBER))
MAX_TOKENS = 500


@pytest.fixture(scope="module")
def reciting() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:text=-1")) as running:
        yield running.wait_ready()


def client_of(server: Server, **more: Any) -> Anthropic:  # Any: settings of the client
    return Anthropic(base_url=server.url, api_key="unused", timeout=LONG_S, **{"max_retries": 0, **more})


@pytest.fixture
def client(reciting: Server) -> Iterator[Anthropic]:
    with client_of(reciting) as client:
        yield client


def test_a_message(client: Anthropic) -> None:
    message = client.messages.create(model="scripted", max_tokens=MAX_TOKENS, messages=MESSAGES)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == TEXT
    assert (message.role, message.model, message.stop_reason) == ("assistant", "scripted", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (INPUT_TOKENS, OUTPUT_TOKENS)


def test_events(client: Anthropic) -> None:
    with client.messages.create(model="scripted", max_tokens=MAX_TOKENS, messages=MESSAGES, stream=True) as stream:
        events = list(stream)
    names = [event.type for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert events[0].type == "message_start"
    assert events[0].message.usage.input_tokens == INPUT_TOKENS


def test_the_helper_that_collects_a_stream(client: Anthropic) -> None:
    with client.messages.stream(model="scripted", max_tokens=MAX_TOKENS, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == TEXT
        message = stream.get_final_message()
        assert stream.get_final_text() == TEXT
    assert message.stop_reason == "end_turn"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (INPUT_TOKENS, OUTPUT_TOKENS)


def test_every_byte_of_a_stream(reciting: Server) -> None:
    """Each token of this text shows its characters with their last byte."""
    with reciting.wire() as wire:
        body = {"model": "scripted", "max_tokens": MAX_TOKENS, "messages": MESSAGES, "stream": True}
        wire.send("POST", "/v1/messages", body, {"anthropic-version": "2023-06-01", "x-api-key": "unused"})
        assert wire.head() == 200
        assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
        stream_id, sent = wire.headers["x-stream-id"], wire.body()

    def frame(name: str, **fields: object) -> str:
        return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'))}\n\n"

    usage = {"input_tokens": INPUT_TOKENS, "output_tokens": 0}
    message: dict[str, object]
    message = {"id": f"msg_{stream_id}", "type": "message", "role": "assistant", "model": "scripted", "content": [],
               "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
    texts = [as_json(line[6:])["delta"]["text"] for line in sent.decode().split("\n") if '"text_delta"' in line]
    assert "".join(texts) == TEXT
    expected = [
        frame("message_start", message=message),
        frame("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(frame("content_block_delta", index=0, delta={"type": "text_delta", "text": text}) for text in texts),
        frame("content_block_stop", index=0),
        frame(
            "message_delta",
            delta={"stop_reason": "end_turn", "stop_sequence": None},
            usage={"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS},
        ),
        frame("message_stop"),
    ]
    assert sent.decode() == "".join(expected)


def test_a_limit(client: Anthropic) -> None:
    message = client.messages.create(model="scripted", max_tokens=5, messages=MESSAGES)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 5


def test_stop_sequences(client: Anthropic) -> None:
    stop = " near"
    with client.messages.stream(
        model="scripted", max_tokens=MAX_TOKENS, messages=MESSAGES, stop_sequences=["never", stop]
    ) as stream:
        message = stream.get_final_message()
    (block,) = message.content
    assert block.type == "text"
    assert block.text == TEXT[: TEXT.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_the_tokens_of_a_prompt_are_counted(client: Anthropic) -> None:
    assert client.messages.count_tokens(model="scripted", messages=MESSAGES).input_tokens == INPUT_TOKENS
    turns: list[MessageParam] = [*MESSAGES, {"role": "assistant", "content": "The best"}]
    counted = client.messages.count_tokens(model="scripted", messages=turns, system="Be brief.")
    answer = client.messages.create(model="scripted", messages=turns, system="Be brief.", max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens


def test_the_beginning_of_an_answer(client: Anthropic) -> None:
    """It is the last of the prompt: `<|user|>…\\n<|assistant|>The best`, a token for each byte."""
    turns: list[MessageParam] = [*MESSAGES, {"role": "assistant", "content": "The best"}]
    answer = client.messages.create(model="scripted", messages=turns, max_tokens=1)
    assert answer.usage.input_tokens == INPUT_TOKENS + len("The best")


def test_the_models(client: Anthropic) -> None:
    page = client.models.list()
    (model,) = page.data
    assert ModelInfo.model_validate(model.to_dict()) == model  # which has all that the client promises its users
    assert (model.id, model.display_name, model.lifecycle) == ("scripted", "scripted", "active")
    assert model.created_at.tzinfo is not None
    assert (page.has_more, page.first_id, page.last_id) == (False, "scripted", "scripted")
    assert client.models.retrieve("scripted") == client.models.retrieve("default") == model
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("claude-opus-5")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.models.list(after_id="claude-opus-5")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (anthropic.NotFoundError, {"model": "claude-opus-5"}),
        (anthropic.BadRequestError, {"messages": []}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x" * 70_000}], "stream": True}),
        (anthropic.BadRequestError, {"extra_body": {"temperature": 2.5}}),
    ],
)
def test_the_classes_of_errors(client: Anthropic, kind: type[anthropic.APIStatusError], more: dict[str, Any]) -> None:
    asks: dict[str, Any] = {"model": "scripted", "max_tokens": 5, "messages": MESSAGES, **more}
    with pytest.raises(kind) as refused:
        client.messages.create(**asks)
    assert refused.value.type in ("not_found_error", "invalid_request_error")
    assert refused.value.api_message


@pytest.mark.deep
def test_overload_is_a_rate_limit_error_and_is_retried(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100", "--max-concurrent-requests", "1")
    stream_id = server.create({"prompt": "Long.", "max_tokens": 5_000})
    with client_of(server) as client:
        with pytest.raises(anthropic.RateLimitError) as full:
            client.messages.create(model="scripted", max_tokens=5, messages=MESSAGES)
        assert int(full.value.response.headers["retry-after"]) >= 1
        server.http.delete(f"/v1/streams/{stream_id}")
    with client_of(server, max_retries=2) as client:
        assert client.messages.create(model="scripted", max_tokens=5, messages=MESSAGES).usage.output_tokens == 5


def test_the_error_in_a_stream_is_raised(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100")
    with client_of(server) as client:
        stream = client.messages.create(model="scripted", max_tokens=5_000, messages=MESSAGES, stream=True)
        assert next(stream).type == "message_start"
        server.send_signal(signal.SIGTERM)  # nobody can come back on this wire: it ends with the server
        with pytest.raises(anthropic.APIStatusError) as failed, stream:
            list(stream)
        assert failed.value.type == "overloaded_error"


def test_a_stream_cancelled_by_another_client_is_an_error(paced: Server) -> None:
    with (
        client_of(paced) as client,
        client.messages.stream(model="scripted", max_tokens=5_000, messages=MESSAGES) as stream,
    ):
        next(stream.text_stream)
        paced.post(f"/v1/streams/{stream.response.headers['x-stream-id']}/cancel", None)
        with pytest.raises(anthropic.APIStatusError) as failed:
            stream.get_final_message()
    assert failed.value.type == "api_error"


def test_a_disconnect_stops_the_engine(paced: Server) -> None:
    with (
        client_of(paced) as client,
        client.messages.stream(model="scripted", max_tokens=5_000, messages=MESSAGES) as stream,
    ):
        next(stream.text_stream)
        stream_id = stream.response.headers["x-stream-id"]
    assert paced.wait_state(stream_id, "cancelled")["usage"]["completion_tokens"] < 1_000


@pytest.mark.deep
def test_heartbeats_are_ignored(serve: Callable[..., Server]) -> None:
    server = serve("scripted:text=-1,tokens_per_s=100", "--heartbeat-s", "0.002")
    with (
        client_of(server) as client,
        client.messages.stream(model="scripted", max_tokens=MAX_TOKENS, messages=MESSAGES) as stream,
    ):
        assert stream.get_final_text() == TEXT


async def test_the_asynchronous_client(reciting: Server) -> None:
    async with AsyncAnthropic(base_url=reciting.url, api_key="unused", max_retries=0, timeout=LONG_S) as client:
        message = await client.messages.create(model="scripted", max_tokens=MAX_TOKENS, messages=MESSAGES)
        assert message.content[0].type == "text"
        assert message.content[0].text == TEXT
        async with client.messages.stream(model="scripted", max_tokens=MAX_TOKENS, messages=MESSAGES) as stream:
            assert await stream.get_final_text() == TEXT
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(model="scripted", max_tokens=5, messages=[])
