"""A Redis for tests: the one that answers on this machine, or one of its own; and names for the keys of each test."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

__all__ = ["OwnRedis", "copy_keys", "delete_keys", "own_redis", "prefix_of", "shared_url"]

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


def copy_keys(source: str, target: str) -> None:
    """What a server leaves that is killed now, under another prefix: all its keys, and no lease that is alive."""
    with redis.Redis.from_url(LOCAL_URL) as client:
        for key in client.scan_iter(match=f"{source}:*", count=1_000):
            name = key.decode().replace(source, target, 1)
            kept = client.dump(key)
            if kept is not None:
                client.restore(name, max(0, client.pttl(key)), kept, replace=True)
            if ":lease:" in name:
                client.set(name, "dead")


class OwnRedis:
    """A Redis server of a test's own, without a file: what it had is gone after a restart."""

    def __init__(self, program: str, port: int, options: tuple[str, ...], directory: Path) -> None:
        self._command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
        self._command += options
        self._port = port
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with redis.Redis(port=self._port, socket_connect_timeout=1) as client:
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

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self._process = self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def own_redis(directory: Path, *options: str) -> Iterator[tuple[str, OwnRedis]]:
    """A Redis server of the test's own, and its URL. Skips the test if the program is missing."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = OwnRedis(program, port, options, directory)
    try:
        yield f"redis://127.0.0.1:{port}/0", server
    finally:
        server.kill()
