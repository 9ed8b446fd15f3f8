"""WebSocket at `/`: the chatbot of Ray Serve's streaming tutorial. Text in, text out, and a memory while it is open.

The client sends a prompt as a text frame. The answer comes as text frames, one for each token that gives text, and
`<<Response Finished>>` behind the last. What was said is kept for the life of the socket.

Divergences from the tutorial's server:

1. No frame is empty. The tutorial's streamer sends one for each token that does not complete a word.
2. The conversation goes through the model's chat template as turns. The tutorial strings prompts and answers together
   with nothing in between, which is done here only for a model without a template.
3. When the conversation and an answer no longer fit the model, its oldest turns are forgotten, a prompt with its answer
   at a time. An answer has the length of `--default-max-tokens`, or of half the model's window if that is less; only a
   single prompt that leaves less room than that gets a shorter one.
4. Errors. The tutorial has none, and a frame with an error in it would be taken for the answer. So an answer is
   complete if, and only if, `<<Response Finished>>` came, and the socket is closed for anything else: 1003 a binary
   frame, 1007 a frame that is not UTF-8, 1008 a prompt that is refused, 1009 one that is too long, 1011 the engine
   failed, 1012 the server goes away, 1013 the model is too busy, 1001 nothing was said for `--ws-idle-s`.
5. An overloaded server does not lose the conversation at once, for it lives in the socket: the prompt waits as the
   Retry-After of HTTP would have it wait, and only after `--queue-s` the socket is closed with 1013.
6. Prompts that come while an answer runs wait, as they would in the tutorial's socket buffer: 16 of them at most, and
   together no longer than the largest message. Beyond that the socket is closed with 1008: waiting without reading
   would leave a client's leaving unnoticed, and its answer running.
7. Leaving cancels the answer within a step.

8. What a model thinks is a part of the answer: a text frame has no place beside it. Chat templates know how to leave
   it out of earlier turns.

A limit that the protocol has by nature: `<<Response Finished>>` is text like any other, and a model can say it. A
client cannot tell. `/v1/ws` does not have this limit.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tailrace.dialects.websocket import Close
from tailrace.errors import AdmissionError, ContextLengthExceeded, Draining, EngineError, RequestError, TailraceError
from tailrace.types import GenerateRequest, Message, Sampling, Usage

__all__ = ["FINISHED", "MAX_WAITING", "ChatbotConversation", "close_for"]

FINISHED = "<<Response Finished>>"
MAX_WAITING = 16  # prompts


class _Turn(NamedTuple):
    prompt: str
    answer: str
    num_tokens: int


class ChatbotConversation:
    """What was said on one socket, as far as it fits the model."""

    def __init__(self, *, has_template: bool, repetition_penalty: float = 1.0) -> None:
        self._has_template = has_template
        self._repetition_penalty = repetition_penalty
        self._turns: deque[_Turn] = deque()

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def ask(self, prompt: str, *, max_tokens: int | None) -> GenerateRequest:
        """The conversation with a new prompt. Greedy, as the tutorial's model call is, with a small repetition penalty
        where the engine has one: small models end in a loop without."""
        sampling = Sampling(temperature=0.0, repetition_penalty=self._repetition_penalty, max_tokens=max_tokens)
        if not self._has_template:
            said = [text for turn in self._turns for text in (turn.prompt, turn.answer)]
            return GenerateRequest(prompts=("".join([*said, prompt]),), sampling=sampling)
        messages: list[Message] = []
        for turn in self._turns:
            messages += (Message("user", turn.prompt), Message("assistant", turn.answer))
        messages.append(Message("user", prompt))
        return GenerateRequest(messages=tuple(messages), sampling=sampling, split_reasoning=False)

    def add(self, prompt: str, answer: str, usage: Usage) -> None:
        """Keep a turn. `usage` is that of the whole conversation, from which follows what this turn takes."""
        before = sum(turn.num_tokens for turn in self._turns)
        self._turns.append(_Turn(prompt, answer, max(1, sum(usage) - before)))

    def shorten(self, num_tokens: int) -> bool:
        """Forget the oldest turns, until so many tokens are gone, but one turn at least. False if there is none."""
        if not self._turns:
            return False
        num_gone = self._turns.popleft().num_tokens
        while self._turns and num_gone < num_tokens:
            num_gone += self._turns.popleft().num_tokens
        return True


def close_for(error: TailraceError) -> Close:
    """How the socket is closed for what kept an answer from beginning, or cut it off."""
    if isinstance(error, ContextLengthExceeded):
        code = 1009
    elif isinstance(error, RequestError):
        code = 1008
    elif isinstance(error, Draining) or error.code == "interrupted":
        code = 1012
    elif isinstance(error, AdmissionError):
        code = 1013
    else:
        assert isinstance(error, EngineError) or error.status == 500
        code = 1011
    return Close.saying(code, error.message)
