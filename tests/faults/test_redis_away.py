"""Redis does not answer for a while: docs/many-servers.md, "While Redis is away"."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.faults.team import team
from tests.waiting import until

_WAIT_S = 5.0  # the default of --journal-wait-s
_LONG_S = 120.0


class _Call:
    """A request in a thread of its own."""

    def __init__(self, server: Server, method: str, path: str, **options: object) -> None:
        self._answers: list[httpx.Response] = []

        def ask() -> None:
            self._answers.append(server.http.request(method, path, timeout=_LONG_S, **options))  # type: ignore[arg-type]

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def status(self) -> int:
        self._thread.join(_LONG_S)
        (answer,) = self._answers
        return answer.status_code


def _begin(server: Server) -> _Call:
    return _Call(server, "POST", "/v1/streams", json={"prompt": "New.", "max_tokens": 3})


def _change(server: Server, name: str) -> _Call:
    return _Call(server, "PUT", f"/v1/durable/{name}", headers={"content-type": "text/plain"})


@pytest.mark.deep
def test_for_less_than_the_limit(tmp_path: Path) -> None:
    """Everything that can wait does, and nothing fails."""
    with team(tmp_path) as (servers, redis):
        one, other = servers.servers
        (stream,) = servers.begin_some("Pause", 1, 300, on=one)
        redis.stop()
        calls = [_begin(one), _begin(other), _change(one, "a")]
        assert one.http.get(stream.path).status_code == 200
        assert one.http.get("/readyz").status_code == 200
        time.sleep(3)
        redis.resume()
        assert [call.status() for call in calls] == [201, 201, 201]
        stream.wait()  # `team` compares its events


@pytest.mark.deep
def test_for_longer_than_the_limit(tmp_path: Path) -> None:
    """Streams end with an error that clients can read later, and what comes meanwhile is refused."""
    with team(tmp_path) as (servers, redis):
        one, other = servers.servers
        (stream,) = servers.begin_some("End", 1, 5_000, on=one)
        stream.ends = ("error",)
        finished = one.create({"prompt": "Short.", "max_tokens": 1})
        until(lambda: one.http.get(f"/v1/streams/{finished}").json()["status"] == "done")
        redis.stop()
        waiting = [_begin(one), _change(one, "b")]
        time.sleep(_WAIT_S)
        until(lambda: one.http.get("/readyz").status_code == 503)
        assert [call.status() for call in waiting] == [503, 503]
        assert _begin(one).status() == 503
        assert one.http.get(stream.path).status_code == 200
        assert one.http.get(f"/v1/streams/{finished}").status_code == 503
        time.sleep(30 - _WAIT_S)
        redis.resume()
        stream.wait()
        assert b'"journal_unavailable"' in stream.end
        until(lambda: all(server.http.get("/readyz").status_code == 200 for server in (one, other)))
        assert one.http.get(f"/v1/streams/{finished}").status_code == 200
        servers.begin(Answer("Afterwards.", 20, seed=1), on=one).wait()
