"""The chatbot's conversation, and the codes that close its socket."""

from __future__ import annotations

import pytest

from tailrace.dialects.chatbot import ChatbotConversation, close_for
from tailrace.dialects.wire import failure_of
from tailrace.errors import (
    ContextLengthExceeded,
    Draining,
    EngineLost,
    QueueFull,
    RequestError,
    StorageError,
    TailraceError,
    UnsupportedParameter,
)
from tailrace.types import End, Failure, Message, Released, Usage


def _spoken() -> ChatbotConversation:
    """Return a conversation with three turns of 10, 20 and 30 tokens."""
    conversation = ChatbotConversation(has_template=True)
    total = 0
    for number, num_tokens in enumerate((10, 20, 30), 1):
        total += num_tokens
        conversation.add(f"prompt {number}", f"answer {number}", Usage(total - 4, 4))
    return conversation


def test_turns_go_through_the_template() -> None:
    conversation = ChatbotConversation(has_template=True, repetition_penalty=1.1)
    assert conversation.ask("Hi", max_tokens=9).messages == (Message("user", "Hi"),)
    conversation.add("Hi", "Hello.", Usage(5, 2))
    asked = conversation.ask("And?", max_tokens=9)
    assert asked.messages == (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "And?"))
    assert (asked.sampling.temperature, asked.sampling.repetition_penalty, asked.sampling.max_tokens) == (0.0, 1.1, 9)
    assert asked.on_disconnect == "cancel"


def test_without_a_template_texts_are_joined() -> None:
    conversation = ChatbotConversation(has_template=False)
    conversation.add("Space the final", " frontier.", Usage(5, 2))
    asked = conversation.ask(" These are", max_tokens=None)
    assert asked.prompts == ("Space the final frontier. These are",)
    assert asked.messages == ()


@pytest.mark.parametrize(("num_tokens", "num_left"), [(1, 2), (10, 2), (11, 1), (30, 1), (31, 0), (1_000, 0)])
def test_the_oldest_turns_are_dropped_until_it_fits(num_tokens: int, num_left: int) -> None:
    conversation = _spoken()
    assert conversation.shorten(num_tokens)
    assert conversation.num_turns == num_left
    contents = [message.content for message in conversation.ask("!", max_tokens=1).messages]
    assert contents == [f"{who} {n}" for n in range(4 - num_left, 4) for who in ("prompt", "answer")] + ["!"]


def test_there_may_be_no_turn_to_drop() -> None:
    assert not ChatbotConversation(has_template=True).shorten(1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("No."), 1008),
        (UnsupportedParameter("No."), 1008),
        (ContextLengthExceeded(9, 5), 1009),
        (EngineLost("Gone.", retry_after_s=1), 1011),
        (TailraceError("A defect."), 1011),
        (Draining("Stopping."), 1012),
        (QueueFull("Full.", retry_after_s=1), 1013),
        (failure_of(End("error", Usage(1, 1), Failure("engine_stalled", "It hung."))), 1011),
        (failure_of(End("error", Usage(1, 1), Failure("queue_timeout", "Too busy."))), 1013),
        (failure_of(End("interrupted", Usage(1, 1), Failure("interrupted", "Stopped."))), 1012),
        (failure_of(End("cancelled", Usage(1, 1))), 1011),
        (failure_of(Released("s", 1, Failure("draining", "Stopping."))), 1012),
        (failure_of(Released("s", 1, Failure("lease_lost", "Taken over."))), 1012),
        (failure_of(Released("s", 1, Failure("journal_unavailable", "Away."))), 1013),
        (StorageError("Away."), 1013),
    ],
    ids=lambda value: value.code if isinstance(value, TailraceError) else str(value),
)
def test_an_error_closes_the_socket_with_its_reason(error: TailraceError, code: int) -> None:
    assert close_for(error) == (code, error.message)


def test_a_reason_fits_its_frame() -> None:
    close = close_for(RequestError("é" * 200))
    assert close.reason == "é" * 61
