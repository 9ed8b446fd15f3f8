"""How Redis is reached: the URL of --journal, the three kinds of clients, and checks at the start."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from tailrace.errors import ModelError
from tailrace_outer.redis._patience import CLOSE_S, CONNECT_S, NODE_S

__all__ = ["connect", "reason"]

_OLDEST = (6, 2)  # of Redis; Valkey begins with 7.2
_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
_URL_HINT = (
    "Write redis://HOST:PORT/DATABASE, rediss://… for TLS, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE. "
    "A cluster is found by any of its nodes. ?prefix=NAME separates two groups of servers on one Redis."
)
_FAILURES = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError)


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[tuple[Any, bool, str]]:
    """Yield a client of a Redis that can keep streams, whether it is one of a cluster, and the prefix of all keys.

    Raises: ModelError, in one line that says what to do.
    """
    # Any: the clients of one Redis, of Sentinel and of a cluster have the same commands and no common type
    parts, parameters = _parse(url)
    shown = parts.netloc.rpartition("@")[2]  # without name and password
    async with contextlib.AsyncExitStack() as stack:
        try:
            client, is_cluster = await _client(parts, parameters, stack)
        except AuthenticationError:
            raise ModelError(
                f"Redis at {shown} refuses the name or the password. Put them into the URL of --journal: "
                "redis://:PASSWORD@HOST:PORT/0."
            ) from None
        except _FAILURES as error:
            raise ModelError(f"Redis at {shown} cannot be reached: {reason(error)}.") from None
        _check(await _info(client, is_cluster=is_cluster), shown)
        yield client, is_cluster, parameters.get("prefix", "tailrace")


def reason(error: BaseException) -> str:
    """Return the text of an error of the library, without the full stop."""
    return (str(error) or type(error).__name__).rstrip(".")


def _parse(url: str) -> tuple[SplitResult, Mapping[str, str]]:
    """Return the URL without its query, and the parameters of the query. Raises: ModelError."""
    try:
        parts = urlsplit(url)
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ModelError(f"--journal has a URL that cannot be read. {_URL_HINT}") from None
    if parts.scheme not in _SCHEMES or not parts.netloc.rpartition("@")[2]:
        raise ModelError(f"--journal has a URL of another kind. {_URL_HINT}")
    is_watched = parts.scheme.endswith("+sentinel")  # then the path names the service, too
    if not is_watched and re.fullmatch("(/[0-9]*)?", parts.path) is None:  # the library would take database 0
        raise ModelError(f"The URL of --journal has a database that is not a number. {_URL_HINT}")
    known = {"prefix"}
    if parts.scheme.startswith("rediss"):
        known.add("ca_file")
    if is_watched:
        known |= {"sentinel_user", "sentinel_password"}
    for name, value in parameters.items():
        if name not in known:
            raise ModelError(f"The URL of --journal has an unknown parameter: {name}. {_URL_HINT}")
        if not value:
            raise ModelError(f"The URL of --journal has a parameter without a value: {name}.")
    return parts._replace(query=""), parameters


async def _client(
    parts: SplitResult, parameters: Mapping[str, str], stack: contextlib.AsyncExitStack
) -> tuple[Any, bool]:
    """Return a client that Redis has answered, and whether it is one of a cluster. The stack closes it. Raises:
    ModelError, and the errors of the library."""
    link: dict[str, Any] = {"socket_connect_timeout": CONNECT_S, "socket_keepalive": True}
    if "ca_file" in parameters:
        link["ssl_ca_certs"] = _readable(parameters["ca_file"])
    # The store itself tries again, and knows how often.
    once = {**link, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    if parts.scheme.endswith("+sentinel"):
        return await _watched(parts, parameters, once, stack), False
    client = Redis.from_url(parts.geturl(), **once)
    stack.push_async_callback(_close, client.aclose)
    async with asyncio.timeout(CONNECT_S):
        fields: Any = await client.info("cluster")
    if not fields.get("cluster_enabled"):
        return client, False
    cluster = RedisCluster.from_url(parts.geturl(), **link, socket_timeout=NODE_S)
    stack.push_async_callback(_close, cluster.aclose)
    async with asyncio.timeout(CONNECT_S):
        await cluster.initialize()
    return cluster, True


def _readable(path: str) -> str:
    """Raises: ModelError."""
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError):  # the library would fail at each connection, and not name the file
        raise ModelError(f"The ca_file of --journal is not a readable file of certificates (PEM): {path}.") from None
    return path


async def _close(close: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(Exception):  # as in `ask`
        async with asyncio.timeout(CLOSE_S):
            await close()


async def _watched(
    parts: SplitResult, parameters: Mapping[str, str], options: dict[str, Any], stack: contextlib.AsyncExitStack
) -> Any:
    """Return a client of the primary that Sentinel names. With TLS, the connections to both are encrypted. Raises:
    ModelError, and the errors of the library."""
    access, _, hosts = parts.netloc.rpartition("@")
    user, _, password = map(unquote, access.partition(":"))
    service, _, database = parts.path.strip("/").partition("/")
    nodes = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not name or not port.isdecimal():
            raise ModelError(f"--journal has a Sentinel without a port. {_URL_HINT}")
        nodes.append((name.strip("[]"), int(port)))
    if not service or (database and not database.isdecimal()):
        raise ModelError(f"--journal does not name the service that Sentinel watches. {_URL_HINT}")
    options = {**options, "ssl": parts.scheme.startswith("rediss")}
    watchers: Any = Sentinel  # redis-py has no types for it
    sentinel = watchers(
        nodes,
        sentinel_kwargs={
            **options,
            "username": parameters.get("sentinel_user"),
            "password": parameters.get("sentinel_password"),
        },
        **options,
        db=int(database or 0),
        username=user or None,
        password=password or None,
    )
    for watcher in sentinel.sentinels:
        stack.push_async_callback(_close, watcher.aclose)
    client = sentinel.master_for(service)
    stack.push_async_callback(_close, client.connection_pool.disconnect)  # which `aclose` leaves open
    try:
        async with asyncio.timeout(CONNECT_S):
            await client.ping()
    except MasterNotFoundError:  # its text is the whole configuration of the clients
        reasons = [
            f"{host}:{port} {await _no_primary(watcher, service)}"
            for (host, port), watcher in zip(nodes, sentinel.sentinels, strict=True)
        ]
        raise ModelError(f"No Sentinel of --journal names a primary: {', '.join(reasons)}.") from None
    return client


async def _no_primary(watcher: Any, service: str) -> str:
    """Return why a Sentinel names no primary of a service."""
    try:
        async with asyncio.timeout(CONNECT_S):
            is_known = await watcher.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", service)
    except AuthenticationError:
        return "refuses the name or the password (?sentinel_user=NAME&sentinel_password=PASSWORD)"
    except _FAILURES as error:
        return f"cannot be reached ({reason(error)})"
    return "sees that it is down" if is_known else "watches no service of this name"


async def _info(client: Any, *, is_cluster: bool) -> Mapping[str, Any]:
    """Raises: ModelError."""
    try:
        async with asyncio.timeout(CONNECT_S):
            if is_cluster:
                every: Mapping[str, Mapping[str, Any]] = await client.info(target_nodes="primaries")
                # The node that is worst off speaks for all.
                return min(every.values(), key=lambda fields: fields.get("maxmemory_policy") == "noeviction")
            fields: Mapping[str, Any] = await client.info()
            return fields
    except _FAILURES as error:
        raise ModelError(f"Redis does not say what it is: {reason(error)}. --journal needs the command INFO.") from None


def _check(fields: Mapping[str, Any], shown: str) -> None:
    """Raises: ModelError if streams would be lost or could not be written."""
    version = str(fields.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST:
        raise ModelError(f"Redis at {shown} has version {version}. --journal needs 6.2 or later, or Valkey.")
    if fields.get("role") == "slave":
        raise ModelError(f"Redis at {shown} is a replica, which cannot be written. --journal needs the primary.")
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ModelError(
            f"Redis at {shown} may drop streams when its memory is full: maxmemory-policy is {policy}. "
            "Set it to noeviction."
        )
