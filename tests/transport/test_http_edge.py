"""Input that is too slow, too large or not HTTP is refused within its limit.

Limits are set low here. What is waited for is that a connection ends at all; how soon, only the tests' own time limits
say.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.api.test_server_metrics import scrape
from tests.http.frames import TEXT, FrameWire, frame
from tests.http.wire import as_json, sse_ids
from tests.transport.disconnecting import LIMITS, SMALL_BYTES, DisconnectingClient, refused
from tests.waiting import LONG_S

MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/streams HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture(scope="module")
def edge() -> Iterator[Server]:
    with contextlib.closing(Server("scripted", *LIMITS)) as server:
        yield server.wait_ready()


# Heads


@pytest.mark.parametrize("sent", [b"G", b"GET / HT", MODELS, MODELS + b"x-a: ", POST + b"content-length: 2\r\n"])
def test_an_incomplete_head(edge: Server, sent: bytes) -> None:
    with DisconnectingClient(edge) as client:
        client.send_bytes(sent)
        assert refused(client) == 408


def test_a_head_that_comes_byte_by_byte(edge: Server) -> None:
    with DisconnectingClient(edge) as client, contextlib.suppress(ConnectionError):
        for byte in MODELS + b"x-a: b\r\n" * 90:
            client.send_bytes(bytes([byte]))
            time.sleep(0.05)  # the client's own pace
        raise AssertionError
    client.wait_ended()


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
def test_a_silent_connection_is_closed_without_an_answer(edge: Server, sent: bytes) -> None:
    with DisconnectingClient(edge) as client:
        client.send_bytes(sent)
        assert client.is_closed()


def test_a_connection_is_used_again_until_it_is_idle(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        for _ in range(3):
            assert client.request("GET", "/v1/models")[0] == 200
        assert client.is_closed()


def test_the_next_head_has_its_time_too(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        assert client.request("GET", "/v1/models")[0] == 200
        client.send_bytes(b"GET /v1")
        assert refused(client) == 408


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
REFUSED = {
    "target": (b"GET /" + b"x" * 65_535 + b" HTTP/1.1\r\n", 414),
    "endless target": (b"GET /" + b"x" * 2_000_000, 414),
    "header": (MODELS + b"x-a: " + b"b" * 33_000 + b"\r\n\r\n", 431),
    "endless header": (MODELS + b"x-a: " + b"b" * 2_000_000, 431),
    "name": (MODELS + b"x" * 2_000_000, 431),
    "headers": (MODELS + b"x-a: b\r\n" * 100 + b"\r\n", 431),
    "extension": (CHUNKED + b"1;" + b"x" * 2_000_000, 431),
    "extension of 64 KiB": (CHUNKED + b"1;x=" + b"y" * 65_536 + b"\r\n{\r\n", 431),
    "trailers of 64 KiB": (CHUNKED + b"1\r\na\r\n0\r\n" + (b"x-a: " + b"b" * 1_017 + b"\r\n") * 64, 431),
    "trailer": (CHUNKED + b"1\r\na\r\n0\r\nx-a: " + b"b" * 2_000_000, 431),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n" + b"x-a: b\r\n" * 200_000, 431),
    "two lengths": (POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}", 400),
    "two different lengths": (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
    "length and chunks": (POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", 400),
    "chunks and length": (POST + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}", 400),
    "other codings": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n", 400),
    "size of a chunk": (CHUNKED + b"0x1\r\na\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "version 2.0": (b"GET /v1/models HTTP/2.0\r\nhost: localhost\r\n\r\n", 505),
    "version 0.9": (b"GET /v1/models HTTP/0.9\r\nhost: localhost\r\n\r\n", 505),
    "no version": (b"GET /v1/models\r\n\r\n", 505),
    "RTSP": (b"GET /v1/models RTSP/1.0\r\nhost: localhost\r\n\r\n", 400),
    "RTSP/1.1": (b"OPTIONS /v1/models RTSP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "method of RTSP": (b"DESCRIBE /v1/models RTSP/1.0\r\nhost: localhost\r\n\r\n", 400),
    "RTSP that quotes HTTP": (
        b"GET /v1/models RTSP/1.0\r\nhost: localhost\r\nx-a: GET /v1/models HTTP/1.0\r\n\r\n",
        400,
    ),
    "ICE": (b"SOURCE /v1/models ICE/1.0\r\nhost: localhost\r\n\r\n", 400),
    "CONNECT": (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "chunks in 1.0": (POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "other host": (b"GET http://evil.test/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "other scheme": (b"GET ftp://localhost/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "user in the target": (b"GET http://a@localhost/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "fragment": (b"GET /v1/models#a HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "two origins": (MODELS + b"origin: http://localhost\r\norigin: http://evil.test\r\n\r\n", 400),
    "two lifetimes": (
        b"PUT /v1/durable/a HTTP/1.1\r\nhost: localhost\r\nstream-ttl: 5\r\nstream-ttl: 6\r\n\r\n",
        400,
    ),
    "two types": (POST + b"content-type: text/plain\r\ncontent-length: 2\r\n\r\n{}", 400),
    "two keys": (POST + b"idempotency-key: a\r\nidempotency-key: b\r\ncontent-length: 2\r\n\r\n{}", 400),
    "handshake with a body": (HANDSHAKE + b"content-length: 5\r\n\r\nhello", 400),
    "handshake with chunks": (HANDSHAKE + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "handshake with a long query": (HANDSHAKE.replace(b"/ws", b"/ws?" + b"x" * 8_100) + b"\r\n", 414),
    "handshake with a long header": (HANDSHAKE + b"x-a: " + b"b" * 8_100 + b"\r\n\r\n", 431),
    "two spaces": (b"GET  /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "space before a colon": (MODELS + b"x-a : b\r\n\r\n", 400),
    "folded header": (MODELS + b"x-a: b\r\n c\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", REFUSED)
def test_input_that_is_too_long_or_not_http(edge: Server, case: str) -> None:
    sent, status = REFUSED[case]
    with DisconnectingClient(edge) as client:
        client.send_bytes(sent)
        assert refused(client) == status


def test_each_request_on_a_connection_has_its_protocol(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        assert client.request("GET", "/v1/models")[0] == 200
        client.send_bytes(b"GET /v1/models RTSP/1.0\r\nhost: localhost\r\n\r\n")
        assert refused(client) == 400


def test_a_request_may_begin_directly_behind_a_body(edge: Server) -> None:
    quoting = b"x-a: GET /v1/models HTTP/1.1\r\n"
    with DisconnectingClient(edge) as client:
        client.send_bytes(POST + b"content-length: 2\r\n\r\n{}" + MODELS + quoting + b"\r\n" + MODELS + b"\r\n")
        statuses = []
        for _ in range(3):
            statuses.append(client.head())
            client.body()
        assert statuses == [400, 200, 200]


def test_a_target_may_name_this_server(edge: Server) -> None:
    """Clients of a proxy send this form, and every server has to accept it (RFC 9112, 3.2.2)."""
    with DisconnectingClient(edge) as client:
        for target, status in [(b"/v1/models?a", 200), (b"/nowhere", 404)]:
            client.send_bytes(b"GET HTTP://LocalHost:1" + target + b" HTTP/1.1\r\nhost: localhost:1\r\n\r\n")
            assert client.head() == status
            client.body()
    with DisconnectingClient(edge) as client:
        client.send_bytes(HANDSHAKE.replace(b"/v1/ws", b"http://localhost/v1/ws") + b"\r\n")
        assert client.head() == 101


def test_frames_may_come_with_the_handshake(edge: Server) -> None:
    with FrameWire(edge.port) as client:
        client.send_bytes(HANDSHAKE + b"\r\n" + frame(TEXT, b'{"type":"ping"}'))
        assert client.head() == 101
        opcode, payload = client.frame()
        assert opcode == TEXT
        assert as_json(payload)["type"] == "pong"


def test_input_at_the_limits(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        path = "/v1/models?" + "x" * 60_000
        headers = {f"x-{number}": "b" * 300 for number in range(97)}  # and host, accept
        assert client.request("GET", path, None, headers)[0] == 200


def test_trailers_are_ignored(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        client.send_bytes(
            MODELS + b"transfer-encoding: chunked\r\n\r\n0\r\nx-request-id: trailer\r\n\r\n" + MODELS + b"\r\n"
        )
        for _ in range(2):
            assert client.head() == 200
            assert client.body()
            assert client.headers["x-request-id"] != "trailer"


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\nupgrade: h2c\r\n"
PROMPT = b'{"prompt":"Upgrade.","max_tokens":3,"seed":1}'
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SIZED = b"content-length: %d\r\n\r\n%s" % (len(PROMPT), PROMPT)
IN_CHUNKS = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(PROMPT), PROMPT)


def _read_completion(client: DisconnectingClient) -> None:
    assert client.head() == 200
    assert as_json(client.body())["choices"][0]["text"] == Answer("Upgrade.", 3, 1).text


@pytest.mark.parametrize("body", [SIZED, IN_CHUNKS], ids=["sized", "chunked"])
def test_an_upgrade_to_anything_but_websocket_is_ignored(edge: Server, body: bytes) -> None:
    """Java's HttpClient offers HTTP/2 with the first request of each connection, followed by a body."""
    request = COMPLETION + UPGRADE + body
    with DisconnectingClient(edge) as client:
        client.send_bytes(request)
        _read_completion(client)
        client.send_bytes(request)  # the connection goes on
        _read_completion(client)
        client.send_bytes(MODELS + UPGRADE + b"\r\n" + request * 2 + MODELS + b"\r\n")  # also sent ahead
        assert client.head() == 200
        client.body()
        _read_completion(client)
        _read_completion(client)
        assert client.head() == 200
        client.body()


def test_an_upgrade_that_is_ignored_may_arrive_byte_by_byte(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        for byte in COMPLETION + UPGRADE + IN_CHUNKS:
            client.send_bytes(bytes([byte]))
        _read_completion(client)


def test_an_upgrade_that_is_ignored_keeps_the_limits(edge: Server) -> None:
    for sent, status in [
        (COMPLETION + UPGRADE + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (COMPLETION + UPGRADE + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 70_000, 431),
        (COMPLETION + UPGRADE + b"x-a: b\r\n" * 100 + b"\r\n", 431),
        (COMPLETION.replace(b"1.1", b"2.0") + UPGRADE + SIZED, 505),
        (COMPLETION + UPGRADE + b"content-length: 5\r\n\r\n", 408),
    ]:
        with DisconnectingClient(edge) as client:
            client.send_bytes(sent)
            assert client.head() == status, sent[:300]


# Bodies


def test_a_body_that_comes_byte_by_byte(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        client.send_bytes(POST + b"content-length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                client.send_bytes(b" ")
                time.sleep(0.05)  # the client's own pace
        client.wait_ended()


def test_a_body_that_is_not_read(edge: Server) -> None:
    with DisconnectingClient(edge) as client:
        client.send_bytes(MODELS + b"content-length: 1000\r\n\r\n ")
        assert client.head() == 200
        assert client.body()
        assert client.is_closed()


# Requests behind requests


def test_requests_may_be_pipelined(edge: Server) -> None:
    seeds = range(20)
    with DisconnectingClient(edge) as client:
        for seed in seeds:
            client.send("POST", "/v1/completions", {"prompt": "Ahead.", "max_tokens": 20, "seed": seed})
        for seed in seeds:
            assert client.head() == 200
            assert as_json(client.body())["choices"][0]["text"] == Answer("Ahead.", 20, seed).text


@pytest.mark.parametrize("behind", [MODELS * 2 + b"\r\n", b"\x00", (MODELS + b"\r\n") * 100], ids=["bad", "no", "many"])
def test_an_invalid_pipelined_request_cuts_the_answer_before_it(paced: Server, behind: bytes) -> None:
    answer = Answer("Long.", 5_000)
    with DisconnectingClient(paced) as client:
        client.send(
            "POST", "/v1/streams", {"prompt": "Long.", "max_tokens": 5_000, "seed": 0}, {"accept": "text/event-stream"}
        )
        assert client.head() == 200
        seen = client.event()
        client.send_bytes(behind)
        rest, is_complete = client.rest()
    assert not is_complete
    stream_id = sse_ids(seen)[0].rpartition("-")[0]
    assert b"".join(answer.native(stream_id)).startswith(seen + rest)
    paced.http.delete(f"/v1/streams/{stream_id}")


def test_a_disconnect_with_a_pipelined_request_is_noticed(paced: Server) -> None:
    with DisconnectingClient(paced) as client:
        client.send("POST", "/?prompt=Long.&max_tokens=5000")
        assert client.head() == 200
        assert client.chunk()
        client.send_bytes(MODELS + b"\r\n")
    client.wait_ended()
    deadline_s = time.monotonic() + LONG_S
    while scrape(paced)["tgi_batch_current_size"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)  # there is nothing to wait on


# All at once


def test_other_connections_are_not_affected(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=200", *LIMITS)
    answers = [Answer("Neighbour.", 800, seed) for seed in range(4)]
    ids = [server.create({"prompt": "Neighbour.", "max_tokens": 800, "seed": answer.seed}) for answer in answers]
    found: dict[str, bytes] = {}

    def read(stream_id: str) -> None:
        with DisconnectingClient(server) as client:
            client.send("GET", f"/v1/streams/{stream_id}/events")
            assert client.head() == 200
            found[stream_id] = client.body()

    threads = [threading.Thread(target=read, args=(stream_id,)) for stream_id in ids]
    for thread in threads:
        thread.start()
    with contextlib.ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(DisconnectingClient(server, receive_bytes=SMALL_BYTES))
            sent, _ = list(REFUSED.values())[number % len(REFUSED)]
            with contextlib.suppress(ConnectionError):
                client.send_bytes([b"", MODELS, sent][number % 3])
        for thread in threads:
            thread.join()
    for stream_id, answer in zip(ids, answers, strict=True):
        assert found[stream_id] == b"".join(answer.native(stream_id))
