"""Wires of plain text: prompts without roles and with few parameters or none, and answers that are the text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tailrace.dialects.facts import ServerFacts, StreamFacts
from tailrace.dialects.fields import SamplingFields, sampling_of
from tailrace.dialects.wire import Encoder, failure_of
from tailrace.errors import RequestError
from tailrace.types import Event, GenerateRequest, Message, Released, Sampling, TextDelta

__all__ = ["BareTextView", "bare_request", "bare_sampling"]

_SAMPLING_FIELDS = set(SamplingFields.__struct_fields__) - {"max_tokens", "max_completion_tokens", "stop"}


def bare_sampling(server: ServerFacts, fields: SamplingFields) -> Sampling:
    """Return the sampling parameters. By default sampling is greedy, as in Ray Serve's tutorial, with a small
    repetition penalty if the engine supports it: without it, small models repeat themselves endlessly.
    Raises: RequestError."""
    sampling = sampling_of(fields, {})
    if any(getattr(fields, name) is not None for name in _SAMPLING_FIELDS):
        return sampling
    penalty = 1.1 if "repetition_penalty" in server.generator.parameters else 1.0
    return replace(sampling, temperature=0.0, repetition_penalty=penalty)


def bare_request(server: ServerFacts, prompt: str, sampling: Sampling) -> GenerateRequest:
    """Return a request for a plain prompt. It is put into `--prompt-template` if that is set; otherwise it is a chat of
    one turn if the model has a chat template; otherwise it is used unchanged. Reasoning is a part of the answer: these
    wires have no field for it. Raises: RequestError if the prompt is empty."""
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    if server.prompt_template:
        return GenerateRequest(prompts=(server.prompt_template.replace("{prompt}", prompt),), sampling=sampling)
    if server.chat.can_chat:
        return GenerateRequest(messages=(Message("user", prompt),), sampling=sampling, split_reasoning=False)
    return GenerateRequest(prompts=(prompt,), sampling=sampling)


@dataclass(frozen=True, slots=True)
class BareTextView:
    """The text of an answer, and nothing else. It cannot have an error, so a failed answer is cut off."""

    media_type: str = "text/plain; charset=utf-8"
    heartbeat = b""  # a client would read it as text

    def open(self, facts: StreamFacts) -> Encoder:
        return _BareTextEncoder()


class _BareTextEncoder(Encoder):
    __slots__ = ()

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if isinstance(event, TextDelta):
            return event.text.encode()
        if event.status != "done":
            raise failure_of(event)
        return b""

    def whole(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.encode(seq, event) for seq, event in enumerate(events, 1))
