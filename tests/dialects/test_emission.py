"""Rules that all known clients need, checked on the golden files and on random streams.

Source of the rules: WHATWG HTML 9.2, and the framings that were measured to break openai-python, huggingface_hub,
text-generation, vLLM's benchmark and fetch-event-source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.sse import parse, whole_events
from tests.dialects.transcripts import GOLDEN, STREAMS, VIEWS, facts, transcript, vocabulary
from tests.examples import examples

from tailrace.dialects import native
from tailrace.types import End, Event, Failure, FinishReason, Status, TextDelta, Usage
from tailrace_outer.scripted.scripted_engine import EOS_ID

EVENT_STREAMS = [
    path
    for path in sorted(GOLDEN.glob("*/*.txt"))
    if VIEWS[path.parent.name].media_type.partition(";")[0] == "text/event-stream"
]
OPENAI = [path for path in EVENT_STREAMS if path.parent.name.startswith(("chat", "completion"))]
TGI = [path for path in EVENT_STREAMS if path.parent.name.startswith("tgi")]
NATIVE = [path for path in EVENT_STREAMS if path.parent.name == "native"]


def by_name(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def keys(text: str) -> Any:  # Any: JSON
    """Return the keys of the objects in some JSON, in order."""
    return json.loads(text, object_pairs_hook=lambda pairs: [(n, v) if isinstance(v, list) else n for n, v in pairs])


def cut_fields(path: Path) -> list[str]:
    """Return the fields for programs that an error has in a stream that was cut off."""
    return ["retryable", "stream_id", "last_seq"] if path.stem == "released" else ["retryable"]


def objects(text: str) -> dict[str, Any]:  # Any: JSON
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(value, dict)
    return value


def check_framing(stream: bytes) -> None:
    """Check the laws of all event streams of this server."""
    assert stream.isascii()
    assert b"\r" not in stream
    assert not re.search(rb"[\x00-\x09\x0b-\x1f]", stream)
    # Clients that split lines as Unicode does see the same lines.
    assert stream.decode().splitlines() == stream.decode().split("\n")[:-1]
    events = whole_events(stream)
    first = sum(event.startswith(b"event: progress\n") for event in events)  # which come before, and are no events
    for number, event in enumerate(events):
        names = [line.partition(b":")[0] for line in event.splitlines()[:-1]]
        assert names.count(b"data") == 1
        assert set(names) <= {b"id", b"event", b"retry", b"data"}
        assert all(line.partition(b":")[2].startswith(b" ") for line in event.splitlines()[:-1])
        assert (b"retry" in names) <= (number == first)
    assert len(parse(stream)) == len(events)  # each is dispatched, and none comes from thin air


@pytest.mark.parametrize("path", EVENT_STREAMS, ids=by_name)
def test_framing(path: Path) -> None:
    check_framing(path.read_bytes())


@pytest.mark.parametrize("path", [*OPENAI, *TGI], ids=by_name)
def test_only_data_lines_for_clients_that_expect_json_after_an_id(path: Path) -> None:
    for event in whole_events(path.read_bytes()):
        assert re.fullmatch(rb"data: [^\n]+\n\n", event)


@pytest.mark.parametrize("path", OPENAI, ids=by_name)
def test_openai_streams_end_with_done_and_a_reason(path: Path) -> None:
    messages = [message.text for message in parse(path.read_bytes())]
    assert messages.index("[DONE]") == len(messages) - 1
    chunks = [objects(text) for text in messages[:-1]]
    failed = [chunk for chunk in chunks if "error" in chunk]
    finished = [chunk for chunk in chunks for choice in chunk.get("choices", ()) if choice["finish_reason"]]
    if failed:
        assert failed == chunks[-1:]
        assert not finished
        assert failed[0]["error_type"] == "generation"
        assert list(failed[0]["error"]) == ["message", "type", "code", "param", *cut_fields(path)]
    else:
        assert {choice["index"] for chunk in finished for choice in chunk["choices"]} == {
            choice["index"] for chunk in chunks for choice in chunk["choices"]
        }


@pytest.mark.parametrize("path", OPENAI, ids=by_name)
def test_usage_is_in_every_chunk_or_in_none(path: Path) -> None:
    chunks = [objects(message.text) for message in parse(path.read_bytes())[:-1]]
    chunks = [chunk for chunk in chunks if "choices" in chunk]
    if not path.parent.name.endswith("_usage"):
        assert not any("usage" in chunk for chunk in chunks)
    elif path.stem in ("plain", "progress"):
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    elif path.stem == "cached":
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    elif path.stem == "thinking":
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 21}
    else:
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


@pytest.mark.parametrize("path", TGI, ids=by_name)
def test_tgi_streams_are_as_tgi_serialises_them(path: Path) -> None:
    assert b"[DONE]\n" not in path.read_bytes()
    messages = [message.text for message in parse(path.read_bytes())]
    *before, last = messages
    failed = "error" in objects(last)
    if failed:
        assert keys(last) == ["error", "error_type", *cut_fields(path)]
    for index, text in enumerate(before if failed else messages, 1):
        assert [name[0] if isinstance(name, tuple) else name for name in keys(text)] == [
            "index",
            "token",
            "generated_text",
            "details",
        ]
        assert dict(keys(text)[1:2])["token"] == ["id", "text", "logprob", "special"]
        event = objects(text)
        assert event["index"] == index
        assert "error" not in event  # JavaScript clients raise at the mere name
        assert (event["generated_text"] is not None) == (text is last)
        assert (event["details"] is not None) == (text is last and path.parent.name == "tgi_details")
    if path.parent.name == "tgi_details":
        details = dict(keys(last)[-1:])["details"]
        assert details == ["finish_reason", "generated_tokens", "seed", "input_length"]


@pytest.mark.parametrize("path", NATIVE, ids=by_name)
def test_native_streams_number_their_events_and_end_once(path: Path) -> None:
    messages = parse(path.read_bytes())
    *ids, last = [message.last_event_id for message in messages]
    assert ids == [f"{facts().record.stream_id}-{seq}" for seq in range(1, len(messages))]
    # A reader that is sent away comes back to where it was.
    assert last == (ids[-1] if path.stem == "released" else f"{facts().record.stream_id}-{len(messages)}")
    events = {message.event for message in messages[:-1]}
    assert events <= ({"message", "reasoning"} if path.stem == "thinking" else {"message"})
    assert messages[-1].event in ("done", "error", "cancelled", "interrupted", "released")
    assert objects(messages[-1].text)["status"] == messages[-1].event


# Any stream at all.

few = settings(max_examples=examples(30), deadline=None)  # each is a stream of a dozen events

texts = st.text(st.characters(codec="utf-8"), max_size=12)
logprobs = st.floats(width=32)
finishes: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length"])
statuses: st.SearchStrategy[Status] = st.sampled_from(["done", "error", "cancelled", "interrupted"])
usages = st.builds(Usage, st.integers(0, 10**6), st.integers(0, 10**6))


@st.composite
def deltas(draw: st.DrawFn, num_choices: int) -> TextDelta:
    token_ids = tuple(draw(st.lists(st.integers(0, vocabulary().vocab_size - 1), min_size=1, max_size=3)))
    values = tuple(draw(logprobs) for _ in token_ids)
    choice = draw(st.integers(0, num_choices - 1))
    text, reasoning = draw(st.tuples(texts, st.just("")) | st.tuples(st.just(""), texts))
    return TextDelta(text, token_ids, choice, draw(st.sampled_from([(), values])), reasoning=reasoning)


@st.composite
def streams(draw: st.DrawFn, num_choices: int = 2, only_done: bool = False) -> list[Event]:
    events: list[Event] = list(draw(st.lists(deltas(num_choices), max_size=8)))
    status: Status = "done" if only_done else draw(statuses)
    if status == "done":
        for choice in range(num_choices):
            ids = (draw(st.sampled_from([EOS_ID, 264])),)
            stop = draw(st.none() | texts)
            events.append(TextDelta(draw(texts), ids, choice, finish_reason=draw(finishes), stop=stop))
    failure = Failure("sequence_failed", draw(texts)) if status in ("error", "interrupted") else None
    return [*events, End(status, draw(usages), failure)]


def texts_of(events: list[Event]) -> list[str]:
    both = ["", ""]
    for event in events:
        if isinstance(event, TextDelta):
            both[event.choice] += event.text
    return both


def reasoning_of(events: list[Event], choice: int) -> str:
    return "".join(event.reasoning for event in events if isinstance(event, TextDelta) and event.choice == choice)


@few
@given(streams())
def test_native_events_have_all_facts(events: list[Event]) -> None:
    stream = transcript("native", events)
    check_framing(stream)
    messages = parse(stream)
    assert len(messages) == len(events)
    for message, event in zip(messages, events, strict=True):
        shown = objects(message.text)
        if isinstance(event, End):
            assert (shown["status"], message.event) == (event.status, event.status)
            assert shown["usage"]["total_tokens"] == sum(event.usage)
            failure = {**event.failure._asdict(), "retryable": False} if event.failure else None
            assert shown.get("error") == failure
        else:
            assert message.event == ("reasoning" if event.reasoning else "message")
            assert (shown["text"], tuple(shown["token_ids"])) == (event.text or event.reasoning, event.token_ids)
            assert (shown.get("choice", 0), shown.get("finish_reason")) == (event.choice, event.finish_reason)
            assert shown.get("stop") == (event.stop if event.finish_reason else None)
            assert len(shown.get("logprobs", ())) == len(event.logprobs)


@few
@given(streams(), st.integers(0, 12))
def test_a_native_stream_may_be_encoded_from_anywhere(events: list[Event], seen: int) -> None:
    whole = whole_events(transcript("native", events))
    resumed = native.NativeEncoder(facts())
    assert [resumed.encode(seq, event) for seq, event in enumerate(events[seen:], seen + 1)] == whole[seen:]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_golden_native_stream_may_be_encoded_from_every_event(stream: str) -> None:
    events = STREAMS[stream]
    whole = transcript("native", events)
    before = whole_events(whole)
    for seen in range(len(events) + 1):
        resumed = native.NativeEncoder(facts())
        tail = b"".join(resumed.encode(seq, event) for seq, event in enumerate(events[seen:], seen + 1))
        assert b"".join(before[:seen]) + tail == whole


def test_event_ids_stay_safe_for_browsers_across_origins() -> None:
    encoder = native.NativeEncoder(facts())
    last_id = parse(encoder.encode(10**15 - 1, TextDelta("a", (97,))))[0].last_event_id
    assert re.fullmatch(r"[A-Za-z0-9._~-]{1,40}", last_id)


@few
@given(st.sampled_from(["chat_two", "completion_two"]), streams())
def test_openai_chunks_carry_the_whole_text_of_each_choice(view: str, events: list[Event]) -> None:
    stream = transcript(view, events)
    check_framing(stream)
    *messages, done = [message.text for message in parse(stream)]
    assert done == "[DONE]"
    chunks = [objects(text) for text in messages]
    shown, thought, finished = ["", ""], ["", ""], []
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            thought[choice["index"]] += choice.get("delta", {}).get("reasoning_content", "")
            shown[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finished += [choice["index"]] if choice["finish_reason"] else []
    assert shown == texts_of(events)
    if view == "chat_two":
        assert thought == [reasoning_of(events, choice) for choice in (0, 1)]
    end = events[-1]
    assert isinstance(end, End)
    assert ("error" in chunks[-1]) == (end.status != "done")
    assert sorted(finished) == ([0, 1] if end.status == "done" else [])


@few
@given(st.sampled_from(["chat_logprobs", "completion_logprobs"]), streams(1))
def test_openai_chunks_with_logprobs_lose_no_token(view: str, events: list[Event]) -> None:
    def tokens(chunk: dict[str, Any]) -> Iterator[float | None]:  # Any: JSON
        for choice in chunk.get("choices", ()):
            shown = choice["logprobs"] or {}
            yield from shown.get("token_logprobs") or [token["logprob"] for token in shown.get("content") or ()]

    chunks = [objects(message.text) for message in parse(transcript(view, events))[:-1]]
    shown = [logprob for chunk in chunks for logprob in tokens(chunk)]
    expected = [logprob for event in events if isinstance(event, TextDelta) for logprob in event.logprobs]
    assert len(shown) == len(expected)
    for one, other in zip(shown, expected, strict=True):
        assert one == (max(other, -9999.0) if isfinite(other) else -9999.0)  # JSON has no infinity


@few
@given(streams(1, only_done=True))
def test_tgi_events_carry_the_whole_text_outside_special_tokens(events: list[Event]) -> None:
    stream = transcript("tgi_details", events)
    check_framing(stream)
    shown = [objects(message.text) for message in parse(stream)]
    text = texts_of(events)[0]
    assert "".join(event["token"]["text"] for event in shown if not event["token"]["special"]) == text
    assert shown[-1]["generated_text"] == facts().record.prompts[0].text + text
    ids = [token_id for event in events if isinstance(event, TextDelta) for token_id in event.token_ids]
    assert [event["token"]["id"] for event in shown] == ids
    assert shown[-1]["details"]["generated_tokens"] == len(ids)


@few
@given(streams(1, only_done=True))
def test_whole_answers_equal_the_streams(events: list[Event]) -> None:
    text = texts_of(events)[0]
    chat = objects(VIEWS["chat"].open(facts()).whole(events).decode())
    assert chat["choices"][0]["message"]["content"] == text
    assert chat["choices"][0]["message"].get("reasoning_content", "") == reasoning_of(events, 0)
    completion = objects(VIEWS["completion_logprobs"].open(facts()).whole(events).decode())
    assert completion["choices"][0]["text"] == text
    tgi = objects(VIEWS["tgi_details"].open(facts()).whole(events).decode())
    assert tgi["generated_text"] == facts().record.prompts[0].text + text
    streamed = [objects(message.text)["token"] for message in parse(transcript("tgi_details", events))]
    assert tgi["details"]["tokens"] == streamed
