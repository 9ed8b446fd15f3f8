"""One trace for each request, from the events that observers get.

All spans are made when they are over. Their ids are functions of the stream's id, so every server knows the span of a
stream, also of one that another server has begun. A stream that another server began, or an earlier process, is a span
of its own in the same trace, with a link to the first one.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.errors import TailraceError
from tailrace.server import Observer, StreamLog, Times
from tailrace.types import Arrival, End, Record
from tailrace_plugins.otlp.exporter_process import ExporterProcess
from tailrace_plugins.otlp.names import PROVIDER, REQUEST, TPOT, TTFT
from tailrace_plugins.otlp.spans import AttributeValue, Span, SpanLink, SpanRef

__all__ = ["Tracing"]

_TEXT_CHARS = 16_384  # of the prompts of a span, and of its answers: thousands of spans may wait for a collector
_MAX_STREAMS = 20_000  # in memory; the oldest are forgotten, whose end never came


@dataclass(slots=True)
class _Stream:
    """The part of a stream that this server generates."""

    ref: SpanRef
    parent: SpanRef | None
    begun_s: float = field(default_factory=time.monotonic)
    links: list[SpanLink] = field(default_factory=list)
    last: SpanRef | None = None  # the last decode span
    decodes_s: float | None = None  # since when it gets tokens, monotonic


class Tracing(Observer):
    """`has_text`: spans have prompts and answers."""

    def __init__(self, exporter: ExporterProcess, *, has_text: bool) -> None:
        self._add = exporter.add
        self._has_text = has_text
        self._streams: dict[str, _Stream] = {}

    def headers(self, record: Record) -> Mapping[str, str]:
        """Return the header that tells a client the span of a stream."""
        ref = _ref_of(record)
        return {"traceparent": f"00-{ref.trace_id}-{ref.span_id}-{'01' if ref.is_sampled else '00'}"}

    # The stages of a request

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        parent, now_s = _parsed(arrival.trace), time.monotonic()
        ref = _below(parent) if parent is not None else SpanRef(_new_id() + _new_id(), _new_id())
        attributes = _common(arrival.model) | {"error.type": error.code, "tailrace.wire": arrival.wire}
        self._add(
            Span(f"refuse {arrival.model}", ref, parent, now_s, now_s, attributes, is_server=True, error=error.code)
        )

    def on_begun(self, record: Record) -> None:
        self._keep(record, _Stream(_ref_of(record), _parsed(record.trace)))

    def on_taken_over(self, record: Record, num_tokens: int) -> None:
        first = _ref_of(record)
        link = SpanLink(first, {"tailrace.link": "taken over", "tailrace.tokens": num_tokens})
        self._keep(record, _Stream(_below(first), _parsed(record.trace), links=[link]))

    def on_admitted(self, record: Record, times: Times) -> None:
        self._phase("queue", self._stream(record), times.entered_s, times.admitted_s)

    def on_first_token(self, record: Record, times: Times) -> None:
        stream = self._stream(record)
        self._phase("prefill", stream, times.admitted_s, times.first_s)
        stream.decodes_s = times.first_s

    def on_caught_up(self, record: Record, silent_s: float) -> None:
        """The tokens before the loss are one decode span, and those from now on another, which has a link to it."""
        stream, now_s = self._stream(record), time.monotonic()
        lost_s = now_s - silent_s
        self._decode(stream, lost_s)
        self._phase("replay", stream, lost_s, now_s)
        stream.decodes_s = now_s

    def on_readmitted(self, record: Record, waited_s: float) -> None:
        """As after a loss, but it has waited in the queue."""
        stream, now_s = self._stream(record), time.monotonic()
        was_decoding = stream.decodes_s is not None
        self._decode(stream, now_s - waited_s)
        self._phase("queue", stream, now_s - waited_s, now_s)
        stream.decodes_s = now_s if was_decoding else None

    def on_read(self, record: Record, after: int, read_s: float, trace: str) -> None:
        stream, now_s = _ref_of(record), time.monotonic()
        parent = _parsed(trace) or stream
        attributes: dict[str, AttributeValue] = {"tailrace.stream.id": record.stream_id, "tailrace.after": after}
        self._add(
            Span(
                f"{'resume' if after else 'read'} {record.model}", _below(parent), parent, now_s - read_s, now_s,
                attributes, [SpanLink(stream, {})], is_server=True,
            )
        )  # fmt: skip

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        stream, end = self._stream(record), log.end
        self._streams.pop(record.stream_id, None)
        assert end is not None
        if times.ended_s is None:
            return
        self._decode(stream, times.ended_s)
        error = end.failure.code if end.failure is not None else ""
        operation = _operation(record)
        attributes = _common(record.model) | {"gen_ai.operation.name": operation, "error.type": error or None}
        attributes |= _of_request(record) | _of_end(log, end)
        if self._has_text:
            attributes |= _text(record, log)
        durations = {REQUEST: times.ended_s - times.arrived_s}
        if times.first_s is not None and end.status == "done":
            durations[TTFT] = times.first_s - times.arrived_s
            if (gaps := end.usage.num_completion_tokens / record.num_choices - 1) > 0:
                durations[TPOT] = (times.ended_s - times.first_s) / gaps
        self._add(
            Span(
                f"{operation} {record.model}", stream.ref, stream.parent, stream.begun_s, times.ended_s,
                attributes, stream.links, is_server=True, error=error, durations=durations,
            )
        )  # fmt: skip

    # Spans

    def _keep(self, record: Record, stream: _Stream) -> None:
        while len(self._streams) >= _MAX_STREAMS:
            del self._streams[next(iter(self._streams))]
        self._streams[record.stream_id] = stream

    def _stream(self, record: Record) -> _Stream:
        if record.stream_id not in self._streams:  # taken over before the server told us
            self.on_taken_over(record, 0)
        return self._streams[record.stream_id]

    def _phase(
        self, name: str, stream: _Stream, begun_s: float | None, ended_s: float | None, *, link: SpanRef | None = None
    ) -> SpanRef | None:
        if begun_s is None or ended_s is None:
            return None
        ref = _below(stream.ref)
        links = [SpanLink(link, {"tailrace.link": "continued after a loss"})] if link is not None else []
        self._add(Span(name, ref, stream.ref, begun_s, ended_s, links=links))
        return ref

    def _decode(self, stream: _Stream, until_s: float) -> None:
        if stream.decodes_s is not None:
            stream.last = self._phase("decode", stream, stream.decodes_s, until_s, link=stream.last)
            stream.decodes_s = None


def _parsed(trace: str) -> SpanRef | None:
    """Return the span that a valid `traceparent` names."""
    if not trace:
        return None
    _, trace_id, span_id, flags = trace.split("-")
    return SpanRef(trace_id, span_id, is_sampled=bool(int(flags, 16) & 1), is_remote=True)


def _new_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def _below(parent: SpanRef) -> SpanRef:
    """Return a new span in the trace of another one."""
    return SpanRef(parent.trace_id, _new_id(), parent.is_sampled)


def _ref_of(record: Record) -> SpanRef:
    """Return the span of a stream where it began."""
    digest, parent = hashlib.sha256(record.stream_id.encode()).hexdigest(), _parsed(record.trace)
    if parent is None:
        return SpanRef(digest[16:48], digest[:16])
    return SpanRef(parent.trace_id, digest[:16], parent.is_sampled)


# Attributes


def _operation(record: Record) -> str:
    if record.sampling.max_tokens is None:
        return "embeddings"
    return "chat" if record.is_chat else "text_completion"


def _common(model: str) -> dict[str, AttributeValue]:
    return {"gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model, "gen_ai.response.model": model}


def _of_request(record: Record) -> dict[str, AttributeValue]:
    sampling = record.sampling
    return {
        "gen_ai.response.id": record.stream_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed if sampling.seed is not None and abs(sampling.seed) < 2**63 else None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "tailrace.wire": record.wire,
        "tailrace.stream.id": record.stream_id,
    }


def _of_end(log: StreamLog, end: End) -> dict[str, AttributeValue]:
    return {
        "gen_ai.usage.input_tokens": end.usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": end.usage.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.num_cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": end.num_reasoning_tokens or None,
        "gen_ai.response.finish_reasons": log.finish_reasons() or None,
        "tailrace.status": end.status,
        "tailrace.unread_tokens": log.num_unread_tokens,
        "tailrace.continuity": end.continuity,
    }


def _text(record: Record, log: StreamLog) -> dict[str, AttributeValue]:
    """Return the prompts, each as one text of a user with what the chat template makes of all messages, and the
    answers. Long ones are cut."""

    def messages(role: str, texts: list[str]) -> str:
        most = _TEXT_CHARS // max(1, len(texts))
        cut = [text if len(text) <= most else f"{text[:most]}…" for text in texts]
        return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]} for text in cut])

    return {
        "gen_ai.input.messages": messages("user", [prompt.text for prompt in record.prompts]),
        "gen_ai.output.messages": messages("assistant", [log.text(choice) for choice in range(record.num_choices)]),
    }
