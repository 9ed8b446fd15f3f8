"""Who may be connected, and how fast a client has to take what it is sent.

A connection takes one slot among all and one among those of its client, which is an IPv4 address or an IPv6 network of
64 bits. A client on loopback may have more slots than others, since it may be a proxy for many. The limits are looked
at when somebody comes: the number of descriptors that the process may have can change while it runs. Some are kept back
for what else is open, and for those who are told that there is no slot.

The lowest pace: in each `write_s`, a client takes `PIECE_BYTES`, or all that waits for it. Nothing is written while
anything waits, so what a slow client holds is one piece. The kernel keeps the same time for what waits in its own
buffers, and notices clients that have vanished: unacknowledged bytes, and probes where there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import Counter

from tailrace.access.principal import is_loopback, network_of
from tailrace.settings import Settings

if sys.platform != "win32":
    import resource

__all__ = ["PIECE_BYTES", "Connections", "Slot"]

PIECE_BYTES = 64 * 2**10
_RESERVED = 64  # descriptors, of which the process has some dozens open at most
_MAX_REFUSED = 16  # connections too many that are told so at a time; further ones are cut off at once
_PROBE_S = 15  # silence after which the kernel asks whether the client is still there, and between two questions


class Connections:
    """The connections of a server."""

    def __init__(self, settings: Settings) -> None:
        self._max_connections = settings.max_connections
        self._client_connections = settings.client_connections
        self._write_s = settings.write_s
        self._num_open = 0
        self._by_client: Counter[str] = Counter()

    def enter(self, transport: asyncio.Transport, address: str) -> Slot:
        """Everybody gets a slot, to be left again; it says whether that was one too many."""
        client = network_of(address)
        self._num_open += 1
        self._by_client[client] += 1
        limit = _within_descriptors(self._max_connections)
        share = limit - limit // 4 if is_loopback(client) else max(limit // 10, 1)
        client_limit = self._client_connections or share
        num_excess = max(self._num_open - limit, self._by_client[client] - client_limit)
        _tune(transport, self._write_s)
        return Slot(self, transport, client, self._write_s, num_excess)

    def free(self, client: str) -> None:
        self._num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


class Slot:
    """One connection's. It keeps the time while the transport has bytes that its client does not take."""

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
        self.gets_refusal = num_excess <= _MAX_REFUSED  # and is not just cut off

    def begin(self) -> None:
        """From now on any byte that waits is noticed, and nothing is put behind it. May pause writing at once."""
        # TLS pauses from its limit on, TCP beyond it.
        limit_bytes = 0 if self._transport.get_extra_info("sslcontext") is None else 1
        self._transport.set_write_buffer_limits(high=limit_bytes)

    def leave(self) -> None:
        """The connection is lost. Called once."""
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
    """What the kernel is asked to see to, as far as it can."""
    sock = transport.get_extra_info("socket")
    options = {
        "TCP_KEEPIDLE": _PROBE_S,
        "TCP_KEEPINTVL": _PROBE_S,
        "TCP_USER_TIMEOUT": int(write_s * 1000),
        # Without it, the kernel keeps megabytes for a client that does not read, and we hear of that late.
        "TCP_NOTSENT_LOWAT": PIECE_BYTES,
    }
    with contextlib.suppress(OSError):  # the client has left already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, number in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
