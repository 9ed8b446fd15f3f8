"""A Redis in this process: the data types and commands that the shared store uses, and its scripts in a real Lua.

`test_redis_model.py` holds it against a real Redis.
"""

from __future__ import annotations

import bisect
import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lupa.lua51
import msgspec

__all__ = ["Argument", "CommandError", "RedisModel", "ScriptUnknown", "as_bytes", "name_of"]

Argument = bytes | str | int | float
Reply = Any  # of Redis: bytes, int, None, or a list of replies


class ScriptUnknown(Exception):
    """Redis does not know a script of this name."""


class CommandError(Exception):
    """Redis refuses a command."""


@dataclass(slots=True)
class _Log:
    """A value of the type stream."""

    entries: list[tuple[tuple[int, int], list[bytes]]] = field(default_factory=list)
    last_id: tuple[int, int] = (0, 0)


def _id_of(text: bytes) -> tuple[int, int]:
    ms, _, number = text.partition(b"-")
    return int(ms), int(number or 0)


def _shown(entry_id: tuple[int, int]) -> bytes:
    return b"%d-%d" % entry_id


def as_bytes(value: Argument) -> bytes:
    if isinstance(value, bytes):
        return value
    return (repr(value) if isinstance(value, float) else str(value)).encode()


class RedisModel:
    """`clock_s` returns the time of day of its machine. `on_xadd` and `on_hset` are called with each such change,
    `on_command` with each command of a client and its reply, `on_expired` with each key whose time is over."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._values: dict[bytes, Any] = {}  # Any: bytes, dict (hash, or sorted set), set or _Log
        self._expires_ms: dict[bytes, float] = {}
        self._scripts: dict[str, str] = {}  # texts by name
        self.on_command: Callable[[Sequence[Argument], Reply], None] | None = None
        self.on_expired: Callable[[bytes], None] | None = None
        self.on_xadd: list[Callable[[bytes, bytes, Sequence[bytes]], None]] = []
        self.on_hset: list[Callable[[bytes, Mapping[bytes, bytes]], None]] = []

    # State

    def snapshot(self) -> object:
        """Return a copy of everything, for `restore`."""
        return {key: _copy(value) for key, value in self._values.items()}, dict(self._expires_ms)

    def restore(self, state: Any) -> None:  # Any: what `snapshot` returns
        """Begin again with an earlier state. Scripts are forgotten."""
        self._values = {key: _copy(value) for key, value in state[0].items()}
        self._expires_ms = dict(state[1])
        self._scripts.clear()

    def clear(self) -> None:
        self.restore(({}, {}))

    def keys(self) -> list[bytes]:
        return sorted(key for key in list(self._values) if self._get(key) is not None)

    def dump(self) -> dict[bytes, object]:
        """Return all values: bytes, dict (a hash, or a sorted set), set, or the entries of a stream."""
        values = {key: self._get(key) for key in self.keys()}
        return {key: self.xrange(key, b"-", b"+") if isinstance(one, _Log) else one for key, one in values.items()}

    # Commands

    def execute(self, name: str, *arguments: Argument) -> Reply:
        """Run a command. Raises: CommandError."""
        reply = self.call(name, *map(as_bytes, arguments))
        if self.on_command is not None:
            self.on_command([name, *arguments], reply)
        return reply

    def evalsha(self, sha: str, num_keys: int, arguments: Sequence[Argument]) -> Reply:
        """Raises: ScriptUnknown, CommandError."""
        if sha not in self._scripts:
            raise ScriptUnknown
        reply = _evaluate(self, sha, num_keys, [as_bytes(one) for one in arguments])
        if self.on_command is not None:
            self.on_command(["EVAL", self._scripts[sha], num_keys, *arguments], reply)
        return reply

    def eval(self, text: str, num_keys: int, arguments: Sequence[Argument]) -> Reply:
        """Raises: CommandError."""
        sha = _load(text)
        self._scripts[sha] = text
        return self.evalsha(sha, num_keys, arguments)

    def xread(self, positions: Mapping[bytes, bytes], count: int) -> Reply:
        """Return the entries with larger ids, of each key that has any; None if there are none."""
        found = [[key, self._after(key, after, count)] for key, after in positions.items()]
        reply = [pair for pair in found if pair[1]] or None
        if self.on_command is not None:
            self.on_command(["XREAD", "COUNT", count, "STREAMS", *positions.keys(), *positions.values()], reply)
        return reply

    def call(self, name: str, *arguments: bytes) -> Reply:
        """Run a command of a script. Raises: CommandError."""
        return _COMMANDS[name](self, *arguments)

    def now_ms(self) -> float:
        return self._clock_s() * 1000

    def _get(self, key: bytes) -> Any:
        if key in self._expires_ms and self._expires_ms[key] <= self._clock_s() * 1000:
            self._delete(key)
            if self.on_expired is not None:
                self.on_expired(key)
        return self._values.get(key)

    def _of(self, key: bytes, kind: Callable[[], Any]) -> Any:
        """Return the value of a key, which is made if it is missing."""
        value = self._get(key)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _delete(self, key: bytes) -> None:
        self._values.pop(key, None)
        self._expires_ms.pop(key, None)

    def _drop_if_empty(self, key: bytes) -> None:
        if not self._values[key]:
            self._delete(key)

    def ping(self) -> Reply:
        return b"PONG"

    def time(self) -> Reply:
        us = int(self._clock_s() * 1e6)
        return [b"%d" % (us // 1_000_000), b"%d" % (us % 1_000_000)]

    def get(self, key: bytes) -> Reply:
        return self._get(key)

    def set(self, key: bytes, value: bytes, *options: bytes) -> Reply:
        self._delete(key)
        self._values[key] = value
        if options:
            assert options[0] == b"PX"
            self._expires_ms[key] = self.now_ms() + int(options[1])
        return b"OK"

    def exists(self, *keys: bytes) -> Reply:
        return sum(self._get(key) is not None for key in keys)

    def delete(self, *keys: bytes) -> Reply:
        count = self.exists(*keys)
        for key in keys:
            self._delete(key)
        return count

    def pexpire(self, key: bytes, ms: bytes) -> Reply:
        if self._get(key) is None:
            return 0
        if int(ms) <= 0:
            self._delete(key)
        else:
            self._expires_ms[key] = self.now_ms() + int(ms)
        return 1

    def pttl(self, key: bytes) -> Reply:
        if self._get(key) is None:
            return -2
        return round(self._expires_ms[key] - self.now_ms()) if key in self._expires_ms else -1

    def keys_like(self, pattern: bytes) -> list[bytes]:
        return [key for key in self.keys() if fnmatch.fnmatchcase(key.decode(), pattern.decode().replace("\\", ""))]

    # Hashes

    def hget(self, key: bytes, name: bytes) -> Reply:
        return (self._get(key) or {}).get(name)

    def hmget(self, key: bytes, *names: bytes) -> Reply:
        has = self._get(key) or {}
        return [has.get(name) for name in names]

    def hexists(self, key: bytes, name: bytes) -> Reply:
        return int(name in (self._get(key) or {}))

    def hincrby(self, key: bytes, name: bytes, number: bytes) -> Reply:
        has = self._of(key, dict)
        has[name] = b"%d" % (int(has.get(name, b"0")) + int(number))
        return int(has[name])

    def hgetall(self, key: bytes) -> Reply:
        return [part for pair in (self._get(key) or {}).items() for part in pair]

    def hset(self, key: bytes, *pairs: bytes) -> Reply:
        has = self._of(key, dict)
        before = len(has)
        new = dict(zip(pairs[::2], pairs[1::2], strict=True))
        has.update(new)
        for call in self.on_hset:
            call(key, new)
        return len(has) - before

    def hsetnx(self, key: bytes, name: bytes, value: bytes) -> Reply:
        has = self._of(key, dict)
        if name in has:
            return 0
        has[name] = value
        return 1

    def hdel(self, key: bytes, *names: bytes) -> Reply:
        has = self._get(key)
        if has is None:
            return 0
        count = sum(has.pop(name, None) is not None for name in names)
        self._drop_if_empty(key)
        return count

    # Sets, which here have an order: that of their members

    def sadd(self, key: bytes, *members: bytes) -> Reply:
        has = self._of(key, set)
        before = len(has)
        has.update(members)
        return len(has) - before

    def srem(self, key: bytes, *members: bytes) -> Reply:
        has = self._get(key)
        if has is None:
            return 0
        count = len(has & set(members))
        has.difference_update(members)
        self._drop_if_empty(key)
        return count

    def sismember(self, key: bytes, member: bytes) -> Reply:
        return int(member in (self._get(key) or ()))

    def sunion(self, *keys: bytes) -> Reply:
        return sorted(set().union(*(self._get(key) or () for key in keys)))

    # Sorted sets

    def zadd(self, key: bytes, score: bytes, member: bytes) -> Reply:
        has = self._of(key, dict)
        is_new = member not in has
        has[member] = float(score)
        return int(is_new)

    def zrem(self, key: bytes, *members: bytes) -> Reply:
        return self.hdel(key, *members)

    def zcard(self, key: bytes) -> Reply:
        return len(self._get(key) or ())

    def zscore(self, key: bytes, member: bytes) -> Reply:
        score = (self._get(key) or {}).get(member)
        return None if score is None else b"%.17g" % score

    def zrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> Reply:
        assert (first, last, options) == (b"0", b"-1", (b"WITHSCORES",))
        ordered = sorted((self._get(key) or {}).items(), key=lambda pair: (pair[1], pair[0]))
        return [part for member, score in ordered for part in (member, b"%.17g" % score)]

    def zrangebylex(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> Reply:
        """All members have one score. `last` is exclusive."""
        assert (options[:2], last[:1]) == ((b"LIMIT", b"0"), b"(")
        begin, members = bisect.bisect_left if first[:1] == b"[" else bisect.bisect_right, sorted(self._get(key) or ())
        found = members[begin(members, first[1:]) : bisect.bisect_left(members, last[1:])]
        return found[: int(options[2])]

    # Streams

    def xadd(self, key: bytes, *arguments: bytes) -> Reply:
        most, rest = None, list(arguments)
        if rest[0] == b"MAXLEN":
            most = int(rest[2 if rest[1] == b"~" else 1])
            rest = rest[3 if rest[1] == b"~" else 2 :]
        log = self._of(key, _Log)
        entry_id = self._next_id(log, rest[0])
        if entry_id <= log.last_id:
            if not log.entries and log.last_id == (0, 0):
                self._delete(key)
            raise CommandError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        log.entries.append((entry_id, rest[1:]))
        log.last_id = entry_id
        if most is not None:
            del log.entries[:-most]
        for call in self.on_xadd:
            call(key, _shown(entry_id), rest[1:])
        return _shown(entry_id)

    def _next_id(self, log: _Log, asked: bytes) -> tuple[int, int]:
        if asked != b"*":
            return _id_of(asked)
        return max((int(self.now_ms()), 0), (log.last_id[0], log.last_id[1] + 1))

    def xrange(self, key: bytes, first: bytes, last: bytes) -> Reply:
        assert (first, last) == (b"-", b"+")
        log = self._get(key)
        return [[_shown(entry_id), fields] for entry_id, fields in log.entries] if log is not None else []

    def _after(self, key: bytes, after: bytes, count: int) -> Reply:
        log = self._get(key)
        if log is None or log.last_id <= (position := _id_of(after)):
            return []
        return [[_shown(one), fields] for one, fields in log.entries if one > position][:count]


_COMMANDS: Mapping[str, Callable[..., Reply]] = {
    "PING": RedisModel.ping,
    "TIME": RedisModel.time,
    "GET": RedisModel.get,
    "SET": RedisModel.set,
    "EXISTS": RedisModel.exists,
    "DEL": RedisModel.delete,
    "PEXPIRE": RedisModel.pexpire,
    "PTTL": RedisModel.pttl,
    "HGET": RedisModel.hget,
    "HMGET": RedisModel.hmget,
    "HEXISTS": RedisModel.hexists,
    "HINCRBY": RedisModel.hincrby,
    "HGETALL": RedisModel.hgetall,
    "HSET": RedisModel.hset,
    "HSETNX": RedisModel.hsetnx,
    "HDEL": RedisModel.hdel,
    "SADD": RedisModel.sadd,
    "SREM": RedisModel.srem,
    "SISMEMBER": RedisModel.sismember,
    "SUNION": RedisModel.sunion,
    "ZADD": RedisModel.zadd,
    "ZREM": RedisModel.zrem,
    "ZCARD": RedisModel.zcard,
    "ZSCORE": RedisModel.zscore,
    "ZRANGE": RedisModel.zrange,
    "ZRANGEBYLEX": RedisModel.zrangebylex,
    "XADD": RedisModel.xadd,
    "XRANGE": RedisModel.xrange,
}


def _copy(value: Any) -> Any:
    return (
        _Log(list(value.entries), value.last_id)
        if isinstance(value, _Log)
        else value
        if isinstance(value, bytes)
        else value.copy()
    )


# Scripts. One Lua serves all models, of which one runs a script at a time.

_lua = lupa.lua51.LuaRuntime(encoding=None, unpack_returned_tuples=False)
_table = _lua.table_from
_functions: dict[str, Any] = {}  # by the names that Redis gives to scripts
_current: list[RedisModel] = []


def _to_lua(value: Reply) -> Any:
    if isinstance(value, list | tuple):
        return _table([_to_lua(one) for one in value])
    return False if value is None else value.encode() if isinstance(value, str) else value


def _from_lua(value: Any) -> Reply:
    if lupa.lua51.lua_type(value) == "table":
        found: list[Reply] = []
        while (one := value[len(found) + 1]) is not None:
            found.append(_from_lua(one))
        return found
    if isinstance(value, float):
        return int(value)
    return 1 if value is True else None if value is False else value


def _call(name: bytes, *arguments: Any) -> Any:
    shown = [one if isinstance(one, bytes) else b"%.17g" % one for one in arguments]  # as Redis shows Lua's numbers
    return _to_lua(_current[-1].call(name.decode(), *shown))


_lua.globals()[b"redis"] = _table({b"call": _call})
_lua.globals()[b"cmsgpack"] = _table({b"unpack": lambda packed: _to_lua(msgspec.msgpack.decode(packed))})


def name_of(text: str) -> str:
    """Return the name that Redis gives to a script."""
    return hashlib.sha1(text.encode()).hexdigest()


def _load(text: str) -> str:
    sha = name_of(text)
    if sha not in _functions:
        _functions[sha] = _lua.execute(b"return function(KEYS, ARGV)\n" + text.encode() + b"\nend")
    return sha


def _evaluate(model: RedisModel, sha: str, num_keys: int, arguments: list[bytes]) -> Reply:
    _current.append(model)
    try:
        return _from_lua(_functions[sha](_table(arguments[:num_keys]), _table(arguments[num_keys:])))
    except lupa.lua51.LuaError as error:
        raise CommandError(f"ERR Error running script: {error}") from error
    finally:
        _current.pop()
