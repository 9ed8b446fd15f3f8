"""Servers with a network each, a cable to each that can be pulled, and HAProxy where the cables meet.

Use it in a test of `apart`: then all of it is in a network of the test's own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.api.process import TAILRACE, Server
from tests.missing import skip_missing
from tests.waiting import LONG_S, until

__all__ = ["HUB", "Cable", "CabledServer", "Entry", "cables", "entry"]

HUB = "10.77.0.1"
_PORT = 8000
_ENTRY_PORT = 8080
_keys = itertools.count()


@dataclass(frozen=True)
class Cable:
    """The way to the network of one server."""

    network: str
    device: str
    address: str

    def pull(self) -> None:
        _run(f"ip link set {self.device} down")

    def plug(self) -> None:
        _run(f"ip link set {self.device} up")


class CabledServer(Server):
    """A server at the end of a cable."""

    listening = r"Listening on http://[0-9.]+:([0-9]+)"

    def __init__(self, source: str, *flags: str, cable: Cable) -> None:
        self.cable = cable
        self.command = ("ip", "netns", "exec", cable.network, TAILRACE)
        self.usual_flags = (
            "--host", cable.address, "--port", str(_PORT), "--insecure", "--allowed-hosts", "*",
            "--client-connections", "2000", "--heartbeat-s", "1",
        )  # fmt: skip
        super().__init__(source, *flags)

    @property
    def url(self) -> str:
        return f"http://{self.cable.address}:{self.port}"


@contextmanager
def cables(count: int) -> Iterator[list[Cable]]:
    """Networks that meet in the present one, at the address HUB. Skips the test if the system does not allow it."""
    _run(f"ip link add hub type bridge && ip addr add {HUB}/24 dev hub && ip link set hub up")
    with ExitStack() as stack:
        found = []
        for number in range(count):
            cable = Cable(f"tailrace-{os.getpid()}-{number}", f"cable{number}", f"10.77.0.{10 + number}")
            try:
                _run(f"ip netns add {cable.network}")
            except subprocess.CalledProcessError as error:
                skip_missing("the right to several networks", error.stderr)
            stack.callback(_run, f"ip netns del {cable.network}")
            inside = f"ip -n {cable.network}"
            _run(
                f"ip link add {cable.device} type veth peer name eth0 netns {cable.network}"
                f" && ip link set {cable.device} master hub up"
                f" && {inside} addr add {cable.address}/24 dev eth0"
                f" && {inside} link set eth0 up && {inside} link set lo up"
            )
            found.append(cable)
        yield found


def _run(commands: str) -> None:
    for command in commands.split(" && "):
        subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=LONG_S)


class Entry:
    """HAProxy in front of the servers. `failures` has what clients got instead of an answer."""

    port = _ENTRY_PORT

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LONG_S, trust_env=False)

    def create(self, body: dict[str, Any], **headers: str) -> str:  # Any: bodies are what JSON can be
        """Create a stream. A client that gets no answer asks again with the same key."""
        key = {"Idempotency-Key": f"entry-{next(_keys)}"}
        while True:
            try:
                answer = self.http.post("/v1/streams", json=body, headers=key | headers)
            except httpx.TransportError as error:
                self.failures.append(repr(error))
            else:
                if answer.is_success:
                    return str(answer.json()["id"])
                assert answer.status_code >= 500, answer.text
                self.failures.append(f"{answer.status_code} {answer.text}")
            time.sleep(0.05)


@contextmanager
def entry(directory: Path, some: Sequence[Cable]) -> Iterator[Entry]:
    """HAProxy, as docs/many-servers.md has it, with faster checks. Skips the test if it is not installed."""
    if shutil.which("haproxy") is None:
        skip_missing("haproxy")
    servers = "\n".join(f"  server s{number} {cable.address}:{_PORT}" for number, cable in enumerate(some))
    path = directory / "haproxy.cfg"
    path.write_text(f"""
global
  maxconn 4000
defaults
  mode http
  timeout client 1h
  timeout connect 1s
  timeout server 4s
  option redispatch
  retries 3
  retry-on conn-failure
frontend all
  bind 127.0.0.1:{_ENTRY_PORT}
  default_backend servers
backend servers
  balance roundrobin
  option httpchk
  http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host tailrace
  default-server check inter 200ms fall 2 rise 1
{servers}
""")
    process = subprocess.Popen(["haproxy", "-db", "-q", "-f", str(path)])
    door = Entry()

    def is_up() -> bool:
        assert process.poll() is None, "haproxy has ended"
        try:
            return door.http.get("/readyz").status_code in (200, 503)
        except httpx.TransportError:
            return False

    try:
        until(is_up)
        yield door
    finally:
        door.http.close()
        process.kill()
        process.wait()
