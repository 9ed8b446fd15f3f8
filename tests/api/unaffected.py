"""A stream that must run without delays while its server gets other requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tests.api.oracle import Answer
from tests.api.process import Server
from tests.http.wire import as_json, sse_data
from tests.waiting import LONG_S

__all__ = ["STEADY", "Followed", "unaffected_stream"]

STEADY = "scripted:tokens_per_s=50"
# Ten seconds of events. This detects a stream that hangs: on a machine with four times its load, a stream was two
# seconds behind. `tailrace bench` measures how even a stream is.
_MOST_BEHIND = 500
_ANSWER = Answer("Never mind them.", 25_000, seed=9)  # longer than the tests of a file take


@contextlib.contextmanager
def unaffected_stream(server: Server) -> Iterator[Followed]:
    """Follow a stream of a server that runs `STEADY`, and an equal one of a second server without other requests.

    Both engines are paced by the same clock, so a busy machine slows both streams down. A delay of the first server
    alone leaves its stream behind the other. Raises: AssertionError at the end of the block if the stream was ever more
    than `_MOST_BEHIND` events behind, or if its text differs from the oracle's.
    """
    with contextlib.closing(Server(STEADY)) as quiet:
        seen, other = Followed(server), Followed(quiet.wait_ready())
        seen.wait_begun()
        other.wait_begun()
        ahead, most_behind = seen.num_events - other.num_events, 0

        def compare() -> None:
            nonlocal most_behind
            most_behind = max(most_behind, other.num_events + ahead - seen.num_events)

        other.after_each = compare
        try:
            yield seen
        finally:
            other.stop()
            seen.stop()
    seen.check()
    assert most_behind <= _MOST_BEHIND


class Followed:
    """One stream, begun here, and a thread that reads it."""

    def __init__(self, server: Server) -> None:
        self.num_events = 0
        self.after_each: Callable[[], None] = lambda: None
        self._server = server
        self._stream_id = server.create({"prompt": _ANSWER.prompt, "max_tokens": _ANSWER.count, "seed": _ANSWER.seed})
        self._body = bytearray()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def wait_begun(self) -> None:
        assert self._begun.wait(LONG_S)

    def stop(self) -> None:
        self._server.post(f"/v1/streams/{self._stream_id}/cancel", {})
        self._thread.join(LONG_S)

    def check(self) -> None:
        *deltas, end = sse_data(bytes(self._body))
        assert as_json(end)["status"] == "cancelled"
        assert len(deltas) > 10
        assert bytes(self._body).startswith(b"".join(_ANSWER.native(self._stream_id)[: len(deltas)]))

    def _follow(self) -> None:
        with self._server.wire() as wire:
            wire.send("GET", f"/v1/streams/{self._stream_id}/events")
            wire.head()
            while piece := wire.chunk():
                self._body += piece
                self.num_events += piece.count(b"\n\n")
                self._begun.set()
                self.after_each()
