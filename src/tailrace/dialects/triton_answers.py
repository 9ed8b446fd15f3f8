"""How the wire of Triton and Inferless shows a stream: events of one output, whole answers, and errors.

An event is one `data:` line. There are no ids and no last event: a stream that ends without `error` is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.dialects.bodies import JsonBody, quote, to_json
from tailrace.dialects.wire import HEARTBEAT, SSE, Encoder, StreamFacts, failure_of, finished_end
from tailrace.errors import TailraceError
from tailrace.types import End, Event, TextDelta

__all__ = ["VERSION", "TritonEncoder", "TritonView", "encode_error"]

VERSION = "1"  # of the model; there are no others


@dataclass(frozen=True, slots=True)
class TritonView:
    output: str = "text_output"
    is_tensor: bool = False
    shape: tuple[int, ...] = (1,)
    request_id: str | None = None  # the client's own
    media_type = SSE
    heartbeat = HEARTBEAT
    farewell = b""

    def open(self, facts: StreamFacts) -> Encoder:
        return TritonEncoder(facts, self)


class TritonEncoder:
    def __init__(self, facts: StreamFacts, view: TritonView) -> None:
        self._view = view
        self._named: JsonBody = {"model_name": facts.model, "model_version": VERSION}
        if view.request_id is not None:
            self._named = {"id": view.request_id, **self._named}
        self._head = f"data: {to_json(self._named)[:-1].decode()},{quote(view.output)}:"

    def encode(self, seq: int, event: Event) -> bytes:
        if type(event) is End:
            return b"" if event.status == "done" else b"data: " + encode_error(failure_of(event))[1] + b"\n\n"
        assert type(event) is TextDelta
        return f"{self._head}{quote(event.text)}}}\n\n".encode("ascii") if event.text else b""

    def whole(self, events: Sequence[Event]) -> bytes:
        finished_end(events)
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        view = self._view
        if not view.is_tensor:
            return to_json({**self._named, view.output: text})
        output = {"name": view.output, "datatype": "BYTES", "shape": view.shape, "data": [text]}
        return to_json({**self._named, "outputs": [output]})


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error"}`, also as the last event of a stream."""
    return error.status, to_json({"error": error.message})
