"""tailrace's own wire: `/v1/streams`, server-sent events that resume.

Each event is one `id:` line, one `data:` line of JSON and, where it is the terminal one, an `event:` line that says how
the stream ended. The rules of emission are chosen so that every known client reads the same: LF only, no block without
data, `retry:` inside the first event, nothing beyond ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from tailrace.dialects.fields import ChatMessage, SamplingFields, read_messages, sampling_of, unknown_in_messages
from tailrace.dialects.wire import (
    Call,
    Encoder,
    JsonBody,
    StreamFacts,
    deltas_by_choice,
    failure_of,
    quote,
    read_fields,
    refuse,
    to_json,
    usage_json,
)
from tailrace.errors import RequestError, TailraceError, UnsupportedParameter
from tailrace.types import End, Event, GenerateRequest, TextDelta

__all__ = ["NativeEncoder", "NativeView", "encode_error", "end_fields", "parse"]

_RETRY_MS = 1000

# Known from OpenAI's API, and not to be ignored quietly. The values beside them ask for nothing.
_NOT_YET: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "top_logprobs": (0,),
}


class Body(SamplingFields, kw_only=True):
    """The body of `POST /v1/streams`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    logprobs: bool | None = None
    on_disconnect: Literal["cancel", "detach"] = "detach"
    linger_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    best_of: object = None
    functions: object = None
    logit_bias: object = None
    response_format: object = None
    tools: object = None
    top_logprobs: object = None


def parse(body: JsonBody) -> Call:
    """Raises: RequestError; unknown fields are refused, since a typing mistake here has no other witness."""
    fields, _ = read_fields(body, Body, strict=True)
    refuse(body, _NOT_YET)
    for name in unknown_in_messages(body):
        raise UnsupportedParameter(f"Unknown field: {name}.", param=name)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    request = GenerateRequest(
        model=fields.model,
        prompt=fields.prompt,
        messages=read_messages(fields.messages) if fields.messages is not None else (),
        sampling=sampling_of(fields, logprobs=bool(fields.logprobs)),
        on_disconnect=fields.on_disconnect,
        linger_s=fields.linger_s,
    )
    return Call(request, NativeView(), stream=True)


@dataclass(frozen=True, slots=True)
class NativeView:
    media_type = "text/event-stream; charset=utf-8"

    def open(self, facts: StreamFacts) -> Encoder:
        return NativeEncoder(facts)


class NativeEncoder:
    """Events as they stand on the wire. Keeps nothing between events, so that it may start anywhere."""

    __slots__ = ("_prefix",)

    def __init__(self, facts: StreamFacts) -> None:
        self._prefix = f"id: {facts.stream_id}-"

    def encode(self, seq: int, event: Event) -> bytes:
        if type(event) is End:
            return f"{self._prefix}{seq}\nevent: {event.status}\ndata: {_end_json(event)}\n\n".encode("ascii")
        assert type(event) is TextDelta
        token_ids = event.token_ids
        ids = token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids))
        extra = ""
        if event.finish_reason is not None or event.choice or event.logprobs:
            extra = _extra_json(event)
        retry = f"retry: {_RETRY_MS}\n" if seq == 1 else ""
        return (
            f'{self._prefix}{seq}\n{retry}data: {{"text":{quote(event.text)},"token_ids":[{ids}]{extra}}}\n\n'.encode(
                "ascii"
            )
        )

    def whole(self, events: Sequence[Event]) -> bytes:
        end = events[-1] if events else None
        if not isinstance(end, End) or end.status != "done":
            raise failure_of(end if isinstance(end, End) else None)
        deltas = deltas_by_choice(events, 1)[0]
        return to_json({"text": "".join(delta.text for delta in deltas), **end_fields(end)})


def _extra_json(event: TextDelta) -> str:
    fields: JsonBody = {}
    if event.choice:
        fields["choice"] = event.choice
    if event.logprobs:
        fields["logprobs"] = event.logprobs
    if event.finish_reason is not None:
        fields["finish_reason"] = event.finish_reason
        if event.stop is not None:
            fields["stop"] = event.stop
    return "," + to_json(fields)[1:-1].decode()


def end_fields(end: End) -> JsonBody:
    """The terminal event as JSON fields; also part of a stream's state."""
    fields: JsonBody = {"status": end.status, "usage": usage_json(end)}
    if end.failure is not None:
        fields["error"] = {"code": end.failure.code, "message": end.failure.message}
    return fields


def _end_json(end: End) -> str:
    return to_json(end_fields(end)).decode()


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error": {"message", "type", "code", "param"}}`, as on OpenAI's routes."""
    kind = "invalid_request_error" if error.status < 429 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    body = {"message": error.message, "type": kind, "code": error.code, "param": error.param}
    return error.status, to_json({"error": body})
