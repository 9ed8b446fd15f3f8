"""The chatbot's conversation. Its socket: tests/api/test_sockets.py."""

from __future__ import annotations

import pytest
from tests.dialects.fake_server import FakeServer

from tailrace.errors import ContextLengthExceeded
from tailrace.types import End, Message, TextDelta, Usage
from tailrace_plugins.articles.chatbot import FINISHED, ChatbotChat

_FACTS = FakeServer(default_max_tokens=9)


def _say(chat: ChatbotChat, prompt: str, answer: str, usage: Usage) -> None:
    """Let a chat have one turn."""
    chat.ask(prompt)
    assert chat.encode(TextDelta(answer, ())) == answer.encode()
    assert chat.encode(End("done", usage)) == FINISHED.encode()


def _spoken() -> ChatbotChat:
    """Return a conversation with three turns of 10, 20 and 30 tokens."""
    chat = ChatbotChat(_FACTS)
    total = 0
    for number, num_tokens in enumerate((10, 20, 30), 1):
        total += num_tokens
        _say(chat, f"prompt {number}", f"answer {number}", Usage(total - 4, 4))
    return chat


def _excess(num_tokens: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(100 + num_tokens, 109, max_tokens=9)


def test_turns_go_through_the_template() -> None:
    chat = ChatbotChat(_FACTS)
    assert chat.ask("Hi").messages == (Message("user", "Hi"),)
    _say(chat, "Hi", "Hello.", Usage(5, 2))
    asked = chat.ask("And?")
    assert asked.messages == (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "And?"))
    assert (asked.sampling.temperature, asked.sampling.repetition_penalty, asked.sampling.max_tokens) == (0.0, 1.1, 9)
    assert asked.on_disconnect == "cancel"


def test_without_a_template_texts_are_joined() -> None:
    chat = ChatbotChat(FakeServer(can_chat=False))
    _say(chat, "Space the final", " frontier.", Usage(5, 2))
    asked = chat.ask(" These are")
    assert asked.prompts == ("Space the final frontier. These are",)
    assert asked.messages == ()


@pytest.mark.parametrize(("num_tokens", "num_left"), [(1, 2), (10, 2), (11, 1), (30, 1), (31, 0), (1_000, 0)])
def test_the_oldest_turns_are_dropped_until_it_fits(num_tokens: int, num_left: int) -> None:
    chat = _spoken()
    assert chat.shorten(_excess(num_tokens))
    assert chat.num_turns == num_left
    contents = [message.content for message in chat.ask("!").messages]
    assert contents == [f"{who} {n}" for n in range(4 - num_left, 4) for who in ("prompt", "answer")] + ["!"]


def test_without_a_turn_to_drop_one_answer_is_shorter() -> None:
    chat = ChatbotChat(_FACTS)
    assert chat.ask("Long").sampling.max_tokens == 9
    assert chat.shorten(_excess(1))
    assert chat.ask("Long").sampling.max_tokens is None
    assert not chat.shorten(_excess(1))
    _say(chat, "Long", "Short.", Usage(5, 2))
    assert chat.ask("Hi").sampling.max_tokens == 9


def test_a_short_window_bounds_the_answer() -> None:
    assert ChatbotChat(FakeServer(max_total_tokens=10)).ask("Hi").sampling.max_tokens == 5
