"""Owners take turns and have shares of the slots, whatever the size of their requests."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.admission import Asker, Gate, QueueEntry
from tailrace.errors import QueueFull


class _Door:
    """A gate with one slot, and the requests that it admitted."""

    def __init__(self, *, max_requests: int = 10_000, sequences: int = 1) -> None:
        self.gate = Gate(max_requests=max_requests)
        self.gate.open(capacity_tokens=10**6, capacity_sequences=sequences, block_tokens=1)
        self.started: list[str] = []
        self.running: list[QueueEntry] = []

    def ask(self, owner: str, name: str = "") -> QueueEntry:
        """Raises: QueueFull."""
        num_tokens = self.gate.check(1, 1, 1, Asker(owner))

        def start() -> None:
            self.started.append(name or owner)
            self.running.append(entry)

        entry = QueueEntry(num_tokens, 1, start, owner=owner)
        self.gate.enter(entry)
        return entry

    def finish(self) -> None:
        """End the longest running request."""
        self.gate.leave(self.running.pop(0))


def test_a_thousand_requests_of_one_owner_delay_another_by_one_turn() -> None:
    door = _Door()
    for _ in range(1000):
        door.ask("alice")
    door.ask("bob")
    door.finish()
    door.finish()
    assert door.started == ["alice", "alice", "bob"]


def test_owners_take_turns_and_keep_their_order() -> None:
    door = _Door()
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        door.ask(name[0], name)
    while door.running:
        door.finish()
    assert door.started == ["a1", "a2", "b1", "c1", "a3", "b2"]


def test_one_owner_alone_waits_in_order_of_arrival() -> None:
    door = _Door()
    for number in range(20):
        door.ask("alice", str(number))
    while door.running:
        door.finish()
    assert door.started == [str(number) for number in range(20)]


def test_a_request_that_left_the_queue_has_no_turn() -> None:
    door = _Door()
    door.ask("alice")
    waiting = door.ask("bob")
    door.ask("alice", "second")
    door.gate.leave(waiting)
    door.finish()
    assert door.started == ["alice", "second"]
    assert door.gate.num_waiting == 0


def test_the_number_ahead_counts_turns() -> None:
    door = _Door()
    door.ask("alice")
    entries = {f"{owner}{number}": door.ask(owner) for owner in ("alice", "bob") for number in range(3)}
    assert {name: door.gate.num_ahead(entry) for name, entry in entries.items()} == {
        "alice0": 0, "bob0": 1, "alice1": 2, "bob1": 3, "alice2": 4, "bob2": 5,
    }  # fmt: skip
    door.finish()
    assert [door.gate.num_ahead(entries[name]) for name in ("alice0", "bob0", "alice1", "bob1")] == [0, 0, 1, 2]


def test_a_full_gate_admits_other_owners_up_to_their_share() -> None:
    door = _Door(max_requests=8)
    for _ in range(8):
        door.ask("alice")
    with pytest.raises(QueueFull):
        door.ask("alice")
    for owner, share in (("bob", 4), ("carol", 2)):
        for _ in range(share):
            door.ask(owner)
        with pytest.raises(QueueFull):
            door.ask(owner)
    assert door.gate.num_running + door.gate.num_waiting == 14
    for name in "dxyz":
        try:
            door.ask(name)
        except QueueFull:
            break
    assert door.gate.num_running + door.gate.num_waiting <= 16  # whatever the number of owners


def test_requests_being_checked_use_slots_of_their_owner() -> None:
    door = _Door(max_requests=2)
    with door.gate.coming(Asker("alice")), door.gate.coming(Asker("alice")):
        with pytest.raises(QueueFull), door.gate.coming(Asker("alice")):
            raise AssertionError("let in")
        with door.gate.coming(Asker("bob")):
            pass
    with door.gate.coming(Asker("alice")):
        pass


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=80), st.integers(1, 4))
def test_no_owner_has_two_turns_more_than_a_waiting_one(steps: list[tuple[str, bool]], sequences: int) -> None:
    """While an owner waits for its first turn, no other owner has two turns."""
    door = _Door(sequences=sequences)
    since: dict[str, Counter[str]] = {}  # for each owner who waits: the starts of others
    for owner, must_finish in steps:
        before = len(door.started)
        if must_finish and door.running:
            door.finish()
        else:
            entry = door.ask(owner)
            if entry.admitted_s is None:
                since.setdefault(owner, Counter())
        for name in door.started[before:]:
            since.pop(name, None)
            for others in since.values():
                others[name] += 1
        assert all(max(others.values(), default=0) <= 1 for others in since.values()), door.started
