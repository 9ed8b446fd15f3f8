"""The definition of a wire: a table of operations, and encoders of streams.

A wire is one module with one `Wire`. Each operation has a method and a path, describes its input (also for the OpenAPI
document), and names an action. The server runs the actions equally for all wires:

- `Generate` begins a stream, and answers with its events or with the whole answer;
- `Follow` answers with the events of an existing stream after a position;
- `OnStream` shows an existing stream, and cancels or deletes it before, depending on the verb;
- `MakeVectors` answers with embeddings, or with scores of pairs;
- `Show` answers from facts about the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from tailrace.conversations.items import Branch, BranchPoint
from tailrace.dialects.bodies import JsonBody, read_json, require_json
from tailrace.dialects.facts import ServerFacts, StreamFacts
from tailrace.dialects.shapes import UnusedFields
from tailrace.errors import (
    KINDS,
    AdmissionError,
    Cancelled,
    ContextLengthExceeded,
    EngineError,
    RequestError,
    TailraceError,
    UnsupportedParameter,
)
from tailrace.types import (
    ContentT,
    End,
    Event,
    Failure,
    GenerateRequest,
    PromptProgress,
    Released,
    Task,
    TextDelta,
    VectorRequest,
    Vectors,
    means_any_model,
)

__all__ = [
    "HEARTBEAT",
    "NO_PREFIX",
    "SSE",
    "CumulativeEncoder",
    "Encoder",
    "Example",
    "Follow",
    "Following",
    "FrameEncoder",
    "Generate",
    "GenerateCall",
    "LaneAnswer",
    "LaneCancel",
    "LaneCommand",
    "LaneCreate",
    "LaneFollow",
    "MakeVectors",
    "OnSocket",
    "OnStream",
    "Operation",
    "ParsedRequest",
    "Reply",
    "Show",
    "SocketChat",
    "SocketLanes",
    "VectorCall",
    "VectorView",
    "View",
    "Wire",
    "conformity_json",
    "deltas_by_choice",
    "failure_of",
    "find_model",
    "finished_end",
    "first_model",
    "name_on_wire",
    "named_model",
    "progress_json",
    "shows_progress",
    "usage_json",
    "with_wire_names",
]

SSE = "text/event-stream; charset=utf-8"
NO_PREFIX = "\n"  # matches no path
HEARTBEAT = b": hb\n"  # a comment without a blank line, which some clients would read as an event


class Encoder(ABC, Generic[ContentT]):
    """Encodes one stream for one dialect: a model's (`Encoder`), or an app's (`Encoder[Payload]`). What most wires do
    not have is here, and does nothing."""

    __slots__ = ()

    shows_progress: bool = False  # whether the client asked for `progress`
    headers: Mapping[str, str] = MappingProxyType({})  # of a whole answer, known after `whole`

    @abstractmethod
    def encode(self, seq: int, event: Event[ContentT] | Released) -> bytes:
        """Return the bytes of an event in a streaming answer, or b"". Events come in order. Instead of the terminal
        event, the last one may be a `Released`, with the number of the event before it.

        Raises: TailraceError if the wire has no form for an error; then the answer is cut off.
        """

    @abstractmethod
    def whole(self, events: Sequence[Event[ContentT]]) -> bytes:
        """Return the body of a whole answer. Raises: TailraceError if the stream has not ended or has failed, unless
        the dialect can show that."""

    def progress(self, progress: PromptProgress) -> bytes:
        """Return the bytes of a report how much of the prompt is read. All of them come before the first event."""
        return b""

    def beat(self, usual: bytes) -> bytes:
        """Return what to send after a silence: an event, or else `usual`, the heartbeat of the view."""
        return usual


class CumulativeEncoder(Encoder[ContentT]):
    """An encoder whose events contain all earlier events, so that a reader may skip some."""

    @abstractmethod
    def skip(self, events: Sequence[Event[ContentT]]) -> None:
        """Read the next events without encoding them. Takes time proportional to their text."""

    @abstractmethod
    def num_stale(self, events: Sequence[Event[ContentT]]) -> int:
        """Return how many of the next events are contained in a later one of them."""


class SocketChat(ABC):
    """One client's chat on a WebSocket of a wire. Each text frame of the client is a prompt; the answers are sent one
    after the other, as text frames. An error closes the socket, with its reason."""

    @abstractmethod
    def ask(self, prompt: str) -> GenerateRequest:
        """Return the request of a prompt. It is called again after `shorten`. Raises: RequestError."""

    def shorten(self, error: ContextLengthExceeded) -> bool:
        """Let the next `ask` return a shorter request. Returns False if that is not possible."""
        return False

    @abstractmethod
    def encode(self, event: Event) -> bytes:
        """Return the frame of an event in UTF-8, or b"" for none. The last event of an answer is an `End` whose status
        is `done`."""


class FrameEncoder(ABC):
    """An encoder whose events are also the frames of a WebSocket. Each frame is one JSON object."""

    __slots__ = ()

    @abstractmethod
    def opening(self) -> list[bytes]:
        """Return the frames to send as soon as the stream has begun, before its first event. Called at most once."""

    @abstractmethod
    def frames(self, seq: int, event: Event | Released) -> list[bytes]:
        """Return the frames of an event; as `Encoder.encode`."""

    @abstractmethod
    def beat_frames(self) -> list[bytes]:
        """Return what to send after a silence."""


class Presentation(Protocol):
    """A streaming answer without its events."""

    @property
    def media_type(self) -> str:
        """The media type of a streaming answer."""

    @property
    def heartbeat(self) -> bytes:
        """Bytes to send between events to keep a silent connection open; may be b""."""


class View(Presentation, Protocol):
    """How an answer is encoded."""

    def open(self, facts: StreamFacts) -> Encoder: ...


class VectorView(Protocol):
    """How vectors are encoded."""

    def encode(self, vectors: Vectors) -> bytes:
        """Return the body of the answer. It may take long, and is called in a thread if there are many vectors."""


@dataclass(frozen=True, slots=True)
class OnSocket:
    """What a request on a WebSocket has beside its body."""

    lane: str | None  # the client's name for its lane on the socket; None is the lane without a name
    begun: Mapping[str, bytes]  # `GenerateCall.unkept` of the last streams that the socket has begun, by id


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request before its wire interprets it."""

    server: ServerFacts
    body: JsonBody = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    others: tuple[ServerFacts, ...] = ()  # the other models, if `server` is the first one
    past: tuple[StreamFacts, Sequence[Event]] | None = None  # the stream that `Generate.past` names, if it exists
    newest: StreamFacts | None = None  # the newest stream of the topic that the act names, on any server
    # The caller's unfinished streams on this server, the oldest first, each with its number of events.
    running: Callable[[], Sequence[tuple[StreamFacts, int]]] = field(default=tuple)
    # Returns a request that does not run with its sender. Raises: Forbidden if it needs a scope that the sender lacks.
    attributed: Callable[[GenerateRequest], GenerateRequest] = field(default=lambda request: request)
    branch: Branch | None = None  # of the conversation that `Generate.conversation` names
    socket: OnSocket | None = None  # of a frame on a WebSocket

    @property
    def every(self) -> tuple[ServerFacts, ...]:
        """All models, beginning with the first."""
        return (self.server, *self.others)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A parsed request: what to generate, and how to encode the answer."""

    request: GenerateRequest
    view: View
    stream: bool
    ignored: tuple[str, ...] = ()  # names of fields without effect
    overflows_in_stream: bool = False  # if streamed: that the prompt is too long is an event, not a status
    at_once: bool = False  # if not streamed: answer with the current state, without waiting for the end
    status: int = 200
    unkept: bytes = b""  # what its socket keeps for a request that continues from here, and the record does not


@dataclass(frozen=True, slots=True)
class Following:
    """An existing stream, to be encoded after event `after`. With `replay` the view's encoder is a `CumulativeEncoder`,
    and skips the earlier events."""

    stream_id: str
    after: int
    view: View
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    status: int = 200
    media_type: str = "application/json"
    retry_after_s: float | None = None
    ignored: tuple[str, ...] = ()  # as in `GenerateCall`


@dataclass(frozen=True, slots=True)
class Generate:
    """`past` returns the id of the stream that the request continues, `conversation` where it continues a conversation,
    `topic` the topic whose newest running stream is `ParsedRequest.newest`."""

    parse: Callable[[ParsedRequest], GenerateCall | Following | Reply]  # a reply if nothing has to be generated
    past: Callable[[ParsedRequest], str | None] | None = None
    conversation: Callable[[ParsedRequest], BranchPoint | None] | None = None
    topic: Callable[[ParsedRequest], str | None] | None = None


@dataclass(frozen=True, slots=True)
class VectorCall:
    """A parsed request for vectors, and how to encode them."""

    request: VectorRequest
    view: VectorView
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MakeVectors:
    """A request that names no model gets the first one with this task."""

    parse: Callable[[ParsedRequest], VectorCall | Reply]
    task: Task


@dataclass(frozen=True, slots=True)
class Follow:
    """`topic` returns the topic whose newest stream is `ParsedRequest.newest`: one that runs, or, if `may_have_ended`
    returns true, any that is kept."""

    parse: Callable[[ParsedRequest], Following | Reply]  # a reply if there is nothing to follow
    topic: Callable[[ParsedRequest], str] | None = None
    may_have_ended: Callable[[ParsedRequest], bool] = lambda request: False


@dataclass(frozen=True, slots=True)
class OnStream:
    """`find` returns the id of the stream and its view. `topic` is as that of `Follow`; the stream runs."""

    find: Callable[[ParsedRequest], tuple[str, View]]
    verb: Literal["show", "cancel", "delete"] = "show"
    topic: Callable[[ParsedRequest], str] | None = None


@dataclass(frozen=True, slots=True)
class Show:
    render: Callable[[ParsedRequest], Reply]
    is_slow: bool = False  # runs in a thread, with a limit on concurrent runs


Example: TypeAlias = JsonBody


def read_json_body(body: bytes, headers: Mapping[str, str]) -> JsonBody:
    """Raises: RequestError."""
    return read_json(body)


@dataclass(frozen=True, slots=True)
class Operation:
    """A method and a path that a wire answers."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # with {names}, as in OpenAPI
    act: Generate | MakeVectors | Follow | OnStream | Show
    summary: str
    body: type[msgspec.Struct] | None = None
    check: Callable[[Mapping[str, str]], None] = require_json  # checks the headers before the body is read
    read: Callable[[bytes, Mapping[str, str]], JsonBody] = read_json_body  # reads the body, with its headers
    query: tuple[str, ...] = ()  # names of the known fields; a required one ends with `!`
    query_in_body: bool = False  # whether these fields may also be in a form or a JSON body
    example: Example | None = None  # of the body
    has_images: bool = False  # whether the body may have images, and may be larger where a model reads them
    # Conditions for this operation: `name` or `name=value` in the query, the name of a header.
    only_with: str | None = None
    only_with_header: str | None = None

    @property
    def is_conditional(self) -> bool:
        """Whether it has a condition. Such operations are tried before others on the same path."""
        return self.only_with is not None or self.only_with_header is not None


class LaneCreate(NamedTuple):
    """Begin a stream. `key` is its idempotency key; `view` shows the stream that has it already."""

    lane: str | None
    body: JsonBody
    view: View
    key: str | None = None


class LaneFollow(NamedTuple):
    """Follow a stream that has begun. `number` is that of the last event that the client has; -1 for none."""

    lane: str | None
    following: Following
    number: int = -1


class LaneCancel(NamedTuple):
    """Cancel a stream that the socket follows."""

    stream_id: str


class LaneAnswer(NamedTuple):
    """An answer that needs no stream."""

    frame: bytes


LaneCommand: TypeAlias = LaneCreate | LaneFollow | LaneCancel | LaneAnswer


@dataclass(frozen=True, slots=True)
class SocketLanes:
    """A WebSocket of a wire with several streams at once, in lanes: a lane answers one command after the other.

    Each frame of the client is a JSON object, which `read` turns into a command. `resumed` returns what a socket
    follows from its beginning, by the query of its URL. The views of its streams open a `FrameEncoder`.
    """

    operation: Operation  # begins the streams
    read: Callable[[JsonBody], LaneCommand]  # raises RequestError
    resumed: Callable[[Mapping[str, str]], LaneFollow | None]  # raises RequestError
    lane_of: Callable[[JsonBody], str | None]  # for errors of a frame that cannot be read
    encode_error: Callable[[TailraceError, str | None], bytes]  # with the lane
    in_lane: Callable[[bytes, str | None], bytes]  # adds the lane to an event
    noted: Callable[[bytes, Sequence[str]], bytes]  # adds to the first frame of a stream what has no effect
    max_lanes: int


def first_model(request: ParsedRequest) -> ServerFacts | None:
    """Pick the first model, for wires whose requests name none."""
    return request.server


def named_model(request: ParsedRequest) -> ServerFacts | None:
    """Pick the model that is named by `model` in the body, or by the path."""
    return find_model(request, request.body.get("model") or request.path.get("name"))


def find_model(request: ParsedRequest, *names: object) -> ServerFacts | None:
    """Return the first model with one of these names; without names the first model."""
    given = [name for name in names if name]
    if not given:
        return request.server
    by_name = {server.model: server for server in request.every}
    for name in given:
        if isinstance(name, str) and name in by_name:
            return by_name[name]
    return request.server if any(isinstance(name, str) and means_any_model(name) for name in given) else None


@dataclass(frozen=True, slots=True)
class Wire:
    """One dialect: its operations and its errors."""

    name: str
    title: str
    operations: tuple[Operation, ...]
    encode_error: Callable[[TailraceError], tuple[int, bytes]]  # returns the status and the JSON body
    # Returns the model that a request names, of `ParsedRequest.every`; None for an unknown name, which `parse` refuses.
    find_model: Callable[[ParsedRequest], ServerFacts | None] = first_model
    sockets: Mapping[str, Callable[[ServerFacts], SocketChat]] = field(default_factory=dict)  # by path
    lanes: Mapping[str, SocketLanes] = field(default_factory=dict)  # further WebSockets, by path
    prefix: str = NO_PREFIX  # errors on unknown paths below it have this wire's format
    unused: UnusedFields = field(default_factory=dict)  # fields of the API that this server does not use
    # This wire's names of parameters, by tailrace's names.
    names: Mapping[str, str] = field(default_factory=dict)


def name_on_wire(ours: str, wire: Wire, request: ParsedRequest) -> str:
    """Return a request's name of a parameter."""
    return ours if request.body.get(ours) is not None else wire.names.get(ours, ours)


def with_wire_names(error: RequestError, wire: Wire, request: ParsedRequest) -> RequestError:
    """Return the error of the generator with the parameter's name on this wire."""
    ours = error.param or ""
    error.param = name_on_wire(ours, wire, request) or None
    if isinstance(error, UnsupportedParameter):
        error.message = error.message.replace(ours, error.param or ours)
    return error


def failure_of(ending: End | Released | None) -> TailraceError:
    """Return the error of a stream that did not end as `done`. Its `cut_fields` tell a program whether to send the
    request again (`retryable`) or, if the stream was only released, where to follow it (`stream_id`, `last_seq`)."""
    failure = ending.failure if ending is not None else None
    if failure is None:
        failure = Failure(Cancelled.code, "The stream was cancelled before the answer was complete.")
    kind = KINDS.get(failure.code, EngineError)
    # For wires that distinguish kinds of errors, all other kinds are engine errors.
    base = next((base for base in (AdmissionError, RequestError) if issubclass(kind, base)), EngineError)
    is_released = isinstance(ending, Released)
    failed: TailraceError = base(
        failure.message, retry_after_s=1.0 if is_released or kind.status in (429, 503) else None
    )
    failed.code, failed.status = failure.code, kind.status
    failed.cut_fields = {"retryable": is_released or kind.is_retryable}
    if isinstance(ending, Released):
        failed.cut_fields |= {"stream_id": ending.stream_id, "last_seq": ending.last_seq}
    return failed


def finished_end(events: Sequence[Event]) -> End:
    """Return the terminal event of a stream that ended as `done`. Raises: otherwise the TailraceError of its end."""
    end = events[-1] if events else None
    if not isinstance(end, End) or end.status != "done":
        raise failure_of(end if isinstance(end, End) else None)
    return end


def deltas_by_choice(events: Sequence[Event], num_choices: int) -> list[list[TextDelta]]:
    """Return the deltas of each choice, in order."""
    deltas: list[list[TextDelta]] = [[] for _ in range(num_choices)]
    for event in events:
        if isinstance(event, TextDelta):
            deltas[event.choice].append(event)
    return deltas


def conformity_json(end: End) -> JsonBody:
    """Return the field about the schema of a request, if the answers were checked against it."""
    return {} if end.schema_mismatches is None else {"schema_mismatches": list(end.schema_mismatches)}


def usage_json(end: End) -> JsonBody:
    """Return the token counts with OpenAI's names."""
    usage: JsonBody = {
        "prompt_tokens": end.usage.num_prompt_tokens,
        "completion_tokens": end.usage.num_completion_tokens,
        "total_tokens": sum(end.usage),
    }
    if end.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": end.num_cached_tokens}
    if end.num_reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": end.num_reasoning_tokens}
    return usage


def shows_progress(server: ServerFacts, notes: list[str], *, wanted: bool | None, is_streamed: bool) -> bool:
    """Return whether an answer shows how much of the prompt is read. If it cannot, `notes` gets the name."""
    can_show = is_streamed and server.reports_progress
    if wanted and not can_show:
        notes.append("return_progress")
    return bool(wanted) and can_show


def progress_json(progress: PromptProgress) -> JsonBody:
    """Return how much of the prompt is read, with llama.cpp's names."""
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached_tokens,
        "processed": progress.num_read_tokens,
        "time_ms": round(progress.spent_s * 1000),
    }
