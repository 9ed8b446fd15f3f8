"""The Redis of the simulation and a real one answer alike to everything that servers ask in a schedule."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import hiredis
import pytest
from tests.simulation.defects import EVERY_BATCH, FIRST_WITH_BATCH
from tests.simulation.redis_model import Argument, as_bytes
from tests.simulation.schedule import Schedule
from tests.testing.redis_server import own_redis

_SEEDS = (*range(6), FIRST_WITH_BATCH, FIRST_WITH_BATCH + EVERY_BATCH)
_WITH_TIME = ("'TIME'",)  # in scripts whose replies depend on it


def _recorded(seed: int) -> tuple[list[tuple[list[Argument], Any]], Mapping[bytes, object]]:
    """Return the commands of a schedule in order with their replies, and what Redis has at the end. A key whose time is
    over is deleted in that place."""
    schedule = Schedule(seed, may_lose=False)
    commands: list[tuple[list[Argument], Any]] = []  # Any: as in RESP
    model = schedule.host.model
    model.on_command = lambda command, reply: commands.append((list(command), reply))
    model.on_expired = lambda key: commands.append((["DEL", key], 1))
    assert schedule.outcome().violation == ""
    return commands, model.dump()


class _Plain:
    """A client of a real Redis that leaves replies as they are."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._reader = hiredis.Reader()

    def ask(self, *command: Argument) -> Any:  # Any: as in RESP
        packed: Any = tuple(map(as_bytes, command))  # Any: its type has one element
        self._socket.sendall(hiredis.pack_command(packed))
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(1 << 16))
        return reply

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Plain]:
    with own_redis(tmp_path_factory.mktemp("redis")) as (_, process), closing(_Plain(process.port)) as client:
        yield client


@pytest.mark.parametrize("seed", _SEEDS)
def test_the_same_commands_have_the_same_replies(client: _Plain, seed: int) -> None:
    commands, state = _recorded(seed)
    client.ask("FLUSHALL")
    for command, reply in commands:
        if command[0] == "XADD" and "*" in command:
            command[command.index("*")] = reply  # the time
        theirs = client.ask(*command)
        if command[0] == "PTTL":
            assert (theirs > 0) == (reply > 0), command
        elif command[0] == "EVAL" and any(name in str(command[1]) for name in _WITH_TIME):
            assert type(theirs) is type(reply), command
        elif command[0] == "SUNION":
            assert sorted(theirs) == reply, command
        else:
            assert theirs == reply, command
    theirs = {key: _value(client, key) for key in client.ask("KEYS", "*") if not key.endswith(b":epoch")}
    assert theirs == {key: value for key, value in state.items() if not key.endswith(b":epoch")}  # the time


def _value(client: _Plain, key: bytes) -> object:
    """Return what a real Redis has under a key, as `RedisModel.dump` returns it."""
    match client.ask("TYPE", key):
        case b"string":
            return client.ask("GET", key)
        case b"hash":
            return _pairs(client.ask("HGETALL", key))
        case b"set":
            return set(client.ask("SMEMBERS", key))
        case b"zset":
            return {one: float(score) for one, score in _pairs(client.ask("ZRANGE", key, 0, -1, "WITHSCORES")).items()}
        case b"stream":
            return client.ask("XRANGE", key, "-", "+")
    raise AssertionError(key)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
