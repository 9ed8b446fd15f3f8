"""WebSocket at `/`: the chatbot of Ray Serve's streaming tutorial.

The client sends a prompt as a text frame. The answer comes as text frames, one for each token that adds text, and
`<<Response Finished>>` after the last. The conversation is kept until the socket is closed.

Divergences from the tutorial's server:

1. No frame is empty. The tutorial's streamer sends an empty frame for each token that does not complete a word.
2. The conversation goes through the model's chat template as turns. The tutorial joins prompts and answers without
   separators; this is done here only for models without a template.
3. When the conversation and an answer no longer fit the model's window, the oldest prompts are dropped with their
   answers. An answer has at most `--default-max-tokens`, or half the window if that is less. It is shorter only if a
   single prompt leaves less space.
4. The tutorial has no errors, and a client would take a frame with an error for the answer. So an answer is complete
   if, and only if, `<<Response Finished>>` follows. Otherwise the socket is closed: 1003 for a binary frame, 1007 for a
   frame that is not UTF-8, 1008 for a refused prompt, 1009 for a too long one, 1011 if the engine failed, 1012 if the
   server stops or another one writes the answer, 1013 if the model is too busy or answers cannot be stored, 1001 if
   there was no traffic for `--ws-idle-s`.
5. Closing the socket would lose the conversation. So on an overloaded server the prompt is retried after the
   Retry-After of HTTP, and the socket is closed with 1013 only after `--queue-s`.
6. Prompts that arrive during an answer wait, as in the tutorial's socket buffer. At most 16 wait, together not longer
   than the largest message. For more, the socket is closed with 1008: if the server stopped reading, it would not
   notice a disconnect, and the answer would continue.
7. A disconnect cancels the answer within a step.
8. Reasoning is a part of the answer, because text frames have no other place for it. Chat templates know how to leave
   it out of earlier turns.

A limit of the protocol: a model can write `<<Response Finished>>` as text, and the client cannot notice. `/v1/ws` does
not have this limit.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tailrace.dialects.websocket import Close
from tailrace.errors import (
    KINDS,
    AdmissionError,
    ContextLengthExceeded,
    Draining,
    Interrupted,
    LeaseLost,
    RequestError,
    StorageError,
    TailraceError,
)
from tailrace.types import GenerateRequest, Message, Sampling, Usage

__all__ = ["FINISHED", "MAX_WAITING", "ChatbotConversation", "close_for"]

FINISHED = "<<Response Finished>>"
MAX_WAITING = 16  # prompts


class _Turn(NamedTuple):
    prompt: str
    answer: str
    num_tokens: int


class ChatbotConversation:
    """The conversation of one socket, as far as it fits the model's window."""

    def __init__(self, *, has_template: bool, repetition_penalty: float = 1.0) -> None:
        self._has_template = has_template
        self._repetition_penalty = repetition_penalty
        self._turns: deque[_Turn] = deque()

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def ask(self, prompt: str, *, max_tokens: int | None) -> GenerateRequest:
        """Return a request with the conversation and a new prompt. Sampling is greedy, as in the tutorial, with a small
        repetition penalty if the engine supports it: without it, small models repeat themselves endlessly."""
        sampling = Sampling(temperature=0.0, repetition_penalty=self._repetition_penalty, max_tokens=max_tokens)
        if not self._has_template:
            texts = [text for turn in self._turns for text in (turn.prompt, turn.answer)]
            return GenerateRequest(prompts=("".join([*texts, prompt]),), sampling=sampling)
        messages: list[Message] = []
        for turn in self._turns:
            messages += (Message("user", turn.prompt), Message("assistant", turn.answer))
        messages.append(Message("user", prompt))
        return GenerateRequest(messages=tuple(messages), sampling=sampling, split_reasoning=False)

    def add(self, prompt: str, answer: str, usage: Usage) -> None:
        """Keep a turn. `usage` is that of the whole conversation."""
        before = sum(turn.num_tokens for turn in self._turns)
        self._turns.append(_Turn(prompt, answer, max(1, sum(usage) - before)))

    def shorten(self, num_tokens: int) -> bool:
        """Drop the oldest turns, at least one, until this many tokens are dropped. Returns False without turns."""
        if not self._turns:
            return False
        num_gone = self._turns.popleft().num_tokens
        while self._turns and num_gone < num_tokens:
            num_gone += self._turns.popleft().num_tokens
        return True


def close_for(error: TailraceError) -> Close:
    """Return how to close the socket after an error."""
    if isinstance(error, ContextLengthExceeded):
        code = 1009
    elif isinstance(error, RequestError):
        code = 1008
    elif error.code in (Draining.code, Interrupted.code, LeaseLost.code):
        code = 1012
    elif isinstance(error, AdmissionError) or issubclass(KINDS.get(error.code, TailraceError), StorageError):
        code = 1013
    else:
        code = 1011
    return Close.with_reason(code, error.message)
