"""Events that are skipped for a reader are read without being encoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.sse import parse
from tests.dialects.test_emission import streams
from tests.dialects.transcripts import MEMOS, STREAMS, VIEWS, facts
from tests.examples import examples

from tailrace.dialects.bodies import quote, to_json
from tailrace.dialects.wire import CumulativeEncoder, Encoder
from tailrace.types import End, Event, TextDelta, Usage
from tailrace_outer.responses import responses_events
from tailrace_outer.responses.responses_events import ResponsesEncoder, ResponsesView, answer_message
from tailrace_plugins.articles import cumulative

LONG: list[Event] = [
    *(TextDelta(f" word {number}", (97,), logprobs=(-0.5,)) for number in range(2_000)),
    TextDelta("", (256,), finish_reason="stop"),
    End("done", Usage(4, 2_001)),
]
few = settings(max_examples=examples(50), deadline=None)


def cumulative_encoder(view: str = "cumulative_followed") -> CumulativeEncoder:
    encoder = VIEWS[view].open(facts())
    assert isinstance(encoder, CumulativeEncoder)
    return encoder


def rest(encoder: Encoder, events: list[Event], after: int) -> bytes:
    return b"".join(encoder.encode(seq, event) for seq, event in enumerate(events[after:], after + 1))


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the size of each rendered text."""
    sizes: list[int] = []

    def counting(render: Callable[[str], str]) -> Callable[[str], str]:
        def count(text: str) -> str:
            sizes.append(len(shown := render(text)))
            return shown

        return count

    def count_json(value: object) -> bytes:
        sizes.append(len(shown := to_json(value)))
        return shown

    monkeypatch.setattr(cumulative, "quote", counting(quote))
    monkeypatch.setattr(responses_events, "to_json", count_json)
    return sizes


# All the text so far


@few
@given(streams(), st.integers(0, 12))
def test_skipped_text_is_in_the_next_event(events: list[Event], after: int) -> None:
    seen = cumulative_encoder()
    for seq, event in enumerate(events[:after], 1):
        seen.encode(seq, event)
    skipping = cumulative_encoder()
    skipping.skip(events[: after // 2])
    skipping.skip(events[after // 2 : after])
    assert rest(skipping, events, after) == rest(seen, events, after)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_golden_stream_may_be_resumed_at_every_event(stream: str) -> None:
    events = STREAMS[stream]
    whole = [cumulative_encoder()]
    shown = [whole[0].encode(seq, event) for seq, event in enumerate(events, 1)]
    for after in range(len(events) + 1):
        skipping = cumulative_encoder()
        skipping.skip(events[:after])
        assert rest(skipping, events, after) == b"".join(shown[after:])


@few
@given(streams(), st.integers(0, 12))
def test_stale_events_are_those_that_a_later_event_contains(events: list[Event], after: int) -> None:
    """A reader without them still gets the whole text and the end."""
    full, short = cumulative_encoder(), cumulative_encoder()
    whole = [message.text for message in parse(rest(full, events, 0))]
    head = b"".join(short.encode(seq, event) for seq, event in enumerate(events[:after], 1))
    num_stale = short.num_stale(events[after:])
    short.skip(events[after : after + num_stale])
    shown = [message.text for message in parse(head + rest(short, events, after + num_stale))]
    assert shown[-2:] == whole[-2:]
    assert set(shown) <= set(whole)
    assert len(shown) <= len(parse(head)) + 2


def test_skipping_takes_linear_time(rendered: list[int]) -> None:
    encoder = cumulative_encoder()
    encoder.skip(LONG)
    text = "".join(event.text for event in LONG if isinstance(event, TextDelta))
    assert sum(rendered) <= 2 * len(text)
    assert len(rendered) == 1


# Responses


class Heavy(str):
    """A text that counts the characters to which it is appended."""

    moved: int = 0

    __slots__ = ()

    def __radd__(self, before: str) -> str:
        Heavy.moved += len(before)
        return f"{before}{self}"


@pytest.mark.parametrize("name", [name for name in MEMOS if name.startswith("responses")])
def test_only_written_events_are_encoded(name: str, rendered: list[int]) -> None:
    known = facts(memo=MEMOS[name])
    body = ResponsesEncoder(known, ResponsesView()).whole(LONG)
    assert rendered == [len(body)]
    rendered.clear()
    assert answer_message(known, LONG).content or name == "responses_forced"
    assert rendered == []
    shown = rest(ResponsesEncoder(known, ResponsesView()), LONG, 0).count(b"\n\n")
    assert len(rendered) == shown
    rendered.clear()
    assert rest(ResponsesEncoder(known, ResponsesView(starting_after=shown - 3)), LONG, 0).count(b"\n\n") == 2
    assert len(rendered) == 2


def test_a_growing_text_is_not_copied_for_each_piece() -> None:
    encoder = ResponsesEncoder(facts(), ResponsesView(starting_after=10_000))
    Heavy.moved = 0
    for seq in range(1, 1_001):
        encoder.encode(seq, TextDelta(Heavy("river"), (97,)))
    encoder.encode(1_001, End("done", Usage(4, 1_000)))
    assert encoder.items[0]["content"][0]["text"] == "river" * 1_000
    assert Heavy.moved <= 5_000


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", [name for name in MEMOS if name.startswith("responses")])
def test_the_current_response_is_the_sum_of_its_events(name: str, stream: str) -> None:
    known = facts(memo=MEMOS[name])
    events = STREAMS[stream]
    for num_seen in range(len(events) + 1):
        one_by_one, folded = (ResponsesEncoder(known, ResponsesView()) for _ in range(2))
        for seq, event in enumerate(events[:num_seen], 1):
            one_by_one.encode(seq, event)
        one_by_one.fold([])
        folded.fold(events[:num_seen])
        assert folded.items == one_by_one.items
