"""Which answers of apps become streams with a log."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
from starlette.types import Message

from tailrace_outer.apps.events import is_recordable
from tailrace_outer.serve.stream import STREAM_HEADER, StreamOffer

__all__ = ["take_offer"]


def take_offer(message: Message, *, method: str, in_body: bool, records_all: bool = False) -> StreamOffer | None:
    """Return the offer if the answer with this start becomes a stream with a log. Its header is removed from the start.

    `in_body`: more of the request's body is to come. With `records_all`, all streamed answers are recorded.
    """
    headers = {name.lower(): value for name, value in message["headers"]}
    can_record = _can_record(message, headers, method=method, in_body=in_body)
    offered = headers.get(STREAM_HEADER)
    if offered is not None:
        message["headers"] = [pair for pair in message["headers"] if pair[0].lower() != STREAM_HEADER]
        with contextlib.suppress(msgspec.DecodeError):  # it may not be ours: the app may pass on foreign headers
            offer = msgspec.json.decode(offered, type=StreamOffer)
            return offer if offer.wire != "recorded" or can_record else None
    media_type = headers.get(b"content-type", b"").decode("latin-1")
    return StreamOffer("recorded") if records_all and is_recordable(media_type) and can_record else None


def _can_record(message: Message, headers: Mapping[bytes, bytes], *, method: str, in_body: bool) -> bool:
    """Return whether the answer can be resumed: status 200, the request's body is complete, the answer is streamed (no
    length), and not compressed, since a compressed body can be read only from its beginning."""
    is_streamed = b"content-length" not in headers
    is_coded = headers.get(b"content-encoding", b"identity").lower() != b"identity"
    is_good = message["status"] == 200 and method != "HEAD"
    return is_good and is_streamed and not is_coded and not in_body
