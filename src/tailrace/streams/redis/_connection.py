"""How Redis is reached: URL, checks at the start, commands with a time limit, and errors in one type."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoScriptError, OutOfMemoryError, RedisError, ResponseError

from tailrace.errors import JournalFull, ModelError, StorageError
from tailrace.streams.redis._keys import CLUSTER_SHARDS, Keys
from tailrace.streams.redis._scripts import Script

__all__ = ["Connection", "start_error"]

_T = TypeVar("_T")

_COMMAND_S = 2.0  # after which a command has failed
_CONNECT_S = 5.0
_AT_ONCE = 64  # commands, each on a connection of its own; others wait
_OLDEST = (6, 2)  # of Redis; Valkey begins with 7.2
_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
_URL_HINT = (
    "Write redis://HOST:PORT/DATABASE, rediss://… for TLS, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE. "
    "A cluster is found by any of its nodes. ?prefix=NAME separates two groups of servers on one Redis."
)

_FAILURES = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError)


class Connection:
    """A client of one Redis, of a Redis that Sentinel watches, or of a Redis Cluster. `open` makes one."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self.client = client  # Any: the three clients have the same commands and no common type
        self.keys = keys
        self._turns = asyncio.Semaphore(_AT_ONCE)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, kind: str = "") -> AsyncIterator[Connection]:
        """Connect, and check that Redis can keep streams. Servers of one `kind` have their keys apart from the others.

        Raises: ModelError, in one line that says what to do.
        """
        parts = _parse(url)
        prefix = parse_qs(parts.query).get("prefix", ["tailrace"])[0]
        if kind:
            prefix = f"{prefix}:{kind}"
        plain = parts._replace(query="").geturl()
        async with contextlib.AsyncExitStack() as stack:
            try:
                client, is_cluster = await _connect(parts, plain, stack)
            except AuthenticationError:
                raise ModelError(
                    f"Redis at {_shown(parts)} refuses the name or the password. Put them into the URL of --journal: "
                    "redis://:PASSWORD@HOST:PORT/0."
                ) from None
            except _FAILURES as error:
                raise ModelError(f"Redis at {_shown(parts)} cannot be reached: {_reason(error)}.") from None
            _check(await _info(client, is_cluster=is_cluster), _shown(parts))
            yield cls(client, Keys(prefix, CLUSTER_SHARDS if is_cluster else 1))

    async def run(self, script: Script, keys: Sequence[str | bytes], *arguments: bytes | str | int) -> Any:
        """Run a script. Raises: StorageError."""
        return await self.ask(self._run(script, keys, arguments))

    async def _run(self, script: Script, keys: Sequence[str | bytes], arguments: Sequence[bytes | str | int]) -> Any:
        try:
            return await self.client.evalsha(script.sha, len(keys), *keys, *arguments)
        except NoScriptError:  # Redis is new, or was restarted
            return await self.client.eval(script.text, len(keys), *keys, *arguments)

    async def ask(self, command: Awaitable[_T], *, within_s: float = _COMMAND_S) -> _T:
        """Return the answer of a command of `client`. Waiting for a turn counts as time of the command. Raises:
        StorageError."""
        try:
            async with asyncio.timeout(within_s), self._turns:
                answer = await command
        except Exception as error:  # of the client library and the event loop, which have errors of many kinds
            _require_uncancelled()
            raise _as_storage_error(error) from error
        finally:
            if inspect.iscoroutine(command):
                command.close()  # if it has not begun
        _require_uncancelled()
        return answer

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Yield the keys that match a pattern. Raises: StorageError."""
        try:
            async for key in self.client.scan_iter(match=pattern, count=1_000):
                yield key
        except Exception as error:
            raise _as_storage_error(error) from error


def _require_uncancelled() -> None:
    """Raise CancelledError if this task was cancelled: redis-py may lose a cancellation while it connects."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _as_storage_error(error: BaseException) -> StorageError:
    """Return the error for clients. It has no address of the log store."""
    if isinstance(error, OutOfMemoryError):
        return JournalFull("The log store of this server is full.")
    return StorageError("The log store of this server cannot be reached.")


def start_error(error: StorageError) -> ModelError:
    """Return why this server cannot take part in the store."""
    cause = error.__cause__
    if isinstance(cause, ResponseError) and not isinstance(cause, OutOfMemoryError):
        return ModelError(f"Redis refuses a command of --journal: {_reason(cause)}.")
    return ModelError(error.message)


def _parse(url: str) -> SplitResult:
    """Raises: ModelError."""
    try:
        parts = urlsplit(url)
        unknown = parse_qs(parts.query, strict_parsing=bool(parts.query)).keys() - {"prefix"}
    except ValueError:
        raise ModelError(f"--journal has a URL that cannot be read. {_URL_HINT}") from None
    if parts.scheme not in _SCHEMES or not parts.netloc.rpartition("@")[2]:
        raise ModelError(f"--journal has a URL of another kind. {_URL_HINT}")
    is_watched = parts.scheme.endswith("+sentinel")  # then the path names the service, too
    if not is_watched and re.fullmatch("(/[0-9]*)?", parts.path) is None:  # the library would take database 0
        raise ModelError(f"The URL of --journal has a database that is not a number. {_URL_HINT}")
    if unknown:
        raise ModelError(f"The URL of --journal has an unknown parameter: {min(unknown)}. {_URL_HINT}")
    return parts


def _shown(parts: SplitResult) -> str:
    """Return the address without name and password."""
    return parts.netloc.rpartition("@")[2]


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


async def _connect(parts: SplitResult, url: str, stack: contextlib.AsyncExitStack) -> tuple[Any, bool]:
    """Return a client, and whether it is one of a cluster. The stack closes it."""
    options: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_S,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),  # the store itself tries again, and knows how often
        "protocol": 2,
    }
    if parts.scheme.endswith("+sentinel"):
        return _sentinel(parts, options, stack), False
    client = Redis.from_url(url, **options)
    stack.push_async_callback(_close, client.aclose)
    async with asyncio.timeout(_CONNECT_S):
        facts: Any = await client.info("cluster")
    if not facts.get("cluster_enabled"):
        return client, False
    cluster = RedisCluster.from_url(url, socket_connect_timeout=_CONNECT_S, socket_keepalive=True)
    stack.push_async_callback(_close, cluster.aclose)
    async with asyncio.timeout(_CONNECT_S):
        await cluster.initialize()
    return cluster, True


async def _close(close: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(Exception):  # as in `ask`
        async with asyncio.timeout(_COMMAND_S):
            await close()


def _sentinel(parts: SplitResult, options: dict[str, Any], stack: contextlib.AsyncExitStack) -> Any:
    """Raises: ModelError."""
    access, _, hosts = parts.netloc.rpartition("@")
    user, _, password = access.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    nodes = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not name or not port.isdecimal():
            raise ModelError(f"--journal has a Sentinel without a port. {_URL_HINT}")
        nodes.append((name.strip("[]"), int(port)))
    if not service or (database and not database.isdecimal()):
        raise ModelError(f"--journal does not name the service that Sentinel watches. {_URL_HINT}")
    login = {"username": user or None, "password": password or None} if access else {}
    options |= {"db": int(database or 0), "ssl": parts.scheme.startswith("rediss"), **login}
    watchers: Any = Sentinel  # redis-py has no types for it
    sentinel = watchers(nodes, sentinel_kwargs={"socket_connect_timeout": _CONNECT_S}, **options)
    for watcher in sentinel.sentinels:
        stack.push_async_callback(_close, watcher.aclose)
    client = sentinel.master_for(service)
    stack.push_async_callback(_close, client.connection_pool.disconnect)  # which `aclose` leaves open
    return client


async def _info(client: Any, *, is_cluster: bool) -> Mapping[str, Any]:
    """Raises: ModelError."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            if is_cluster:
                every: Mapping[str, Mapping[str, Any]] = await client.info(target_nodes="primaries")
                # The node that is worst off speaks for all.
                return min(every.values(), key=lambda facts: facts.get("maxmemory_policy") == "noeviction")
            facts: Mapping[str, Any] = await client.info()
            return facts
    except _FAILURES as error:
        raise ModelError(
            f"Redis does not say what it is: {_reason(error)}. --journal needs the command INFO."
        ) from None


def _check(facts: Mapping[str, Any], shown: str) -> None:
    """Raises: ModelError if streams would be lost or could not be written."""
    version = str(facts.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST:
        raise ModelError(f"Redis at {shown} has version {version}. --journal needs 6.2 or later, or Valkey.")
    if facts.get("role") == "slave":
        raise ModelError(f"Redis at {shown} is a replica, which cannot be written. --journal needs the primary.")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ModelError(
            f"Redis at {shown} may drop streams when its memory is full: maxmemory-policy is {policy}. "
            "Set it to noeviction."
        )
