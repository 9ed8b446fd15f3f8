"""The streams that every wire is shown, and the wires that show them.

Token ids are those of the scripted engine's vocabulary: 0 to 255 are bytes, 256 is the end of a sequence, and words
follow from 264. A test holds the texts below against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tailrace.dialects import StreamFacts, View, native, openai, plain, tgi
from tailrace.engines.scripted import EOS_ID, tokenizer_json
from tailrace.text import Tokenizer
from tailrace.types import End, Event, Failure, FinishReason, TextDelta, Usage

__all__ = ["GOLDEN", "STREAMED", "STREAMS", "VIEWS", "WHOLE", "facts", "transcript", "vocabulary"]

GOLDEN = Path(__file__).parent.parent / "golden"

THE, RIVER, RUNS, OVER = 264, 265, 266, 267


def _step(
    text: str,
    token_ids: Sequence[int],
    choice: int = 0,
    logprobs: tuple[float, ...] = (),
    finish_reason: FinishReason | None = None,
    stop: str | None = None,
) -> TextDelta:
    """A delta whose ids may be written as the bytes that they stand for."""
    return TextDelta(text, tuple(token_ids), choice, logprobs, finish_reason, stop)


_CUT = _step(" the", (THE,))
_LOST = Failure("engine_lost", "The engine stopped: killed by SIGKILL.")
_BUSY = Failure("queue_timeout", "The model was too busy to begin this request in time.")
_GOING = Failure("interrupted", "The server was shut down before the answer was complete.")

STREAMS: dict[str, list[Event]] = {
    # Ends with the model's own end token, which shows no text.
    "plain": [
        _CUT,
        _step(" river", (RIVER,)),
        _step("", (EOS_ID,), finish_reason="stop"),
        End("done", Usage(4, 3)),
    ],
    # Everything that has broken a line reader or a JSON reader somewhere, and half a character at the end.
    "unicode": [
        _step("", b"\xc3"),
        _step("\u00e9", b"\xa9"),
        _step("\u2028", b"\xe2\x80\xa8"),
        _step("\x85", b"\xc2\x85"),
        _step("\U0001f30a", b"\xf0\x9f\x8c\x8a"),
        _step('"', b'"'),
        _step("\\", b"\\"),
        _step("\r\n", b"\r\n"),
        _step("data: [DONE]", b"data: [DONE]"),
        _step("\x0b\x1c\x1b\x7f", b"\x0b\x1c\x1b\x7f"),
        _step("\ufffd", b"\xf0\x9f", finish_reason="length"),
        End("done", Usage(4, 33)),
    ],
    # Ends by the stop string "\n🌊", which is not shown.
    "stop": [
        _CUT,
        _step("", b"\n"),
        _step("", b"\xf0\x9f\x8c"),
        _step("", b"\x8a", finish_reason="stop", stop="\n\U0001f30a"),
        End("done", Usage(4, 6)),
    ],
    # The same as TGI asks for it: with the stop string.
    "stop_shown": [
        _CUT,
        _step("", b"\n"),
        _step("", b"\xf0\x9f\x8c"),
        _step("\n\U0001f30a", b"\x8a", finish_reason="stop", stop="\n\U0001f30a"),
        End("done", Usage(4, 6)),
    ],
    # " river" could have become a stop string until the end token came.
    "held": [
        _CUT,
        _step("", (RIVER,)),
        _step(" river", (EOS_ID,), finish_reason="stop"),
        End("done", Usage(4, 3)),
    ],
    # The end token in one step with the last word.
    "merged": [_step(" the river", (THE, RIVER, EOS_ID), finish_reason="stop"), End("done", Usage(4, 3))],
    "length": [
        _CUT,
        _step(" river runs", (RIVER, RUNS), finish_reason="length"),
        End("done", Usage(4, 3)),
    ],
    # Two choices, and the second is done first.
    "two": [
        _step(" the", (THE,), 0),
        _step(" over", (OVER,), 1),
        _step(" river", (RIVER,), 0),
        _step("", (EOS_ID,), 1, finish_reason="stop"),
        _step(" runs", (RUNS,), 0, finish_reason="length"),
        End("done", Usage(4, 5)),
    ],
    # Several tokens in one step, a character in two, and the end token with a logprob of its own.
    "logprobs": [
        _step(" the river", (THE, RIVER), 0, (-0.5, -1.25)),
        _step("", b"\xc3", 0, (-2.0,)),
        _step("\u00e9", b"\xa9", 0, (-0.00012207031,)),
        _step("", (EOS_ID,), 0, (-3.75,), "stop"),
        End("done", Usage(4, 5)),
    ],
    "error": [_CUT, End("error", Usage(4, 1), _LOST)],
    "cancelled": [_CUT, End("cancelled", Usage(4, 1))],
    "interrupted": [_CUT, End("interrupted", Usage(4, 1), _GOING)],
    # Never began: the end is the first event.
    "refused": [End("error", Usage(4, 0), _BUSY)],
}
_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
_TEXT = {"prompt": "Hi", "stream": True}
_USAGE = {"stream_options": {"include_usage": True}}
_DETAILS = {"details": True, "return_full_text": True, "do_sample": True}

VIEWS: dict[str, View] = {
    "native": native.parse({"prompt": "Hi"}).view,
    "chat": openai.parse_chat(_CHAT).view,
    "chat_usage": openai.parse_chat(_CHAT | _USAGE).view,
    "chat_two": openai.parse_chat(_CHAT | {"n": 2}).view,
    "chat_logprobs": openai.parse_chat(_CHAT | {"logprobs": True}).view,
    "completion": openai.parse_completion(_TEXT).view,
    "completion_usage": openai.parse_completion(_TEXT | _USAGE).view,
    "completion_two": openai.parse_completion(_TEXT | {"n": 2}).view,
    "completion_logprobs": openai.parse_completion(_TEXT | {"logprobs": 0}).view,
    "tgi": tgi.parse({"inputs": "Hi", "parameters": {}}, stream=True).view,
    "tgi_details": tgi.parse({"inputs": "Hi", "parameters": _DETAILS}, stream=True).view,
    "tgi_root": tgi.parse({"inputs": "Hi", "parameters": {"details": True}}, stream=None).view,
    "plain": plain.parse({"prompt": "Hi"}, has_template=True).view,
}

_ENDS = ("error", "cancelled", "interrupted", "refused")
_ALL = ("plain", "unicode", "stop", "length", *_ENDS)
STREAMED: dict[str, tuple[str, ...]] = {
    "native": (*_ALL, "two", "logprobs"),
    "chat": _ALL,
    "chat_usage": ("plain", "error"),
    "chat_two": ("two",),
    "chat_logprobs": ("logprobs",),
    "completion": _ALL,
    "completion_usage": ("plain", "error"),
    "completion_two": ("two",),
    "completion_logprobs": ("logprobs",),
    "tgi": ("plain", "unicode", "held", "merged", *_ENDS),
    "tgi_details": ("plain", "unicode", "stop_shown", "length", "logprobs"),
    "plain": ("plain", "unicode", "stop"),
}
WHOLE: dict[str, tuple[str, ...]] = {
    "chat": ("plain", "unicode", "stop"),
    "chat_two": ("two",),
    "chat_logprobs": ("logprobs",),
    "completion": ("plain",),
    "completion_two": ("two",),
    "completion_logprobs": ("logprobs",),
    "tgi": ("plain", "held"),
    "tgi_details": ("stop_shown", "logprobs"),
    "tgi_root": ("plain",),
}


@lru_cache(maxsize=1)
def vocabulary() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json())


def facts() -> StreamFacts:
    return StreamFacts(
        stream_id="q83v-jRWeJCrze8SNF_4kA",
        model="scripted",
        created_s=1_700_000_000,
        seed=7,
        num_prompt_tokens=4,
        prompt_text="Wo\u00df?",
        vocabulary=vocabulary(),
    )


def transcript(view: str, events: list[Event]) -> bytes:
    """A whole stream on the wire."""
    encoder = VIEWS[view].open(facts())
    return b"".join(encoder.encode(seq, event) for seq, event in enumerate(events, 1))
