"""The streams in the golden files, and the wires that encode them.

Token ids are those of the scripted engine's vocabulary: 0 to 255 are bytes, 256 is the end of a sequence, and words
follow from 264. A test holds the texts below against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs
from tests.dialects.fake_server import chat, completion, generate, native, parsed, tutorial, view_of, vocabulary

from tailrace.dialects import Encoder, StreamFacts, View
from tailrace.dialects.native import NativeView
from tailrace.types import (
    End,
    Event,
    Failure,
    FinishReason,
    Prompt,
    PromptProgress,
    Record,
    Released,
    Sampling,
    TextDelta,
    Usage,
)
from tailrace_outer.responses import responses_wire
from tailrace_outer.scripted.scripted_engine import EOS_ID
from tailrace_plugins.anthropic import anthropic_wire as anthropic
from tailrace_plugins.articles import cumulative
from tailrace_plugins.front_ends import ag_ui_wire as ag_ui
from tailrace_plugins.front_ends import ai_sdk_wire as ai_sdk
from tailrace_plugins.ollama import ollama_wire as ollama
from tailrace_plugins.tgi import tgi_wire as tgi
from tailrace_plugins.triton import triton_wire as triton

__all__ = [
    "GOLDEN",
    "MEMOS",
    "REPORTING",
    "STREAMED",
    "STREAMS",
    "VIEWS",
    "WHOLE",
    "encoder_for",
    "facts",
    "facts_for",
    "progress_transcript",
    "released_transcript",
    "transcript",
    "vocabulary",
]

GOLDEN = Path(__file__).parent.parent / "golden"

THE, RIVER, RUNS, OVER = 264, 265, 266, 267


def _step(
    text: str,
    token_ids: Sequence[int],
    choice: int = 0,
    logprobs: tuple[float, ...] = (),
    finish_reason: FinishReason | None = None,
    stop: str | None = None,
    reasoning: str = "",
) -> TextDelta:
    """Return a delta. Its ids may be given as bytes."""
    return TextDelta(text, tuple(token_ids), choice, logprobs, finish_reason, stop, reasoning=reasoning)


def _spelled(text: str, finish_reason: FinishReason | None = None) -> TextDelta:
    """Return a delta with one token for each byte."""
    return _step(text, text.encode(), finish_reason=finish_reason)


_CUT = _step(" the", (THE,))
_LOST = Failure("engine_unavailable", "The engine stopped: killed by SIGKILL.")
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
    # Three tokens of the prompt were in a cache.
    "cached": [_step(" the", (THE,), finish_reason="length"), End("done", Usage(4, 1), num_cached_tokens=3)],
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
    # Text, a call, and another one that is not JSON.
    "calls": [
        _spelled("Let me see."),
        _spelled('<tool_call>\n{"name": "weather", "argu'),
        _spelled('ments": {"city": "K\u00f6ln", "days": [1, 2'),
        _spelled("]}}\n</tool_call>"),
        _spelled('<tool_call>{"name": "weather", "arguments": {"city" "Bonn"}}</tool_call>'),
        _step("", (EOS_ID,), finish_reason="stop"),
        End("done", Usage(4, 176)),
    ],
    # A call that was forced, with nothing around it.
    "forced_call": [
        _spelled('{"name":"weather","arguments":{"city":'),
        _spelled('"Bonn"}}'),
        _step("", (EOS_ID,), finish_reason="stop"),
        End("done", Usage(4, 47)),
    ],
    # A call that the length cuts off.
    "cut_call": [
        _spelled('<tool_call>{"name": "weather", "arguments": {"ci'),
        _spelled('ty": "Bo', finish_reason="length"),
        End("done", Usage(4, 56)),
    ],
    # Reasoning and its markers, then text.
    "thinking": [
        _step("", b"<think>\n"),
        _step("", (RIVER,), reasoning="river"),
        _step("", b"\xf0\x9f\x8c"),
        _step("", b"\x8a", reasoning="\U0001f30a"),
        _step("", b"</think>\n\n"),
        _step("the", (THE,)),
        _step(" river", (RIVER,), finish_reason="length"),
        End("done", Usage(4, 25), num_reasoning_tokens=21),
    ],
    # The length cuts it off.
    "thinking_cut": [
        _step("", b"<think>"),
        _step("", (RIVER,), finish_reason="length", reasoning=" river"),
        End("done", Usage(4, 8), num_reasoning_tokens=8),
    ],
    # Reasoning, and a call behind it.
    "thinking_call": [
        _step("", b"<think>the", reasoning="the"),
        _step("", b"</think>"),
        _spelled('<tool_call>{"name": "weather", "arguments": {}}</tool_call>'),
        _step("", (EOS_ID,), finish_reason="stop"),
        End("done", Usage(4, 78), num_reasoning_tokens=18),
    ],
    # Never began: the end is the first event.
    "refused": [End("error", Usage(4, 0), _BUSY)],
}
_STREAM_ID = "q83v-jRWeJCrze8SNF_4kA"
_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
_TEXT = {"prompt": "Hi", "stream": True}
_USAGE = {"stream_options": {"include_usage": True}}
_PROGRESS = {"return_progress": True}
_DETAILS = {"details": True, "return_full_text": True, "do_sample": True}

_MESSAGES = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
_LINES = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
_LOOK = {"name": "weather", "input_schema": {"type": "object"}}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
_TENSORS = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["Hi"]}]}

_INPUT = {"input": "Hi", "stream": True}
_FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
_REMEMBERED = {
    "instructions": "Be brief.",
    "max_output_tokens": 9,
    "metadata": {"k\u00e9y": "v"},
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
}
_RESPONSES = {
    "responses": responses_wire.parse(parsed(_INPUT)),
    "responses_tools": responses_wire.parse(parsed({**_INPUT, "tools": [_FUNCTION]})),
    "responses_forced": responses_wire.parse(parsed({**_INPUT, "tools": [_FUNCTION], "tool_choice": "required"})),
    "responses_logprobs": responses_wire.parse(parsed({**_INPUT, "include": ["message.output_text.logprobs"]})),
    "responses_background": responses_wire.parse(parsed({**_INPUT, **_REMEMBERED, "background": True})),
}
_UI = {"id": "chat-1", "messages": [{"id": "m1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}]}
_RUN = {"threadId": "t1", "runId": "r1", "messages": [{"id": "m1", "role": "user", "content": "Hi"}]}
_FRONT_ENDS = {
    "ai_sdk": ai_sdk.parse(parsed(_UI)),
    "ai_sdk_tools": ai_sdk.parse(parsed({**_UI, "tools": {"weather": {"inputSchema": {"type": "object"}}}})),
    "ag_ui": ag_ui.parse(parsed(_RUN)),
    "ag_ui_tools": ag_ui.parse(parsed({**_RUN, "tools": [{"name": "weather", "description": "d"}]})),
}
# Of views that want something to be kept.
MEMOS = {name: call.request.memo for name, call in (_RESPONSES | _FRONT_ENDS).items()}

VIEWS: dict[str, View] = {
    "native": native({"prompt": "Hi"}).view,
    "native_progress": NativeView(shows_progress=True),
    "chat": chat(_CHAT).view,
    "chat_progress": chat(_CHAT | _PROGRESS).view,
    "chat_progress_usage": chat(_CHAT | _PROGRESS | _USAGE).view,
    "chat_usage": chat(_CHAT | _USAGE).view,
    "chat_tools": chat(_CHAT | {"tools": [_TOOL]}).view,
    "chat_two": chat(_CHAT | {"n": 2}).view,
    "chat_logprobs": chat(_CHAT | {"logprobs": True}).view,
    "completion": completion(_TEXT).view,
    "completion_progress": completion(_TEXT | _PROGRESS).view,
    "completion_progress_usage": completion(_TEXT | _PROGRESS | _USAGE).view,
    "completion_usage": completion(_TEXT | _USAGE).view,
    "completion_two": completion(_TEXT | {"n": 2}).view,
    "completion_logprobs": completion(_TEXT | {"logprobs": 0}).view,
    "tgi": generate({"inputs": "Hi", "parameters": {}}).view,
    "tgi_details": generate({"inputs": "Hi", "parameters": _DETAILS}).view,
    "tgi_root": tgi.parse_root(parsed({"inputs": "Hi", "parameters": {"details": True}})).view,
    "plain": tutorial({"prompt": "Hi"}).view,
    "cumulative": cumulative.parse(parsed({"prompt": "Hi"})).view,
    "cumulative_followed": cumulative.parse_following(parsed(query={"stream_id": _STREAM_ID})).view,
    "anthropic": view_of(anthropic.parse(parsed(_MESSAGES))),
    "anthropic_thinking": view_of(
        anthropic.parse(parsed({**_MESSAGES, "tools": [_LOOK], "thinking": {"type": "adaptive"}}))
    ),
    "anthropic_tools": view_of(anthropic.parse(parsed({**_MESSAGES, "tools": [_LOOK]}))),
    "anthropic_forced": view_of(
        anthropic.parse(parsed({**_MESSAGES, "tools": [_LOOK], "tool_choice": {"type": "any"}}))
    ),
    "ollama_chat": view_of(ollama.parse_chat(parsed(_LINES))),
    "ollama_tools": view_of(ollama.parse_chat(parsed({**_LINES, "tools": [_TOOL]}))),
    "ollama_generate": view_of(ollama.parse_generate(parsed({"model": "scripted", "prompt": "Hi"}))),
    "ollama_logprobs": view_of(ollama.parse_generate(parsed({"model": "scripted", "prompt": "Hi", "logprobs": True}))),
    "triton": view_of(triton.parse_stream(parsed({"text_input": "Hi"}, path={"model": "scripted"}))),
    "triton_parameters": view_of(
        triton.parse_generate(parsed({"parameters": {"prompt": "Hi"}, "id": "7"}, path={"model": "scripted"}))
    ),
    "triton_tensors": view_of(triton.parse_infer(parsed(_TENSORS, path={"model": "scripted"}))),
    **{name: call.view for name, call in (_RESPONSES | _FRONT_ENDS).items()},
}

_ENDS = ("error", "cancelled", "interrupted", "refused")
_ALL = ("plain", "unicode", "stop", "length", *_ENDS)
STREAMED: dict[str, tuple[str, ...]] = {
    "native": (*_ALL, "cached", "two", "logprobs", "thinking"),
    "chat": (*_ALL, "thinking", "thinking_cut"),
    "chat_usage": ("plain", "cached", "error", "thinking"),
    "chat_tools": ("thinking_call",),
    "chat_two": ("two",),
    "chat_logprobs": ("logprobs",),
    "completion": _ALL,
    "completion_usage": ("plain", "cached", "error"),
    "completion_two": ("two",),
    "completion_logprobs": ("logprobs",),
    "tgi": ("plain", "unicode", "held", "merged", *_ENDS),
    "tgi_details": ("plain", "unicode", "stop_shown", "length", "logprobs"),
    "plain": ("plain", "unicode", "stop"),
    "cumulative": _ALL,
    "cumulative_followed": ("plain", "unicode", *_ENDS),
    "anthropic": (*_ALL, "cached", "thinking"),
    "anthropic_thinking": ("thinking", "thinking_cut", "thinking_call"),
    "anthropic_tools": ("plain", "calls", "cut_call", "stop", "error"),
    "anthropic_forced": ("forced_call",),
    "ollama_chat": (*_ALL, "thinking", "thinking_cut"),
    "ollama_tools": ("plain", "calls", "cut_call", "thinking_call"),
    "ollama_generate": ("plain", "unicode", "stop", "length", "error", "thinking"),
    "ollama_logprobs": ("logprobs",),
    "triton": _ALL,
    "triton_parameters": ("plain",),
    "responses": (*_ALL, "cached", "thinking", "thinking_cut"),
    "responses_tools": ("plain", "calls", "cut_call", "error", "thinking_call"),
    "responses_forced": ("forced_call",),
    "responses_logprobs": ("logprobs",),
    "responses_background": ("plain", "length", "cancelled"),
    "ai_sdk": (*_ALL, "cached", "thinking", "thinking_cut"),
    "ai_sdk_tools": ("plain", "calls", "cut_call", "thinking_call"),
    "ag_ui": (*_ALL, "cached", "thinking", "thinking_cut"),
    "ag_ui_tools": ("plain", "calls", "cut_call", "thinking_call"),
}
REPORTING = (
    "native_progress", "chat_progress", "chat_progress_usage", "completion_progress", "completion_progress_usage",
)  # fmt: skip
WHOLE: dict[str, tuple[str, ...]] = {
    "chat": ("plain", "cached", "unicode", "stop", "thinking", "thinking_cut"),
    "chat_tools": ("thinking_call",),
    "chat_two": ("two",),
    "chat_logprobs": ("logprobs",),
    "completion": ("plain",),
    "completion_two": ("two",),
    "completion_logprobs": ("logprobs",),
    "tgi": ("plain", "held"),
    "tgi_details": ("stop_shown", "logprobs"),
    "tgi_root": ("plain",),
    "cumulative": ("plain", "unicode"),
    "anthropic": ("plain", "cached", "unicode", "stop", "length", "thinking"),
    "anthropic_thinking": ("thinking", "thinking_cut", "thinking_call"),
    "anthropic_tools": ("plain", "calls", "cut_call"),
    "anthropic_forced": ("forced_call",),
    "ollama_chat": ("plain", "unicode", "stop", "thinking"),
    "ollama_tools": ("calls", "cut_call", "thinking_call"),
    "ollama_generate": ("plain", "length", "thinking"),
    "ollama_logprobs": ("logprobs",),
    "triton": ("plain",),
    "triton_parameters": ("unicode",),
    "triton_tensors": ("plain", "unicode"),
    "responses": ("plain", "cached", "unicode", "length", "thinking", "thinking_cut"),
    "responses_tools": ("calls", "cut_call", "thinking_call"),
    "responses_forced": ("forced_call",),
    "responses_logprobs": ("logprobs",),
    "responses_background": ("plain", *_ENDS),
}


_RECORD = Record(
    _STREAM_ID,
    1_700_000_000.0,
    "scripted",
    prompts=(Prompt("Wo\u00df?", ((1, 2, 3, 4),)),),
    sampling=Sampling(seed=7),
    num_prompt_tokens=4,
)


def facts(num_choices: int = 1, **changes: Any) -> StreamFacts:  # Any: of each field's type
    """Return facts of a stream, with these changes of its record."""
    return StreamFacts(structs.replace(_RECORD, num_choices=num_choices, **changes), vocabulary())


def facts_for(events: Sequence[Event], **changes: Any) -> StreamFacts:  # Any: of each field's type
    """Return facts of a stream with as many choices as in these events, with these changes of its record."""
    num_choices = 1 + max((event.choice for event in events if isinstance(event, TextDelta)), default=0)
    return facts(num_choices, **changes)


def encoder_for(view: str, events: Sequence[Event]) -> Encoder:
    """Return an encoder of this view."""
    return VIEWS[view].open(facts_for(events, memo=MEMOS.get(view, b"")))


def transcript(view: str, events: list[Event]) -> bytes:
    """Return the bytes of a whole stream."""
    encoder = encoder_for(view, events)
    return b"".join(encoder.encode(seq, event) for seq, event in enumerate(events, 1))


def released_transcript(view: str) -> bytes:
    """Return the bytes of a stream whose reader is sent away after one event. Raises: as the encoder."""
    encoder = encoder_for(view, [_CUT])
    reason = Failure("draining", "The server is shutting down. The next one continues this stream.")
    return encoder.encode(1, _CUT) + encoder.encode(1, Released(_STREAM_ID, 1, reason))


def progress_transcript(view: str) -> bytes:
    """Return an answer whose prompt is read in two parts, after one token that was cached."""
    encoder = encoder_for(view, STREAMS["plain"])
    assert encoder.shows_progress
    reports = (PromptProgress(4, 2, 1, 0.5), PromptProgress(4, 4, 1, 1.25))
    read = b"".join(encoder.progress(report) for report in reports)
    return read + b"".join(encoder.encode(seq, event) for seq, event in enumerate(STREAMS["plain"], 1))
