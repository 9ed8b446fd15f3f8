"""The exact bytes of every wire. `tests/golden/README.md` explains how to update the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.dialects.transcripts import (
    GOLDEN,
    REPORTING,
    STREAMED,
    STREAMS,
    WHOLE,
    encoder_for,
    progress_transcript,
    released_transcript,
    transcript,
    vocabulary,
)

from tailrace.errors import TailraceError
from tailrace.text import Detokenizer
from tailrace.types import End, TextDelta

_streamed = [(view, stream) for view, streams in STREAMED.items() for stream in streams]
_released = [view for view, streams in STREAMED.items() if "interrupted" in streams]
_whole = [(view, stream) for view, streams in WHOLE.items() for stream in streams]


def check(path: Path, actual: bytes) -> None:
    if os.environ.get("TAILRACE_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(actual)
    assert actual == path.read_bytes()


@pytest.mark.parametrize(("view", "stream"), _streamed)
def test_a_streaming_answer(view: str, stream: str) -> None:
    check(GOLDEN / view / f"{stream}.txt", transcript(view, STREAMS[stream]))


@pytest.mark.parametrize("view", _released)
def test_a_reader_that_is_sent_away(view: str) -> None:
    check(GOLDEN / view / "released.txt", released_transcript(view))


def test_bare_text_cannot_say_why_it_is_cut_off() -> None:
    with pytest.raises(TailraceError, match="shutting down"):
        released_transcript("plain")


@pytest.mark.parametrize("view", REPORTING)
def test_a_prompt_that_is_read_in_parts(view: str) -> None:
    check(GOLDEN / view / "progress.txt", progress_transcript(view))


@pytest.mark.parametrize(("view", "stream"), _whole)
def test_an_answer_without_streaming(view: str, stream: str) -> None:
    check(GOLDEN / view / f"{stream}.json", encoder_for(view, STREAMS[stream]).whole(STREAMS[stream]))


def test_no_unused_transcripts() -> None:
    expected = {GOLDEN / view / f"{stream}.txt" for view, stream in _streamed}
    expected |= {GOLDEN / view / "released.txt" for view in _released}
    expected |= {GOLDEN / view / "progress.txt" for view in REPORTING}
    expected |= {GOLDEN / view / f"{stream}.json" for view, stream in _whole}
    assert set(GOLDEN.glob("*/*")) == expected


@pytest.mark.parametrize("stream", [name for name in STREAMS if not name.startswith(("stop", "thinking"))])
def test_the_streams_agree_with_the_vocabulary(stream: str) -> None:
    for choice in (0, 1):
        detokenizer = Detokenizer(vocabulary())
        deltas = [e for e in STREAMS[stream] if isinstance(e, TextDelta) and e.choice == choice]
        text = "".join(detokenizer.push(delta.token_ids) for delta in deltas)
        assert text + detokenizer.flush() == "".join(delta.text for delta in deltas)


def test_the_streams_count_their_tokens() -> None:
    for events in STREAMS.values():
        counted = sum(len(event.token_ids) for event in events if isinstance(event, TextDelta))
        end = events[-1]
        assert isinstance(end, End)
        assert end.usage.num_completion_tokens == counted
