"""The table of the streams that a server writes: a stream is in one state at most, whatever happens in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ClaimTaken
from tailrace.streams import StreamLog
from tailrace.types import Record
from tailrace_outer.redis.own_streams import OwnStreams

_NAMES = ("a", "b")
_LOGS = {name: [StreamLog(Record(name, 0.0)) for _ in range(2)] for name in _NAMES}  # an earlier one, and a later one
_STEPS = ("begin", "refuse", "doubt", "settle", "recall", "forget", "own", "end", "drop")


def _state(own: OwnStreams, name: str) -> str:
    unanswered = []
    while (first := own.next_unanswered) is not None:  # the only way to see them all
        unanswered.append(first)
        own.settle(first, None)
    for one in unanswered:
        own.doubt(one)
    states = {
        "owned": own.get(name) is not None,
        "recalled": name in own.recalled,
        "unanswered": name in unanswered,
    }
    (state,) = [state for state, is_in in states.items() if is_in] or ["opening" if name in own else "none"]
    return state


_NEXT = {
    "begin": {"none": "opening", "opening": "opening", "unanswered": "opening"},
    "refuse": {"opening": "none"},
    "doubt": {"none": "unanswered", "opening": "unanswered"},
    "settle": {"unanswered": "none"},
    "recall": {"unanswered": "recalled"},
    "forget": {"recalled": "none"},
    "own": {"none": "owned", "opening": "owned", "unanswered": "owned", "recalled": "owned", "owned": "owned"},
    "end": {"owned": "none"},
    "drop": {"owned": "none"},
    "read_again": {"owned": "recalled"},
}


def _do(own: OwnStreams, step: str, name: str, log: StreamLog) -> None:
    match step:
        case "settle":
            own.settle(name, None)
        case "recall":
            own.settle(name, recalled_by=7)
        case "forget":
            own.forget_recalled(name)
        case "own" | "end" | "drop" | "read_again":
            getattr(own, step)(log)
        case _:
            getattr(own, step)(name)


@given(st.lists(st.tuples(st.sampled_from(_STEPS), st.sampled_from(_NAMES), st.integers(0, 1))))
def test_transitions(steps: list[tuple[str, str, int]]) -> None:
    own, owned = OwnStreams(), dict.fromkeys(_NAMES, -1)
    for step, name, number in steps:
        before, other = _state(own, name), _state(own, "b" if name == "a" else "a")
        is_other_log = step in ("end", "drop", "read_again") and owned[name] != number
        if step == "begin" and before in ("recalled", "owned"):
            with pytest.raises(ClaimTaken):
                own.begin(name)
            continue
        _do(own, step, name, _LOGS[name][number])
        if step == "own":
            owned[name] = number
        expected = before if is_other_log else _NEXT[step].get(before, before)
        assert _state(own, name) == expected, (step, before)
        assert _state(own, "b" if name == "a" else "a") == other


def test_readers_on_other_servers() -> None:
    own, log = OwnStreams(), StreamLog(Record("a", 0.0))
    own.doubt("a")
    own.settle("a", recalled_by=7)
    own.own(log)
    owned = own.get("a")
    assert owned is not None
    assert log.num_readers == 1  # the server that recalled it has one
    for _ in range(2):
        owned.join(8)
    assert log.num_readers == 2
    owned.leave([7, 9])
    assert log.num_readers == 1
    assert own.end(log)
    assert log.num_readers == 0


def test_readers_on_other_servers_stay_while_it_is_read_again() -> None:
    own, log, again = OwnStreams(), StreamLog(Record("a", 0.0)), StreamLog(Record("a", 0.0))
    own.own(log)
    owned = own.get("a")
    assert owned is not None
    owned.join(7)
    owned.join(8)
    own.read_again(log)
    own.own(again)
    assert again.num_readers == 2
