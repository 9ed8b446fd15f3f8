"""The way between servers and Redis: a client like redis-py's, whose commands and answers are late, or get lost."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from tests.simulation.redis_model import Argument, CommandError, RedisModel, ScriptUnknown, name_of
from tests.simulation.simulated_time import Process, Simulation

__all__ = ["PARTS", "Line", "RedisHost", "SimulatedClient"]

Reply = Any  # of Redis: bytes, int, None, or a list of replies

PARTS = 5  # into which commands and scripts are divided by their names
_REFUSED_S = 0.001  # until a connection is refused where nothing listens


@dataclass(slots=True)
class Line:
    """How a server reaches Redis. The chances are of each command."""

    delay_s: float = 0.0005  # of a message, on average
    lose_command: float = 0.0
    lose_answer: float = 0.0
    late: float = 0.0  # the command arrives when the server has given it up
    only: int | None = None  # a part of all commands: the chances are of no others
    is_cut: bool = False  # no message arrives, and nobody is told


@dataclass(slots=True, eq=False)
class _Blocked:
    """An XREAD that waits."""

    positions: Mapping[bytes, bytes]
    count: int
    answer: Callable[[Reply], None]
    is_over: bool = False


@dataclass(eq=False)
class RedisHost:
    """The machine on which Redis runs. Its clock may be set."""

    simulation: Simulation
    clock_offset_s: float = 0.0
    is_up: bool = True
    model: RedisModel = field(init=False)
    num_commands: int = 0
    life: int = 0  # how often it was started again: connections do not outlive that
    actor: Process | None = None  # whose command runs
    on_send: Callable[[Process, str, Sequence[Argument]], None] | None = None  # for who looks into a schedule
    on_late: Callable[[Process], None] | None = None  # whose command arrives when the server has given it up
    _blocked: dict[bytes, list[_Blocked]] = field(default_factory=dict)  # by key

    def __post_init__(self) -> None:
        self.model = RedisModel(lambda: 1_700_000_000.0 + self.simulation.now_s + self.clock_offset_s)
        self.model.on_xadd.append(self._on_xadd)

    def stop(self) -> None:
        self.is_up = False
        self.life += 1
        self._blocked.clear()

    def start(self, state: object | None) -> None:
        """Start again with what its file has: everything if it is None."""
        self.model.restore(self.model.snapshot() if state is None else state)
        self.is_up = True

    def run(self, actor: Process, call: Callable[[RedisModel], Reply]) -> Reply:
        self.num_commands += 1
        self.actor = actor
        try:
            return call(self.model)
        finally:
            self.actor = None

    def block(self, waiting: _Blocked, timeout_s: float) -> None:
        for key in waiting.positions:
            self._blocked.setdefault(key, []).append(waiting)
        self.simulation.after(timeout_s, self._unblock, waiting, None)

    def _on_xadd(self, key: bytes, entry_id: bytes, fields: Sequence[bytes]) -> None:
        if waiting := self._blocked.get(key):
            # When the script is over, as in Redis.
            for one in list(waiting):
                self.simulation.after(0.0, self._serve, one)

    def _serve(self, waiting: _Blocked) -> None:
        if not waiting.is_over and self.is_up and (found := self.model.xread(waiting.positions, waiting.count)):
            self._unblock(waiting, found)

    def _unblock(self, waiting: _Blocked, reply: Reply) -> None:
        if waiting.is_over:
            return
        waiting.is_over = True
        for key in waiting.positions:
            if waiting in (others := self._blocked.get(key, [])):
                others.remove(waiting)
        waiting.answer(reply)


class SimulatedClient:
    """The commands of `redis.asyncio.Redis` that the shared store uses, with the same results."""

    def __init__(self, host: RedisHost, process: Process, line: Line) -> None:
        self._host = host
        self._simulation = host.simulation
        self._process = process
        self.line = line

    # Sending

    def _delay_s(self) -> float:
        return self._simulation.random.expovariate(1.0) * self.line.delay_s

    async def _send(self, name: str, call: Callable[[RedisModel], Reply]) -> Reply:
        """Return the reply to a command. Raises: redis.ConnectionError, what the command raises."""
        return await self._ask(name, lambda answer: answer(self._host.run(self._process, call)))

    async def _ask(self, name: str, serve: Callable[[Callable[[Reply], None]], None]) -> Reply:
        """Let `serve` run at Redis, and return what it answers with."""
        host, simulation, line, process = self._host, self._simulation, self.line, self._process
        future: asyncio.Future[Reply] = process.create_future()
        life, fate, is_meant = (
            host.life,
            simulation.random.random(),
            line.only in (None, zlib.crc32(name.encode()) % PARTS),
        )
        loses_command = is_meant and fate < line.lose_command
        loses_answer = is_meant and not loses_command and fate < line.lose_command + line.lose_answer
        is_late = is_meant and 1 - fate < line.late

        def settle(reply: Reply, error: BaseException | None = None) -> None:
            if future.done() or process.is_dead:
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(reply)

        def break_off() -> None:
            settle(None, RedisConnectionError("Connection closed by server."))

        def answer(reply: Reply, error: BaseException | None = None) -> None:
            if line.is_cut:
                return
            if loses_answer:
                if simulation.random.random() < 0.5:  # else nothing is heard until it takes too long
                    simulation.after(self._delay_s(), break_off)
                return
            simulation.after(self._delay_s(), settle, reply, error)

        def arrive() -> None:
            if not host.is_up or host.life != life:
                simulation.after(self._delay_s(), break_off)
                return
            try:
                serve(answer)
            except ScriptUnknown:
                answer(None, NoScriptError("No matching script."))
            except CommandError as error:
                answer(None, ResponseError(str(error)))

        if line.is_cut or loses_command:
            if not line.is_cut and simulation.random.random() < 0.5:
                simulation.after(self._delay_s(), break_off)
        elif not host.is_up:
            simulation.after(_REFUSED_S, break_off)
        elif is_late:
            simulation.after(simulation.random.uniform(1.0, 12.0), arrive)
            if host.on_late is not None:
                host.on_late(process)
        else:
            simulation.after(self._delay_s(), arrive)
        return await future

    def _command(self, name: str, *arguments: Argument) -> Any:
        self._trace(name, arguments)
        return self._send(name, lambda model: model.execute(name, *arguments))

    def _trace(self, name: str, arguments: Sequence[Argument]) -> None:
        if self._host.on_send is not None:
            self._host.on_send(self._process, name, arguments)

    # Commands

    async def evalsha(self, sha: str, num_keys: int, *arguments: Argument) -> Reply:
        self._trace(sha, arguments)
        return await self._send(sha, lambda model: model.evalsha(sha, num_keys, arguments))

    async def eval(self, text: str, num_keys: int, *arguments: Argument) -> Reply:
        return await self._send(name_of(text), lambda model: model.eval(text, num_keys, arguments))

    async def ping(self) -> bool:
        return bool(await self._command("PING") == b"PONG")

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._command("GET", key)
        return found

    async def set(self, key: str, value: Argument, px: int | None = None) -> bool:
        options = ("PX", px) if px is not None else ()
        return bool(await self._command("SET", key, value, *options) == b"OK")

    async def exists(self, *keys: str) -> int:
        return int(await self._command("EXISTS", *keys))

    async def delete(self, *keys: str) -> int:
        return int(await self._command("DEL", *keys))

    async def pexpire(self, key: str, ms: int) -> bool:
        return bool(await self._command("PEXPIRE", key, ms))

    async def pttl(self, key: str) -> int:
        return int(await self._command("PTTL", key))

    async def hget(self, key: str, name: str) -> bytes | None:
        found: bytes | None = await self._command("HGET", key, name)
        return found

    async def hmget(self, key: str, names: Sequence[Argument] | str, *more: str) -> list[bytes | None]:
        every = [names, *more] if isinstance(names, str) else [*names, *more]
        found: list[bytes | None] = await self._command("HMGET", key, *every)
        return found

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        return _pairs(await self._command("HGETALL", key))

    async def hset(self, key: str, name: str, value: Argument) -> int:
        return int(await self._command("HSET", key, name, value))

    async def hsetnx(self, key: str, name: str, value: Argument) -> bool:
        return bool(await self._command("HSETNX", key, name, value))

    async def hdel(self, key: str, *names: str) -> int:
        return int(await self._command("HDEL", key, *names))

    async def sadd(self, key: str, *members: Argument) -> int:
        return int(await self._command("SADD", key, *members))

    async def srem(self, key: str, *members: Argument) -> int:
        return int(await self._command("SREM", key, *members))

    async def sunion(self, keys: Sequence[str]) -> list[bytes]:
        """Return the members in an order that does not depend on their hashes."""
        found: list[bytes] = await self._command("SUNION", *keys)
        return found

    async def zcard(self, key: str) -> int:
        return int(await self._command("ZCARD", key))

    async def zrem(self, key: str, *members: str) -> int:
        return int(await self._command("ZREM", key, *members))

    async def zrange(self, key: str, first: int, last: int, *, withscores: bool) -> list[tuple[bytes, float]]:
        assert withscores
        found = await self._command("ZRANGE", key, first, last, "WITHSCORES")
        return list(zip(found[::2], map(float, found[1::2]), strict=True))

    async def xadd(self, key: str, fields: Mapping[str, Argument], *, maxlen: int) -> bytes:
        flat = [part for pair in fields.items() for part in pair]
        added: bytes = await self._command("XADD", key, "MAXLEN", "~", maxlen, "*", *flat)
        return added

    async def xread(self, streams: Mapping[str, str], *, count: int, block: int) -> list[Any]:
        positions = {key.encode(): after.encode() for key, after in streams.items()}

        def serve(answer: Callable[[Reply], None]) -> None:
            found = self._host.run(self._process, lambda model: model.xread(positions, count))
            if found is not None:
                answer(found)
            else:
                self._host.block(_Blocked(positions, count, answer), block / 1000)

        found = await self._ask("XREAD", serve) or []
        return [[key, [(entry_id, _pairs(fields)) for entry_id, fields in entries]] for key, entries in found]

    async def scan_iter(self, match: str, count: int) -> AsyncIterator[bytes]:
        for key in await self._send("SCAN", lambda model: model.keys_like(match.encode())):
            yield key


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
