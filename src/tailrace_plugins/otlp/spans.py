"""What a server tells the process that exports its traces: spans that are over, a line of JSON each."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

__all__ = ["AttributeValue", "Span", "SpanLink", "SpanRef", "decode", "encode"]

AttributeValue: TypeAlias = str | bool | int | float | list[str] | None
"""None is left out."""


class SpanRef(NamedTuple):
    """Names a span. Ids are in hexadecimal, as in `traceparent`."""

    trace_id: str
    span_id: str
    is_sampled: bool = True
    is_remote: bool = False  # it came with a request


class SpanLink(NamedTuple):
    ref: SpanRef
    attributes: dict[str, AttributeValue]


class Span(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Times are seconds on the monotonic clock. `durations` are measured values, in seconds, for the histograms of
    these names; a span that is not sampled is sent only for them."""

    name: str
    ref: SpanRef
    parent: SpanRef | None
    begun_s: float
    ended_s: float
    attributes: dict[str, AttributeValue] = {}
    links: list[SpanLink] = []
    is_server: bool = False
    error: str = ""
    durations: dict[str, float] = {}


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Span).decode
