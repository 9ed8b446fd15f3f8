"""Conformance: an echo server with this server's settings, tested by the Autobahn test suite."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from tests.transport.autobahn import Suite
from tests.waiting import LONG_S

from tailrace.dialects import native
from tailrace.settings import Settings
from tailrace.transport.listening import Uvicorn

# 9 is large messages; 12 and 13 are compression, which is not offered, and this is what they say to that.
GROUPS = {
    "framing": (["1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "10.*"], 247),
    "limits": (["9.*"], 54),
    "compression": (["12.1.1", "13.1.1"], 2),
}


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({**message, "type": "websocket.send"})


@contextmanager
def _serving() -> Iterator[str]:
    config = Uvicorn(_echo, Settings(ws_message_bytes=16 * 2**20), native.encode_error).config
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=uvloop.run, args=(server.serve(sockets=[sock]),))
        thread.start()
        try:
            yield f"ws://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS)
def test_no_case_fails(group: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cases, count = GROUPS[group]
    suite = Suite()
    with _serving() as url:
        outcomes = suite.run(url, cases, tmp_path)
    assert len(outcomes) == count
    well = {"OK", "NON-STRICT", "INFORMATIONAL"} if group != "compression" else {"UNIMPLEMENTED"}
    assert [outcome for outcome in outcomes if outcome.behavior not in well] == []
    assert [outcome for outcome in outcomes if outcome.closing not in ("OK", "INFORMATIONAL")] == []
    assert not caplog.records  # bad input of clients is not news
