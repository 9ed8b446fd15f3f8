"""How requests share the budget for bodies."""

from __future__ import annotations

import contextlib

import pytest

from tailrace.errors import AdmissionError
from tailrace.http.body_budget import BodyBudget
from tailrace.settings import Settings

SETTINGS = Settings()
LARGEST = SETTINGS.body_bytes


def _fill(budget: BodyBudget, caller: str) -> list[int]:
    """Read bodies of the largest size that is allowed to one caller, until not even 100 bytes are allowed; returns
    their sizes."""
    taken = []
    size = LARGEST
    while size >= 100:
        try:
            budget.take(caller, size, 0)
            taken.append(size)
        except AdmissionError:
            size //= 2
    return taken


def test_one_caller_cannot_keep_others_out() -> None:
    budget = BodyBudget(SETTINGS)
    taken = _fill(budget, "192.0.2.1")
    assert SETTINGS.pending_body_bytes // 8 < sum(taken) <= SETTINGS.pending_body_bytes // 4
    budget.take("192.0.2.2", LARGEST, 0)
    with pytest.raises(AdmissionError):
        budget.take("192.0.2.1", 200, 0)
    for size in taken:
        budget.give_back("192.0.2.1", size)
    budget.take("192.0.2.1", LARGEST, 0)


def test_a_body_in_pieces_counts_once() -> None:
    budget = BodyBudget(SETTINGS)
    for own in range(0, LARGEST, LARGEST // 4):
        budget.take("192.0.2.1", LARGEST // 4, own)


def test_a_caller_on_loopback_has_the_whole_budget() -> None:
    """It may be a proxy for many clients."""
    for caller in ("127.0.0.1", "::/64"):
        assert sum(_fill(BodyBudget(SETTINGS), caller)) > SETTINGS.pending_body_bytes // 2


def test_many_callers_together_stay_within_the_budget() -> None:
    budget = BodyBudget(SETTINGS)
    assert sum(sum(_fill(budget, f"192.0.2.{number}")) for number in range(8)) <= SETTINGS.pending_body_bytes


def test_one_body_of_the_largest_size_always_fits_into_a_share() -> None:
    BodyBudget(Settings(body_bytes=1000, pending_body_bytes=1000)).take("192.0.2.1", 1000, 0)


def test_bodies_with_images_leave_room_for_others() -> None:
    budget, most = BodyBudget(SETTINGS), SETTINGS.image_body_bytes
    for _ in range(2):
        budget.take("192.0.2.1", most, 0)
    with pytest.raises(AdmissionError):
        budget.take("192.0.2.1", most, 0)
    budget.take("192.0.2.1", LARGEST // 2, 0)
    for number in range(2, 60):
        with contextlib.suppress(AdmissionError):
            budget.take(f"192.0.2.{number}", most, 0)
    budget.take("192.0.2.99", LARGEST // 2, 0)
