"""The proxy does what its script says, and does not change bytes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from tailrace.testing import Chaos, Flow, Line

MUCH = random.Random(1).randbytes(3_000_000)  # more than fits into the buffers on the way
_TIMEOUT_S = 10.0


class Far:
    """The other end of a connection: it sends `says` to each connection, and records what it receives."""

    def __init__(self, says: bytes) -> None:
        self.heard: list[bytes] = []
        self.resets = 0
        self.is_over = threading.Event()
        self._says = says
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            near.settimeout(_TIMEOUT_S)
            with near:
                self.heard.append(b"")
                try:
                    near.sendall(self._says)
                    near.shutdown(socket.SHUT_WR)
                    while heard := near.recv(1 << 16):
                        self.heard[-1] += heard
                except OSError:
                    self.resets += 1
            self.is_over.set()


@pytest.fixture
def far() -> Iterator[Far]:
    with contextlib.closing(Far(MUCH)) as far:
        yield far


def dial(chaos: Chaos) -> socket.socket:
    return socket.create_connection(("127.0.0.1", chaos.port), timeout=_TIMEOUT_S)


def hear(near: socket.socket) -> tuple[bytes, bool]:
    """Return all received bytes, and whether the connection ended properly."""
    pieces = []
    try:
        while piece := near.recv(1 << 16):
            pieces.append(piece)
    except ConnectionError:
        return b"".join(pieces), False
    return b"".join(pieces), True


@pytest.mark.parametrize("script", [[], [Line(Flow(piece_bytes=101), Flow(piece_bytes=1))]], ids=["whole", "pieces"])
def test_every_byte_passes_in_both_directions(far: Far, script: Sequence[Line]) -> None:
    sent = MUCH[:50_000]
    with Chaos(far.port, script) as chaos, dial(chaos) as near:
        speaker = threading.Thread(target=near.sendall, args=(sent,))
        speaker.start()
        assert hear(near) == (MUCH, True)
        speaker.join()
        near.shutdown(socket.SHUT_WR)
        assert far.is_over.wait(_TIMEOUT_S)
    assert far.heard == [sent]
    assert far.resets == 0


@pytest.mark.parametrize("count", [0, 1, 70_000])
@pytest.mark.parametrize("end", ["fin", "reset"])
def test_it_ends_after_the_given_bytes(far: Far, end: str, count: int) -> None:
    with Chaos(far.port, [Line(to_client=Flow(end_after_bytes=count, end=end))]) as chaos:  # type: ignore[arg-type]  # one of them
        try:
            with dial(chaos) as near:
                heard, is_proper = hear(near)
        except ConnectionResetError:  # it can be here before connect() has returned
            heard, is_proper = b"", False
        assert far.is_over.wait(_TIMEOUT_S), "the other side was not told"
    assert MUCH[:count].startswith(heard)
    assert is_proper is (end == "fin")
    assert heard == MUCH[:count] or end == "reset"


def test_one_direction_is_closed_and_the_other_continues(far: Far) -> None:
    with Chaos(far.port, [Line(to_client=Flow(end_after_bytes=0, end="half"))]) as chaos, dial(chaos) as near:
        assert hear(near) == (b"", True)
        near.sendall(b"still here")
        near.close()
    assert far.is_over.wait(_TIMEOUT_S)


def test_a_hole_sends_nothing_and_closes_nothing(far: Far) -> None:
    hole = Flow(end_after_bytes=1000, end="hole")
    with Chaos(far.port, [Line(hole, hole)]) as chaos, dial(chaos) as near:
        heard = b""
        while len(heard) < 1000:
            heard += near.recv(1 << 16)
        assert heard == MUCH[:1000]
        near.settimeout(0.2)
        with pytest.raises(TimeoutError):
            near.recv(1)
        assert not far.is_over.is_set()
    assert far.is_over.wait(_TIMEOUT_S), "what is open when the context ends is closed"


def test_a_slow_line_slows_the_sender(far: Far) -> None:
    with Chaos(far.port, [Line(to_client=Flow(bytes_per_s=1000))]) as chaos, dial(chaos) as near:
        heard = near.recv(1)  # waits for as long as dial() allows: a loaded machine may take its time to begin
        near.settimeout(0.01)
        for _ in range(20):
            with contextlib.suppress(TimeoutError):
                heard += near.recv(1 << 16)
        assert 0 < len(heard) < 5000
        assert not far.is_over.wait(0.2), "megabytes were taken from a server whose client reads none"


def test_pieces_arrive_separately(far: Far) -> None:
    line = Line(to_client=Flow(piece_bytes=7, delay_s=0.01, end_after_bytes=70))
    with Chaos(far.port, [line]) as chaos, dial(chaos) as near:
        pieces = list(iter(lambda: near.recv(1 << 16), b""))
    assert b"".join(pieces) == MUCH[:70]
    assert len(pieces) > 5


def test_the_script_applies_to_the_first_connections(far: Far) -> None:
    script = (Line(to_client=Flow(end_after_bytes=count)) for count in (3, 5))
    with Chaos(far.port, script) as chaos:
        lengths = []
        for _ in range(3):
            with dial(chaos) as near:
                lengths.append(len(hear(near)[0]))
        assert chaos.num_connections == 3
    assert lengths == [3, 5, len(MUCH)]


def test_the_server_port_may_change_and_without_a_server_connections_are_reset(far: Far) -> None:
    with Chaos(1, itertools.repeat(Line(to_client=Flow(end_after_bytes=10)))) as chaos:
        with pytest.raises(ConnectionResetError), dial(chaos) as near:
            near.recv(1)
        chaos.server_port = far.port
        with dial(chaos) as near:
            assert hear(near) == (MUCH[:10], True)


def test_a_reset_by_one_side_resets_the_other(far: Far) -> None:
    with Chaos(far.port) as chaos, dial(chaos) as near:
        assert near.recv(1) == MUCH[:1]
        near.close()  # over what it has not read: that is a reset
        assert far.is_over.wait(_TIMEOUT_S)
    assert far.resets == 1


async def test_on_the_loop_of_a_test(far: Far) -> None:
    async with Chaos(far.port, [Line(to_client=Flow(end_after_bytes=10))]) as chaos:
        reader, writer = await asyncio.open_connection("127.0.0.1", chaos.port)
        assert await reader.read() == MUCH[:10]
        writer.close()
    assert len(asyncio.all_tasks()) == 1
