"""The endpoint of the vLLM article: `POST /generate-stream` with `{"prompt"}`.

Each event is `data: {"text": …}` with all the text so far, as in the article (vLLM's outputs are cumulative). The last
event is `data: [DONE]`. So the bytes of an answer grow with the square of its length; `/v1/streams` sends each word
once. If a reader is slow, older events are skipped, because the newest one contains them. vLLM does the same
(`RequestOutputCollector.put`).

The article then uses `new EventSource(url)`, which sends a GET and cannot read the answer of the POST. Here this works
as `GET /generate-stream?stream_id=…`, with the id from the POST's `X-Stream-Id`. These events have ids: after a lost
connection a browser continues where it was, and after the end it stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.dialects import (
    RETRY_MS,
    CumulativeEncoder,
    Encoder,
    EventStreamView,
    Follow,
    Following,
    Generate,
    GenerateCall,
    Operation,
    ParsedRequest,
    SamplingFields,
    StreamFacts,
    Wire,
    bare_request,
    bare_sampling,
    encode_error,
    event_id,
    failure_of,
    finished_end,
    ignored,
    parse_cursor,
    quote,
    read_known,
    refused,
    to_json,
)
from tailrace.errors import RequestError
from tailrace.types import Event, Released, TextDelta

__all__ = ["WIRE"]

_UNUSED = {"best_of": ignored(1), "n": ignored(1), "use_beam_search": refused(False)}


class CumulativeBody(SamplingFields, kw_only=True):
    """The article's field, and sampling parameters with vLLM's names."""

    prompt: str


def parse(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, CumulativeBody, _UNUSED)
    generate = bare_request(request.server, fields.prompt, bare_sampling(request.server, fields))
    return GenerateCall(generate, _View(), stream=True, ignored=unused)


def parse_following(request: ParsedRequest) -> Following:
    """Raises: RequestError."""
    stream_id = request.query.get("stream_id")
    if not stream_id:
        raise RequestError(
            "Send a POST first, then GET with ?stream_id= and the X-Stream-Id of its answer.", param="stream_id"
        )
    cursor = request.headers.get("last-event-id")
    after = parse_cursor(cursor, stream_id)[1] if cursor else 0
    return Following(stream_id, after, _View(with_ids=True), replay=True)


@dataclass(frozen=True, slots=True)
class _View(EventStreamView):
    with_ids: bool = False

    def open(self, facts: StreamFacts) -> Encoder:
        return _Encoder(facts.record.stream_id if self.with_ids else "")


class _Encoder(CumulativeEncoder):
    def __init__(self, stream_id: str) -> None:
        self._stream_id = stream_id
        self._text = bytearray()  # escaped

    def encode(self, seq: int, event: Event | Released) -> bytes:
        name = f"id: {event_id(self._stream_id, seq)}\n".encode("ascii") if self._stream_id else b""
        if not isinstance(event, TextDelta):
            body = b"[DONE]" if event.status == "done" else encode_error(failure_of(event))[1]
            return b"data: " + body + b"\n" + name + b"\n"
        retry = f"retry: {RETRY_MS}\n".encode("ascii") if self._stream_id and seq == 1 else b""
        if not event.text:
            return retry
        self._text += _escaped(event.text)
        return b"".join((retry, b'data: {"text": "', self._text, b'"}\n', name, b"\n"))

    def skip(self, events: Sequence[Event]) -> None:
        self._text += _escaped("".join(event.text for event in events if type(event) is TextDelta))

    def num_stale(self, events: Sequence[Event]) -> int:
        for position in reversed(range(len(events))):
            event = events[position]
            if type(event) is TextDelta and event.text:
                return position
        return 0

    def whole(self, events: Sequence[Event]) -> bytes:
        finished_end(events)
        return to_json({"text": "".join(event.text for event in events if isinstance(event, TextDelta))})


def _escaped(text: str) -> bytes:
    return quote(text)[1:-1].encode("ascii")


WIRE = Wire(
    name="cumulative",
    title="The vLLM article's endpoint",
    operations=(
        Operation(
            "POST",
            "/generate-stream",
            Generate(parse),
            "Answer a prompt. Each event has all the text so far.",
            body=CumulativeBody,
            example={"prompt": "How are you?", "max_tokens": 64},
        ),
        Operation(
            "GET",
            "/generate-stream",
            Follow(parse_following),
            "Follow such an answer, or any stream, with EventSource.",
            query=("stream_id!",),
        ),
    ),
    encode_error=encode_error,
    unused=_UNUSED,
)
