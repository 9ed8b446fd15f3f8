"""Commands to Redis: with a time limit, and errors in one type."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from redis.exceptions import (
    BusyLoadingError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from tailrace.errors import JournalFull, ModelError, StorageError
from tailrace_outer.redis._connect import connect, reason
from tailrace_outer.redis._patience import CLOSE_S, COMMAND_S
from tailrace_outer.redis._redis_keys import CLUSTER_SHARDS, Keys
from tailrace_outer.redis._scripts import Script

__all__ = ["Connection", "start_error"]

_T = TypeVar("_T")

_AT_ONCE = 64  # commands, each on a connection of its own; others wait
# Errors of a server that is no primary, or none that can be written: it has become a replica, is starting again, or
# has lost its replicas. A script's error may have the code in its text only.
_FORMER_PRIMARY = (BusyLoadingError, MasterDownError, ReadOnlyError)
_FORMER_PRIMARY_CODE = re.compile(r"\b(?:LOADING|MASTERDOWN|NOREPLICAS|READONLY|UNBLOCKED)\b")


class Connection:
    """A client of one Redis, of a Redis that Sentinel watches, or of a Redis Cluster. `open` makes one."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self.client = client  # Any: the three clients have the same commands and no common type
        self.keys = keys
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._dropped_s = 0.0  # loop time; when all connections were dropped

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, kind: str = "", client: Any = None) -> AsyncIterator[Connection]:
        """Connect, and check that Redis can keep streams. Servers of one `kind` have their keys apart from the others.
        With a `client` of one Redis, neither is done.

        Raises: ModelError, in one line that says what to do.
        """
        if client is not None:
            yield cls(client, Keys(kind or "tailrace"))
            return
        async with connect(url) as (client, is_cluster, prefix):
            yield cls(client, Keys(f"{prefix}:{kind}" if kind else prefix, CLUSTER_SHARDS if is_cluster else 1))

    async def run(self, script: Script, keys: Sequence[str | bytes], *arguments: bytes | str | int) -> Any:
        """Run a script. Raises: StorageError."""
        return await self.ask(self._run(script, keys, arguments))

    async def _run(self, script: Script, keys: Sequence[str | bytes], arguments: Sequence[bytes | str | int]) -> Any:
        try:
            return await self.client.evalsha(script.sha, len(keys), *keys, *arguments)
        except NoScriptError:  # Redis is new, or was restarted
            return await self.client.eval(script.text, len(keys), *keys, *arguments)

    async def ask(self, command: Awaitable[_T], *, within_s: float = COMMAND_S) -> _T:
        """Return the reply of a command of `client`. Waiting for a turn counts as time of the command. Raises:
        StorageError."""
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(within_s), self._turns:
                reply = await command
        except Exception as error:  # of the client library and the event loop, which have errors of many kinds
            _require_uncancelled()
            await self._drop_former(error, begun_s)
            raise _as_storage_error(error) from error
        finally:
            if inspect.iscoroutine(command):
                command.close()  # if it has not begun
        _require_uncancelled()
        return reply

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Yield the keys that match a pattern. Raises: StorageError."""
        begun_s = asyncio.get_running_loop().time()
        try:
            async for key in self.client.scan_iter(match=pattern, count=1_000):
                yield key
        except Exception as error:
            await self._drop_former(error, begun_s)
            raise _as_storage_error(error) from error

    async def _drop_former(self, error: Exception, begun_s: float) -> None:
        """Drop all connections if the error of a command says that they lead to a former primary, so that the next
        command connects anew: the address belongs to another server by now, or soon will. The client of a cluster does
        this itself."""
        pool = getattr(self.client, "connection_pool", None)
        is_former = isinstance(error, _FORMER_PRIMARY) or _FORMER_PRIMARY_CODE.search(str(error)) is not None
        if pool is None or not is_former or begun_s < self._dropped_s:
            return
        self._dropped_s = asyncio.get_running_loop().time()
        with contextlib.suppress(Exception):  # as in `ask`
            async with asyncio.timeout(CLOSE_S):
                await pool.disconnect()


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
        return ModelError(f"Redis refuses a command of --journal: {reason(cause)}.")
    return ModelError(error.message)
