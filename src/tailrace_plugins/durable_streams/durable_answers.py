"""Answers of the Durable Streams protocol: pages, server-sent events and refusals."""

from __future__ import annotations

import base64
import codecs
import io
import itertools
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from tailrace.dialects import encode_error, to_json
from tailrace.errors import TailraceError
from tailrace_plugins.durable_streams.durable_changes import Created
from tailrace_plugins.durable_streams.durable_errors import SequenceGap, StaleEpoch, StreamClosed
from tailrace_plugins.durable_streams.durable_stream import is_json
from tailrace_plugins.durable_streams.operations import Receipt
from tailrace_plugins.durable_streams.page import Page

__all__ = [
    "EXPOSED_HEADERS",
    "body_of",
    "etag_of",
    "lifetime_headers",
    "next_cursor",
    "num_bytes_of",
    "page_headers",
    "receipt_headers",
    "refusal",
    "sse_headers",
    "sse_of",
]

Headers = dict[str, str]

EXPOSED_HEADERS = (
    "etag",
    "producer-epoch",
    "producer-expected-seq",
    "producer-received-seq",
    "producer-seq",
    "stream-closed",
    "stream-cursor",
    "stream-expires-at",
    "stream-next-offset",
    "stream-sse-data-encoding",
    "stream-ttl",
    "stream-up-to-date",
)

_CURSOR_S = 20  # cursors count intervals of this length
_CURSOR_EPOCH_S = 1_728_432_000  # since 9 October 2024, as proposed by the protocol
_PIECE_BYTES = 48 * 2**10  # of a body that is being sent; a multiple of three, for base64


def next_cursor(known: int | None, now_s: float, jitter: int) -> int:
    """Return a cursor larger than the client's last one, so that caches do not repeat an old answer."""
    current = int(now_s - _CURSOR_EPOCH_S) // _CURSOR_S
    return current if known is None or known < current else known + max(1, jitter)


def body_of(page: Page) -> Iterator[bytes]:
    """Return the bytes of a page, for JSON a list of messages, in pieces of a limited size: while a slow client reads,
    only one of them is in memory a second time."""
    return _pieces(_parts(page))


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of `_PIECE_BYTES`; the last one may be shorter."""
    waiting, num_bytes = list[bytes](), 0
    for part in parts:
        waiting.append(part)
        num_bytes += len(part)
        if num_bytes >= _PIECE_BYTES:
            joined, whole = b"".join(waiting), num_bytes - num_bytes % _PIECE_BYTES
            for start in range(0, whole, _PIECE_BYTES):
                yield joined[start : start + _PIECE_BYTES]
            waiting, num_bytes = [joined[whole:]], num_bytes - whole
    if num_bytes:
        yield b"".join(waiting)


def num_bytes_of(page: Page) -> int:
    """Return the length of the body."""
    return sum(map(len, _parts(page)))


def _parts(page: Page) -> Iterator[bytes]:
    if not is_json(page.content_type):
        yield from page.pieces
        return
    for number, piece in enumerate(page.pieces):
        yield b"," if number else b"["
        yield piece
    yield b"]" if page.pieces else b"[]"


def etag_of(page: Page) -> str:
    """Return the ETag of a page. It changes when the stream is closed, so that clients notice this."""
    return f'"{page.incarnation}:{page.start}:{page.next}{":c" if page.is_closed else ""}"'


def page_headers(page: Page, cursor: int | None = None) -> Headers:
    headers = {"content-type": page.content_type, "stream-next-offset": page.next}
    if cursor is not None and not page.is_closed:
        headers["stream-cursor"] = str(cursor)
    if page.is_up_to_date:
        headers["stream-up-to-date"] = "true"
    return headers | _closed_headers(page.is_closed)


def lifetime_headers(created: Created) -> Headers:
    headers = {}
    if created.ttl_s is not None:
        headers["stream-ttl"] = str(created.ttl_s)
    if created.expires_s is not None:
        moment = datetime.fromtimestamp(created.expires_s, UTC).isoformat(timespec="milliseconds")
        headers["stream-expires-at"] = moment.replace("+00:00", "Z")
    return headers


def receipt_headers(receipt: Receipt) -> Headers:
    headers = {"stream-next-offset": receipt.next_offset} | _closed_headers(receipt.is_closed)
    if receipt.stamp is not None:
        headers |= {"producer-epoch": str(receipt.stamp.epoch), "producer-seq": str(receipt.stamp.seq)}
    return headers


def refusal(error: TailraceError) -> tuple[int, Headers, bytes]:
    """Return status, headers and JSON body."""
    status, body = encode_error(error)
    headers = {"content-type": "application/json"}
    match error:
        case StreamClosed():
            headers |= {"stream-next-offset": error.next_offset} | _closed_headers(True)
        case StaleEpoch():
            headers["producer-epoch"] = str(error.epoch)
        case SequenceGap():
            headers["producer-expected-seq"] = str(error.expected)
            headers["producer-received-seq"] = str(error.received)
    return status, headers, body


def _closed_headers(is_closed: bool) -> Headers:
    return {"stream-closed": "true"} if is_closed else {}


# Server-sent events


def sse_headers(content_type: str) -> Headers:
    headers = {"content-type": "text/event-stream"}
    if not _is_text(content_type):
        headers["stream-sse-data-encoding"] = "base64"
    return headers


def sse_of(page: Page, cursor: int) -> Iterator[bytes]:
    """Return a page as an event with its data, if it has any, and an event with the next position; in pieces like
    those of `body_of`."""
    return _pieces(_event_parts(page, cursor))


def _event_parts(page: Page, cursor: int) -> Iterator[bytes]:
    if page.pieces:
        yield b"event: data\n"
        yield from _data_lines(page) if _is_text(page.content_type) else _base64_line(page)
        yield b"\n"
    control: dict[str, object] = {"streamNextOffset": page.next}
    if not page.is_closed:
        control["streamCursor"] = str(cursor)
    if page.is_up_to_date:
        control["upToDate"] = True
    if page.is_closed:
        control["streamClosed"] = True
    yield b"event: control\ndata:" + to_json(control) + b"\n\n"


def _base64_line(page: Page) -> Iterator[bytes]:
    yield b"data:"
    yield from map(base64.b64encode, body_of(page))  # the size of the pieces is a multiple of three
    yield b"\n"


def _data_lines(page: Page) -> Iterator[bytes]:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    is_at_start = True
    for part in itertools.chain(body_of(page), (b"",)):
        *lines, rest = decoder.decode(part, final=not part).split("\n")
        shown = []
        for line in lines:
            shown.append(f"{_prefix(line) if is_at_start else ''}{line}\n")
            is_at_start = True
        if rest:
            shown.append(f"{_prefix(rest) if is_at_start else ''}{rest}")
            is_at_start = False
        yield "".join(shown).encode()
    yield b"data:\n" if is_at_start else b"\n"


def _prefix(line: str) -> str:
    """A space after the colon is a part of the syntax, so a leading space needs another one."""
    return "data: " if line.startswith(" ") else "data:"


def _is_text(content_type: str) -> bool:
    return is_json(content_type) or content_type.lstrip().lower().startswith("text/")
