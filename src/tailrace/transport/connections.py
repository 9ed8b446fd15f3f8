"""Limits on connections, and the write timeout for slow clients.

There is a limit for all connections, and one for the connections of a client: an IPv4 address or an IPv6 /64 network. A
client on loopback may have more connections, since it may be a proxy for many. The limits are computed for each new
connection, because the process's limit of open files can change while it runs. Some descriptors are reserved for other
files, and for connections that get an error response. If all connections are taken, the one that waits longest for its
next request is closed, and a new one takes its place.

The write timeout: within each `write_s` a client must take `PIECE_BYTES`, or all that is buffered for it. Nothing is
written while anything is buffered, so a slow client holds one piece of memory. The kernel has the same timeout for its
own buffers (TCP_USER_TIMEOUT), and sends keepalive probes to find clients that have vanished.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Callable

from tailrace.errors import TailraceError
from tailrace.settings import Settings
from tailrace.transport.addresses import is_loopback, network_of

if sys.platform != "win32":
    import resource

__all__ = ["PIECE_BYTES", "Connections", "EncodeError", "Slot"]

EncodeError = Callable[[TailraceError], tuple[int, bytes]]  # returns the HTTP status, and a body in JSON

PIECE_BYTES = 64 * 2**10
_RESERVED = 80  # descriptors for other files, of which the process has a few dozen, and for listening
_MAX_REFUSED = 16  # excess connections that get an error response at a time; further ones are closed at once
_PROBE_S = 15  # idle time before the first keepalive probe, and between probes


class Connections:
    """The connections of a server."""

    def __init__(self, settings: Settings) -> None:
        self.use(settings)
        self._num_open = 0
        self._by_client: Counter[str] = Counter()
        self._idle: dict[Slot, None] = {}  # those between two requests, the longest first

    def use(self, settings: Settings) -> None:
        """Use other settings for new connections."""
        self._max_connections = settings.max_connections
        self._client_connections = settings.client_connections
        self._write_s = settings.write_s

    def enter(self, transport: asyncio.Transport, address: str) -> Slot:
        """Count a new connection. The slot says whether the connection exceeds a limit. Every slot must be left."""
        client = network_of(address)
        self._num_open += 1
        self._by_client[client] += 1
        limit = _within_descriptors(self._max_connections)
        share = limit - limit // 4 if is_loopback(client) else max(limit // 10, 1)
        client_limit = self._client_connections or share
        num_excess, client_excess = self._num_open - limit, self._by_client[client] - client_limit
        if client_excess <= 0 < num_excess and self._idle:  # not for a client that is refused anyway
            next(iter(self._idle)).close()
            num_excess = 0
        num_excess = max(num_excess, client_excess)
        _tune(transport, self._write_s)
        return Slot(self, transport, client, self._write_s, num_excess)

    def rest(self, slot: Slot) -> None:
        self._idle[slot] = None

    def wake(self, slot: Slot) -> None:
        self._idle.pop(slot, None)

    def free(self, client: str) -> None:
        self._num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


class Slot:
    """The slot of one connection, with the write timeout."""

    __slots__ = (
        "_client",
        "_connections",
        "_num_waiting_bytes",
        "_timer",
        "_transport",
        "_write_s",
        "gets_refusal",
        "is_refused",
    )

    def __init__(
        self, connections: Connections, transport: asyncio.Transport, client: str, write_s: float, num_excess: int
    ) -> None:
        self._connections = connections
        self._transport = transport
        self._client = client
        self._write_s = write_s
        self._num_waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_refused = num_excess > 0
        self.gets_refusal = num_excess <= _MAX_REFUSED  # otherwise it is closed without a response

    def begin(self) -> None:
        """Pause writing whenever a byte is buffered, from now on. May pause at once."""
        # asyncio's TLS transport pauses at its limit, the TCP transport above it.
        limit_bytes = 0 if self._transport.get_extra_info("sslcontext") is None else 1
        self._transport.set_write_buffer_limits(high=limit_bytes)

    def rest(self) -> None:
        """Wait for the next request. Until `wake`, the connection may be closed."""
        self._connections.rest(self)

    def wake(self) -> None:
        self._connections.wake(self)

    def close(self) -> None:
        self.wake()
        self._transport.close()

    def leave(self) -> None:
        """Free the slot of a lost connection. Called once."""
        self.wake()
        self.resume_writing()
        self._connections.free(self._client)

    def pause_writing(self) -> None:
        self._num_waiting_bytes = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._write_s, self._check)

    def resume_writing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._num_waiting_bytes - self._transport.get_write_buffer_size() < PIECE_BYTES:
            self._transport.abort()
        else:
            self.pause_writing()


def _within_descriptors(num_connections: int) -> int:
    if sys.platform == "win32":
        return num_connections
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return num_connections
    return min(num_connections, limit - min(_RESERVED, limit * 3 // 4))


def _tune(transport: asyncio.Transport, write_s: float) -> None:
    """Set the socket's keepalive and timeout options, as far as the system has them."""
    sock = transport.get_extra_info("socket")
    options = {
        "TCP_KEEPIDLE": _PROBE_S,
        "TCP_KEEPINTVL": _PROBE_S,
        "TCP_USER_TIMEOUT": int(write_s * 1000),
        # Otherwise the kernel buffers megabytes for a client that does not read, and writing pauses late.
        "TCP_NOTSENT_LOWAT": PIECE_BYTES,
    }
    with contextlib.suppress(OSError):  # the client has disconnected
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, number in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
