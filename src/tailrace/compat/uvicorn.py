"""uvicorn's connection class, its server without signal handlers, and what a protocol class needs beside them."""

from __future__ import annotations

import asyncio
import contextlib

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

__all__ = [
    "STATUS_LINE", "HttpConnection", "RequestResponseCycle", "ServerState", "ServerWithoutSignals", "get_local_addr",
    "get_remote_addr", "is_ssl", "report_disconnect",
]  # fmt: skip


class ServerWithoutSignals(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # a generator of None, typed so in uvicorn
        yield


class HttpConnection(HttpToolsProtocol):
    """One HTTP connection. Its only timer is uvicorn's for idle connections, which subclasses use for other times, too.
    Upgrades need HTTP/1.1."""

    # Python shares the keys of instance dictionaries only up to 30 keys, and uvicorn's class has 27. Slots save a
    # kilobyte per connection.
    __slots__ = ("running",)

    running: RequestResponseCycle | None  # the running request; `cycle` is the last one that arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        self.running = None
        super().connection_made(transport)

    def on_timer(self) -> None:
        """The timer has expired."""
        raise NotImplementedError

    @property
    def is_timed(self) -> bool:
        return self.timeout_keep_alive_task is not None

    def start_timer(self, delay_s: float) -> None:
        self.stop_timer()
        self.timeout_keep_alive_task = self.loop.call_later(delay_s, self.timeout_keep_alive_handler)

    def stop_timer(self) -> None:
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        self.on_timer()

    def has_unknown_upgrade(self) -> bool:
        """Return whether the head asks for another protocol than WebSocket."""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def _should_upgrade(self) -> bool:
        return super()._should_upgrade() and self.parser.get_http_version() == "1.1"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self.running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # uvicorn defines its own ASGI types


def report_disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application that its client has left, if it has not answered completely."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
