"""Text as it comes: `POST /?prompt=…` as in Ray Serve's chatbot tutorial.

A plain body has no place for an error, so one that cannot be completed is cut off without its terminating chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from tailrace.dialects.native import encode_error
from tailrace.dialects.wire import Call, Encoder, StreamFacts, failure_of
from tailrace.errors import RequestError
from tailrace.types import End, Event, GenerateRequest, Message, Sampling

__all__ = ["PlainView", "encode_error", "parse", "read_query"]


def read_query(query: bytes) -> dict[str, str]:
    """The fields of a query string, strictly: UTF-8, each once. Raises: RequestError."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError:
        raise RequestError("The query is not valid UTF-8, or has too many fields.") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RequestError("A field of the query is given twice.")
    return fields


def parse(query: Mapping[str, str], *, has_template: bool, repetition_penalty: float = 1.0) -> Call:
    """The prompt is one turn of a chat where the model can chat, and is taken as it stands where it cannot.

    Greedy, as the tutorial's model call is, with a small repetition penalty where the engine has one: small models
    end in a loop without. Raises: RequestError.
    """
    prompt = query["prompt"]
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    unknown = [name for name in query if name not in ("prompt", "max_tokens")]
    if unknown:
        raise RequestError("Only prompt and max_tokens can be given here; use /v1/streams for more.")
    max_tokens: int | None = None
    if "max_tokens" in query:
        digits = query["max_tokens"]
        if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) > 0):
            raise RequestError("max_tokens must be a whole number above 0.", param="max_tokens")
        max_tokens = int(digits)
    sampling = Sampling(temperature=0.0, repetition_penalty=repetition_penalty, max_tokens=max_tokens)
    if has_template:
        request = GenerateRequest(messages=(Message("user", prompt),), sampling=sampling)
    else:
        request = GenerateRequest(prompt=prompt, sampling=sampling)
    return Call(request, PlainView(), stream=True)


@dataclass(frozen=True, slots=True)
class PlainView:
    media_type = "text/plain; charset=utf-8"

    def open(self, facts: StreamFacts) -> Encoder:
        return _PlainEncoder()


class _PlainEncoder:
    __slots__ = ()

    def encode(self, seq: int, event: Event) -> bytes:
        if isinstance(event, End):
            if event.status != "done":
                raise failure_of(event)
            return b""
        return event.text.encode()

    def whole(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.encode(seq, event) for seq, event in enumerate(events, 1))
