"""How many guesses pay, by the times of both models."""

from __future__ import annotations

import pytest

from tailrace_plugins.openvino.costs import Costs, Pace, StepTimes


def test_times_between_measured_ones_lie_on_a_line() -> None:
    times = StepTimes(Pace())
    assert times(4) == 0
    times.note(2, 10.0)
    assert (times(1), times(9)) == (10.0, 10.0)
    times.note(6, 14.0)
    assert [times(rows) for rows in (1, 2, 3, 6, 10)] == [9.0, 10.0, 11.0, 14.0, 18.0]


def test_a_time_follows_what_is_measured_but_not_an_outlier() -> None:
    times = StepTimes(Pace())
    times.note(1, 10.0)
    times.note(1, 1000.0)
    assert times(1) < 17.0
    for _ in range(100):
        times.note(1, 5.0)
    assert times(1) == pytest.approx(5.0, rel=1e-3)


def test_a_slower_machine_is_slower_for_all() -> None:
    """Times that were measured before the load are compared with those that are measured now."""
    costs = _costs(draft_s=4.0)
    before = costs.best([0.9], 1, 5)
    for _ in range(100):
        costs.target.note(1, 40.0)
    after = costs.best([0.9], 1, 5)
    assert after.num_guesses == before.num_guesses
    assert after.saved_s > 2 * before.saved_s


def _costs(*, draft_s: float, alone_s: float = 0.0) -> Costs:
    costs = Costs()
    costs.target.note(1, 10.0)
    costs.target.note(6, 12.0)
    costs.draft.note(1, draft_s)
    if alone_s:
        costs.alone.note(1, alone_s)
    return costs


@pytest.mark.parametrize(
    ("draft_s", "share", "expected"),
    [(1.0, 0.95, 5), (1.0, 0.6, 3), (4.0, 0.8, 2), (6.0, 0.5, 0), (10.0, 1.0, 0), (1.0, 0.0, 0)],
)
def test_fewer_guesses_pay_if_fewer_are_right_or_they_cost_more(draft_s: float, share: float, expected: int) -> None:
    gain = _costs(draft_s=draft_s).best([share], 1, 5)
    assert gain.num_guesses == expected
    assert (gain.saved_s > 0) == (expected > 0)


def test_a_row_that_would_be_faster_alone_needs_better_guesses() -> None:
    assert _costs(draft_s=3.0).best([0.6], 1, 5).num_guesses
    assert not _costs(draft_s=3.0, alone_s=7.0).best([0.6], 1, 5).num_guesses


def test_what_a_token_saves() -> None:
    """With a guess that is always right, a step of 10.4 and 1.0 seconds gives two tokens."""
    assert _costs(draft_s=1.0).best([1.0], 1, 1).saved_s == pytest.approx(10.0 - 11.4 / 2)


def test_from_which_share_of_right_guesses_on_they_pay() -> None:
    assert _costs(draft_s=1.0).least_share(5) == pytest.approx(0.2)
    assert _costs(draft_s=10.0).least_share(5) is None
