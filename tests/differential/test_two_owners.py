"""Two owners with their own keys use every client at once. Each reads only their own texts and pays only for their own
requests."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tests.api.own_keys import key_of
from tests.api.process import TAILRACE, Server, environment
from tests.differential.all_drivers import DRIVERS
from tests.differential.drivers import Driver, Outcome
from tests.differential.proxy import Proxy
from tests.differential.test_texts import PROMPTS, expected
from tests.waiting import until

_OWNERS = ("alice", "bob")
_TEXTS = {"alice": list(PROMPTS)[::2], "bob": list(PROMPTS)[1::2]}
_ONE_A_WIRE = list({driver.wire: driver for driver in DRIVERS.values() if not driver.deep}.values())
_NEVER = "ul9azutsDTrpYOmIk4It1A"  # a stream that never was


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'records.sqlite'}"


@pytest.fixture
def keys(database: str) -> dict[str, str]:
    return {owner: key_of(database, owner) for owner in _OWNERS}


@pytest.fixture
def server(database: str, keys: dict[str, str], tmp_path: Path) -> Iterator[Server]:
    flags = ("--database", database, "--data-dir", str(tmp_path), "--max-concurrent-requests", "1000")
    with closing(Server("scripted:text=-1", "--body-gap-s", "20", *flags)) as server:
        yield server.wait_ready()


@pytest.mark.parametrize(
    "drivers",
    [
        pytest.param(_ONE_A_WIRE, id="one of each wire", marks=pytest.mark.deep),
        pytest.param(list(DRIVERS.values()), id="all", marks=[pytest.mark.deep, pytest.mark.timeout(600)]),
    ],
)
def test_two_owners_with_all_clients(
    drivers: Sequence[Driver], server: Server, keys: dict[str, str], database: str
) -> None:
    with ExitStack() as stack:
        proxies = {owner: stack.enter_context(Proxy(server.port, key=keys[owner])) for owner in _OWNERS}

        def read_all(owner: str) -> dict[tuple[str, str], Outcome]:
            found: dict[tuple[str, str], Outcome] = {}
            for driver in drivers:
                outcomes = driver.read_all(proxies[owner].url, [PROMPTS[name] for name in _TEXTS[owner]])
                found |= {(driver.name, name): outcome for name, outcome in zip(_TEXTS[owner], outcomes, strict=True)}
            return found

        with ThreadPoolExecutor(len(_OWNERS)) as pool:
            found = dict(zip(_OWNERS, pool.map(read_all, _OWNERS), strict=True))
    for owner in _OWNERS:
        wanted = {(driver.name, name): expected(driver)[name] for driver in drivers for name in _TEXTS[owner]}
        assert found[owner] == wanted

    rows = _rows(database, sum(len(drivers) * len(_TEXTS[owner]) for owner in _OWNERS))
    assert {row["status"] for row in rows} == {"done"}
    for owner in _OWNERS:
        num_asked = Counter({driver.wire: 0 for driver in drivers})
        for driver in drivers:
            num_asked[driver.wire] += len(_TEXTS[owner])
        assert sorted(Counter(row["wire"] for row in rows if row["owner"] == owner).values()) == sorted(
            num_asked.values()
        )
    ids = {owner: {row["wire"]: row["request_id"] for row in rows if row["owner"] == owner} for owner in _OWNERS}
    for owner, other in (_OWNERS, _OWNERS[::-1]):
        for stream_id in ids[other].values():
            assert _answers(server, keys[other], stream_id)[0][0] == 200
            assert _answers(server, keys[owner], stream_id) == _answers(server, keys[owner], _NEVER)


def _rows(database: str, least: int) -> list[dict[str, Any]]:  # Any: JSON
    """Wait for this number of rows, one for each request, and return them."""
    command = [TAILRACE, "usage", "--requests", "--format", "json", "--database", database]
    rows: list[dict[str, Any]] = []

    def are_there() -> bool:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
        rows[:] = map(json.loads, done.stdout.splitlines())
        return len(rows) >= least

    until(are_there)
    return rows


def _answers(server: Server, key: str, stream_id: str) -> list[tuple[int, bytes]]:
    """Return the answers of all routes of a stream to this key."""
    headers = {"authorization": f"Bearer {key}"}
    asked = [
        ("GET", f"/v1/streams/{stream_id}"),
        ("GET", f"/v1/streams/{stream_id}/events"),
        ("GET", f"/v1/responses/resp_{stream_id}"),
        ("DELETE", f"/v1/responses/resp_{stream_id}"),
        ("POST", f"/v1/streams/{stream_id}/cancel"),
        ("DELETE", f"/v1/streams/{stream_id}"),
    ]
    answers = (server.http.request(method, path, headers=headers) for method, path in asked)
    return [(answer.status_code, answer.content) for answer in answers]
