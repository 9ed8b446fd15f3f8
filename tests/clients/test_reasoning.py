"""What the official clients read of a model that thinks before it answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.waiting import LONG_S

THINKS = 24
PROMPT = "Why do rivers bend?"
ANSWER = Answer(chat_ids(PROMPT), 60, 7, THINKS)
REASONING, TEXT = ANSWER.split
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    with contextlib.closing(Server(f"scripted:thinks={THINKS}")) as running:
        yield running.wait_ready()


@pytest.fixture
def openai(thinking: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{thinking.url}/v1", api_key="none", timeout=LONG_S, max_retries=0) as client:
        yield client


def test_a_chat_of_openai(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=ANSWER.count, seed=7)
    message = answer.choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == (REASONING, TEXT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8 + THINKS + 9


def test_a_chat_of_openai_streams(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=ANSWER.count, seed=7, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == REASONING
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert len([thought for thought in thoughts if thought]) > THINKS / 2  # as it comes
    last = max(number for number, thought in enumerate(thoughts) if thought)
    assert not any(delta.content for delta in deltas[:last])


@pytest.mark.parametrize(
    ("more", "reasoning", "text"),
    [
        ({"include_reasoning": False}, None, TEXT),
        ({"reasoning_format": "none"}, None, ANSWER.text),
        ({"reasoning_format": "deepseek"}, REASONING, TEXT),
    ],
)
def test_it_can_be_left_out_or_left_in(
    more: dict[str, object], reasoning: str | None, text: str, openai: OpenAI
) -> None:
    answer = openai.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=ANSWER.count, seed=7, extra_body=more
    )
    message = answer.choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, text)


def test_a_template_is_told_not_to_think(openai: OpenAI) -> None:
    told = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = openai.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=20, seed=7, extra_body=told)
    message = answer.choices[0].message
    prompt = (*chat_ids(PROMPT), *b"<think>\n\n</think>\n\n")
    assert (getattr(message, "reasoning_content", None), message.content) == (None, Answer(prompt, 20, 7).text)


def test_an_answer_that_was_cut_off_in_its_reasoning_is_continued(openai: OpenAI) -> None:
    begun = cast("ChatCompletionMessageParam", {"role": "assistant", "content": "", "reasoning_content": "Water is"})
    answer = openai.chat.completions.create(
        model="scripted", messages=[*MESSAGES, begun], max_tokens=ANSWER.count, seed=7
    )
    message = answer.choices[0].message
    prompt = (*chat_ids(PROMPT), *b"<think>\nWater is")
    # The scripted engine begins anew, with a marker that is a part of the reasoning here.
    reasoning, _, text = Answer(prompt, ANSWER.count, 7, THINKS).text.partition("\n</think>\n\n")
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, text.lstrip())
