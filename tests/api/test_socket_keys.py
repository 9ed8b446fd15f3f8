"""Keys and sessions that end while a WebSocket is open which they have opened. Virtual time, and an engine that is
stepped by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from tests.api.socket_client import SocketClient, app_of, models_of
from tests.generation.harness import Harness
from tests.streams.virtual_time import run as run_scenario

from tailrace.access.authentication import Authentication
from tailrace.access.keyring import Keyring
from tailrace.access.keys import Key, NewKey, new_key, rotated
from tailrace.access.sessions import Sessions, new_session

_CREATES: dict[str, dict[str, object]] = {
    "/v1/responses": {"type": "response.create", "input": "Hi", "max_output_tokens": 50, "background": True},
    "/v1/ws": {"type": "create", "prompt": "Hi", "max_tokens": 50},
    "/": {},  # a chat: any text is a prompt
}


@dataclass
class _Server:
    harness: Harness = field(default_factory=lambda: Harness(max_requests=64))
    keyring: Keyring = field(default_factory=Keyring)
    sessions: Sessions = field(default_factory=Sessions)

    def __post_init__(self) -> None:
        self.keyring.on_revoked(models_of(self.harness).end_streams_of)
        self.app = app_of(self.harness, authentication=Authentication(self.keyring, self.sessions))

    def key(self, owner: str = "me") -> NewKey:
        made = new_key(owner, now_s=time.time())
        self.keyring.update([made.key])
        return made

    def client(self, path: str, made: NewKey | None = None) -> SocketClient:
        return SocketClient(self.app, path, {} if made is None else {"authorization": f"Bearer {made.token}"})


async def _is_refused(server: _Server, client: SocketClient, path: str) -> None:
    num_begun = len(server.harness.generator.live)
    await client.ask(_CREATES[path] or "Hi")
    assert client.closing[0] == 1008
    assert len(server.harness.generator.live) <= num_begun


def _expired(server: _Server, key: Key) -> None:
    server.keyring.update([replace(key, expires_s=time.time() - 1)])


def _rotated(server: _Server, key: Key) -> None:
    server.keyring.update([rotated(key, now_s=time.time(), grace_s=0.0).key])


def _revoked(server: _Server, key: Key) -> None:
    server.keyring.update([replace(key, revoked_s=time.time())])


@pytest.mark.parametrize("path", _CREATES)
@pytest.mark.parametrize("end", [_expired, _rotated, _revoked])
def test_a_key_that_has_ended_begins_nothing_on_its_sockets(path: str, end: Callable[[_Server, Key], None]) -> None:
    async def main() -> None:
        server = _Server()
        made = server.key()
        async with server.client(path, made) as client:
            await client.ask(_CREATES[path] or "Hi")
            assert len(server.harness.generator.live) == 1
            server.harness.finish()
            await client.settle()
            end(server, made.key)
            await _is_refused(server, client, path)

    run_scenario(main())


@pytest.mark.parametrize("path", _CREATES)
def test_the_first_key_ends_anonymous_sockets(path: str) -> None:
    async def main() -> None:
        server = _Server()
        async with server.client(path) as client:
            await client.ask(_CREATES[path] or "Hi")
            assert len(server.harness.generator.live) == 1
            server.harness.finish()
            await client.settle()
            server.key()
            await _is_refused(server, client, path)

    run_scenario(main())


@pytest.mark.parametrize("path", _CREATES)
def test_a_session_that_has_ended_begins_nothing_on_its_sockets(path: str) -> None:
    async def main() -> None:
        server = _Server()
        key = server.key().key
        token, session = new_session(key.key_id, key.secret_hash, time.time())
        server.sessions.update([session], time.time())
        headers = {"cookie": f"tailrace={token}", "origin": "http://localhost"}
        async with SocketClient(server.app, path, headers) as client:
            await client.ask(_CREATES[path] or "Hi")
            assert len(server.harness.generator.live) == 1
            server.harness.finish()
            await client.settle()
            server.sessions.update([replace(session, ended_s=time.time())], time.time())
            await _is_refused(server, client, path)

    run_scenario(main())


def test_followed_streams_and_their_commands_need_the_key_too() -> None:
    async def main() -> None:
        server = _Server()
        made = server.key()
        for path, command in (
            ("/v1/responses", {"type": "response.retrieve", "response_id": "resp_" + "a" * 22}),
            ("/v1/responses", {"type": "response.cancel", "response_id": "resp_" + "a" * 22}),
            ("/v1/ws", {"type": "follow", "stream_id": "a" * 22}),
            ("/v1/ws", {"type": "cancel", "stream_id": "a" * 22}),
        ):
            server.keyring.update([made.key])
            async with server.client(path, made) as client:
                await client.ask(command)
                assert client.is_open()  # there is no such stream
                _expired(server, made.key)
                await client.ask(command)
                assert client.closing[0] == 1008

    run_scenario(main())


def test_what_waits_in_a_lane_does_not_begin_with_a_revoked_key() -> None:
    async def main() -> None:
        server = _Server()
        made = server.key()
        async with server.client("/v1/responses", made) as client:
            for lane in "ab":
                for _ in range(3):
                    await client.ask({**_CREATES["/v1/responses"], "stream_id": lane})
            assert len(server.harness.generator.live) == 2
            client.read()
            _revoked(server, made.key)
            await client.settle()
            assert not server.harness.generator.live
            frames = client.read_json()
            failed = [frame for frame in frames if frame["type"] == "response.failed"]
            assert len(failed) == 2
            assert all("revoked" in frame["response"]["error"]["message"] for frame in failed)
            assert [frame["status"] for frame in frames if frame["type"] == "error"] == [401] * 4
            await asyncio.sleep(1)
            assert client.closing == (1008, "The key was revoked.")

    run_scenario(main())
