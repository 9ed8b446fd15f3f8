"""What all dialects share: the shape of a call, the facts an encoder may use, and the reading of JSON bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol, TypeVar

import msgspec

from tailrace.errors import AdmissionError, EngineError, RequestError, TailraceError, UnsupportedParameter
from tailrace.types import End, Event, GenerateRequest, TextDelta

__all__ = [
    "Call",
    "Dialect",
    "Encoder",
    "JsonBody",
    "StreamFacts",
    "View",
    "Vocabulary",
    "deltas_by_choice",
    "failure_of",
    "printable",
    "quote",
    "read_fields",
    "read_json",
    "refuse",
    "to_json",
    "usage_json",
]

T = TypeVar("T", bound=msgspec.Struct)

_MAX_DEPTH = 64
_MAX_BRACKETS = 100_000  # of lists and objects (those in strings count, too): about 40 ms to look through

JsonBody = dict[str, Any]  # Any: whatever the client sent, before it is checked

# Everything beyond ASCII is escaped: clients that split lines as Unicode does would break at U+2028, U+2029 and U+0085.
quote = encode_basestring_ascii
_encode_json = msgspec.json.Encoder().encode


class Vocabulary(Protocol):
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
    prompt_text: str
    vocabulary: Vocabulary


class Encoder(Protocol):
    """Shows one stream in one dialect."""

    def encode(self, seq: int, event: Event) -> bytes:
        """The bytes that a streaming answer has for an event, b"" for none. Events come in order."""

    def whole(self, events: Sequence[Event]) -> bytes:
        """The body of an answer in one piece. Raises: TailraceError if the stream did not end well."""


class View(Protocol):
    """How a call wants its answer shown."""

    media_type: str  # of a streaming answer

    def open(self, facts: StreamFacts) -> Encoder: ...


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request: what to generate, and how to show it."""

    request: GenerateRequest
    view: View
    stream: bool
    ignored: tuple[str, ...] = ()  # names of fields that nobody here knows


class Dialect(Protocol):
    """A wire's own errors; what else it has differs too much to be listed."""

    def encode_error(self, error: TailraceError) -> tuple[int, bytes]:
        """Status and JSON body of a refusal before the first byte."""


def to_json(value: object) -> bytes:
    """Compact JSON in ASCII."""
    text = _encode_json(value)
    if text.isascii():
        return text
    return _BEYOND_ASCII.sub(_escape, text.decode()).encode("ascii")


_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


def _escape(match: re.Match[str]) -> str:
    return quote(match[0])[1:-1]


def read_json(body: bytes) -> JsonBody:
    """A JSON object, strictly: no NaN, no lone surrogates, nothing nested beyond reason.

    Raises: RequestError, which never repeats what was sent.
    """
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise RequestError("The body has too many lists and objects.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        position = re.search(r"\(byte (\d+)\)", str(error))
        where = f" at byte {position[1]}" if position else ""
        raise RequestError(f"The body is not valid JSON{where}.") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    _bound_depth(value, _MAX_DEPTH)
    return value


def _bound_depth(value: object, depth: int) -> None:
    if isinstance(value, dict | list):
        if not depth:
            raise RequestError("The body is nested too deeply.")
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                _bound_depth(item, depth - 1)


def read_fields(body: JsonBody, shape: type[T], *, strict: bool = False) -> tuple[T, tuple[str, ...]]:
    """The body as a msgspec struct, and the names of the fields that it does not have, at most ten of them.

    Raises: RequestError that names the field, or with `strict` UnsupportedParameter for one that is unknown.
    """
    known = _field_names(shape)
    unknown = islice((name for name in body if name not in known), 10)
    ignored = tuple(sorted(printable(name) for name in unknown))
    if strict and ignored:
        raise UnsupportedParameter(f"Unknown field: {ignored[0]}.", param=ignored[0])
    try:
        return msgspec.convert(body, shape), ignored
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".")[:100] or None
        if "contains unknown field" in reason or "Invalid enum value" in reason or "Invalid value" in reason:
            reason = "Not one of the values that this field takes"  # the original repeats the input
        where = f"{param}: " if param else ""
        raise RequestError(f"{where}{reason[:200]}.", param=param) from None


@cache
def _field_names(shape: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(shape))


def printable(name: str) -> str:
    """A field's name, fit for a header."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:40])


def refuse(body: JsonBody, neutral: dict[str, tuple[object, ...]]) -> None:
    """Refuse known fields that cannot be honoured yet, unless they hold a value that asks for nothing.

    Raises: UnsupportedParameter that names the field.
    """
    for name, harmless in neutral.items():
        if name in body and body[name] is not None and body[name] not in harmless:
            raise UnsupportedParameter(f"{name} is not supported here.", param=name)


def failure_of(end: End | None) -> TailraceError:
    """The error that a stream which did not end in `done` stands for."""
    if end is None or end.failure is None:
        error: TailraceError = EngineError("The stream was cancelled before the answer was complete.")
        error.status, error.code = 499, "cancelled"  # clients repeat a 409
        return error
    kind = AdmissionError if end.failure.code == "queue_timeout" else EngineError
    failed = kind(end.failure.message)
    failed.code = end.failure.code
    failed.status = _STATUS_OF_FAILURE.get(end.failure.code, 500)
    failed.retry_after_s = 1.0 if failed.status in (429, 503) else None
    return failed


_STATUS_OF_FAILURE = {"engine_lost": 503, "engine_stalled": 504, "interrupted": 503, "queue_timeout": 429}


def deltas_by_choice(events: Sequence[Event], num_choices: int) -> list[list[TextDelta]]:
    """The deltas of each choice, in order."""
    deltas: list[list[TextDelta]] = [[] for _ in range(num_choices)]
    for event in events:
        if isinstance(event, TextDelta):
            deltas[event.choice].append(event)
    return deltas


def usage_json(end: End) -> JsonBody:
    """Token counts as OpenAI names them."""
    return {
        "prompt_tokens": end.usage.num_prompt_tokens,
        "completion_tokens": end.usage.num_completion_tokens,
        "total_tokens": sum(end.usage),
    }
