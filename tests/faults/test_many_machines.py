"""Three servers on networks of their own, one Redis, and HAProxy in front: nobody notices when any of them goes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.faults.apart import apart
from tests.faults.cables import Entry
from tests.faults.machines import FAULTS, machines, pull
from tests.waiting import until

DEATHS = int(os.environ.get("TAILRACE_TEST_DEATHS", "12"))
NUM_TOKENS = 150


@pytest.mark.deep
@pytest.mark.timeout(300 + 6 * DEATHS)
@apart
def test_deaths_at_any_time(tmp_path: Path) -> None:
    """TAILRACE_TEST_DEATHS says how many."""
    with machines(tmp_path) as (servers, _, redis):
        for death in range(DEATHS):
            streams = [
                servers.begin(Answer(f"Death {death}, {seed}.", NUM_TOKENS, seed), num_readers=1 + seed % 2)
                for seed in range(4)
            ]
            streams[0].seen(servers.chance.randint(1, 100))
            for stream in servers.streams[:-8]:
                stream.wait()
            fault = FAULTS[death % len(FAULTS)]
            fault(servers, servers.chance.choice(servers.servers), redis)


@pytest.mark.deep
@pytest.mark.timeout(600)
@apart
def test_a_rolling_restart_is_not_noticed(tmp_path: Path) -> None:
    """Under load, with clients that do not resume beside those that do: no request is refused, no answer is cut off."""
    with machines(tmp_path, "--shutdown-delay-s", "2", "--drain-s", "15") as (servers, door, _):
        is_over = threading.Event()
        plain = [_Plain(door, number, is_over) for number in range(4)]
        number = 0
        for victim in list(servers.servers):
            for _ in range(4):
                number += 1
                servers.begin(Answer(f"Roll {number}.", NUM_TOKENS, number), num_readers=1)
            assert servers.stop(victim) == 0
            servers.rejoin(victim.cable)
        is_over.set()
        for client in plain:
            client.check()
        servers.check()
        assert door.failures == []


class _Plain:
    """A client that knows nothing of resuming, and asks one question after the other."""

    def __init__(self, door: Entry, number: int, is_over: threading.Event) -> None:
        self._door = door
        self._answer = Answer(f"Plain {number}.", NUM_TOKENS if number % 2 else 10, number)  # 10: many requests
        self._is_over = is_over
        self._num_answers = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": self._answer.prompt, "max_tokens": self._answer.count, "seed": self._answer.seed}
        try:
            while not self._is_over.is_set():
                answer = self._door.http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == self._answer.text
                self._num_answers += 1
        except BaseException as error:  # shown by `check`
            self._failure = error

    def check(self) -> None:
        self._thread.join()
        assert self._failure is None, repr(self._failure)
        assert self._num_answers


@pytest.mark.deep
@apart
def test_a_cable_is_pulled(tmp_path: Path) -> None:
    """A server that is cut off loses its streams to the others, and takes part again when it is back."""
    with machines(tmp_path) as (servers, _, redis):
        streams = [servers.begin(Answer(f"Pull {seed}.", 500, seed), num_readers=1) for seed in range(6)]
        for stream in streams:
            stream.seen(5)
        victim = servers.servers[0]
        pull(servers, victim, redis)
        victim.wait_line("Other servers took the streams of this server over")
        for stream in streams:
            stream.wait()
        until(lambda: victim.http.get("/readyz").status_code == 200)
