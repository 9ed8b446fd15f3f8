"""The WebSocket code around the protocol library, with a fake transport and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from tests.http.frames import BINARY, CLOSE, CONTINUATION, PING, TEXT, frame, handshake
from tests.streams.virtual_time import run as run_scenario
from tests.streams.virtual_time import scenario
from tests.waiting import turn
from uvicorn.server import ServerState

from tailrace.dialects import native
from tailrace.transport.websocket_protocol import WebSocketProtocol


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_reading_ = True
        self.has_said_all = False
        self.is_aborted = False

    def write(self, data: Any) -> None:
        assert not self.has_said_all
        self.written += data

    def write_eof(self) -> None:
        self.has_said_all = True

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        assert self.is_reading_
        self.is_reading_ = False

    def resume_reading(self) -> None:
        assert not self.is_reading_
        self.is_reading_ = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_protocol(self) -> asyncio.BaseProtocol:
        return asyncio.Protocol()

    def take(self) -> bytes:
        written, self.written = self.written, b""
        return written


class _Line:
    """A connection and its application, whose actions a test controls through `receive` and `send`."""

    scope: Scope
    receive: Receive
    send: Send

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None, *, ping_s: float = 0.0
    ) -> None:  # fmt: skip
        config = uvicorn.Config(
            app or self._app, interface="asgi3", log_config=None, ws_max_size=100_000, ws_ping_interval=ping_s
        )
        config.load()
        self.state = ServerState()
        self.shell = WebSocketProtocol(config, self.state, {}, message_s=30.0, encode_error=native.encode_error)
        config.ws_max_size, config.ws_ping_interval = 1, 0.1  # of later connections
        self.transport = _Transport()
        self.shell.connection_made(self.transport)
        self.over = asyncio.Event()
        self.has_app = asyncio.Event()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.has_app.set()
        await self.over.wait()

    def ask(self, **headers: str) -> None:
        lines = [f"{name}: {text}" for name, text in {"host": "localhost", **handshake(**headers)}.items()]
        self.shell.data_received("\r\n".join(["GET /v1/ws HTTP/1.1", *lines, "", ""]).encode())

    async def open(self) -> _Line:
        self.ask()
        await self.has_app.wait()
        assert await self.receive() == {"type": "websocket.connect"}
        await self.send({"type": "websocket.accept", "headers": [(b"x-request-id", b"5")]})
        head = self.transport.take()
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"x-request-id: 5\r\n" in head
        return self

    def hear(self, content: bytes) -> None:
        self.shell.data_received(content)

    async def say(self, text: str) -> None:
        await self.send({"type": "websocket.send", "text": text})


def _server_frame(opcode: int, payload: bytes = b"") -> bytes:
    return frame(opcode, payload, is_masked=False)


def _closing(code: int, reason: str) -> bytes:
    return _server_frame(CLOSE, code.to_bytes(2, "big") + reason.encode())


# Reading


@scenario
async def test_reading_continues_as_the_application_reads() -> None:
    line = await _Line().open()
    line.hear(frame(TEXT, b"One") + frame(BINARY, b"Two"))
    assert not line.transport.is_reading_
    assert await line.receive() == {"type": "websocket.receive", "text": "One"}
    assert not line.transport.is_reading_
    assert await line.receive() == {"type": "websocket.receive", "bytes": b"Two"}
    assert line.transport.is_reading_


@scenario
async def test_large_input_is_read_in_slices_with_turns_for_other_tasks() -> None:
    line = await _Line().open()
    num_turns = 0
    line.hear(frame(TEXT, is_last=False) + frame(CONTINUATION, is_last=False) * 40_000 + frame(CONTINUATION, b"Hi"))
    receiving = asyncio.ensure_future(line.receive())
    while not receiving.done():
        assert num_turns == 0 or not line.transport.is_reading_
        num_turns += 1
        await turn()
    assert receiving.result() == {"type": "websocket.receive", "text": "Hi"}
    assert num_turns > 50
    assert line.transport.is_reading_


@scenario
async def test_fragments_are_joined_inside_characters() -> None:
    line = await _Line().open()
    for byte in "🌊é".encode():
        line.hear(frame(TEXT if byte == 0xF0 else CONTINUATION, bytes([byte]), is_last=byte == 0xA9))
    assert await line.receive() == {"type": "websocket.receive", "text": "🌊é"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, b"x" * 100_001), 1009),
        (frame(TEXT | 0x40, b"x"), 1002),
        (frame(TEXT, b"x", is_masked=False), 1002),
    ],
    ids=["not UTF-8", "too large", "reserved bit", "no mask"],
)
def test_errors_close_with_their_code(content: bytes, code: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        line = await _Line().open()
        line.hear(content + frame(TEXT, b"Too late."))
        await asyncio.sleep(0.001)
        message = await line.receive()
        assert (message["type"], message["code"]) == ("websocket.disconnect", code)
        assert line.transport.written[2:4] == code.to_bytes(2, "big")
        assert line.transport.has_said_all
        with pytest.raises(ConnectionResetError):
            await line.say("Hello?")
        await asyncio.sleep(10.1)
        assert line.transport.is_aborted

    run_scenario(main())
    assert not caplog.records


@scenario
async def test_messages_before_the_close_are_received() -> None:
    line = await _Line().open()
    line.hear(frame(TEXT, b"Stop") + frame(CLOSE, b"\x03\xe8Bye"))
    assert await line.receive() == {"type": "websocket.receive", "text": "Stop"}
    assert await line.receive() == {"type": "websocket.disconnect", "code": 1000, "reason": "Bye"}
    assert line.transport.take() == _closing(1000, "Bye")
    assert line.transport.has_said_all


@pytest.mark.parametrize(
    "content",
    [
        frame(TEXT, b"x" * 100),
        frame(BINARY, b"x" * 70_000),
        frame(TEXT, b"x", is_last=False) * 1 + frame(CONTINUATION, b"x", is_last=False) * 40,
        frame(TEXT, b"x", is_last=False) + (frame(PING) + frame(CONTINUATION, is_last=False)) * 20,
        frame(PING, b"x" * 60),
        frame(BINARY, is_last=False) + frame(CONTINUATION, is_last=False) * 40,
    ],
    ids=["a frame", "a large frame", "fragments", "fragments and pings", "a ping", "empty fragments"],
)
def test_a_message_byte_by_byte_times_out(content: bytes) -> None:
    @scenario
    async def one_message() -> None:
        line = await _Line().open()
        receiving = asyncio.ensure_future(line.receive())
        num_bytes = 0
        while not receiving.done():
            line.hear(content[num_bytes : num_bytes + 1])
            num_bytes += 1
            await asyncio.sleep(1)
        assert num_bytes in (30, 31)
        assert receiving.result() == {"type": "websocket.disconnect", "code": 1008, "reason": ""}
        assert line.transport.take().endswith(_closing(1008, "A message did not arrive in time."))

    one_message()


@scenario
async def test_each_message_has_its_own_time() -> None:
    """Reads do not have to end at the end of a message."""
    line = await _Line().open()
    content = frame(TEXT, b"Hi") * 100
    line.hear(content[:3])
    for start in range(3, 600, 8):
        line.hear(content[start : start + 8])
        assert await line.receive() == {"type": "websocket.receive", "text": "Hi"}
        await asyncio.sleep(20)


@scenario
async def test_a_message_does_not_time_out_while_the_application_is_busy() -> None:
    line = await _Line().open()
    line.hear(frame(TEXT, b"One") + frame(TEXT, b"Two")[:4])
    await asyncio.sleep(100)
    assert await line.receive() == {"type": "websocket.receive", "text": "One"}
    await asyncio.sleep(20)
    line.hear(frame(TEXT, b"Two")[4:])
    assert await line.receive() == {"type": "websocket.receive", "text": "Two"}
    await asyncio.sleep(100)
    await line.say("Still here.")


# Writing


@scenario
async def test_senders_wait_for_space_and_take_turns() -> None:
    line = await _Line().open()
    line.shell.pause_writing()
    tasks = [asyncio.create_task(line.say(text)) for text in ("a", "b")]
    await asyncio.sleep(1)
    assert line.transport.take() == b""
    line.shell.resume_writing()
    line.shell.pause_writing()  # room for one
    await asyncio.sleep(1)
    assert line.transport.take() == _server_frame(TEXT, b"a")
    line.shell.resume_writing()
    await asyncio.gather(*tasks)
    assert line.transport.take() == _server_frame(TEXT, b"b")


@scenario
async def test_many_frames_are_one_write() -> None:
    line = await _Line().open()
    texts = [b"a" * size for size in (0, 1, 125, 126, 65_535, 65_536)]
    await line.send({"type": "tailrace.websocket.send", "frames": texts})
    assert line.transport.take() == b"".join(_server_frame(TEXT, text) for text in texts)
    await line.send({"type": "websocket.send", "bytes": b"\xff"})
    assert line.transport.take() == _server_frame(BINARY, b"\xff")


@scenario
async def test_a_waiting_sender_notices_a_disconnect() -> None:
    line = await _Line().open()
    line.shell.pause_writing()
    tasks = [asyncio.create_task(line.say(text)) for text in ("a", "b")]
    await asyncio.sleep(1)
    line.shell.connection_lost(ConnectionResetError())
    for task in tasks:
        with pytest.raises(ConnectionResetError):
            await task
    assert (await line.receive())["code"] == 1006
    assert not line.state.connections


@scenario
async def test_senders_do_not_wait_on_a_half_closed_connection() -> None:
    line = await _Line().open()
    line.shell.pause_writing()
    waiting = asyncio.create_task(line.say("a"))
    await asyncio.sleep(1)
    line.shell.eof_received()
    for saying in (waiting, line.say("b")):
        with pytest.raises(ConnectionResetError):
            await saying
    assert line.transport.take() == b""
    await asyncio.sleep(10.1)
    assert line.transport.is_aborted


@scenario
async def test_only_the_last_ping_is_answered() -> None:
    line = await _Line().open()
    line.hear(frame(PING, b"1"))
    assert line.transport.take() == b"\x8a\x011"
    line.shell.pause_writing()
    for number in b"23456789":
        line.hear(frame(PING, bytes([number])))
    assert line.transport.written == b""
    line.shell.resume_writing()
    assert line.transport.take() == b"\x8a\x019"
    line.shell.pause_writing()
    line.hear(frame(PING, b"10"))
    await line.send({"type": "websocket.close"})
    line.shell.resume_writing()
    assert line.transport.take() == _closing(1000, "")  # and no pong behind it


# Time


@scenario
async def test_an_idle_client_is_pinged_and_then_closed() -> None:
    line = await _Line(ping_s=20.0).open()
    await asyncio.sleep(20.1)
    assert line.transport.take() == _server_frame(PING)
    line.hear(frame(0xA))
    await asyncio.sleep(40)
    assert line.transport.take() == _server_frame(PING) * 2
    await asyncio.sleep(20)
    assert line.transport.take() == _closing(1011, "Pings were not answered.")
    await asyncio.sleep(10)
    assert line.transport.is_aborted


@scenario
async def test_a_client_that_is_not_read_is_not_closed() -> None:
    line = await _Line(ping_s=20.0).open()
    line.hear(frame(TEXT, b"Hi"))
    await asyncio.sleep(500)
    assert set(line.transport.take()[::2]) == {_server_frame(PING)[0]}
    assert (await line.receive())["type"] == "websocket.receive"
    line.hear(frame(0xA))
    await asyncio.sleep(19)
    assert not line.transport.has_said_all


@scenario
async def test_a_client_that_does_not_answer_a_close_is_cut_off() -> None:
    line = await _Line().open()
    await line.send({"type": "websocket.close", "code": 1001, "reason": "Enough."})
    assert line.transport.take() == _closing(1001, "Enough.")
    assert not line.transport.has_said_all
    await asyncio.sleep(10.1)
    assert line.transport.is_aborted


@scenario
async def test_a_client_that_answers_a_close_is_finished() -> None:
    line = await _Line().open()
    await line.send({"type": "websocket.close", "code": 1001, "reason": "Enough."})
    line.hear(frame(TEXT, b"Oh?") + frame(CLOSE, b"\x03\xe9"))
    assert line.transport.has_said_all
    assert (await line.receive())["code"] == 1001
    line.shell.connection_lost(None)


# The server, and the application


@scenario
async def test_a_stopping_server_closes_with_1012() -> None:
    line = await _Line().open()
    line.shell.shutdown()
    assert line.transport.take() == _closing(1012, "The server is shutting down.")
    assert (await line.receive())["code"] == 1012
    await asyncio.sleep(1.1)
    assert line.transport.is_aborted
    early = _Line()
    early.ask()
    early.shell.shutdown()
    assert early.transport.take().startswith(b"HTTP/1.1 503 ")
    assert early.transport.has_said_all


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_application_is_logged_and_reported(when: str, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if when == "after":
            await send({"type": "websocket.accept"})
        raise ValueError("a defect")

    async def main() -> None:
        line = _Line(app)
        line.ask()
        await asyncio.sleep(0.001)
        written = line.transport.take()
        if when == "before":
            assert written.startswith(b"HTTP/1.1 500 ")
        else:
            assert written.endswith(_closing(1011, ""))
        assert not line.state.tasks

    run_scenario(main())
    assert "a defect" in caplog.text


@pytest.mark.parametrize("does_accept", [True, False])
def test_an_application_that_just_returns(does_accept: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if does_accept:
            await send({"type": "websocket.accept"})

    async def main() -> None:
        line = _Line(app)
        line.ask()
        await asyncio.sleep(0.001)
        written = line.transport.take()
        assert written.endswith(_closing(1000, "")) if does_accept else written.startswith(b"HTTP/1.1 500 ")

    run_scenario(main())


@scenario
async def test_an_application_may_answer_with_http() -> None:
    line = _Line()
    line.ask()
    await line.has_app.wait()
    start: Message = {"type": "websocket.http.response.start", "status": 403, "headers": [(b"content-type", b"a/b")]}
    await line.send(start)
    await line.send({"type": "websocket.http.response.body", "body": b"No", "more_body": True})
    assert line.transport.written == b""
    await line.send({"type": "websocket.http.response.body", "body": b"."})
    head, _, body = line.transport.take().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"content-type: a/b" in head
    assert b"content-length: 3" in head
    assert body == b"No."
    assert line.transport.has_said_all
    with pytest.raises(ConnectionResetError):
        await line.send({"type": "websocket.accept"})


@pytest.mark.parametrize("leaving", ["junk", "lost", "eof"])
def test_a_client_that_disconnects_before_the_answer_gets_none(leaving: str) -> None:
    async def main() -> None:
        line = _Line()
        line.ask()
        await line.has_app.wait()
        if leaving == "junk":
            line.hear(b"\xff\xff\xff\xff")
        elif leaving == "lost":
            line.shell.connection_lost(None)
        else:
            line.shell.eof_received()
        assert await line.receive() == {"type": "websocket.connect"}
        assert (await line.receive())["type"] == "websocket.disconnect"
        assert line.transport.is_aborted
        with pytest.raises(ConnectionResetError):
            await line.send({"type": "websocket.accept"})
        line.over.set()
        await asyncio.sleep(0.001)
        assert line.transport.written == b""

    run_scenario(main())


@scenario
async def test_bad_input_before_the_answer_is_refused() -> None:
    line = _Line()
    line.ask()
    await line.has_app.wait()
    line.hear(frame(TEXT, b"\xff"))
    head, _, body = line.transport.take().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"This is not UTF-8." in body
    assert line.transport.has_said_all
    assert await line.receive() == {"type": "websocket.connect"}
    assert (await line.receive())["type"] == "websocket.disconnect"


@scenario
async def test_an_application_may_answer_with_any_status() -> None:
    line = _Line()
    line.ask()
    await line.has_app.wait()
    await line.send({"type": "websocket.http.response.start", "status": 499, "headers": []})
    await line.send({"type": "websocket.http.response.body", "body": b"No."})
    assert line.transport.take().startswith(b"HTTP/1.1 499 ")
    assert line.transport.has_said_all


@scenario
async def test_the_application_chooses_a_subprotocol() -> None:
    for chosen, header in (("superchat", b"sec-websocket-protocol: superchat\r\n"), ("other", b""), (None, b"")):
        line = _Line()
        line.ask(sec_websocket_protocol="chat, superchat")
        await line.has_app.wait()
        assert line.scope["subprotocols"] == ["chat", "superchat"]
        await line.send({"type": "websocket.accept", "subprotocol": chosen, "headers": []})
        head = line.transport.take().lower()
        assert head.startswith(b"http/1.1 101 ")
        assert header in head
        assert (b"sec-websocket-protocol" in head) == bool(header)
