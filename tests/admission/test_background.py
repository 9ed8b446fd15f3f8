"""Requests in the background wait behind all others, and leave the engine to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.admission import Asker, Gate, QueueEntry
from tailrace.errors import QueueFull


class _Room:
    """A gate for four sequences. Entries in the background wait again when they are preempted."""

    def __init__(self, *, max_requests: int = 128) -> None:
        self.gate = Gate(max_requests=max_requests)
        self.gate.open(capacity_tokens=100, capacity_sequences=4, block_tokens=1)
        self.entries: dict[str, QueueEntry] = {}

    def enter(self, name: str, *, is_background: bool = False, tokens: int = 1, is_firm: bool = False) -> QueueEntry:
        def preempt() -> None:
            if not is_firm:
                self.gate.leave(self.entries[name])
                self.entries[name] = replace(self.entries[name])
                self.gate.enter(self.entries[name])

        entry = QueueEntry(
            tokens, 1, lambda: None, is_background=is_background, preempt=preempt if is_background else None
        )
        self.entries[name] = entry
        self.gate.enter(entry)
        return entry

    def leave(self, name: str) -> None:
        self.gate.leave(self.entries.pop(name))

    @property
    def running(self) -> list[str]:
        return sorted(name for name, entry in self.entries.items() if entry.admitted_s is not None)


def test_the_newest_leave_to_one_that_has_no_room() -> None:
    room = _Room()
    for name in "abcd":
        room.enter(name, is_background=True)
    room.enter("live")
    assert room.running == ["a", "b", "c", "live"]
    room.enter("more")
    assert room.running == ["a", "b", "live", "more"]
    assert [room.gate.num_ahead(room.entries[name]) for name in "dc"] == [0, 1]
    room.leave("live")
    assert room.running == ["a", "b", "d", "more"]


def test_others_overtake_those_that_wait() -> None:
    room = _Room()
    for number in range(4):
        room.enter(f"live {number}")
    room.enter("background", is_background=True)
    waiting = room.enter("live 4")
    assert room.gate.num_ahead(waiting) == 0
    assert room.gate.num_ahead(room.entries["background"]) == 1
    room.leave("live 0")
    assert "live 4" in room.running
    assert "background" not in room.running
    room.leave("live 1")
    assert "background" in room.running


def test_nobody_is_disturbed_for_one_that_would_not_fit_all_the_same() -> None:
    room = _Room()
    room.enter("large", tokens=60)
    room.enter("background", is_background=True, tokens=30)
    room.enter("larger", tokens=50)
    assert room.running == ["background", "large"]
    room.leave("large")
    assert room.running == ["background", "larger"]


def test_one_that_cannot_be_interrupted_stays() -> None:
    room = _Room()
    for name in "abcd":
        room.enter(name, is_background=True, is_firm=True)
    room.enter("live")
    assert room.running == ["a", "b", "c", "d"]
    room.leave("a")
    assert room.running == ["b", "c", "d", "live"]


def test_background_requests_take_no_slots_of_others() -> None:
    room = _Room(max_requests=3)
    for name in "abc":
        room.enter(name, is_background=True)
    with pytest.raises(QueueFull):
        room.gate.check_open(Asker(is_background=True))
    room.gate.check_open()
    with room.gate.coming():
        room.enter("live")
        room.enter("more")
        with pytest.raises(QueueFull):
            room.gate.check_open()
    for name in ("a", "b", "c", "live", "more"):
        room.leave(name)
    room.gate.check_open(Asker(is_background=True))
    assert (room.gate.used_tokens, room.gate.used_sequences, room.gate.num_running, room.gate.num_waiting) == (
        0,
        0,
        0,
        0,
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=20), st.data())
def test_what_waits_of_the_others_does_not_fit_beside_them(
    arrivals: list[tuple[bool, int]], data: st.DataObject
) -> None:
    """Whatever comes and goes: the first of the others that waits would not fit if nothing ran in the background."""
    room = _Room()
    for number, (is_background, tokens) in enumerate(arrivals):
        room.enter(str(number), is_background=is_background, tokens=tokens)
        if data.draw(st.booleans()):
            room.leave(data.draw(st.sampled_from(sorted(room.entries))))
        live = [entry for entry in room.entries.values() if not entry.is_background]
        used = [entry for entry in live if entry.admitted_s is not None]
        waiting = [entry for entry in live if entry.admitted_s is None]
        if waiting:
            assert sum(entry.num_tokens for entry in used) + waiting[0].num_tokens > 100 or len(used) == 4
        assert room.gate.used_tokens <= 100
        assert room.gate.used_sequences <= 4
