"""A Redis for tests: the one that answers on this machine, or servers of a test's own, alone, with a replica that
Sentinel may promote, or as a cluster; and names for the keys of each test."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import redis
from tests.waiting import until

__all__ = [
    "OwnRedis", "copy_keys", "delete_keys", "free_port", "own_cluster", "own_redis", "prefix_of", "shared_url",
    "watched_redis",
]  # fmt: skip

LOCAL_URL = os.environ.get("TAILRACE_TEST_REDIS", "redis://127.0.0.1:6379/9")


def shared_url() -> str:
    """The URL of the Redis of this machine. Skips the test if there is none."""
    try:
        with redis.Redis.from_url(LOCAL_URL, socket_connect_timeout=1) as client:
            client.ping()
    except redis.RedisError as error:
        pytest.skip(f"no Redis answers at {LOCAL_URL}: {error}")
    return LOCAL_URL


def prefix_of(path: Path) -> str:
    """The prefix of the keys of a test that has this directory."""
    return "test-" + hashlib.sha256(str(path).encode()).hexdigest()[:16]


def delete_keys(prefix: str) -> None:
    with redis.Redis.from_url(LOCAL_URL) as client:
        for key in client.scan_iter(match=f"{prefix}:*", count=1_000):
            client.delete(key)


def copy_keys(source: str, target: str, client: redis.Redis | redis.RedisCluster) -> None:
    """What a server leaves that is killed now, under another prefix: all its keys, and no lease that is alive."""
    for key in client.scan_iter(match=f"{source}:*", count=1_000):
        name = key.decode().replace(source, target, 1)
        kept = client.dump(key)
        if kept is not None:
            client.restore(name, max(0, client.pttl(key)), kept, replace=True)
        if ":lease:" in name:
            client.set(name, "dead")


class OwnRedis:
    """A Redis server of a test's own. Without `options` for a file, what it had is gone after a restart."""

    def __init__(self, directory: Path, *options: str, config: str = "") -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self.port = free_port()
        directory.mkdir(exist_ok=True)
        self._directory = directory
        file = directory / f"{self.port}.conf"
        file.write_text(f'port {self.port}\nbind 127.0.0.1\ndir "{directory}"\n{config}')
        self._command = [program, str(file), *options]
        self._process = self._start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_connect_timeout=1)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with self.client() as client:
            for _ in range(400):
                try:
                    client.ping()
                    break
                except redis.AuthenticationError:
                    break
                except redis.RedisError:
                    time.sleep(0.05)
        return process

    def stop(self) -> None:
        """Freeze it: it takes connections and does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def start(self) -> None:
        self._process = self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    close = kill

    # The file in which it keeps its commands, with `--appendonly yes`

    @property
    def _file(self) -> Path:
        (file,) = self._directory.glob("appendonlydir/*.incr.aof")
        return file

    @property
    def file_bytes(self) -> int:
        return self._file.stat().st_size

    def cut_file(self, num_bytes: int) -> None:
        """Lose the end of it, as a power cut does."""
        os.truncate(self._file, num_bytes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def own_redis(directory: Path, *options: str) -> Iterator[tuple[str, OwnRedis]]:
    """A Redis server of the test's own, and its URL. Skips the test if the program is missing."""
    with closing(OwnRedis(directory, "--save", "", *options)) as server:
        yield server.url, server


@contextmanager
def own_cluster(directory: Path, *, with_replicas: bool = False) -> Iterator[tuple[str, list[OwnRedis]]]:
    """A Redis Cluster of three primaries, and the URL of one of them. The servers are the primaries, then the replicas,
    which are promoted half a second after their primary has gone."""
    with ExitStack() as stack:
        servers = []
        for number in range(6 if with_replicas else 3):
            options = (
                "--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "500",
                "--save", "", "--repl-diskless-sync-delay", "0",
            )  # fmt: skip
            servers.append(stack.enter_context(closing(OwnRedis(directory / str(number), *options))))
        clients = [stack.enter_context(server.client()) for server in servers]
        bus_ports = [int(client.config_get("cluster-port")["cluster-port"]) for client in clients]
        for client in clients[1:]:
            client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port, bus_ports[0])
        bounds = [0, 5461, 10923, 16384]
        for client, first, end in zip(clients[:3], bounds, bounds[1:], strict=False):
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        until(lambda: all(client.cluster("info")["cluster_state"] == "ok" for client in clients))
        until(lambda: all(len(client.cluster("nodes")) == len(servers) for client in clients))
        for replica, primary in zip(clients[3:], clients, strict=False):
            replica.execute_command("CLUSTER REPLICATE", primary.execute_command("CLUSTER MYID"))
        until(lambda: all(client.info("replication").get("master_link_status") == "up" for client in clients[3:]))
        yield f"redis://127.0.0.1:{servers[0].port}", servers


@contextmanager
def watched_redis(directory: Path) -> Iterator[tuple[str, list[OwnRedis]]]:
    """A primary, a replica, and a Sentinel that promotes the replica half a second after the primary has gone. The URL
    names the Sentinel."""
    with ExitStack() as stack:
        fast = ("--save", "", "--repl-diskless-sync-delay", "0")
        primary = stack.enter_context(closing(OwnRedis(directory / "primary", *fast)))
        replica = stack.enter_context(
            closing(OwnRedis(directory / "replica", *fast, "--replicaof", "127.0.0.1", str(primary.port)))
        )
        with replica.client() as client:
            until(lambda: client.info("replication")["master_link_status"] == "up")
        config = (
            f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        sentinel = stack.enter_context(closing(OwnRedis(directory / "sentinel", "--sentinel", config=config)))
        with sentinel.client() as client:
            until(lambda: len(client.sentinel_slaves("main")) == 1)
        yield f"redis+sentinel://127.0.0.1:{sentinel.port}/main", [primary, replica]
