"""The official clients with a model that writes reasoning before the answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam
from ollama import Client
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputParam, ResponseOutputMessage, ResponseReasoningItem
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.waiting import LONG_S

THINKS = 24
PROMPT = "Why do rivers bend?"
ANSWER = Answer(chat_ids(PROMPT), 60, 7, THINKS)
REASONING, TEXT = ANSWER.split
NUM_REASONING = 8 + THINKS + 9  # with the markers, and without the white space behind them
SEED = {"seed": 7}
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
    assert answer.usage.completion_tokens_details.reasoning_tokens == NUM_REASONING


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
def test_it_can_be_hidden_or_left_in_the_text(
    more: dict[str, object], reasoning: str | None, text: str, openai: OpenAI
) -> None:
    answer = openai.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=ANSWER.count, seed=7, extra_body=more
    )
    message = answer.choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, text)


def test_thinking_can_be_switched_off_in_the_template(openai: OpenAI) -> None:
    told = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = openai.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=20, seed=7, extra_body=told)
    message = answer.choices[0].message
    prompt = (*chat_ids(PROMPT), *b"<think>\n\n</think>\n\n")
    assert (getattr(message, "reasoning_content", None), message.content) == (None, Answer(prompt, 20, 7).text)


def test_an_answer_that_ended_in_its_reasoning_is_continued(openai: OpenAI) -> None:
    begun = cast("ChatCompletionMessageParam", {"role": "assistant", "content": "", "reasoning_content": "Water is"})
    answer = openai.chat.completions.create(
        model="scripted", messages=[*MESSAGES, begun], max_tokens=ANSWER.count, seed=7
    )
    message = answer.choices[0].message
    prompt = (*chat_ids(PROMPT), *b"<think>\nWater is")
    # The scripted engine begins anew, with a marker that is a part of the reasoning here.
    reasoning, _, text = Answer(prompt, ANSWER.count, 7, THINKS).text.partition("\n</think>\n\n")
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, text.lstrip())


# Responses


def test_a_response(openai: OpenAI) -> None:
    answer = openai.responses.create(model="scripted", input=PROMPT, max_output_tokens=ANSWER.count, extra_body=SEED)
    reasoning, message = answer.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert isinstance(message, ResponseOutputMessage)
    assert reasoning.content is not None
    assert ([part.text for part in reasoning.content], reasoning.summary) == ([REASONING], [])
    assert answer.output_text == TEXT
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == NUM_REASONING


def test_a_response_streams(openai: OpenAI) -> None:
    """The client's own stream checks that items come in order."""
    with openai.responses.stream(
        model="scripted", input=PROMPT, max_output_tokens=ANSWER.count, extra_body=SEED
    ) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == REASONING
    assert [event.text for event in events if event.type == "response.reasoning_text.done"] == [REASONING]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    last = events[-1]
    assert last.type == "response.incomplete"
    assert [item.type for item in last.response.output] == ["reasoning", "message"]


def test_a_response_is_sent_back_as_input(openai: OpenAI) -> None:
    """Templates that use earlier reasoning get it."""
    first = openai.responses.create(model="scripted", input=PROMPT, max_output_tokens=ANSWER.count, extra_body=SEED)
    again = cast("ResponseInputParam", [
        {"role": "user", "content": PROMPT},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": "Go on."},
    ])  # fmt: skip
    answer = openai.responses.create(model="scripted", input=again, max_output_tokens=ANSWER.count, extra_body=SEED)
    first_answer = f"<think>\n{REASONING}\n</think>\n\n{TEXT}\n".encode()
    user, assistant = chat_ids("")[0], chat_ids("")[-1]
    prompt = (*chat_ids(PROMPT), *first_answer, user, *b"Go on.\n", assistant)
    assert answer.output_text == Answer(prompt, ANSWER.count, 7, THINKS).split[1]
    previous = openai.responses.create(
        model="scripted", input="Go on.", previous_response_id=first.id, max_output_tokens=ANSWER.count, extra_body=SEED
    )
    assert previous.output_text == answer.output_text


# Anthropic


@pytest.fixture
def anthropic(thinking: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=thinking.url, api_key="unused", timeout=LONG_S, max_retries=0) as client:
        yield client


ASKED: list[MessageParam] = [{"role": "user", "content": PROMPT}]
# Its API has no seed: the answer differs each time, and so does the place where the length limit cuts it.
LONG = 2000


def test_a_message_of_anthropic(anthropic: Anthropic) -> None:
    message = anthropic.messages.create(
        model="scripted", max_tokens=LONG, messages=ASKED, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    thinking_block, text_block = message.content
    assert thinking_block.type == "thinking"
    assert thinking_block.signature
    assert text_block.type == "text"
    assert "think>" not in thinking_block.thinking + text_block.text
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == NUM_REASONING


def test_a_message_of_anthropic_streams(anthropic: Anthropic) -> None:
    with anthropic.messages.stream(
        model="scripted", max_tokens=LONG, messages=ASKED, thinking={"type": "adaptive"}
    ) as stream:
        events = list(stream)
        thinking_block, text_block = stream.get_final_message().content
    assert thinking_block.type == "thinking"
    assert text_block.type == "text"
    assert "".join(event.thinking for event in events if event.type == "thinking") == thinking_block.thinking
    assert [event.signature for event in events if event.type == "signature"] == [thinking_block.signature]
    assert "".join(event.text for event in events if event.type == "text") == text_block.text
    handed_back = cast(
        "MessageParam", {"role": "assistant", "content": [thinking_block.model_dump(), text_block.model_dump()]}
    )
    again = anthropic.messages.create(
        model="scripted", max_tokens=9, messages=[*ASKED, handed_back, {"role": "user", "content": "Go on."}]
    )
    assert again.usage.output_tokens == 9


def test_on_anthropics_wire_thinking_is_off_by_default(anthropic: Anthropic, thinking: Server) -> None:
    """The template gets a variable that says so. With `omitted` the model reasons, but the reasoning is not sent."""
    message = anthropic.messages.create(model="scripted", max_tokens=60, messages=ASKED)
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.output_tokens_details is None
    unseen = anthropic.messages.create(
        model="scripted", max_tokens=60, messages=ASKED, thinking={"type": "adaptive", "display": "omitted"}
    )
    assert [block.type for block in unseen.content] == ["text"]
    assert unseen.usage.output_tokens_details is not None


def test_on_anthropics_wire_a_model_without_thinking_answers_without_it(server: Server) -> None:
    with Anthropic(base_url=server.url, api_key="unused", timeout=LONG_S, max_retries=0) as client:
        answer = client.messages.with_raw_response.create(
            model="scripted", max_tokens=LONG, messages=ASKED, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    assert "thinking" in answer.headers["x-tailrace-ignored"]
    assert [block.type for block in answer.parse().content] == ["text"]


# Ollama

OPTIONS = {"num_predict": ANSWER.count, "seed": 7}


@pytest.fixture
def ollama(thinking: Server) -> Iterator[Client]:
    with Client(thinking.url, timeout=LONG_S) as client:
        yield client


@pytest.mark.parametrize("think", [None, True])
def test_a_chat_of_ollama(think: bool | None, ollama: Client) -> None:
    answer = ollama.chat("scripted", [{"role": "user", "content": PROMPT}], think=think, options=OPTIONS)
    assert (answer.message.thinking, answer.message.content) == (REASONING, TEXT)
    parts = list(
        ollama.chat("scripted", [{"role": "user", "content": PROMPT}], think=think, options=OPTIONS, stream=True)
    )
    assert "".join(part.message.thinking or "" for part in parts) == REASONING
    assert "".join(part.message.content or "" for part in parts) == TEXT


def test_a_prompt_of_ollama(ollama: Client) -> None:
    answer = ollama.generate("scripted", PROMPT, think=True, options=OPTIONS)
    assert (answer.thinking, answer.response) == (REASONING, TEXT)
    parts = list(ollama.generate("scripted", PROMPT, options=OPTIONS, stream=True))
    assert "".join(part.thinking or "" for part in parts) == REASONING
    assert "".join(part.response or "" for part in parts) == TEXT
    raw = ollama.generate("scripted", PROMPT, raw=True, options=OPTIONS)
    assert raw.thinking is None
    assert raw.response == Answer(PROMPT, ANSWER.count, 7, THINKS).text


def test_on_ollamas_wire_thinking_can_be_switched_off(ollama: Client) -> None:
    answer = ollama.chat("scripted", [{"role": "user", "content": PROMPT}], think=False, options=OPTIONS)
    prompt = (*chat_ids(PROMPT), *b"<think>\n\n</think>\n\n")
    assert (answer.message.thinking, answer.message.content) == (None, Answer(prompt, ANSWER.count, 7).text)


def test_capabilities_on_ollamas_wire(ollama: Client, server: Server) -> None:
    assert ollama.show("scripted").capabilities == ["completion", "thinking", "insert"]
    asked = [{"role": "user", "content": PROMPT}]
    assert ollama.chat("scripted", asked, think="high", options=OPTIONS).message.thinking  # there are no levels
    assert ollama.generate("scripted", PROMPT, raw=True, think=True, options=OPTIONS).thinking is None
    with Client(server.url, timeout=LONG_S) as other:
        assert other.show("scripted").capabilities == ["completion", "vision", "insert"]
        for think in (True, False):
            assert other.chat("scripted", asked, think=think, options=OPTIONS).message.thinking is None
