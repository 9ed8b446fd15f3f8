"""huggingface_hub's clients, used as with text-generation-inference."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import (
    BadRequestError,
    GenerationError,
    HfHubHTTPError,
    OverloadedError,
    ValidationError,
)
from tests.api.oracle import LOGPROB, Answer, chat_ids
from tests.api.process import Server

from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS

PROMPT = "Tell me of rivers."
SEED = 11
ANSWER = Answer(PROMPT, 24, SEED)
CHAT = Answer(chat_ids(PROMPT), 24, SEED)
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def client(server: Server) -> Iterator[InferenceClient]:
    with InferenceClient(server.url) as client:
        yield client


def test_a_plain_answer(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=24, seed=SEED, return_full_text=False)
    assert text == ANSWER.text
    assert client.text_generation(PROMPT, max_new_tokens=24, seed=SEED) == PROMPT + ANSWER.text


def test_an_answer_with_details(client: InferenceClient) -> None:
    output = client.text_generation(
        PROMPT, max_new_tokens=24, seed=SEED, details=True, do_sample=True, return_full_text=False
    )
    assert output.generated_text == ANSWER.text
    details = output.details
    assert details is not None
    assert details.finish_reason == "length"
    assert details.generated_tokens == 24
    assert details.seed == SEED
    assert [(token.id, token.text, token.special) for token in details.tokens] == [
        (token_id, text, False) for token_id, text in zip(ANSWER.token_ids, ANSWER.texts, strict=True)
    ]
    assert {token.logprob for token in details.tokens} == {LOGPROB}


def test_a_stream_of_text(client: InferenceClient) -> None:
    texts = list(client.text_generation(PROMPT, max_new_tokens=24, seed=SEED, stream=True))
    assert texts == ANSWER.texts


def test_a_stream_with_details(client: InferenceClient) -> None:
    events = list(client.text_generation(PROMPT, max_new_tokens=24, seed=SEED, stream=True, details=True))
    assert [event.token.id for event in events] == ANSWER.token_ids
    assert [event.index for event in events] == list(range(1, 25))
    assert [event.generated_text for event in events] == [None] * 23 + [PROMPT + ANSWER.text]
    details = events[-1].details
    assert details is not None
    assert (details.finish_reason, details.generated_tokens) == ("length", 24)
    assert details.input_length == len(PROMPT)
    assert all(event.details is None for event in events[:-1])


def test_stop_sequences(client: InferenceClient) -> None:
    stop = ANSWER.text[20:25]
    output = client.text_generation(
        PROMPT, max_new_tokens=24, seed=SEED, stop=[stop, "never"], details=True, return_full_text=False
    )
    assert output.generated_text == ANSWER.text[: ANSWER.text.index(stop) + len(stop)]
    assert output.details is not None
    assert output.details.finish_reason == "stop_sequence"
    pieces = client.text_generation(
        PROMPT, max_new_tokens=24, seed=SEED, stop=[stop], return_full_text=False, stream=True
    )
    assert "".join(pieces) == output.generated_text


WAYS = [pytest.param(way, id=way) for way in ("whole", "whole details", "stream", "stream details")]


def ask(client: InferenceClient, way: str, prompt: str = PROMPT, **parameters: Any) -> list[Any]:  # Any: of hub
    """Yield the pieces of a streaming answer, or the whole answer as one piece."""
    stream, details = way.startswith("stream"), way.endswith("details")
    answer: Any = client.text_generation(prompt, stream=stream, details=details, **parameters)
    return list(answer) if stream else [answer]


async def ask_async(client: AsyncInferenceClient, way: str, prompt: str = PROMPT, **parameters: Any) -> list[Any]:
    stream, details = way.startswith("stream"), way.endswith("details")
    answer: Any = await client.text_generation(prompt, stream=stream, details=details, **parameters)
    return [piece async for piece in answer] if stream else [answer]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature"),
    ({"prompt": ""}, "empty"),
    ({"max_new_tokens": 70_000}, "70000"),
]


@pytest.mark.parametrize("way", WAYS)
async def test_invalid_requests_are_validation_errors(way: str, client: InferenceClient, server: Server) -> None:
    async with AsyncInferenceClient(server.url) as async_client:
        for parameters, reason in WRONG:
            with pytest.raises(ValidationError, match=reason):
                ask(client, way, **parameters)
            with pytest.raises(ValidationError, match=reason):
                await ask_async(async_client, way, **parameters)


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_during_the_answer_is_a_generation_error(
    way: str, client: InferenceClient, server: Server
) -> None:
    with pytest.raises(GenerationError, match="the script says so"):
        ask(client, way, "<|fail|>", max_new_tokens=10)
    async with AsyncInferenceClient(server.url) as async_client:
        with pytest.raises(GenerationError, match="the script says so"):
            await ask_async(async_client, way, "<|fail|>", max_new_tokens=10)


def test_text_before_a_failure_is_shown(client: InferenceClient) -> None:
    control = 256 + CONTROL_TOKENS.index("<|fail|>")
    pieces = iter(client.text_generation("<|fail|>", max_new_tokens=10, seed=SEED, stream=True))
    assert [next(pieces) for _ in range(3)] == Answer((control,), 10, SEED).texts[:3]
    with pytest.raises(GenerationError):
        next(pieces)


@pytest.mark.parametrize("way", [pytest.param("whole details", marks=pytest.mark.deep), "stream"])
def test_the_death_of_the_worker_is_a_generation_error(way: str, serve: Callable[..., Server]) -> None:
    with InferenceClient(serve("scripted").url) as client, pytest.raises(GenerationError):
        ask(client, way, "<|crash|>", max_new_tokens=10)


@pytest.fixture(scope="module")
def full() -> Iterator[Server]:
    """A server whose slots are all in use."""
    with contextlib.closing(Server("scripted:tokens_per_s=50", "--max-concurrent-requests", "1")) as server:
        server.wait_ready().create({"prompt": "Long.", "max_tokens": 20_000, "linger_s": 600})
        yield server


@pytest.mark.parametrize("way", WAYS)
async def test_overload_is_an_overloaded_error(way: str, full: Server) -> None:
    with InferenceClient(full.url) as client, pytest.raises(OverloadedError):
        ask(client, way)
    async with AsyncInferenceClient(full.url) as async_client:
        with pytest.raises(OverloadedError):
            await ask_async(async_client, way)


@pytest.mark.parametrize("stream", [False, True])
def test_overload_of_a_chat_is_an_http_error(stream: bool, full: Server) -> None:
    with InferenceClient(full.url) as client:
        with pytest.raises(HfHubHTTPError) as error:
            list(client.chat_completion(MESSAGES, stream=stream))
        assert error.value.response.status_code == 429


def test_chat(client: InferenceClient) -> None:
    output = client.chat_completion(MESSAGES, max_tokens=24, seed=SEED)
    assert output.choices[0].message.content == CHAT.text
    assert output.choices[0].finish_reason == "length"
    assert output.usage.completion_tokens == 24
    with pytest.raises(BadRequestError, match="temperature"):
        client.chat_completion(MESSAGES, temperature=9.0)


def test_a_stream_of_chat(client: InferenceClient) -> None:
    chunks = list(client.chat_completion(MESSAGES, max_tokens=24, seed=SEED, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CHAT.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert chunks[0].choices[0].delta.role == "assistant"


@pytest.mark.deep
def test_the_error_in_a_stream_of_chat_is_raised(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=50")
    with InferenceClient(server.url) as client:
        chunks = client.chat_completion(MESSAGES, max_tokens=1_000, stream=True)
        next(iter(chunks))
        server.send_signal(signal.SIGTERM)  # nobody can come back on this wire: it ends with the server
        with pytest.raises(GenerationError):
            list(chunks)


def test_info_and_health(server: Server) -> None:
    with InferenceClient(server.url, provider="hf-inference") as client:
        assert client.health_check()
        assert client.get_endpoint_info()["model_id"] == "scripted"


async def test_the_asynchronous_client(server: Server) -> None:
    async with AsyncInferenceClient(server.url) as client:
        text = await client.text_generation(PROMPT, max_new_tokens=24, seed=SEED, return_full_text=False)
        assert text == ANSWER.text
        stream = await client.text_generation(PROMPT, max_new_tokens=24, seed=SEED, stream=True)
        assert [piece async for piece in stream] == ANSWER.texts
        detailed = await client.text_generation(PROMPT, max_new_tokens=24, seed=SEED, stream=True, details=True)
        events = [event async for event in detailed]
        assert [event.token.id for event in events] == ANSWER.token_ids
        with pytest.raises(ValidationError, match="temperature"):
            await client.text_generation(PROMPT, temperature=-1.0)
        failing = await client.text_generation("<|fail|>", max_new_tokens=10, stream=True)
        with pytest.raises(GenerationError):
            [piece async for piece in failing]
        chunks = await client.chat_completion(MESSAGES, max_tokens=24, seed=SEED, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == CHAT.text
