"""OpenAI's clients with only the server's address."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from tests.api.oracle import LOGPROB, Answer, chat_ids
from tests.api.process import Server
from tests.waiting import LONG_S

from tailrace import __version__

PROMPT = "Tell me of rivers."
SEED = 13
COUNT = 24
TEXT = Answer(PROMPT, COUNT, SEED)
CHAT = Answer(chat_ids(PROMPT), COUNT, SEED)
TOO_LONG: list[ChatCompletionMessageParam] = [{"role": "user", "content": "x" * 70_000}]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


def _client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LONG_S)


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with _client(server) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LONG_S) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED)
    (choice,) = completion.choices
    assert choice.message.content == CHAT.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert completion.model == "scripted"
    assert completion.usage is not None
    assert completion.usage.model_dump(exclude_none=True) == CHAT.usage


def test_a_stream_of_chat(client: OpenAI) -> None:
    with client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_completion_tokens=COUNT, seed=SEED, stream=True
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CHAT.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_has_its_own_chunk(client: OpenAI) -> None:
    with client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        max_tokens=COUNT,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == COUNT
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_helper_that_collects_a_stream(client: OpenAI) -> None:
    stop = CHAT.text[20:25]  # it raises where a length was reached
    with client.chat.completions.stream(
        model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED, stop=stop
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == "".join(deltas) == CHAT.text[: CHAT.text.index(stop)]


def test_logprobs(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED, logprobs=True
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content) == b"".join(CHAT.pieces)
    assert {entry.logprob for entry in logprobs.content} == {LOGPROB}
    with client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED, logprobs=True, stream=True
    ) as stream:
        streamed = [
            entry
            for chunk in stream
            if (found := chunk.choices[0].logprobs) is not None
            for entry in found.content or []
        ]
    assert streamed == logprobs.content


def test_two_choices(client: OpenAI) -> None:
    expected = [Answer(CHAT.prompt_ids, COUNT, SEED + index).text for index in (0, 1)]
    completion = client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED, n=2)
    assert [choice.message.content for choice in completion.choices] == expected
    texts = ["", ""]
    with client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED, n=2, stream=True
    ) as stream:
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_completions(client: OpenAI) -> None:
    completion = client.completions.create(model="scripted", prompt=PROMPT, max_tokens=COUNT, seed=SEED)
    assert completion.choices[0].text == TEXT.text
    assert completion.choices[0].finish_reason == "length"
    with client.completions.create(
        model="scripted",
        prompt=PROMPT,
        max_tokens=COUNT,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT.text
    assert last.usage is not None
    assert last.usage.model_dump(exclude_none=True) == TEXT.usage


def test_stop(client: OpenAI) -> None:
    stop = CHAT.text[20:25]
    completion = client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED, stop=[stop]
    )
    assert completion.choices[0].message.content == CHAT.text[: CHAT.text.index(stop)]
    assert completion.choices[0].finish_reason == "stop"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "tailrace"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_the_classes_of_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.code == "invalid_request"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="scripted", messages=TOO_LONG, stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")


def test_tools_that_the_template_cannot_show_are_ignored_and_named(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="scripted",
        messages=MESSAGES,
        seed=SEED,
        max_tokens=24,
        tools=[{"type": "function", "function": {"name": "f"}}],
        parallel_tool_calls=False,
    )
    assert answer.headers["x-tailrace-ignored"] == "tools"
    assert answer.parse().choices[0].message.content == CHAT.text


def test_overload_is_a_rate_limit_error_and_is_retried(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100", "--max-concurrent-requests", "1")
    stream_id = server.create({"prompt": "Long.", "max_tokens": 5_000})
    with _client(server) as client:
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        assert int(full.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="scripted", prompt=PROMPT)
        server.http.delete(f"/v1/streams/{stream_id}")
        completion = client.with_options(max_retries=2).completions.create(
            model="scripted", prompt=PROMPT, max_tokens=3, seed=SEED
        )
        assert completion.choices[0].text == Answer(PROMPT, 3, SEED).text


def test_the_error_in_a_stream_is_raised(client: OpenAI) -> None:
    stream = client.completions.create(model="scripted", prompt="<|fail|>", max_tokens=20, stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="the script says so"), stream:
        texts += [chunk.choices[0].text for chunk in stream]
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="scripted", prompt="<|fail|>", max_tokens=20)


@pytest.mark.deep
def test_a_request_that_kills_the_engine_is_raised(serve: Callable[..., Server]) -> None:
    with _client(serve("scripted")) as client:
        stream = client.completions.create(model="scripted", prompt="<|crash|>", max_tokens=20, stream=True)
        with pytest.raises(openai.APIError, match="engine"), stream:
            list(stream)
    with _client(serve("scripted")) as client, pytest.raises(openai.UnprocessableEntityError) as lost:
        client.completions.create(model="scripted", prompt="<|crash|>", max_tokens=20)
    assert lost.value.code == "poison_request"


@pytest.mark.deep
def test_heartbeats_are_ignored(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=20", "--heartbeat-s", "0.01")
    with (
        _client(server) as client,
        client.chat.completions.create(
            model="scripted", messages=MESSAGES, max_tokens=6, seed=SEED, stream=True
        ) as stream,
    ):
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in stream) == Answer(CHAT.prompt_ids, 6, SEED).text
        )


async def test_the_asynchronous_client(async_client: AsyncOpenAI) -> None:
    completion = await async_client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED
    )
    assert completion.choices[0].message.content == CHAT.text
    async with await async_client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=COUNT, seed=SEED, stream=True
    ) as chat:
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == CHAT.text
    async with await async_client.completions.create(
        model="scripted", prompt=PROMPT, max_tokens=COUNT, seed=SEED, stream=True
    ) as text:
        assert "".join([chunk.choices[0].text async for chunk in text]) == TEXT.text
    with pytest.raises(openai.BadRequestError):
        await async_client.chat.completions.create(model="scripted", messages=MESSAGES, top_p=7)
    failing = await async_client.completions.create(model="scripted", prompt="<|fail|>", max_tokens=20, stream=True)
    async with failing:
        with pytest.raises(openai.APIError):
            [chunk async for chunk in failing]


def test_embeddings_are_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="scripted", input="Rivers.")
    assert caught.value.code == "unsupported_operation"
    assert "cannot make embeddings" in caught.value.message
    assert "Rivers" not in caught.value.message


def test_the_version_as_on_vllm(server: Server) -> None:
    assert server.http.get("/version").json() == {"version": __version__}
