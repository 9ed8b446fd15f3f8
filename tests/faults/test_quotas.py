"""Usage stays within the limit, to the token, during crashes, and no row is lost."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.api.process import Server
from tests.records.postgresql import OwnPostgresql
from tests.waiting import LONG_S, until

from tailrace.access.quota import Quota
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.records.request_rows import RequestRow
from tailrace.records.request_store import RequestStore

_PROMPT_TOKENS = 2  # of "Hi"


class _Clients:
    """People who ask with one key, as often as they are let in, and begin again where a server was lost."""

    def __init__(self, url: str, token: str, *, max_tokens: int) -> None:
        self.url = url
        self.begun: list[str] = []  # ids of streams
        self.num_refused = 0
        self.num_cancelled = 0
        self.num_lines = 0  # of streams that were read
        self.late_s = 0.0  # the longest pause in an answer
        self._headers = {"authorization": f"Bearer {token}"}
        self._max_tokens = max_tokens
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def asking(self, num_clients: int) -> Iterator[None]:
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()

    def wait_for_more(self) -> None:
        """Until a request more was answered."""
        num_answered = len(self.begun) + self.num_refused
        until(lambda: len(self.begun) + self.num_refused > num_answered)

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(headers=self._headers, timeout=60.0, trust_env=False) as client:
            while not self._is_over.is_set():
                body = {"prompt": "Hi", "max_tokens": chance.randint(1, self._max_tokens), "on_disconnect": "detach"}
                try:
                    answer = client.post(f"{self.url}/v1/streams", json=body)
                    if answer.status_code == 429:
                        self.num_refused += 1
                        self._is_over.wait(0.05)
                        continue
                    self.begun.append(answer.json()["id"])
                    if chance.random() < 0.2:
                        client.post(self.url + answer.json()["cancel_url"]).raise_for_status()
                        self.num_cancelled += 1
                    else:
                        self._read(client, self.url + answer.json()["events_url"])
                except (httpx.HTTPError, KeyError):
                    self._is_over.wait(0.05)  # the server is away

    def _read(self, client: httpx.Client, url: str) -> None:
        with client.stream("GET", url) as events:
            last_s = time.monotonic()
            for _ in events.iter_lines():
                self.num_lines += 1
                self.late_s = max(self.late_s, time.monotonic() - last_s)
                last_s = time.monotonic()


def _rows(database: RecordDatabase, owner: str) -> list[RequestRow]:
    return list(RequestStore(database).rows(owner=owner))


def _spent(rows: list[RequestRow]) -> dict[int, int]:
    """Tokens by the minute in which their requests came."""
    spent: dict[int, int] = {}
    for row in rows:
        minute = int(row.created_s // 60)
        spent[minute] = spent.get(minute, 0) + row.num_prompt_tokens + row.num_completion_tokens
    return spent


@pytest.mark.deep  # it waits for the next minute of the limit, once for each
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_clients", "num_kills"), [(24, 2), (500, 20)])
def test_limits_hold_while_engine_and_server_are_killed(tmp_path: Path, num_clients: int, num_kills: int) -> None:
    url = f"sqlite:///{tmp_path / 'records.sqlite'}"
    database = RecordDatabase(url)
    database.prepare()
    limit = 10 * num_clients  # less than one request of each may take
    token = KeyStore(database).create("alice", quota=Quota(tokens_per_minute=limit)).token
    flags = ("--data-dir", str(tmp_path), "--database", url, "--max-concurrent-requests", "1000")

    def start() -> Server:
        return Server("scripted:tokens_per_s=100", *flags).wait_ready()

    server = start()
    clients = _Clients(server.url, token, max_tokens=30)
    try:
        with clients.asking(num_clients):
            for kill in range(num_kills):
                clients.wait_for_more()
                server.worker().kill()
                server.wait_line("Starting another engine")
                if kill % 2:
                    server.process.kill()
                    server.close()
                    server = start()
                    clients.url = server.url
            until(lambda: clients.num_refused > 0 and clients.num_cancelled > 0 and clients.num_lines > 0)
        until(lambda: set(clients.begun) <= {row.request_id for row in _rows(database, "alice")})
    finally:
        server.close()
    rows = [row for row in _rows(database, "alice") if row.status != "refused"]
    assert {row.status for row in rows} <= {"done", "cancelled", "error"}  # the journal lost none
    assert max(_spent(rows).values()) <= limit
    database.close()


@pytest.mark.deep
@pytest.mark.parametrize("away_s", [3, pytest.param(30, marks=pytest.mark.timeout(300))])
def test_an_unreachable_database_delays_no_token_and_loses_no_row(away_s: int) -> None:
    with OwnPostgresql() as postgresql:
        database = RecordDatabase(postgresql.url)
        database.prepare()
        token = KeyStore(database).create("alice").token
        server = Server("scripted:tokens_per_s=100", "--database", postgresql.url).wait_ready()
        try:
            clients = _Clients(server.url, token, max_tokens=60)
            with clients.asking(6):
                until(lambda: len(_rows(database, "alice")) > 5)
                postgresql.kill()
                num_begun, since_s = len(clients.begun), time.monotonic()
                num_lines = clients.num_lines
                until(lambda: clients.num_lines > num_lines + 500)
                until(lambda: len(clients.begun) > num_begun + 20 and time.monotonic() - since_s > away_s)
                postgresql.start()
                until(lambda: "to the database again" in server.log)
            until(lambda: set(clients.begun) <= {row.request_id for row in _rows(database, "alice")})
        finally:
            server.close()
        rows = _rows(database, "alice")
        assert sorted(row.request_id for row in rows) == sorted(clients.begun)
        print(f"the longest pause in a stream: {clients.late_s:.2f} s")  # noqa: T201 - the machine may be busy: no limit
        assert {row.status for row in rows} <= {"done", "cancelled"}
        assert "Traceback" not in server.log
        database.close()


@contextlib.contextmanager
def _server_over(postgresql: OwnPostgresql) -> Iterator[Server]:
    """A server with a key, which has no traceback in its log at the end."""
    database = RecordDatabase(postgresql.url)
    database.prepare()
    token = KeyStore(database).create("alice").token
    database.close()
    server = Server("scripted", "--database", postgresql.url).wait_ready()
    server.http.headers["authorization"] = f"Bearer {token}"
    try:
        yield server
    finally:
        postgresql.thaw()
        server.close()
    assert "Traceback" not in server.log


@pytest.mark.deep
def test_a_hanging_database_delays_no_stream_and_no_end() -> None:
    with OwnPostgresql() as postgresql, _server_over(postgresql) as server:
        postgresql.freeze()
        for _ in range(50):  # more than there are threads
            assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout_s=45) == 0


@pytest.mark.deep
def test_a_frozen_database_refuses_requests_and_they_work_again_afterwards() -> None:
    with OwnPostgresql() as postgresql, _server_over(postgresql) as server:
        postgresql.freeze()
        with ThreadPoolExecutor(40) as threads:
            asking = [threads.submit(server.post, "/v1/conversations", {}) for _ in range(40)]
            refused = [one.result(timeout=LONG_S) for one in asking]
        postgresql.thaw()
        assert {answer.status_code for answer in refused} == {503}
        assert all("The database" in answer.json()["error"]["message"] for answer in refused)
        until(lambda: server.post("/v1/conversations", {}).status_code == 200)
