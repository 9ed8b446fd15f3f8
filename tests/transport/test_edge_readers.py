"""Readers that are slow, do not read or disconnect, and too many connections: no other client is affected.

Limits are set low here. What is waited for is that a connection ends at all; how soon, only the tests' own time limits
say.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.http.frames import TEXT, FrameWire, frame
from tests.http.wire import Wire, sse_ids
from tests.transport.disconnecting import LIMITS, SMALL_BYTES, DisconnectingClient, refused, wait_connections
from tests.waiting import LONG_S

LONG = Answer("Long.", 40_000, seed=1)  # some megabytes: more than the kernel takes for a client that does not read

linux = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel is asked for is Linux's")


def read_long(client: DisconnectingClient, stream_id: str, after: str = "") -> None:
    client.send("GET", f"/v1/streams/{stream_id}/events", None, {"last-event-id": after})
    assert client.head() == 200


def whole(seen: bytes) -> tuple[bytes, str]:
    """Return the complete events among these bytes, and the id of the last. A reset may lose unread bytes."""
    seen = seen[: seen.rfind(b"\n\n") + 2]
    return seen, (sse_ids(seen) or [""])[-1]


@pytest.fixture(scope="module")
def edge() -> Iterator[Server]:
    with contextlib.closing(Server("scripted", *LIMITS)) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def long_id(edge: Server) -> str:
    """Return the id of a complete stream."""
    stream_id = edge.create({"prompt": "Long.", "max_tokens": LONG.count, "seed": LONG.seed})
    edge.wait_state(stream_id, "done", timeout_s=LONG_S)
    return stream_id


# Readers


@pytest.mark.parametrize("taken_bytes", [0, 1, 100, 30_000], ids=lambda count: f"{count}-bytes-a-second")
def test_a_too_slow_reader_is_cut_off_and_can_resume(edge: Server, long_id: str, taken_bytes: int) -> None:
    with DisconnectingClient(edge, receive_bytes=SMALL_BYTES) as client:
        read_long(client, long_id)
        gone = threading.Event()
        thread = threading.Thread(target=client.dribble, args=(taken_bytes, gone))
        thread.start()
        client.wait_ended()
        gone.set()
        thread.join()
        seen, is_complete = client.rest()
    assert not is_complete
    seen, last_id = whole(seen)
    with DisconnectingClient(edge) as client:
        read_long(client, long_id, last_id)
        assert seen + client.body() == b"".join(LONG.native(long_id))


def test_a_slow_reader_gets_everything(edge: Server, long_id: str) -> None:
    with DisconnectingClient(edge, receive_bytes=SMALL_BYTES) as client:
        read_long(client, long_id)
        pieces = []
        while piece := client.chunk():
            pieces.append(piece)
            time.sleep(0.05)  # the client's own pace: in all, longer than a piece may take
    assert b"".join(pieces) == b"".join(LONG.native(long_id))


def test_a_whole_answer_that_is_not_read(edge: Server) -> None:
    """The answer is larger than one write. The connection would be closed after it anyway."""
    with DisconnectingClient(edge, receive_bytes=SMALL_BYTES) as client:
        body = {"prompt": "Long.", "max_tokens": LONG.count, "seed": LONG.seed}
        client.send("POST", "/v1/completions", body, {"connection": "close"})
        assert client.head() == 200
        client.wait_ended()


def leave_by_fin(client: DisconnectingClient) -> None:
    client.close()


def leave_by_reset(client: DisconnectingClient) -> None:
    client.reset()


def leave_by_half(client: DisconnectingClient) -> None:
    """Close one half: the server treats this as a disconnect, and closes the other half."""
    client.close_half()
    assert not client.rest()[1]


def leave_by_cable(client: DisconnectingClient) -> None:
    client.vanish()


@linux
@pytest.mark.parametrize("leave", [leave_by_fin, leave_by_reset, leave_by_half, leave_by_cable])
def test_a_stream_continues_without_its_reader(
    serve: Callable[..., Server], leave: Callable[[DisconnectingClient], None]
) -> None:
    server = serve("scripted:tokens_per_s=100", *LIMITS)
    answer = Answer("Long.", 12_000, seed=2)  # for two minutes
    stream_id = server.create({"prompt": "Long.", "max_tokens": answer.count, "seed": answer.seed})
    with DisconnectingClient(server) as client:
        read_long(client, stream_id)
        seen = client.event()
        leave(client)
        client.wait_ended()
    assert server.state(stream_id)["status"] == "running"
    with DisconnectingClient(server) as client:
        read_long(client, stream_id, sse_ids(seen)[0])
        for expected in answer.native(stream_id)[1:100]:
            assert client.event() == expected


@linux
@pytest.mark.deep
def test_a_silent_reader_without_a_network(serve: Callable[..., Server]) -> None:
    """No bytes are sent, so only the kernel's keep-alive packets can detect it."""
    server = serve("scripted:tokens_per_s=0.001", "--heartbeat-s", "1000", *LIMITS)
    stream_id = server.create({"prompt": "Long.", "max_tokens": 300})
    with DisconnectingClient(server) as client:
        read_long(client, stream_id)
        client.vanish()
        client.wait_ended()


def test_a_websocket_that_does_not_read_is_cut_off(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--ws-ping-s", "0", *LIMITS)
    stream_id = server.create({"prompt": "Long.", "max_tokens": LONG.count, "seed": LONG.seed})
    with FrameWire(server.port, receive_bytes=SMALL_BYTES) as wire:
        wire.open("/v1/ws")
        wire.send_bytes(frame(TEXT, json.dumps({"type": "follow", "stream_id": stream_id}).encode()))
        wait_connections(server, 1)  # its own, and not that of `server.http`
    assert server.wait_state(stream_id, "done")["usage"]["completion_tokens"] == LONG.count


# Places


@pytest.mark.deep
@pytest.mark.parametrize(
    "flags",
    [("--max-connections", "4", "--client-connections", "4"), ("--client-connections", "4")],
    ids=["all", "one"],
)
def test_a_connection_too_many(serve: Callable[..., Server], flags: tuple[str, ...]) -> None:
    server = serve("scripted", *flags)
    with contextlib.ExitStack() as stack:
        upgraded = stack.enter_context(FrameWire(server.port))
        upgraded.open("/v1/ws")
        others = [stack.enter_context(DisconnectingClient(server)) for _ in range(3)]
        for one in others:
            assert one.request("GET", "/v1/models")[0] == 200
        for _ in range(3):
            with DisconnectingClient(server) as client:
                client.send("GET", "/v1/models")
                assert refused(client) == 503
                assert int(client.headers["retry-after"]) >= 1
        leaving: tuple[Wire, ...] = (upgraded, others[0])
        for closing in leaving:
            closing.close()
            wait_connections(server, 3)
            again = stack.enter_context(DisconnectingClient(server))
            assert again.request("GET", "/v1/models")[0] == 200
        for one in others[1:]:
            assert one.request("GET", "/v1/models")[0] == 200


@pytest.mark.deep
@linux
@pytest.mark.parametrize("limit", [64, None], ids=["places", "descriptors"])
def test_a_process_without_descriptors_waits(serve: Callable[..., Server], limit: int | None) -> None:
    """The limit is the number of connections or, if nearly all descriptors are in use, the number of descriptors."""
    server = serve("scripted:tokens_per_s=100", "--journal", "memory")  # one on disk needs a descriptor to be synced
    stream_id = server.create({"prompt": "Long.", "max_tokens": 500, "seed": 2})
    server.http.close()
    with DisconnectingClient(server) as reader:
        read_long(reader, stream_id)
        process = psutil.Process(server.process.pid)
        _, most = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        limit = limit or process.num_fds() + 6
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, most))
        clients = [DisconnectingClient(server) for _ in range(150)]
        statuses = set()
        for client in clients:
            with contextlib.suppress(ConnectionError, EOFError):
                client.send("GET", "/v1/models")
                statuses.add(client.head())
        assert statuses <= {200, 503}
        assert reader.body() == b"".join(Answer("Long.", 500, seed=2).native(stream_id))
        before_s = process.cpu_times().user + process.cpu_times().system
        time.sleep(1)  # in which a loop that spins does nothing else
        assert process.cpu_times().user + process.cpu_times().system - before_s < 0.5
        for client in clients:
            client.close()
    wait_connections(server, 0)
    with DisconnectingClient(server) as client:
        assert client.request("GET", "/v1/models")[0] == 200
