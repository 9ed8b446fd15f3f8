"""Three servers with the real model on networks of their own, one Redis, and HAProxy in front: they die, and answers
stay the same."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.apart import apart
from tests.faults.cables import Entry
from tests.faults.house import Follower
from tests.faults.laws import seq_of, status_of
from tests.faults.machines import FAULTS, Machines, machines
from tests.http.wire import as_json, sse_data
from tests.missing import skip_missing

from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.resolve import resolve

DEATHS = int(os.environ.get("TAILRACE_TEST_DEATHS", "10"))
_NUM_TOKENS = 120
_LONG_S = 600.0  # three engines share the processors with everything else
_SAMPLING: tuple[dict[str, object], ...] = ({"temperature": 0.0}, {"temperature": 0.9})
_PROMPTS = ("Once upon a time", "A river is")
_REQUESTS = tuple(
    {"prompt": prompt, "max_tokens": _NUM_TOKENS, "ignore_eos": True, "seed": 7, **sampling}
    for prompt in _PROMPTS
    for sampling in _SAMPLING
)


@dataclass
class _Reading:
    """A stream, and its readers."""

    request: int  # of `_REQUESTS`
    followers: list[Follower]

    def check(self) -> tuple[str, list[int]]:
        """Wait for the end; hold that no reader saw a gap, another text or two ends, and that no token is missing.
        Return the continuity that the end states ("" for none) and the ids of the tokens."""
        for follower in self.followers:
            follower.wait(timeout_s=_LONG_S)
        *deltas, end = self.followers[0].events
        assert status_of(end) == "done", end
        for follower in self.followers:
            assert follower.events == [*deltas, end]
        assert [seq_of(event) for event in (*deltas, end)] == list(range(1, len(deltas) + 2))
        ids: list[int] = [token_id for event in deltas for token_id in as_json(sse_data(event)[0])["token_ids"]]
        fields = as_json(sse_data(end)[0])
        assert len(ids) == _NUM_TOKENS == fields["usage"]["completion_tokens"]
        return fields.get("continuity", ""), ids


def _begin_all(servers: Machines, door: Entry) -> list[_Reading]:
    begun = []
    for number, body in enumerate(_REQUESTS):
        stream_id = door.create(dict(body))
        begun.append(_Reading(number, [Follower(servers, stream_id) for _ in range(2)]))
    return begun


@pytest.mark.deep
@pytest.mark.timeout(4 * 3600)
@apart
def test_deaths_with_the_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TAILRACE_TEST_DEATHS says how many. Every stream ends with all its tokens, and all its readers get the same ones.

    If the engine is certified as exact (`tailrace certify smollm2 --threads 1 --no-prefix-cache`), each replay gave the
    tokens that readers had. If it is not, a stream whose replay gave other tokens says `continued`. Answers that differ
    from those of the first round are only counted: they also depend on which tokens were computed alone.
    """
    try:
        resolve("smollm2", NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)
    # Next to three engines, Redis may need longer to start again than streams wait for it by default.
    flags = ("--drain-s", "0.2", "--threads", "1", "--no-prefix-cache", "--linger-s", "600", "--journal-wait-s", "60")
    counts: Counter[str] = Counter()
    with machines(tmp_path, *flags, source="smollm2", load_s=_LONG_S) as (servers, door, redis):
        is_certified = door.http.get("/readyz").json()["replay"] == "exact"
        undisturbed = [reading.check() for reading in _begin_all(servers, door)]
        assert [continuity for continuity, _ in undisturbed] == [""] * len(_REQUESTS)
        for death in range(DEATHS):
            readings = _begin_all(servers, door)
            readings[0].followers[0].wait_events(servers.chance.randint(1, _NUM_TOKENS - 20), timeout_s=_LONG_S)
            fault = FAULTS[death % len(FAULTS)]
            fault(servers, servers.chance.choice(servers.servers), redis)
            counts[fault.__name__] += 1
            for reading in readings:
                continuity, ids = reading.check()
                counts[continuity or "undisturbed"] += 1
                counts["other text"] += ids != undisturbed[reading.request][1]
                assert continuity != "continued" or not is_certified, (death, fault.__name__)
        assert counts["replayed"] + counts["continued"]
    with capsys.disabled():
        print(f"\n{DEATHS} deaths, certified: {is_certified}, {dict(counts)}", flush=True)  # noqa: T201
