"""Clients ask about an image, unmodified: OpenAI's, Anthropic's, Ollama's, Hugging Face's and LangChain's. The scripted
engine's answer is a function of the question, also of the image in it."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path

import ollama
import openai
import pytest
from anthropic import Anthropic
from huggingface_hub import InferenceClient
from tests.api.process import Server
from tests.clients.test_frameworks import langchain
from tests.seeing import data_url, picture

_PICTURE, _QUESTION, _COUNT = picture(1), "What is in it?", 12
_URL = data_url(_PICTURE)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server("scripted")) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def expected(server: Server) -> tuple[str, int]:
    """The answer to the same question as plain JSON, with the tokens of its prompt."""
    found = _asked(server, _URL)
    assert found[0] != _asked(server, data_url(picture(2)))[0]
    return found


def _asked(server: Server, url: str, max_tokens: int = _COUNT) -> tuple[str, int]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": _QUESTION}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": max_tokens, "seed": 5}
    answer = server.post("/v1/chat/completions", body).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def test_openai(server: Server, expected: tuple[str, int]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="scripted",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": _URL, "detail": "auto"}},
                        {"type": "text", "text": _QUESTION},
                    ],
                }
            ],
            max_tokens=_COUNT,
            seed=5,
        )
        assert chat.usage is not None
        assert (chat.choices[0].message.content, chat.usage.prompt_tokens) == expected
        response = client.responses.create(
            model="scripted",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": _URL, "detail": "auto"},
                        {"type": "input_text", "text": _QUESTION},
                    ],
                }
            ],
            max_output_tokens=_COUNT,
            extra_body={"seed": 5},
        )
        assert response.usage is not None
        assert (response.output_text, response.usage.input_tokens) == expected


def test_anthropic(server: Server, expected: tuple[str, int]) -> None:
    """Its API has no seed: only the tokens are compared."""
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        content = base64.b64encode(_PICTURE).decode()
        message = client.messages.create(
            model="scripted",
            max_tokens=_COUNT,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": content}},
                        {"type": "text", "text": _QUESTION},
                    ],
                }
            ],
        )
        counted = client.messages.count_tokens(
            model="scripted",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": content}},
                        {"type": "text", "text": _QUESTION},
                    ],
                }
            ],
        )
    assert message.usage.input_tokens == counted.input_tokens == expected[1]


def test_ollama(server: Server, expected: tuple[str, int], tmp_path: Path) -> None:
    """With the bytes of an image, and with the path of its file."""
    file = tmp_path / "picture.png"
    file.write_bytes(_PICTURE)
    options = {"num_predict": _COUNT, "seed": 5}
    messages = [ollama.Message(role="user", content=_QUESTION, images=[ollama.Image(value=_PICTURE)])]
    with ollama.Client(host=server.url) as client:
        chat = client.chat("scripted", messages, options=options)
        generated = client.generate("scripted", _QUESTION, images=[str(file)], options=options)
    assert (chat.message.content, chat.prompt_eval_count) == expected
    assert (generated.response, generated.prompt_eval_count) == expected


def test_huggingface_hub(server: Server, expected: tuple[str, int]) -> None:
    with InferenceClient(server.url) as client:
        answer = client.chat_completion(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": _URL}},
                        {"type": "text", "text": _QUESTION},
                    ],
                }
            ],
            max_tokens=_COUNT,
            seed=5,
        )
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected


@pytest.mark.deep
@pytest.mark.timeout(900)  # its packages are installed first
def test_langchain(server: Server) -> None:
    text, num_tokens, url = langchain("langchain_image", server)
    assert (text, num_tokens) == _asked(server, url, max_tokens=60)
