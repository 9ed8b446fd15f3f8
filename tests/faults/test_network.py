"""The network between server and reader fails in many ways: a reader that reconnects gets the rest, to the byte.

Clients that leave or do not read, at the socket itself, are in `tests/transport/test_edge_readers.py`; other people's
clients behind a proxy that cuts answers into single bytes, and between events, in `tests/differential/test_texts.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.clients.conftest import no_settings
from tests.differential.all_drivers import DRIVERS
from tests.differential.drivers import Driver, params
from tests.faults.apart import apart, dropping, narrow
from tests.faults.house import House
from tests.faults.laws import Seen, check, status_of
from tests.http.frames import CLOSE, TEXT, FrameWire, frame
from tests.http.wire import Wire, as_json
from tests.missing import skip_missing
from tests.transport.disconnecting import DisconnectingClient
from tests.waiting import until

from tailrace.testing import Chaos, Flow, Line
from tailrace_outer.scripted.scripted_engine import TEXTS

__all__ = ["no_settings"]

PACED = "scripted:tokens_per_s=200"
SHORT = Answer("Cut.", 24, seed=3)
LONG = Answer("Long.", 5_000, seed=1)  # more than the kernel takes for a client that does not read
READER_BYTES = 256 * 2**10  # what one that does not read may cost


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path / "data", PACED) as house:
        yield house


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server("scripted")) as server:
        yield server.wait_ready()


def begin(server: Server, answer: Answer, **fields: object) -> str:
    return server.create({"prompt": answer.prompt, "max_tokens": answer.count, "seed": answer.seed, **fields})


def follow(port: int, stream_id: str, events: list[bytes] | None = None) -> list[bytes]:
    """Return all events of a stream, over as many connections as needed. Incomplete events are dropped, as in
    browsers."""
    events = [] if events is None else events
    while not events or status_of(events[-1]) is None:
        last_id = f"{stream_id}-{len(events)}" if events else ""
        with contextlib.suppress(EOFError, OSError), Wire(port) as wire:
            wire.send("GET", f"/v1/streams/{stream_id}/events", headers={"last-event-id": last_id})
            assert wire.head() == 200
            for event in wire.events():
                events.append(event)
    return events


# It breaks in the middle


@pytest.mark.parametrize("end", ["fin", pytest.param("reset", marks=pytest.mark.deep)])
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=(pytest.mark.deep, pytest.mark.timeout(300)))])
def test_cut_after_any_byte(server: Server, end: str, step: int) -> None:
    """In the head, between two digits of a length, in an event, in its id: every reader comes back once, and has it
    all."""
    stream_id = begin(server, SHORT)
    server.wait_state(stream_id, "done")
    expected = SHORT.native(stream_id)
    num_bytes = sum(len(event) + 10 for event in expected) + 700  # at least, as it stands on the wire
    script = itertools.chain.from_iterable(
        (Line(to_client=Flow(end_after_bytes=length, end=end)), Line())  # type: ignore[arg-type]  # one of them
        for length in range(0, num_bytes, step)
    )
    with Chaos(server.port, script) as chaos:
        num_readings = 0
        while chaos.num_connections < 2 * len(range(0, num_bytes, step)):
            assert follow(chaos.port, stream_id) == expected
            num_readings += 1
        assert num_readings < chaos.num_connections, "nothing was cut"


@pytest.mark.parametrize("end", ["fin", *(pytest.param(end, marks=pytest.mark.deep) for end in ("reset", "half"))])
def test_cut_again_and_again_while_it_runs(house: House, end: str) -> None:
    """At lengths of which none fits an event. What a broken network costs is connections."""
    stream = house.begin(Answer("Again.", 300, seed=2))
    lengths = itertools.cycle((700, 1501, 0, 303, 2003))
    script = (Line(to_client=Flow(end_after_bytes=length, end=end)) for length in lengths)  # type: ignore[arg-type]  # one of them
    with Chaos(house.server.port, script) as chaos:
        events = follow(chaos.port, stream.stream_id)
        assert chaos.num_connections > 20
    check(stream.stream_id, stream.answer, [Seen(events)], None)


@pytest.mark.deep
def test_the_server_is_replaced_behind_a_network_that_breaks(house: House) -> None:
    stream = house.begin(Answer("Both.", 200, seed=3))
    script = itertools.repeat(Line(to_client=Flow(end_after_bytes=2500, end="reset")))
    events: list[bytes] = []
    with Chaos(house.server.port, script) as chaos:
        reader = threading.Thread(target=follow, args=(chaos.port, stream.stream_id, events))
        reader.start()
        for count in (60, 120):
            stream.seen(count)
            chaos.server_port = house.restart().port
        reader.join()
    check(stream.stream_id, stream.answer, [Seen(events)], None)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.deep)])
def test_bare_text_cut_in_the_middle_of_a_character(server: Server, step: int) -> None:
    """A wire that has no ids: what came is how the text begins, and under the stream's name there is all of it."""
    path, headers = "/?prompt=Bare.&max_tokens=96", {"x-tailrace-linger": "60"}
    num_broken, is_whole = 0, False
    script = (Line(to_client=Flow(end_after_bytes=length)) for length in itertools.count(300, step))
    with Chaos(server.port, script) as chaos, httpx.Client(base_url=chaos.url, trust_env=False) as client:
        while not is_whole:
            seen, stream_id = b"", ""
            with contextlib.suppress(httpx.RemoteProtocolError), client.stream("POST", path, headers=headers) as answer:
                stream_id = answer.headers["x-stream-id"]
                for piece in answer.iter_raw():
                    seen += piece
                is_whole = True
            if stream_id:
                text = server.wait_state(stream_id, "done")["text"].encode()
                assert seen == text if is_whole else text.startswith(seen)
                num_broken += "\ufffd" in seen.decode("utf-8", "replace")
    assert num_broken, "no character was torn"


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=(pytest.mark.deep, pytest.mark.timeout(300)))])
def test_a_websocket_cut_after_any_byte(server: Server, step: int) -> None:
    stream_id = begin(server, SHORT)
    server.wait_state(stream_id, "done")
    num_bytes = 100 * SHORT.count
    script = itertools.chain.from_iterable(
        (Line(to_client=Flow(end_after_bytes=length, end="reset")), Line()) for length in range(0, num_bytes, step)
    )
    with Chaos(server.port, script) as chaos:
        while chaos.num_connections < 2 * len(range(0, num_bytes, step)):
            frames: list[bytes] = []
            while not frames or b'"done"' not in frames[-1]:
                frames += hear(chaos.port, stream_id, len(frames))
            assert [as_json(frame)["seq"] for frame in frames] == [*range(1, SHORT.count + 2)]
            assert "".join(as_json(frame).get("text", "") for frame in frames) == SHORT.text


def hear(port: int, stream_id: str, after: int) -> list[bytes]:
    """The events of a stream that come over one WebSocket."""
    frames: list[bytes] = []
    with contextlib.suppress(EOFError, OSError), FrameWire(port) as wire:
        wire.open("/v1/ws")
        command = {"type": "follow", "stream_id": stream_id, "after": after}
        wire.send_bytes(frame(TEXT, json.dumps(command).encode()))
        assert as_json(wire.frame()[1])["type"] == "following"
        while (found := wire.frame())[0] == TEXT:
            frames.append(found[1])
            if b'"type":"done"' in found[1]:
                break
        assert found[0] != CLOSE
    return frames


# It comes in pieces


_PARSERS = ("httpx-sse", "httpx-sse async", "sseclient-py", "aiohttp lines", "httpx-sse chat stream", "our own reader",
            "curl -N", "httpx text", "websockets", "js eventsource-parser")  # fmt: skip
_HARD = ("joined emoji", "right to left", "an event stream", "JSON", "broken characters")


@pytest.fixture(scope="module")
def reciting() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:text=-1")) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("driver", params(DRIVERS[name] for name in _PARSERS))
def test_byte_by_byte(driver: Driver, reciting: Server) -> None:
    """Each byte in its own TCP segment, so that lengths of chunks and frames are split, too."""
    prompts = [f"Recite {[*TEXTS].index(name)}." for name in _HARD]
    with Chaos(reciting.port, itertools.repeat(Line(to_client=Flow(piece_bytes=1)))) as chaos:
        assert driver.read_all(chaos.url, prompts) == [TEXTS[name] for name in _HARD]


# Many come, and come back


async def read_head(port: int, stream_id: str, last_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET /v1/streams/{stream_id}/events HTTP/1.1\r\nhost: localhost\r\nlast-event-id: {last_id}\r\n\r\n"
    writer.write(head.replace("last-event-id: \r\n", "").encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    return reader, writer


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def storm(port: int, stream_id: str, number: int) -> bytes:
    """The events of one of many readers, which is cut off in the middle and reconnects."""
    seen, place = b"", 131 * number % 20_000
    reader, writer = await read_head(port, stream_id, "")
    async for chunk in chunks(reader):
        seen += chunk
        if len(seen) > place:
            break
    writer.transport.abort()
    seen = b"".join(seen[:place].rpartition(b"\n\n")[:2])
    last_id = f"{stream_id}-{seen.count(b'id: ')}" if seen else ""
    reader, writer = await read_head(port, stream_id, last_id)
    async for chunk in chunks(reader):
        seen += chunk
    writer.close()
    return seen


@pytest.mark.parametrize("num_readers", [200, pytest.param(1000, marks=pytest.mark.deep)])
def test_many_readers_reconnect_at_once(house: House, num_readers: int) -> None:
    """All read the same bytes, and other streams are not affected."""
    stream = house.begin(Answer("Storm.", 400, seed=4))
    others = [house.begin(Answer(f"Other {seed}.", 400, seed)) for seed in range(4)]

    async def all_of_them() -> set[bytes]:
        return {*await asyncio.gather(*(storm(house.server.port, stream.stream_id, n) for n in range(num_readers)))}

    assert asyncio.run(all_of_them()) == {b"".join(stream.answer.native(stream.stream_id))}
    for one in (stream, *others):
        one.wait()
        assert one.followers[0].num_connections == 1


# They do not read


@pytest.mark.deep
@pytest.mark.parametrize(
    "flow",
    [Flow(end_after_bytes=3000, end="hole"), Flow(bytes_per_s=1)],
    ids=["never", "a-byte"],
)
def test_many_readers_that_do_not_read_cost_little_and_can_resume(tmp_path: Path, flow: Flow) -> None:
    num_readers = 40
    with House(tmp_path, "scripted:tokens_per_s=2000", "--write-s", "1") as house, contextlib.ExitStack() as stack:
        long_id = begin(house.server, LONG)
        house.server.wait_state(long_id, "done")
        memory = psutil.Process(house.server.process.pid).memory_info
        before_bytes = memory().rss
        neighbour = house.begin(Answer("Neighbour.", 4_000, seed=6))
        chaos = stack.enter_context(Chaos(house.server.port, itertools.repeat(Line(to_client=flow))))
        for _ in range(num_readers):
            reader = stack.enter_context(Wire(chaos.port))
            reader.send("GET", f"/v1/streams/{long_id}/events")
        until(lambda: chaos.num_connections == num_readers)
        most_bytes = 0

        def are_gone() -> bool:
            nonlocal most_bytes
            most_bytes = max(most_bytes, memory().rss - before_bytes)
            return len(psutil.Process(house.server.process.pid).net_connections("tcp4")) < 10

        until(are_gone)
        assert most_bytes < num_readers * READER_BYTES
        neighbour.wait()
        assert follow(house.server.port, long_id) == LONG.native(long_id)


# Packets are lost


@pytest.mark.parametrize("count", [20, pytest.param(150, marks=(pytest.mark.deep, pytest.mark.timeout(300)))])
@apart
def test_three_in_ten_packets_are_lost(tmp_path: Path, count: int) -> None:
    """It is slower, but always correct."""
    with House(tmp_path, PACED) as house:
        streams = [house.begin(Answer(f"Loss {seed}.", count, seed)).seen(1) for seed in range(2)]
        with dropping("numgen random mod 100 < 30"):
            for stream in streams:
                stream.wait()


@pytest.mark.deep
@apart
def test_a_narrow_line(tmp_path: Path) -> None:
    with House(tmp_path, PACED) as house:
        streams = [house.begin(Answer(f"Narrow {seed}.", 100, seed)) for seed in range(3)]
        with narrow("256kbit"):
            for stream in streams:
                stream.wait()


@apart
def test_a_cable_is_pulled_and_put_back(tmp_path: Path) -> None:
    """Both directions fall silent, and nobody says goodbye: the server lets the reader go all the same, and its stream
    runs on. The reader is told nothing, ever. When it comes back by itself, the rest is there."""
    with House(tmp_path, PACED, "--write-s", "1", "--linger-s", "30") as house:
        stream = house.begin(Answer("Cable.", 450, seed=1)).seen(1)
        descriptors = psutil.Process(house.server.process.pid).num_fds
        num_before = descriptors()
        with DisconnectingClient(house.server) as reader:
            reader.send("GET", f"{stream.path}/events")
            assert reader.head() == 200
            seen = [reader.event() for _ in range(20)]
            assert descriptors() == num_before + 1
            with dropping(f"tcp sport {reader.port}"), dropping(f"tcp dport {reader.port}"):
                until(lambda: descriptors() == num_before)
            assert house.server.state(stream.stream_id)["status"] == "running"
        assert follow(house.server.port, stream.stream_id, seen) == stream.answer.native(stream.stream_id)


# A proxy that keeps things back


_NGINX = """
daemon off; worker_processes 1; user root; pid {directory}/nginx.pid; error_log {directory}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off; gzip on; gzip_types *; gzip_min_length 0;
    client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    server {{ listen 127.0.0.1:{port}; location / {{
        proxy_pass http://127.0.0.1:{server_port}; proxy_http_version {version};
    }} }}
}}
"""


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Callable[[int, str], str]]:
    """`nginx(port, version)` is the address of one in front of that port, to which it speaks that version of HTTP. It
    buffers, as it does by itself, and compresses."""
    if shutil.which("nginx") is None:
        skip_missing("nginx")
    with contextlib.ExitStack() as running:

        def start(server_port: int, version: str) -> str:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            path = tmp_path / "nginx.conf"
            path.write_text(_NGINX.format(directory=tmp_path, port=port, server_port=server_port, version=version))
            process = subprocess.Popen(["nginx", "-c", str(path)], stderr=subprocess.PIPE)
            running.callback(process.communicate)
            running.callback(process.terminate)

            def listens() -> bool:
                assert process.poll() is None, process.communicate()[1]
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    return True
                return False

            until(listens)
            return f"http://127.0.0.1:{port}"

        yield start


@pytest.mark.parametrize(("version", "coding"), [("1.0", "identity"), ("1.1", "gzip")])
def test_through_nginx_a_token_comes_when_it_is_there(
    house: House, nginx: Callable[[int, str], str], version: str, coding: str
) -> None:
    """nginx does not wait to fill a buffer or to compress better."""
    url = nginx(house.server.port, version)
    answer = Answer("Buffered.", 200, seed=7)
    stream = house.begin(answer)
    path, headers = f"{url}{stream.path}/events", {"accept-encoding": coding}
    with httpx.stream("GET", path, headers=headers, trust_env=False) as response:
        assert response.status_code == 200
        pieces = response.iter_bytes()
        seen = next(pieces)
        assert house.server.state(stream.stream_id)["status"] == "running"
        assert seen.count(b"\nid: ") < 100
        seen += b"".join(pieces)
    assert seen == b"".join(answer.native(stream.stream_id))
