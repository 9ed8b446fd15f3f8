"""The Durable Streams protocol: reads headers and queries. Its answers are in `durable_answers`.

Source: https://github.com/durable-streams/durable-streams, PROTOCOL.md of June 2026. Divergences:

1. `Stream-Seq` is compared with the last one of the stream, from any producer.
2. `Stream-Forked-From` is a path of this server, or a path below the root of durable streams.
3. An offset that this server did not create for the stream is refused.
4. In server-sent events, invalid UTF-8 is shown as U+FFFD, and so are characters split between two pages. A plain GET
   returns the bytes.
5. Subscriptions (`__ds`), for which the server would send requests to others, are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, cast
from urllib.parse import unquote

from tailrace.errors import Forbidden, RequestError, UnknownStream
from tailrace.types import ANONYMOUS
from tailrace_plugins.durable_streams.durable_changes import Stamp
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch

__all__ = [
    "ROOT",
    "SINGLE_HEADERS",
    "Reading",
    "key_of",
    "owned_key",
    "parse_batch",
    "parse_creation",
    "parse_reading",
    "token_stream_id",
]

ROOT = "/v1/durable/"
SINGLE_HEADERS = (
    "stream-ttl", "stream-expires-at", "stream-closed", "stream-seq", "producer-id", "producer-epoch", "producer-seq",
)  # fmt: skip

_MAX_PATH_BYTES = 1024
_BAD_SEGMENT = re.compile(r"\.{0,2}|.*[\x00-\x1f\x7f\ufffd].*", re.DOTALL)
_CONTENT_TYPE = re.compile(r"[\w!#$&^.+-]{1,100}/[\w!#$&^.+-]{1,100}( *;[\x20-\x7e]{1,200})?", re.ASCII)
_TTL = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,6})?\d*([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_MAX_NUMBER = 2**53 - 1
_WORD = re.compile(r"[\x20-\x7e]{1,256}")
_CURSOR = re.compile(r"[0-9]{1,15}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reading:
    """The position and the mode of a read."""

    offset: str | None  # None or "-1": the beginning; "now": the tail
    live: Literal["long-poll", "sse"] | None
    cursor: int | None  # the last one that the client saw


def key_of(path: str) -> bytes:
    """Return the key of a stream from its path below the root. Raises: RequestError, UnknownStream."""
    key = path.encode()
    segments = path.split("/")
    if len(key) > _MAX_PATH_BYTES or any(map(_BAD_SEGMENT.fullmatch, segments)):
        raise RequestError("A path must have segments of printable characters, at most 1024 bytes.", param="path")
    if segments[0] == "__ds":
        raise UnknownStream("Subscriptions are not supported here.")
    return key


def token_stream_id(path: str) -> str | None:
    """Return the id in `streams/{id}`, the path of a stream of tokens; None for any other path. Ids have no slash, so
    clients may write below `streams/NAME/`."""
    first, _, rest = path.partition("/")
    return rest if first == "streams" and "/" not in rest else None


def owned_key(owner: str, key: bytes) -> bytes:
    """Return the key of an owner's stream. Owners may use the same path: the key contains the owner, separated by NUL
    characters, which paths do not have. Anonymous paths are keys without an owner."""
    return key if owner == ANONYMOUS else b"\0%b\0%b" % (owner.encode(), key)


def parse_creation(headers: Mapping[str, str]) -> Creation:
    """Raises: RequestError."""
    ttl, expires, source = (headers.get(f"stream-{name}") for name in ("ttl", "expires-at", "forked-from"))
    fork_offset, fork_part = headers.get("stream-fork-offset"), headers.get("stream-fork-sub-offset")
    if ttl is not None and expires is not None:
        raise RequestError("Give either Stream-TTL or Stream-Expires-At.", param="stream-ttl")
    if ttl is not None and not _TTL.fullmatch(ttl):
        raise RequestError("Stream-TTL must be a whole number of seconds.", param="stream-ttl")
    if source is None and (fork_offset is not None or fork_part is not None):
        raise RequestError("A fork needs Stream-Forked-From.", param="stream-forked-from")
    return Creation(
        content_type=_content_type(headers),
        ttl_s=int(ttl) if ttl is not None else None,
        expires_s=_time(expires) if expires is not None else None,
        closes=_closes(headers),
        source=_source(source) if source is not None else None,
        fork_offset=fork_offset,
        fork_part=_number(fork_part, "stream-fork-sub-offset") if fork_part is not None else 0,
    )


def parse_batch(headers: Mapping[str, str], body: bytes) -> ProducerBatch:
    """Raises: RequestError."""
    seq = headers.get("stream-seq")
    return ProducerBatch(
        body,
        _content_type(headers) if body else None,
        _closes(headers),
        _stamp(headers),
        _word(seq, "stream-seq") if seq is not None else None,
    )


def parse_reading(query: Mapping[str, str]) -> Reading:
    """Raises: RequestError."""
    offset, live, cursor = query.get("offset"), query.get("live"), query.get("cursor", "")
    if live not in (None, "long-poll", "sse"):
        raise RequestError("live must be long-poll or sse.", param="live")
    if live is not None and offset is None:
        raise RequestError("live needs an offset.", param="offset")
    known = int(cursor) if _CURSOR.fullmatch(cursor) else None
    return Reading(offset, cast(Literal["long-poll", "sse"] | None, live), known)


def _content_type(headers: Mapping[str, str]) -> str | None:
    given = headers.get("content-type")
    if given is not None and not _CONTENT_TYPE.fullmatch(given):
        raise RequestError("This is not a valid content type.", param="content-type")
    return given


def _closes(headers: Mapping[str, str]) -> bool:
    return headers.get("stream-closed", "").lower() == "true"


def _stamp(headers: Mapping[str, str]) -> Stamp | None:
    producer, epoch, seq = (headers.get(f"producer-{name}") for name in ("id", "epoch", "seq"))
    if producer is None and epoch is None and seq is None:
        return None
    if producer is None or epoch is None or seq is None:
        raise RequestError("Send Producer-Id, Producer-Epoch and Producer-Seq together.", param="producer-id")
    return Stamp(_word(producer, "producer-id"), _number(epoch, "producer-epoch"), _number(seq, "producer-seq"))


def _word(given: str, name: str) -> str:
    if not _WORD.fullmatch(given):
        raise RequestError(f"{name} must have 1 to 256 printable characters.", param=name)
    return given


def _number(given: str, name: str) -> int:
    if not _NUMBER.fullmatch(given) or int(given) > _MAX_NUMBER:
        raise RequestError(f"{name} must be a whole number, at most 2^53 - 1.", param=name)
    return int(given)


def _time(given: str) -> float:
    try:
        if _TIME.fullmatch(given):
            return datetime.fromisoformat(given.upper()).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        pass
    raise RequestError("Stream-Expires-At must be a time in the format of RFC 3339.", param="stream-expires-at")


def _source(given: str) -> bytes:
    try:
        path = unquote(given, errors="strict")
    except UnicodeDecodeError:
        raise RequestError("Stream-Forked-From must be a path.", param="stream-forked-from") from None
    path = path.removeprefix(ROOT) if path.startswith(ROOT) else path.removeprefix("/")
    if token_stream_id(path) is not None:
        raise Forbidden("Streams of tokens cannot be forked.", param="stream-forked-from")
    return key_of(path)
