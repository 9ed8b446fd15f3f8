"""Streams are begun, read, cut, cancelled and deleted, engines and servers are killed, in any order: the laws hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.api.oracle import Answer
from tests.faults.house import Follower, House, Stream

_MOST_ENGINES = 2  # killed in a server's life: a third that did not last, and it refuses until one does


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("any-order"), "scripted:tokens_per_s=300", "--retention-s", "7200") as house:
        yield house


def _machine(house: House, most_deaths: int) -> type[RuleBasedStateMachine]:
    class Faults(RuleBasedStateMachine):
        """What was begun in one run is waited for at its end; the journal is looked at when all of them are over.

        Nothing dies before there is a stream that could lose by it, and `most_deaths` bounds a run, since each takes as
        long as something takes to start.
        """

        def __init__(self) -> None:
            super().__init__()
            self.mine: list[Stream] = []
            self.num_deaths = 0

        def may_die(self) -> bool:
            return bool(self.mine) and self.num_deaths < most_deaths

        def one(self, number: int) -> Stream:
            return self.mine[number % len(self.mine)]

        @rule(count=st.integers(1, 150), seed=st.integers(0, 2**32))
        def create(self, count: int, seed: int) -> None:
            self.mine.append(house.begin(Answer(f"Any {len(house.streams)}.", count, seed)))

        @precondition(lambda self: self.mine)
        @rule(number=st.integers(0, 9), num_events=st.integers(1, 150))
        def read_on(self, number: int, num_events: int) -> None:
            stream = self.one(number)
            if stream.ends == ("done",):
                stream.seen(min(num_events, stream.answer.count))

        @precondition(lambda self: self.mine)
        @rule(number=st.integers(0, 9))
        def join(self, number: int) -> None:
            stream = self.one(number)
            if not stream.is_deleted:
                stream.followers.append(Follower(house, stream.stream_id))

        @precondition(lambda self: self.mine)
        @rule(number=st.integers(0, 9), reader=st.integers(0, 3))
        def cut(self, number: int, reader: int) -> None:
            followers = self.one(number).followers
            followers[reader % len(followers)].cut()

        @precondition(lambda self: self.mine)
        @rule(number=st.integers(0, 9))
        def cancel(self, number: int) -> None:
            stream = self.one(number)
            if not stream.is_deleted:
                stream.ends = ("done", "cancelled")
                assert house.server.http.post(f"{stream.path}/cancel").status_code == 200

        @precondition(lambda self: self.mine)
        @rule(number=st.integers(0, 9))
        def delete(self, number: int) -> None:
            stream = self.one(number)
            expected = 410 if stream.is_deleted else 204
            stream.ends, stream.is_deleted = ("done", "cancelled"), True
            assert house.server.http.delete(stream.path).status_code == expected

        @precondition(lambda self: self.may_die())
        @rule()
        def kill_engine(self) -> None:
            self.num_deaths += 1
            if house.engines_killed == _MOST_ENGINES:
                house.restart()
            house.kill_engine()

        @precondition(lambda self: self.may_die())
        @rule(is_asked=st.booleans())
        def next_server(self, is_asked: bool) -> None:
            self.num_deaths += 1
            if is_asked:
                house.stop()
                house.start()
            else:
                house.restart()

        def teardown(self) -> None:
            for stream in self.mine:
                stream.wait()
                stream.check(None)

    return Faults


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num_runs", "num_steps", "most_deaths"),
    [
        pytest.param(3, 15, 3, marks=pytest.mark.timeout(300)),
        pytest.param(60, 30, 30, marks=pytest.mark.timeout(1800)),
    ],
    ids=["short", "long"],
)
def test_in_any_order(house: House, num_runs: int, num_steps: int, most_deaths: int) -> None:
    run_state_machine_as_test(
        _machine(house, most_deaths),
        settings=settings(
            max_examples=num_runs,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            suppress_health_check=[*HealthCheck],
        ),
    )
