"""The client libraries of language models: Hugging Face's, OpenAI's, Anthropic's, Ollama's."""

from __future__ import annotations

from contextlib import AbstractContextManager

from anthropic import Anthropic, AsyncAnthropic
from huggingface_hub import AsyncInferenceClient, InferenceClient
from ollama import AsyncClient as AsyncOllama
from ollama import Client as Ollama
from openai import APIConnectionError, AsyncOpenAI, OpenAI, omit
from openai.types.chat import ChatCompletionMessageParam
from tests.differential.drivers import MAX_TOKENS, TIMEOUT_S, StreamFailed, async_driver, driver

__all__: list[str] = []

# huggingface_hub, over text-generation-inference's wire


def _hub(url: str) -> InferenceClient:
    return InferenceClient(url, timeout=TIMEOUT_S)


def _async_hub(url: str) -> AsyncInferenceClient:
    return AsyncInferenceClient(url, timeout=TIMEOUT_S)


@driver("hub text", "tgi", _hub, streams=False)
def _(client: InferenceClient, prompt: str) -> str:
    return str(client.text_generation(prompt, max_new_tokens=MAX_TOKENS, return_full_text=False))


@driver("hub text stream", "tgi", _hub)
def _(client: InferenceClient, prompt: str) -> str:
    return "".join(client.text_generation(prompt, max_new_tokens=MAX_TOKENS, stream=True))


@driver("hub details stream", "tgi", _hub)
def _(client: InferenceClient, prompt: str) -> str:
    events = client.text_generation(prompt, max_new_tokens=MAX_TOKENS, stream=True, details=True)
    return "".join(event.token.text for event in events if not event.token.special)


@driver("hub generated_text", "tgi", _hub)
def _(client: InferenceClient, prompt: str) -> str:
    *_, last = client.text_generation(
        prompt, max_new_tokens=MAX_TOKENS, stream=True, details=True, return_full_text=False
    )
    return str(last.generated_text)


@async_driver("hub async text", "tgi", _async_hub, streams=False)
async def _(client: AsyncInferenceClient, prompt: str) -> str:
    return str(await client.text_generation(prompt, max_new_tokens=MAX_TOKENS, return_full_text=False))


@async_driver("hub async details stream", "tgi", _async_hub)
async def _(client: AsyncInferenceClient, prompt: str) -> str:
    events = await client.text_generation(prompt, max_new_tokens=MAX_TOKENS, stream=True, details=True)
    return "".join([event.token.text async for event in events if not event.token.special])


# OpenAI's wire


def _openai(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S)


def _async_openai(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S)


def _messages(prompt: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": prompt}]


@driver("openai chat", "openai", _openai, streams=False)
def _(client: OpenAI, prompt: str) -> str:
    answer = client.chat.completions.create(model="scripted", messages=_messages(prompt), max_tokens=MAX_TOKENS)
    return str(answer.choices[0].message.content)


@driver("openai chat stream", "openai", _openai)
def _(client: OpenAI, prompt: str) -> str:
    with client.chat.completions.create(
        model="scripted", messages=_messages(prompt), max_tokens=MAX_TOKENS, stream=True
    ) as chunks:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@driver("openai chat helper", "openai", _openai)
def _(client: OpenAI, prompt: str) -> str:
    with client.chat.completions.stream(model="scripted", messages=_messages(prompt), max_tokens=MAX_TOKENS) as stream:
        return stream.get_final_completion().choices[0].message.content or ""


@driver("openai completion", "openai", _openai, streams=False)
def _(client: OpenAI, prompt: str) -> str:
    return client.completions.create(model="scripted", prompt=prompt, max_tokens=MAX_TOKENS).choices[0].text


@driver("openai completion stream", "openai", _openai)
def _(client: OpenAI, prompt: str) -> str:
    with client.completions.create(model="scripted", prompt=prompt, max_tokens=MAX_TOKENS, stream=True) as chunks:
        return "".join(chunk.choices[0].text for chunk in chunks)


@async_driver("openai async chat stream", "openai", _async_openai)
async def _(client: AsyncOpenAI, prompt: str) -> str:
    async with await client.chat.completions.create(
        model="scripted", messages=_messages(prompt), max_tokens=MAX_TOKENS, stream=True
    ) as chunks:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


@async_driver("openai async completion stream", "openai", _async_openai)
async def _(client: AsyncOpenAI, prompt: str) -> str:
    async with await client.completions.create(
        model="scripted", prompt=prompt, max_tokens=MAX_TOKENS, stream=True
    ) as chunks:
        return "".join([chunk.choices[0].text async for chunk in chunks])


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@driver("hub chat", "openai", _hub, streams=False)
def _(client: InferenceClient, prompt: str) -> str:
    return str(client.chat_completion(_chat(prompt), max_tokens=MAX_TOKENS).choices[0].message.content)


@driver("hub chat stream", "openai", _hub)
def _(client: InferenceClient, prompt: str) -> str:
    chunks = client.chat_completion(_chat(prompt), max_tokens=MAX_TOKENS, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@async_driver("hub async chat stream", "openai", _async_hub)
async def _(client: AsyncInferenceClient, prompt: str) -> str:
    chunks = await client.chat_completion(_chat(prompt), max_tokens=MAX_TOKENS, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


@driver("openai response", "responses", _openai, streams=False)
def _(client: OpenAI, prompt: str) -> str:
    return client.responses.create(model="scripted", input=prompt, max_output_tokens=MAX_TOKENS).output_text


@driver("openai response stream", "responses", _openai)
def _(client: OpenAI, prompt: str) -> str:
    with client.responses.create(model="scripted", input=prompt, max_output_tokens=MAX_TOKENS, stream=True) as events:
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")


@driver("openai response helper", "responses", _openai)
def _(client: OpenAI, prompt: str) -> str:
    with client.responses.stream(model="scripted", input=prompt, max_output_tokens=MAX_TOKENS) as stream:
        return stream.get_final_response().output_text


@driver("openai response, resuming", "responses", _openai, resumes=True)
def _(client: OpenAI, prompt: str) -> str:
    answer = client.responses.create(model="scripted", input=prompt, max_output_tokens=MAX_TOKENS, background=True)
    text, number, status = "", -1, ""
    while not status:
        try:
            after = number if number >= 0 else omit
            with client.responses.retrieve(answer.id, stream=True, starting_after=after) as events:
                for event in events:
                    if str(event.type) == "keepalive":  # no event of the answer: it repeats the number of the last one
                        continue
                    assert event.sequence_number == number + 1
                    number = event.sequence_number
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    elif event.type in ("response.completed", "response.failed", "response.incomplete"):
                        status = event.type
        except APIConnectionError:
            continue
    if status != "response.completed":
        raise StreamFailed(status)
    return text


# Anthropic's


def _anthropic(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=TIMEOUT_S)


def _async_anthropic(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="unused", max_retries=0, timeout=TIMEOUT_S)


@driver("anthropic", "anthropic", _anthropic, streams=False)
def _(client: Anthropic, prompt: str) -> str:
    message = client.messages.create(
        model="scripted", max_tokens=MAX_TOKENS, messages=[{"role": "user", "content": prompt}]
    )
    return "".join(block.text for block in message.content if block.type == "text")


@driver("anthropic stream", "anthropic", _anthropic)
def _(client: Anthropic, prompt: str) -> str:
    with client.messages.stream(
        model="scripted", max_tokens=MAX_TOKENS, messages=[{"role": "user", "content": prompt}]
    ) as stream:
        return "".join(stream.text_stream)


@async_driver("anthropic async stream", "anthropic", _async_anthropic)
async def _(client: AsyncAnthropic, prompt: str) -> str:
    async with client.messages.stream(
        model="scripted", max_tokens=MAX_TOKENS, messages=[{"role": "user", "content": prompt}]
    ) as stream:
        return "".join([text async for text in stream.text_stream])


# Ollama's


def _ollama(url: str) -> AbstractContextManager[Ollama]:
    return Ollama(url, timeout=TIMEOUT_S)


def _async_ollama(url: str) -> AsyncOllama:
    return AsyncOllama(url, timeout=TIMEOUT_S)


_OPTIONS = {"num_predict": MAX_TOKENS}


@driver("ollama chat", "ollama", _ollama, streams=False)
def _(client: Ollama, prompt: str) -> str:
    return client.chat("scripted", _chat(prompt), options=_OPTIONS).message.content or ""


@driver("ollama chat stream", "ollama", _ollama)
def _(client: Ollama, prompt: str) -> str:
    parts = client.chat("scripted", _chat(prompt), options=_OPTIONS, stream=True)
    return "".join(part.message.content or "" for part in parts)


@driver("ollama generate stream", "ollama", _ollama)
def _(client: Ollama, prompt: str) -> str:
    return "".join(part.response or "" for part in client.generate("scripted", prompt, options=_OPTIONS, stream=True))


@async_driver("ollama async chat stream", "ollama", _async_ollama)
async def _(client: AsyncOllama, prompt: str) -> str:
    parts = await client.chat("scripted", _chat(prompt), options=_OPTIONS, stream=True)
    return "".join([part.message.content or "" async for part in parts])
