"""The server that all bad input is thrown at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from tests.server.oracle import Answer
from tests.server.process import Server
from tests.server.refusals import CANARY, Witness
from tests.server.wire import as_json, sse_data

_GAP_S = 1.0  # catches what hangs; how even a stream really is, is a matter for bench


@pytest.fixture(scope="module")
def target() -> Iterator[Server]:
    """A stream runs on it all the while, which is compared with the oracle at the end."""
    with contextlib.closing(Server("scripted:tokens_per_s=200", "--default-max-tokens", "1")) as server:
        server.wait_ready()
        prompt, seed = "Never mind them.", 9
        stream_id = server.create({"prompt": prompt, "max_tokens": 50_000, "seed": seed})
        witness, begun = Witness(server, stream_id), threading.Event()
        thread = threading.Thread(target=witness.follow, args=(begun,))
        thread.start()
        assert begun.wait(10)
        yield server
        server.http.delete(f"/v1/streams/{stream_id}")
        thread.join(10)
        assert CANARY not in server.log
    *deltas, end = sse_data(bytes(witness.body))
    assert as_json(end)["status"] == "cancelled"
    assert len(deltas) > 10
    assert bytes(witness.body).startswith(b"".join(Answer(prompt, 50_000, seed).native(stream_id)[: len(deltas)]))
    assert witness.longest_gap_s < _GAP_S
