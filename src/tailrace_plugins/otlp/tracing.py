"""One trace for each request, from the events that observers get.

All spans are made when they are over. Their ids are functions of the stream's id, so every server knows the span of a
stream, also of one that another server has begun. A stream that another server began, or an earlier process, is a span
of its own in the same trace, with a link to the first one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.util.types import AttributeValue

from tailrace.errors import TailraceError
from tailrace.server import Observer, StreamLog, Times
from tailrace.types import Arrival, End, Record, TextDelta
from tailrace_plugins.otlp.collector import Collector
from tailrace_plugins.otlp.names import PROVIDER, REQUEST, TPOT, TTFT

__all__ = ["Tracing"]

_TEXT_CHARS = 16_384  # of the prompts of a span, and of its answers: thousands of spans may wait for a collector
_MAX_STREAMS = 20_000  # in memory; the oldest are forgotten, whose end never came


@dataclass(slots=True)
class _Stream:
    """The part of a stream that this server generates."""

    context: SpanContext
    parent: SpanContext | None
    begun_ns: int
    links: list[Link] = field(default_factory=list)
    last: SpanContext | None = None  # the last decode span
    decodes_s: float | None = None  # since when it gets tokens, monotonic


class Tracing(Observer):
    """`has_text`: spans have prompts and answers."""

    def __init__(self, collector: Collector, *, has_text: bool) -> None:
        self._collector = collector
        self._has_text = has_text
        self._streams: dict[str, _Stream] = {}

    def headers(self, record: Record) -> Mapping[str, str]:
        """Return the header that tells a client the span of a stream."""
        context = _context_of(record)
        return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}

    # The stages of a request

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        parent = _parsed(arrival.trace)
        trace_id = parent.trace_id if parent is not None else secrets.randbits(128) or 1
        context = _context(trace_id, secrets.randbits(64) or 1, parent)
        now_ns = time.time_ns()
        attributes = _common(arrival.model) | {"error.type": error.code, "tailrace.wire": arrival.wire}
        self._collector.add_span(
            f"refuse {arrival.model}", context, parent, now_ns, now_ns,
            attributes=attributes, is_server=True, error=error.code,
        )  # fmt: skip

    def on_begun(self, record: Record) -> None:
        self._add(record, _Stream(_context_of(record), _parsed(record.trace), time.time_ns()))

    def on_taken_over(self, record: Record, num_tokens: int) -> None:
        first = _context_of(record)
        own = _context(first.trace_id, secrets.randbits(64) or 1, first)
        link = Link(first, {"tailrace.link": "taken over", "tailrace.tokens": num_tokens})
        self._add(record, _Stream(own, _parsed(record.trace), time.time_ns(), [link]))

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
        stream, parent = _context_of(record), _parsed(trace)
        trace_id = parent.trace_id if parent is not None else stream.trace_id
        context = _context(trace_id, secrets.randbits(64) or 1, parent or stream)
        now_ns = time.time_ns()
        self._collector.add_span(
            f"{'resume' if after else 'read'} {record.model}", context, parent or stream,
            now_ns - round(1e9 * read_s), now_ns,
            attributes={"tailrace.stream.id": record.stream_id, "tailrace.after": after},
            is_server=True, links=[Link(stream)],
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
        common = _common(record.model) | {"gen_ai.operation.name": operation}
        attributes = common | _of_request(record) | _of_end(log, end) | ({"error.type": error} if error else {})
        if self._has_text:
            attributes |= _text(record, log)
        self._collector.add_span(
            f"{operation} {record.model}", stream.context, stream.parent, stream.begun_ns, _ns(times.ended_s),
            attributes=attributes, is_server=True, links=stream.links, error=error,
        )  # fmt: skip
        if error:
            common |= {"error.type": error}
        self._collector.record(REQUEST, times.ended_s - times.arrived_s, common)
        if times.first_s is not None and end.status == "done":
            self._collector.record(TTFT, times.first_s - times.arrived_s, common)
            if (gaps := end.usage.num_completion_tokens / record.num_choices - 1) > 0:
                self._collector.record(TPOT, (times.ended_s - times.first_s) / gaps, common)

    # Spans

    def _add(self, record: Record, stream: _Stream) -> None:
        while len(self._streams) >= _MAX_STREAMS:
            del self._streams[next(iter(self._streams))]
        self._streams[record.stream_id] = stream

    def _stream(self, record: Record) -> _Stream:
        if record.stream_id not in self._streams:  # taken over before the server told us
            self.on_taken_over(record, 0)
        return self._streams[record.stream_id]

    def _phase(
        self,
        name: str,
        stream: _Stream,
        begun_s: float | None,
        ended_s: float | None,
        *,
        link: SpanContext | None = None,
    ) -> SpanContext | None:
        if begun_s is None or ended_s is None:
            return None
        context = _context(stream.context.trace_id, secrets.randbits(64) or 1, stream.context)
        links = [Link(link, {"tailrace.link": "continued after a loss"})] if link is not None else []
        self._collector.add_span(
            name, context, stream.context, _ns(begun_s), _ns(ended_s), attributes={}, links=links
        )  # fmt: skip
        return context

    def _decode(self, stream: _Stream, until_s: float) -> None:
        if stream.decodes_s is not None:
            stream.last = self._phase("decode", stream, stream.decodes_s, until_s, link=stream.last)
            stream.decodes_s = None


def _ns(at_s: float) -> int:
    """Return a monotonic time in nanoseconds since the epoch."""
    return time.time_ns() - round(1e9 * (time.monotonic() - at_s))


def _parsed(trace: str) -> SpanContext | None:
    """Return the span that a valid `traceparent` names."""
    if not trace:
        return None
    _, trace_id, span_id, flags = trace.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16) & 1))


def _context(trace_id: int, span_id: int, parent: SpanContext | None) -> SpanContext:
    flags = parent.trace_flags if parent is not None else TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)


def _context_of(record: Record) -> SpanContext:
    """Return the span of a stream where it began."""
    digest, parent = hashlib.sha256(record.stream_id.encode()).digest(), _parsed(record.trace)
    trace_id = parent.trace_id if parent is not None else int.from_bytes(digest[8:24])
    return _context(trace_id, int.from_bytes(digest[:8]), parent)


# Attributes


def _operation(record: Record) -> str:
    if record.sampling.max_tokens is None:
        return "embeddings"
    return "chat" if record.is_chat else "text_completion"


def _common(model: str) -> dict[str, AttributeValue]:
    return {"gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model, "gen_ai.response.model": model}


def _of_request(record: Record) -> dict[str, AttributeValue]:
    sampling = record.sampling
    given: dict[str, AttributeValue | None] = {
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
    return {name: value for name, value in given.items() if value is not None}


def _of_end(log: StreamLog, end: End) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": end.usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": end.usage.num_completion_tokens,
        "tailrace.status": end.status,
        "tailrace.unread_tokens": log.num_unread_tokens,
    }
    if reasons := list(_finish_reasons(log)):
        found["gen_ai.response.finish_reasons"] = reasons
    if end.num_cached_tokens is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = end.num_cached_tokens
    if end.num_reasoning_tokens:
        found["gen_ai.usage.reasoning.output_tokens"] = end.num_reasoning_tokens
    if end.continuity is not None:
        found["tailrace.continuity"] = end.continuity
    return found


def _finish_reasons(log: StreamLog) -> Iterator[str]:
    return (event.finish_reason for event in log.events if isinstance(event, TextDelta) and event.finish_reason)


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
