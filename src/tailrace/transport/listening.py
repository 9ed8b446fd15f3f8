"""Listening sockets, uvicorn and signals, for `tailrace serve` and `tailrace run`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tailrace.compat.uvicorn import ServerWithoutSignals
from tailrace.settings import Settings
from tailrace.transport.connections import Connections, EncodeError
from tailrace.transport.http_protocol import SINGLE_HEADERS, HttpProtocol
from tailrace.transport.tls import Tls
from tailrace.transport.websocket_protocol import WebSocketProtocol

__all__ = ["BACKLOG", "Signals", "Uvicorn"]

BACKLOG = 2048
_LISTENERS = 16  # of a port
_CLOSE_S = 2.0  # for complete answers to reach their clients


class Uvicorn(ServerWithoutSignals):
    """uvicorn; `Signals` has the signal handlers, which drain. `encode_error` writes the errors of connections. A
    request that repeats one of `single_headers` is refused.

    Raises: ModelError for an invalid certificate.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, encode_error: EncodeError, single_headers: Iterable[str] = ()
    ) -> None:
        self._tls = tls = Tls(settings) if settings.tls_cert else None
        self._settings = settings
        self._connections = Connections(settings)
        self._encode_error = encode_error
        self._single_headers = SINGLE_HEADERS.union(name.lower().encode() for name in single_headers)
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",  # it recognises only coroutine functions
                log_config=None,
                access_log=False,
                lifespan="off",
                http=self._http,  # type: ignore[arg-type]  # uvicorn only calls it
                ws=self._websocket,  # type: ignore[arg-type]  # as above
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(_CLOSE_S),
                ssl_context_factory=None if tls is None else lambda config, default: tls.context,
            )
        )
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Use other settings for new connections."""
        self._settings = settings
        self._connections.use(settings)
        self.config.ws_max_size = settings.ws_message_bytes
        self.config.ws_ping_interval = settings.ws_ping_s

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on listening sockets."""
        # uvloop accepts one connection per socket and turn of the event loop, and while streams run, a turn takes
        # milliseconds. With duplicates it accepts more of the clients that connect at once.
        sockets = [sock.dup() for sock in sockets or () for _ in range(_LISTENERS - 1)] + (sockets or [])
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._tls.follow_files()) if self._tls is not None else None
            await super().serve(sockets)
            if following is not None:
                following.cancel()

    def _http(self, *args: Any, **kwargs: Any) -> HttpProtocol:  # Any: of uvicorn
        return HttpProtocol(
            *args,
            **kwargs,
            settings=self._settings,
            connections=self._connections,
            encode_error=self._encode_error,
            single_headers=self._single_headers,
        )

    def _websocket(self, *args: Any, **kwargs: Any) -> WebSocketProtocol:  # Any: of uvicorn
        message_s = self._settings.ws_message_s
        return WebSocketProtocol(*args, **kwargs, message_s=message_s, encode_error=self._encode_error)


class Signals:
    """Handles SIGINT and SIGTERM: the first one starts a graceful shutdown, the second one forces it."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.force_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # asyncio restores the default handlers when its loop closes; a signal would then kill the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    async def wait_forced(self, within_s: float) -> None:
        """Wait for this time, or until a second signal comes."""
        if within_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.force_requested.wait(), within_s)

    def _on_signal(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process exits already
            self._loop.call_soon_threadsafe(self._set_events)

    def _set_events(self) -> None:
        if self.stop_requested.is_set():
            self.force_requested.set()
        self.stop_requested.set()
