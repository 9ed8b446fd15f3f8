"""Run lengths of the tokens that were computed alone, and what a replay has to repeat."""

from __future__ import annotations

from tailrace.engines.schedule import Schedule


def test_lengths_alternate_and_begin_with_a_batch() -> None:
    assert Schedule.of([(1, False), (2, True), (1, True), (1, False)]) == Schedule((1, 3, 1))
    assert Schedule.of([(2, True)]) == Schedule((0, 2))
    assert Schedule.of([]) == Schedule()


def test_tokens_after_the_lengths_are_free() -> None:
    schedule = Schedule((1, 2, 1))
    assert [schedule.is_alone(index) for index in range(5)] == [False, True, True, False, None]
    assert (schedule.alone_end, Schedule((4,)).alone_end, Schedule((0, 2)).alone_end) == (3, 0, 2)
