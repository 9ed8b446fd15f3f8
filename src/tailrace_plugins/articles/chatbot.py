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
8. Reasoning is a part of the answer, because text frames have nothing else for it. Chat templates know how to leave
   it out of earlier turns.

A limit of the protocol: a model can write `<<Response Finished>>` as text, and the client cannot notice. `/v1/ws` does
not have this limit.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from msgspec.structs import replace

from tailrace.dialects import SamplingFields, ServerFacts, SocketChat, Wire, bare_sampling, encode_error
from tailrace.errors import ContextLengthExceeded
from tailrace.types import End, Event, GenerateRequest, Message, TextDelta

__all__ = ["FINISHED", "WIRE", "ChatbotChat"]

FINISHED = "<<Response Finished>>"


class _Turn(NamedTuple):
    prompt: str
    answer: str
    num_tokens: int


class ChatbotChat(SocketChat):
    """The conversation of one socket, as far as it fits the model's window."""

    def __init__(self, server: ServerFacts) -> None:
        self._has_template = server.chat.can_chat
        self._sampling = bare_sampling(server, SamplingFields())
        self._usual_tokens = min(server.default_max_tokens, max(1, server.generator.limit_tokens() // 2))
        self._max_tokens: int | None = self._usual_tokens
        self._turns: deque[_Turn] = deque()
        self._prompt = ""
        self._answer: list[str] = []

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def ask(self, prompt: str) -> GenerateRequest:
        """Return a request with the conversation and a new prompt. Sampling is that of `bare_sampling`."""
        self._prompt = prompt
        sampling = replace(self._sampling, max_tokens=self._max_tokens)
        if not self._has_template:
            texts = [text for turn in self._turns for text in (turn.prompt, turn.answer)]
            return GenerateRequest(prompts=("".join([*texts, prompt]),), sampling=sampling)
        messages: list[Message] = []
        for turn in self._turns:
            messages += (Message("user", turn.prompt), Message("assistant", turn.answer))
        messages.append(Message("user", prompt))
        return GenerateRequest(messages=tuple(messages), sampling=sampling, split_reasoning=False)

    def shorten(self, error: ContextLengthExceeded) -> bool:
        """Drop the oldest turns, at least one, until the rest fits. Without turns, the answer may be shorter."""
        if not self._turns:
            had_limit, self._max_tokens = self._max_tokens is not None, None  # as much as fits
            return had_limit
        num_gone, num_excess = 0, error.num_prompt_tokens + error.max_tokens - error.limit_tokens
        while self._turns and num_gone < max(1, num_excess):
            num_gone += self._turns.popleft().num_tokens
        return True

    def encode(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            self._answer.append(event.text)
            return event.text.encode()
        self._add(event)
        return FINISHED.encode()

    def _add(self, end: End) -> None:
        """Keep the turn. The usage of its end is that of the whole conversation."""
        num_before = sum(turn.num_tokens for turn in self._turns)
        self._turns.append(_Turn(self._prompt, "".join(self._answer), max(1, sum(end.usage) - num_before)))
        self._answer.clear()
        self._max_tokens = self._usual_tokens


WIRE = Wire(
    name="chatbot",
    title="The chatbot of Ray Serve's tutorial",
    operations=(),
    encode_error=encode_error,
    sockets={"/": ChatbotChat},
)
