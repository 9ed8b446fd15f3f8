"""`/v1/responses` as a WebSocket: commands of the client, and frames that are no events of a response.

*Source:* OpenAI's WebSocket mode, as openai-python 3.57 speaks it (`responses.connect`, `lib/responses_websocket`).
`response.create` has the fields of `POST /v1/responses`, and `stream_id`, the client's name of a lane, which every
frame of the response repeats.

Intended divergences: 1. `response.retrieve` follows a response from an event on, also on another socket or after a
restart; a socket that is opened with `response_id` and `starting_after` in its URL begins with it. Here a response
with `store: false` is found, too, as long as its stream is kept: its socket may have been lost. 2. `response.cancel`
cancels a response that the socket follows. 3. A `response.create` with the `idempotency_key` of an earlier one finds
its response. 4. `response.steer` is refused: nothing is added to a response that runs. 5. A failed response has no
`error` after `response.failed`: the client's lane would take it for the answer to its next command. 6. `background`
lets a response outlive its socket for longer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.facts import StreamFacts
from tailrace.dialects.native import encode_error as encode_http_error
from tailrace.dialects.shapes import read_fields
from tailrace.dialects.wire import (
    Encoder,
    Following,
    FrameEncoder,
    LaneAnswer,
    LaneCancel,
    LaneCommand,
    LaneCreate,
    LaneFollow,
    failure_of,
)
from tailrace.errors import InvalidLane, RequestError, SeqOutOfRange, TailraceError
from tailrace.types import Event, Released
from tailrace_outer.responses.responses_events import (
    ResponsesEncoder,
    ResponsesView,
    encoded_event,
    error_fields,
    stream_id_of,
)

__all__ = [
    "MAX_LANES",
    "ResponsesFrames",
    "SocketView",
    "encode_error",
    "in_lane",
    "lane_of",
    "noted",
    "number_of",
    "read_command",
    "resumed",
]

MAX_LANES = 32  # names on one socket, as OpenAI has it
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}", re.ASCII)
_ENVELOPE = ("type", "stream_id", "stream", "idempotency_key")

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


@dataclass(frozen=True, slots=True)
class SocketView(ResponsesView):
    lane: str | None = None

    def open(self, facts: StreamFacts) -> Encoder:
        return ResponsesFrames(facts, self)


class ResponsesFrames(ResponsesEncoder, FrameEncoder):
    """Encodes a stream as frames of a WebSocket, each with its lane."""

    says_why_it_failed = False

    def __init__(self, facts: StreamFacts, view: SocketView) -> None:
        super().__init__(facts, view)
        self._lane = view.lane

    def opening(self) -> list[bytes]:
        self.open()
        return self._taken_frames()

    def frames(self, seq: int, event: Event | Released) -> list[bytes]:
        self.add(event)
        return self._taken_frames()

    def beat_frames(self) -> list[bytes]:
        self.add_beat()
        return self._taken_frames()

    def release(self, ending: Released) -> None:
        error = failure_of(ending)
        fields = {"status": error.status, "error": error_fields(ending)["error"]}
        self.out.append(("error", encoded_event("error", max(0, self.next_number - 1), fields)))

    def _taken_frames(self) -> list[bytes]:
        out, self.out = self.out, []
        return [in_lane(text.encode("ascii"), self._lane) for _, text in out]


class _Retrieve(msgspec.Struct):
    type: str
    response_id: _Id
    stream_id: str | None = None
    starting_after: Annotated[int, msgspec.Meta(ge=0, lt=10**15)] | None = None


class _Cancel(msgspec.Struct):
    type: str
    response_id: _Id


class _Steer(msgspec.Struct):
    type: str
    previous_response_id: _Id
    input: str | list[JsonBody]


def read_command(body: JsonBody) -> LaneCommand:
    """Raises: RequestError."""
    match body.get("type"):
        case "response.create":
            key = body.get("idempotency_key")
            if key is not None and not isinstance(key, str):
                raise RequestError("idempotency_key must be a text.", param="idempotency_key")
            fields = {name: value for name, value in body.items() if name not in _ENVELOPE}
            lane = _lane(body.get("stream_id"))
            return LaneCreate(lane, fields, SocketView(lane=lane), key)
        case "response.retrieve":
            retrieve, _ = read_fields(body, _Retrieve, strict=True)
            after = -1 if retrieve.starting_after is None else retrieve.starting_after
            return _follow(_lane(retrieve.stream_id), retrieve.response_id, after)
        case "response.cancel":
            cancel, _ = read_fields(body, _Cancel, strict=True)
            return LaneCancel(stream_id_of(cancel.response_id))
        case "response.steer":
            steer, _ = read_fields(body, _Steer, strict=True)
            return LaneAnswer(_steering_failed(steer))
    raise RequestError(
        "type must be response.create, response.retrieve, response.cancel or response.steer.", param="type"
    )


def resumed(query: Mapping[str, str]) -> LaneFollow | None:
    """Return what a socket follows from its beginning. Raises: RequestError."""
    response_id = query.get("response_id")
    if not response_id:
        return None
    return _follow(_lane(query.get("stream_id")), response_id, number_of(query.get("starting_after", "")))


def number_of(starting_after: str) -> int:
    """Return the number of the last event that a client has seen; -1 for "". Raises: SeqOutOfRange."""
    if starting_after and not re.fullmatch("[0-9]{1,15}", starting_after, re.ASCII):
        raise SeqOutOfRange("starting_after must be a sequence number.", param="starting_after")
    return int(starting_after) if starting_after else -1


def lane_of(body: JsonBody) -> str | None:
    """Return the lane that an error repeats; None if it is not a valid name."""
    lane = body.get("stream_id")
    return lane if isinstance(lane, str) and _LANE.fullmatch(lane) else None


def encode_error(error: TailraceError, lane: str | None) -> bytes:
    status, body = encode_http_error(error)
    fields: JsonBody = {"type": "error", "status": status, **msgspec.json.decode(body)}
    if error.retry_after_s is not None:
        fields["error"]["headers"] = {"retry-after": f"{error.retry_after_s:.0f}"}
    return to_json(fields if lane is None else {**fields, "stream_id": lane})


def in_lane(event: bytes, lane: str | None) -> bytes:
    """Return an event as a frame of a lane."""
    return event if lane is None else b'%b,"stream_id":%b}' % (event[:-1], to_json(lane))


def noted(frame: bytes, notes: Sequence[str]) -> bytes:
    """Add what HTTP has in X-Tailrace-Ignored."""
    return b'%b,"ignored":%b}' % (frame[:-1], to_json(list(dict.fromkeys(notes))))


def _lane(name: object) -> str | None:
    if name is None or (isinstance(name, str) and _LANE.fullmatch(name)):
        return name
    raise InvalidLane("stream_id must have 1 to 256 letters, digits, _, . or -.", param="stream_id")


def _follow(lane: str | None, response_id: str, after: int) -> LaneFollow:
    view = SocketView(starting_after=after, lane=lane)
    return LaneFollow(lane, Following(stream_id_of(response_id), 0, view), after)


def _steering_failed(steer: _Steer) -> bytes:
    """Return the refusal, which gives the input back to the client, as the format wants it."""
    message = "This server adds no input to a response that runs. Send it when the response has ended."
    return to_json(
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {"code": "steering_not_supported", "message": message},
            "steer": {"input": steer.input, "previous_response_id": steer.previous_response_id},
        }
    )
