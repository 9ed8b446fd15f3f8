"""Many random failures. `TAILRACE_FAULT_SECONDS` sets the duration."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.faults.house import Follower, House, Stream
from tests.faults.laws import seq_of, status_of
from tests.http.wire import Wire, as_json, sse_data
from tests.missing import skip_missing
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(3600)]

FOR_S = float(os.environ.get("TAILRACE_FAULT_SECONDS", "600"))
_NUM_STREAMS = 1_000
_AT_ONCE = 40
_ENGINE_S = (3.0, 12.0)  # between its deaths; where it lives for less than 5 s the next one has to wait
_SERVER_S = (6.0, 20.0)
_CLIENT_S = (0.0, 0.1)
_KILLS = 100


def _says(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        print(f"\n{line}", flush=True)  # noqa: T201


def _begun(house: House, answer: Answer, key: str) -> Stream:
    """A stream that is asked for until it is there, as clients with an Idempotency-Key do."""
    body = {"prompt": answer.prompt, "max_tokens": answer.count, "seed": answer.seed}
    while True:
        with contextlib.suppress(OSError, EOFError), Wire(house.server.port) as wire:
            status, content = wire.request("POST", "/v1/streams", body, {"idempotency-key": key})
            if status == 201:
                stream_id = str(as_json(content)["id"])
                return Stream(stream_id, answer, [Follower(house, stream_id), Follower(house, stream_id)])
            assert status in (429, 503), content
        house.wait_moved()


def test_a_thousand_streams_and_everything_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(1000)
    kills: Counter[str] = Counter()
    # Fast enough to have replayed the longest before the next death: what never gets there is given up, and says so.
    with House(tmp_path, "scripted:tokens_per_s=200", "--linger-s", "600", "--retention-s", "7200") as house:
        lock, numbers = threading.Lock(), itertools.count()
        over_s = time.monotonic() + FOR_S
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                for number in numbers:
                    if number >= _NUM_STREAMS or time.monotonic() > over_s:
                        return
                    begins_s = over_s - FOR_S + FOR_S * number / _NUM_STREAMS  # all the time there are some
                    time.sleep(max(0.0, begins_s - time.monotonic()))
                    answer = Answer(f"Stream {number}.", random.Random(number).randint(1, 800), seed=number)
                    stream = _begun(house, answer, key=f"key-{number}")
                    with lock:
                        house.streams.append(stream)
                    for follower in stream.followers:
                        follower.wait(timeout_s=FOR_S + 300)
            except BaseException as error:  # shown by whoever waits
                failures.append(error)

        askers = [threading.Thread(target=ask) for _ in range(_AT_ONCE)]
        for asker in askers:
            asker.start()
        due = {
            "client": (_CLIENT_S, 0.0),
            "engine": (_ENGINE_S, time.monotonic() + 2),
            "server": (_SERVER_S, time.monotonic() + 5),
        }
        while time.monotonic() < over_s and any(asker.is_alive() for asker in askers) and not failures:
            kind = min(due, key=lambda kind: due[kind][1])
            between, when_s = due[kind]
            time.sleep(max(0.0, when_s - time.monotonic()))
            if kind == "server":
                house.restart()
            elif kind == "engine":
                house.kill_engine()
            else:
                with lock:
                    running = [one for stream in house.streams[-_AT_ONCE:] for one in stream.followers]
                if running:
                    chance.choice(running).cut()
            kills[kind] += 1
            due[kind] = (between, time.monotonic() + chance.uniform(*between))
        for asker in askers:
            asker.join()
        assert not failures, failures[0]
        num_events = sum(len(one.events) for stream in house.streams for one in stream.followers)
        _says(
            capsys,
            f"{len(house.streams)} streams, killed: {kills['client']} clients, {kills['engine']} engines, "
            f"{kills['server']} servers; {num_events} events seen and compared",
        )
    _says(capsys, "losses: 0")


# The real engine

_PROMPTS = ["Once upon a time", "Dogs and cats", "The weather in spring is often", "A river is"]
_TOKENS = 160


@pytest.fixture
def real(tmp_path: Path) -> Iterator[House]:
    try:
        house = House(tmp_path, "smollm2")
    except AssertionError as error:
        if "fetch" in str(error).lower():
            skip_missing("smollm2", "it cannot be fetched")
        raise
    with house:
        yield house


def _read_whole(house: House, prompt: str) -> tuple[str, Follower]:
    """Every second prompt is answered with chance, and a seed."""
    temperature = 0.9 * (_PROMPTS.index(prompt) % 2)
    body = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": temperature, "seed": 7, "ignore_eos": True}
    stream_id = house.server.create(body)
    return stream_id, Follower(house, stream_id)


def _token_ids(event: bytes) -> list[int]:
    ids: list[int] = as_json(sse_data(event)[0])["token_ids"]
    return ids


def test_a_hundred_deaths_of_the_real_engine(real: House, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stream ends with all its tokens, and each reader gets the whole log. Every fifth time the server dies
    instead. The text cannot be compared with another run: it depends on which other streams ran in the same steps."""
    chance = random.Random(100)
    over_s = time.monotonic() + (FOR_S if "TAILRACE_FAULT_SECONDS" in os.environ else 3_000)
    kills: Counter[str] = Counter()
    continuity: Counter[bytes] = Counter()
    num_streams = num_events = 0
    while kills.total() < _KILLS and time.monotonic() < over_s:
        running = {prompt: _read_whole(real, prompt) for prompt in _PROMPTS}
        for _ in range(2):
            _, first = running[_PROMPTS[0]]
            first.wait_events(chance.randint(1, _TOKENS), timeout_s=120)
            if kills.total() % 5 == 4:
                real.restart()
                kills["server"] += 1
            else:
                real.kill_engine()
                kills["engine"] += 1
        for prompt, (stream_id, follower) in running.items():
            follower.wait(timeout_s=240)
            assert status_of(follower.events[-1]) == "done", sse_data(follower.events[-1])
            whole = Follower(real, stream_id)
            whole.wait(timeout_s=60)
            assert follower.events == whole.events  # what was delivered before a death is still in the log
            assert [seq_of(event) for event in whole.events] == list(range(1, len(whole.events) + 1)), prompt
            usage = as_json(sse_data(whole.events[-1])[0])["usage"]
            assert usage["completion_tokens"] == _TOKENS == sum(len(ids) for ids in map(_token_ids, whole.events[:-1]))
            continuity.update(re.findall(rb'"continuity":"(\w+)"', whole.events[-1]))
            num_streams += 1
            num_events += len(follower.events)
    until(lambda: real.server.http.get("/readyz").status_code == 200, timeout_s=60)
    _says(
        capsys,
        f"{num_streams} streams of the real engine, killed: {kills['engine']} engines, {kills['server']} servers; "
        f"{num_events} events compared; {continuity[b'replayed']} streams were replayed, "
        f"{continuity[b'continued']} were continued",
    )
