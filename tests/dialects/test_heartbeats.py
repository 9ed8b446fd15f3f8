"""Heartbeats that are events: they come anywhere in a stream, and change nothing for the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.dialects.sse import parse
from tests.dialects.transcripts import STREAMED, STREAMS, VIEWS, encoder_for

from tailrace.dialects.wire import Encoder

# Agents give up on these wires after minutes without an event: Qwen Code, Codex CLI and Claude Code.
CASES = [
    pytest.param(view, stream, id=f"{view}-{stream}")
    for view, streams in STREAMED.items()
    if view.startswith(("chat", "completion", "anthropic", "responses"))
    for stream in streams
    if stream != "refused"  # without a single event before
]


def streamed(view: str, stream: str, *, num_beats: int) -> list[dict[str, Any]]:  # Any: JSON
    """Return the events of a stream, with heartbeats before each event of its log."""
    encoder = encoder_for(view, STREAMS[stream])
    sent = b""
    for seq, event in enumerate(STREAMS[stream], 1):
        for _ in range(num_beats):
            beat = encoder.beat(VIEWS[view].heartbeat)
            sent += beat
            is_last = seq == len(STREAMS[stream])
            assert is_last or any(one.event != "ping" for one in parse(beat)), "an event that agents count"
        sent += encoder.encode(seq, event)
    return [json.loads(event.text) for event in parse(sent) if event.text != "[DONE]"]


def joined(values: list[Any]) -> Any:  # Any: JSON
    """Return one value with what all of them say: texts and lists one after the other, objects field by field."""
    texts = [value for value in values if value is not None]
    if texts and isinstance(texts[0], dict):
        names = dict.fromkeys(name for value in texts for name in value)
        return {name: joined([value[name] for value in texts if name in value]) for name in names}
    if texts and isinstance(texts[0], (str, list)):
        return sum(texts[1:], start=texts[0]) if isinstance(texts[0], list) else "".join(texts)
    return texts[-1] if texts else None


def chunks_mean(events: list[dict[str, Any]]) -> object:
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event.get("choices", ()):
            assert not any(one.get("finish_reason") for one in choices.get(choice["index"], ()))
            choices.setdefault(choice["index"], []).append(choice)
    roles = [[one.get("delta", {}).get("role") for one in said].count("assistant") for said in choices.values()]
    ends = [{name: event[name] for name in ("usage", "error") if event.get(name)} for event in events[-1:]]
    texts = {index: joined([one | {"index": None} for one in said]) for index, said in sorted(choices.items())}
    return roles, texts, ends


def blocks_mean(events: list[dict[str, Any]]) -> object:
    blocks: list[list[Any]] = []
    is_open = False
    rest = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(blocks))
                is_open = True
                blocks.append([event["content_block"]])
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                blocks[-1].append(event["delta"])
            case "content_block_stop":
                assert is_open
                is_open = False
            case "ping":
                pass
            case _:
                rest.append(event)
    return [block for block in map(_block, blocks) if block != ("text", {"type": "", "text": ""})], rest


def _block(parts: list[Any]) -> tuple[str, Any]:
    return parts[0]["type"], joined([part | {"type": ""} for part in parts])


def responses_mean(events: list[dict[str, Any]]) -> object:
    before = -1
    for event in events:
        step = event["sequence_number"] - before
        assert step == (event["type"] != "keepalive") or event["type"] == "error"
        before = event["sequence_number"]
    return [event for event in events if event["type"] != "keepalive"]


def mean(view: str, events: list[dict[str, Any]]) -> object:
    if view.startswith("anthropic"):
        return blocks_mean(events)
    return responses_mean(events) if view.startswith("responses") else chunks_mean(events)


@pytest.mark.parametrize("num_beats", [1, 3])
@pytest.mark.parametrize(("view", "stream"), CASES)
def test_a_stream_with_heartbeats_says_the_same(view: str, stream: str, num_beats: int) -> None:
    assert mean(view, streamed(view, stream, num_beats=num_beats)) == mean(view, streamed(view, stream, num_beats=0))


def beating() -> Iterator[str]:
    for name, view in VIEWS.items():
        if type(encoder_for(name, STREAMS["plain"])).beat is not Encoder.beat:
            assert view.heartbeat, "whether there are heartbeats"
            yield name


def test_which_wires_have_events_as_heartbeats() -> None:
    assert {name.partition("_")[0] for name in beating()} == {"chat", "completion", "anthropic", "responses"}
