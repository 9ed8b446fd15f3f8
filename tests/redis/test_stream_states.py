"""The table of the states of streams: its docstring says what it does, whatever happens in which order."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.redis.shared_streams import DONE

from tailrace.errors import ClaimTaken
from tailrace.streams import StreamLog
from tailrace.streams.rows import Rows
from tailrace.types import Record
from tailrace_outer.redis import stream_states
from tailrace_outer.redis.stream_states import (
    TRANSITIONS,
    Cached,
    Mirror,
    Opening,
    Owned,
    Recalled,
    State,
    StreamStates,
    Unanswered,
    Unwritten,
)

_KINDS: dict[str, type[State | None]] = {
    "none": type(None), "opening": Opening, "unanswered": Unanswered, "recalled": Recalled, "owned": Owned,
    "mirrored": Mirror, "cached": Cached,
}  # fmt: skip
_NAMES = ("a", "b")
# What each step makes of a state. The others are left as they are. "+": with a mirror.
_NEXT = {
    "begin": {"none": "opening", "unanswered": "opening", "unanswered+": "opening+", "mirrored": "opening+"},
    "doubt": {"none": "unanswered", "opening": "unanswered", "opening+": "unanswered+", "mirrored": "unanswered+"},
    "settle": {"unanswered": "none", "unanswered+": "mirrored"},
    "recall": {"unanswered": "recalled", "unanswered+": "recalled+"},
    "leave": {
        "opening": "none", "unanswered": "none", "recalled": "none", "owned": "none", "mirrored": "none",
        "cached": "none", "opening+": "mirrored", "unanswered+": "mirrored", "recalled+": "mirrored",
    },
    "own": dict.fromkeys(
        ("none", "opening", "opening+", "unanswered", "unanswered+", "recalled", "recalled+", "mirrored", "cached"),
        "owned",
    ),
    "stop owning": {"owned": "none"},
    "stop owning and go on": {"owned": "recalled"},
    "follow": {"none": "mirrored", "opening": "opening+", "unanswered": "unanswered+", "recalled": "recalled+"},
    "unfollow": {
        "mirrored": "none", "opening+": "opening", "unanswered+": "unanswered", "recalled+": "recalled",
    },
    "cache": dict.fromkeys(
        ("none", "opening", "opening+", "unanswered", "unanswered+", "recalled", "recalled+", "owned", "mirrored"),
        "cached",
    ),
}  # fmt: skip
_REFUSED = {  # what a part of the store must not ask for
    **{("begin", state): ClaimTaken for state in ("recalled", "recalled+", "owned", "cached")},
    **{("begin", state): RuntimeError for state in ("opening", "opening+")},
    **{("follow", state): RuntimeError for state in ("owned", "mirrored", "cached")},
    ("own", "owned"): RuntimeError,
}


def _log(name: str) -> StreamLog:
    return StreamLog(Record(name, 0.0), [DONE])


def _mirror(name: str) -> Mirror:
    return Mirror(_log(name), 7, Rows(None), ask=lambda *_: None, on_end=lambda _: None)


def _new(state: str) -> State | None:
    made: dict[str, State] = {
        "opening": Opening(), "unanswered": Unanswered(), "recalled": Recalled(), "owned": Owned(_log("a")),
        "mirrored": _mirror("a"), "cached": Cached(_log("a"), 5),
    }  # fmt: skip
    return made.get(state)


def test_the_table_of_the_docstring() -> None:
    rows = re.findall(r"^    (\w+) {3,}.* {3,}(\w+(?:, \w+)*)$", stream_states.__doc__ or "", re.MULTILINE)
    written = {_KINDS[state]: frozenset(_KINDS[one] for one in following.split(", ")) for state, following in rows}
    assert written == TRANSITIONS


@pytest.mark.parametrize(("before", "after"), list(itertools.product(_KINDS, _KINDS)))
def test_each_transition(before: str, after: str) -> None:
    streams, first, then = StreamStates(), _new(before), _new(after)
    for state in (Unanswered(), first) if before == "recalled" else (first,):
        if state is not None:
            streams.move("a", state)
    if _KINDS[after] in TRANSITIONS[_KINDS[before]]:
        streams.move("a", then)
        assert streams.get("a") is then
    else:
        with pytest.raises(RuntimeError, match="cannot go from"):
            streams.move("a", then)
        assert streams.get("a") is first


def _state(streams: StreamStates, name: str) -> str:
    state = streams.get(name)
    (found,) = [word for word, kind in _KINDS.items() if type(state) is kind]
    return found + "+" * (isinstance(state, Unwritten) and state.mirror is not None)


def _do(streams: StreamStates, step: str, name: str, log: StreamLog) -> None:
    state, mirror = streams.get(name), streams.mirror(name)
    match step:
        case "settle" | "recall":
            streams.settle(name, 7 if step == "recall" else None)
        case "leave":
            assert state is None or streams.leave(name, state)
        case "stop owning" | "stop owning and go on":
            streams.stop_owning(log, goes_on=step != "stop owning")
        case "follow":
            streams.follow(_mirror(name))
        case "unfollow":
            streams.unfollow(mirror or _mirror(name))
        case _:
            getattr(streams, step)(log if step in ("own", "cache") else name)


@given(st.lists(st.tuples(st.sampled_from(list(_NEXT)), st.sampled_from(_NAMES), st.integers(0, 1))))
def test_steps(steps: list[tuple[str, str, int]]) -> None:
    streams, owned = StreamStates(), dict.fromkeys(_NAMES, -1)
    logs = {name: [_log(name), _log(name)] for name in _NAMES}  # an earlier one, and a later one
    for step, name, number in steps:
        before, others = _state(streams, name), [_state(streams, other) for other in _NAMES if other != name]
        if step == "follow" and before.endswith("+"):
            continue
        if error := _REFUSED.get((step, before)):
            with pytest.raises(error):
                _do(streams, step, name, logs[name][number])
            assert _state(streams, name) == before
            continue
        _do(streams, step, name, logs[name][number])
        is_other_log = (
            before == "owned" and step in ("stop owning", "stop owning and go on", "cache") and owned[name] != number
        )
        if step == "own":
            owned[name] = number
        assert _state(streams, name) == (before if is_other_log else _NEXT[step].get(before, before)), (step, before)
        assert [_state(streams, other) for other in _NAMES if other != name] == others
        of = {kind: list(streams.of(kind)) for kind in (Opening, Unanswered, Recalled, Owned, Mirror, Cached)}
        assert sorted(itertools.chain(*of.values())) == [one for one in _NAMES if streams.get(one) is not None]
        assert {one for one in _NAMES if streams.mirror(one)} == {one.log.stream_id for one in streams.mirrors}
        assert (streams.cached_bytes > 0) == bool(of[Cached])


def test_a_state_that_is_over_is_not_left_again() -> None:
    streams = StreamStates()
    opening = streams.begin("a")
    streams.doubt("a")
    assert not streams.leave("a", opening)
    assert isinstance(streams.get("a"), Unanswered)


def test_readers_on_other_servers() -> None:
    streams, log = StreamStates(), StreamLog(Record("a", 0.0))
    streams.doubt("a")
    streams.settle("a", recalled_by=7)
    streams.own(log)
    owned = streams.owned("a")
    assert owned is not None
    assert log.num_readers == 1  # the server that recalled it has one
    for _ in range(2):
        owned.join(8)
    assert log.num_readers == 2
    owned.leave([7, 9])
    assert log.num_readers == 1
    streams.cache(log)
    assert log.num_readers == 0


def test_readers_on_other_servers_stay_while_it_is_read_again() -> None:
    streams, log, again = StreamStates(), StreamLog(Record("a", 0.0)), StreamLog(Record("a", 0.0))
    streams.own(log)
    owned = streams.owned("a")
    assert owned is not None
    owned.join(7)
    owned.join(8)
    assert streams.stop_owning(log, goes_on=True)
    streams.own(again)
    assert again.num_readers == 2
