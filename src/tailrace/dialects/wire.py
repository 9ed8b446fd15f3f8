"""What a wire is: a table of operations, and encoders that show a stream.

A wire is one module with one `Wire` in it. Its operations say which method and path they answer, what goes in (for the
reader, and for the OpenAPI document), and what is to be done; the server does it, the same way for every wire:

- `Generate` begins a stream, and shows it as it grows or in one piece;
- `Follow` shows a stream that exists, from a position on;
- `OnStream` tells of a stream that exists, after cancelling or deleting it where the verb says so;
- `Show` answers from what the server knows anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from tailrace.conversations.items import Branch, Place
from tailrace.dialects.bodies import JsonBody, require_json
from tailrace.errors import (
    KINDS,
    AdmissionError,
    Cancelled,
    EngineError,
    RequestError,
    TailraceError,
    UnsupportedParameter,
)
from tailrace.types import End, Event, GenerateRequest, Message, TextDelta, means_any_model

__all__ = [
    "HEARTBEAT",
    "NO_PREFIX",
    "SSE",
    "CumulativeEncoder",
    "Encoder",
    "Example",
    "Follow",
    "Following",
    "Generate",
    "GenerateCall",
    "OnStream",
    "Operation",
    "ParsedRequest",
    "Reply",
    "ServerFacts",
    "Show",
    "StreamFacts",
    "TokenVocabulary",
    "View",
    "Wire",
    "deltas_by_choice",
    "failure_of",
    "finished_end",
    "in_the_wires_words",
    "pick",
    "pick_first",
    "pick_named",
    "usage_json",
]

SSE = "text/event-stream; charset=utf-8"
NO_PREFIX = "\n"  # no path begins so
HEARTBEAT = b": hb\n"  # a comment without a blank line: some clients would take that for an event


class TokenVocabulary(Protocol):
    """What an encoder may know of tokens."""

    special_ids: frozenset[int]
    pieces: list[bytes]  # the bytes of each token id

    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What an encoder may know of the stream besides its events."""

    stream_id: str
    model: str
    created_s: int  # since the epoch
    seed: int
    num_prompt_tokens: int
    prompts: tuple[str, ...]  # the prompts' texts, while the stream runs
    prompt_ids: tuple[tuple[int, ...], ...]
    vocabulary: TokenVocabulary
    num_choices: int = 1
    status: str = "running"  # queued, running, or how it ended, at the time of asking
    num_ahead: int | None = None  # of a queued one: the requests that wait in front of it
    expires_in_s: float | None = None
    memo: bytes = b""  # what the wire that began the stream asked to be kept (GenerateRequest.memo)


class ServerFacts(Protocol):
    """What an operation may know of the server."""

    @property
    def model(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def started_s(self) -> int: ...
    @property
    def is_live(self) -> bool:
        """Tokens move where some are wanted; a restart would help otherwise."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def state(self) -> str:
        """ready; unloaded, where the next request loads the model; loading; or why not: draining, engine, journal."""

    @property
    def replay(self) -> str | None:
        """How exactly the engine repeats an answer, if that was measured: exact, or "not exact: N of M"."""

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the `Sampling` fields that the engine honours."""

    @property
    def can_chat(self) -> bool:
        """The model has a chat template."""

    @property
    def context_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int:
        """Prompt and answer together."""

    @property
    def max_requests(self) -> int: ...
    @property
    def max_prompts(self) -> int:
        """In one request."""

    @property
    def takes_tools(self) -> bool:
        """The chat template shows tools to the model."""

    @property
    def splits_reasoning(self) -> bool:
        """In chats, reasoning is told apart from the text."""

    @property
    def takes_reasoning(self) -> bool:
        """The chat template asks for the reasoning of earlier answers."""

    @property
    def template_values(self) -> frozenset[str]:
        """Names of the values that the chat template is known to ask for."""

    @property
    def prompt_template(self) -> str:
        """What the prompts of bare wires are put into, with `{prompt}` in it, or nothing."""

    def tokenize(self, text: str) -> list[tuple[int, int, int]]:
        """Ids with the range of characters that each stands for."""

    def tokenize_chat(self, messages: tuple[Message, ...]) -> tuple[str, list[tuple[int, int, int]]]:
        """The prompt that the chat template makes of messages, and its ids as `tokenize` gives them.
        Raises: RequestError."""

    def count_tokens(self, request: GenerateRequest) -> int:
        """How many tokens the request's prompts have. May take a while. Raises: RequestError."""


class Encoder(Protocol):
    """Shows one stream in one dialect."""

    def encode(self, seq: int, event: Event) -> bytes:
        """The bytes that a streaming answer has for an event, b"" for none. Events come in order."""

    def whole(self, events: Sequence[Event]) -> bytes:
        """The body of an answer in one piece. Raises: TailraceError if the stream did not end well, unless the dialect
        has a shape for that, or for one that has not ended."""


@runtime_checkable
class CumulativeEncoder(Encoder, Protocol):
    """Each event that it shows holds all that came before, so that a reader loses nothing by those left out."""

    def skip(self, events: Sequence[Event]) -> None:
        """Take in the next events without showing them. Takes time in the length of their text, and no more."""

    def num_stale(self, events: Sequence[Event]) -> int:
        """How many of the next events say nothing that a later one of them does not say again."""


class Presentation(Protocol):
    """What a streaming answer is besides its events."""

    @property
    def media_type(self) -> str:
        """Of a streaming answer."""

    @property
    def heartbeat(self) -> bytes:
        """What may be sent between events to keep a silent connection open, b"" for nothing."""

    @property
    def farewell(self) -> bytes:
        """What a reader is told who is to come back for the rest of a stream; b"" cuts it off, so that it does not
        look complete."""


class View(Presentation, Protocol):
    """How a call wants its answer shown."""

    def open(self, facts: StreamFacts) -> Encoder: ...


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a request holds, read but not yet understood."""

    server: ServerFacts
    body: JsonBody = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    others: tuple[ServerFacts, ...] = ()  # of the further models, where `server` is the first's
    past: tuple[StreamFacts, Sequence[Event]] | None = None  # the stream that `Generate.past` names, if it is kept
    # The caller's streams that have not ended, the oldest first, and how many events each has.
    running: Callable[[], Sequence[tuple[StreamFacts, int]]] = field(default=tuple)
    branch: Branch | None = None  # of the conversation that `Generate.conversation` names

    @property
    def every(self) -> tuple[ServerFacts, ...]:
        """The facts of every model, the first one first."""
        return (self.server, *self.others)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A parsed request: what to generate, and how to show it."""

    request: GenerateRequest
    view: View
    stream: bool
    ignored: tuple[str, ...] = ()  # names of fields that nobody here knows
    at_once: bool = False  # where not streamed: answer what is there already, and do not wait for the end
    status: int = 200


@dataclass(frozen=True, slots=True)
class Following:
    """A stream that exists, to be shown from behind event `after` on. With `replay` the view's encoder is a
    `CumulativeEncoder`, and skips what came before."""

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
    """`past` names the stream that the request goes on from, if it has one, and `conversation` the item of one."""

    parse: Callable[[ParsedRequest], GenerateCall | Following | Reply]  # a reply where nothing has to be generated
    past: Callable[[ParsedRequest], str | None] | None = None
    conversation: Callable[[ParsedRequest], Place | None] | None = None


@dataclass(frozen=True, slots=True)
class Follow:
    parse: Callable[[ParsedRequest], Following]


@dataclass(frozen=True, slots=True)
class OnStream:
    """`find` names the stream and how to show it."""

    find: Callable[[ParsedRequest], tuple[str, View]]
    verb: Literal["show", "cancel", "delete"] = "show"


@dataclass(frozen=True, slots=True)
class Show:
    render: Callable[[ParsedRequest], Reply]
    is_slow: bool = False  # to be done beside the event loop, and only so often at once


Example: TypeAlias = JsonBody


@dataclass(frozen=True, slots=True)
class Operation:
    """A method and a path that a wire answers."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # with {names}, as in OpenAPI
    act: Generate | Follow | OnStream | Show
    summary: str
    body: type[msgspec.Struct] | None = None
    check: Callable[[Mapping[str, str]], None] = require_json  # what the headers say of a body, before it is read
    query: tuple[str, ...] = ()  # names of the fields that are known; a `!` behind one that must be given
    query_in_body: bool = False  # whether those fields may come in a form or a JSON body instead
    example: Example | None = None  # of the body
    # Without these this operation is not meant: `name` or `name=value` in the query, the name of a header.
    only_with: str | None = None
    only_with_header: str | None = None

    @property
    def is_particular(self) -> bool:
        """Whether it is meant only with something: asked before another one on its path."""
        return self.only_with is not None or self.only_with_header is not None


def pick_first(asked: ParsedRequest) -> ServerFacts | None:
    """For wires that name no model."""
    return asked.server


def pick_named(asked: ParsedRequest) -> ServerFacts | None:
    """For wires that name it in a `model` of the body, or in the path."""
    return pick(asked, asked.body.get("model") or asked.path.get("name"))


def pick(asked: ParsedRequest, *names: object) -> ServerFacts | None:
    """The model of one of these names, the first that there is; without a name the first model."""
    given = [name for name in names if name]
    if not given:
        return asked.server
    by_name = {server.model: server for server in asked.every}
    for name in given:
        if isinstance(name, str) and name in by_name:
            return by_name[name]
    return asked.server if any(isinstance(name, str) and means_any_model(name) for name in given) else None


@dataclass(frozen=True, slots=True)
class Wire:
    """One dialect: its operations and its errors."""

    name: str
    title: str
    operations: tuple[Operation, ...]
    encode_error: Callable[[TailraceError], tuple[int, bytes]]  # status and JSON body of a refusal
    # Which of several models is meant, of `ParsedRequest.every`; None where there is none, which `parse` refuses.
    pick: Callable[[ParsedRequest], ServerFacts | None] = pick_first
    prefix: str = NO_PREFIX  # of paths whose errors have this wire's shape even where it has no operation
    # Fields that are known and cannot be honoured, and values of theirs that ask for nothing.
    refused: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # What this wire calls parameters that an engine may not support, where the body does not have our name.
    names: Mapping[str, str] = field(default_factory=dict)


def in_the_wires_words(error: UnsupportedParameter, wire: Wire, asked: ParsedRequest) -> UnsupportedParameter:
    """The refusal of a parameter, under the name that the client has given it."""
    ours = error.param or ""
    if ours not in wire.names or ours in asked.body:
        return error
    theirs = wire.names[ours]
    return UnsupportedParameter(error.message.replace(ours, theirs), param=theirs)


def failure_of(end: End | None) -> TailraceError:
    """The error that a stream which did not end in `done` stands for."""
    if end is None or end.failure is None:
        return Cancelled("The stream was cancelled before the answer was complete.")
    kind = KINDS.get(end.failure.code, EngineError)
    # To wires that tell kinds of errors apart, whatever else ends a stream is an error during the generation.
    base = next((base for base in (AdmissionError, RequestError) if issubclass(kind, base)), EngineError)
    failed: TailraceError = base(end.failure.message, retry_after_s=1.0 if kind.status in (429, 503) else None)
    failed.code, failed.status = end.failure.code, kind.status
    return failed


def finished_end(events: Sequence[Event]) -> End:
    """The terminal event of a stream that ended in `done`. Raises: the TailraceError that it stands for, otherwise."""
    end = events[-1] if events else None
    if not isinstance(end, End) or end.status != "done":
        raise failure_of(end if isinstance(end, End) else None)
    return end


def deltas_by_choice(events: Sequence[Event], num_choices: int) -> list[list[TextDelta]]:
    """The deltas of each choice, in order."""
    deltas: list[list[TextDelta]] = [[] for _ in range(num_choices)]
    for event in events:
        if isinstance(event, TextDelta):
            deltas[event.choice].append(event)
    return deltas


def usage_json(end: End) -> JsonBody:
    """Token counts as OpenAI names them."""
    usage: JsonBody = {
        "prompt_tokens": end.usage.num_prompt_tokens,
        "completion_tokens": end.usage.num_completion_tokens,
        "total_tokens": sum(end.usage),
    }
    if end.num_reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": end.num_reasoning_tokens}
    return usage
