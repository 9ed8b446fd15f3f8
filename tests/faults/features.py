"""What requests ask of a model besides plain text, each with a model that has it, and what a good answer to it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from jsonschema import validate
from tests.engines.lora import random_pairs, save
from tests.seeing import data_url, picture

__all__ = ["FEATURES", "SOURCES", "Choice", "Feature", "choices_of"]

Json: TypeAlias = dict[str, Any]  # Any: JSON
Source: TypeAlias = Callable[[pytest.FixtureRequest, Path], Sequence[str]]

_LAYERS = {
    "model.layers.0.self_attn.q_proj": (576, 576),
    "model.layers.11.self_attn.o_proj": (576, 576),
    "model.layers.23.mlp.up_proj": (1536, 576),
    "model.layers.29.mlp.down_proj": (576, 1536),
}


def _adapter(directory: Path) -> str:
    return str(save(directory / "adapter", random_pairs(_LAYERS, 0.3)))


# The model and the flags of a server, by name. Paths of models come from fixtures.
SOURCES: dict[str, Source] = {
    "plain": lambda request, directory: ("smollm2",),
    "thinking": lambda request, directory: (str(request.getfixturevalue("smollm2_thinking")),),
    "calling": lambda request, directory: (str(request.getfixturevalue("smollm2_calling")),),
    "adapter": lambda request, directory: ("smollm2", "--adapter", f"poet={_adapter(directory)}"),
    "lookup": lambda request, directory: ("smollm2", "--prompt-lookup-tokens", "5"),
    "draft": lambda request, directory: ("smollm2", "--draft", "smollm2", "--draft-tokens", "3"),
    "seeing": lambda request, directory: (
        str(request.getfixturevalue("seeing_dir")("idefics3")),
        "--engine",
        "openvino",
    ),
}


@dataclass
class Choice:
    """One choice of an answer, put together from OpenAI's chunks."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)  # name and arguments, by index
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None


def choices_of(chunks: Sequence[Json]) -> dict[int, Choice]:
    """Return the choices of a chat's chunks, by their index."""
    found: dict[int, Choice] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        choice, delta = found.setdefault(part["index"], Choice()), part["delta"]
        choice.text += delta.get("content") or ""
        choice.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = choice.calls.get(call["index"], ("", ""))
            function = call["function"]
            choice.calls[call["index"]] = name + (function.get("name") or ""), arguments + function["arguments"]
        choice.logprobs += (part.get("logprobs") or {}).get("content") or ()
        choice.finish_reason = part["finish_reason"] or choice.finish_reason
    return found


@dataclass(frozen=True)
class Feature:
    """`body` is a chat of OpenAI's. `check` gets its choices, and raises AssertionError if they are no good answer. If
    it `has_guesses`, the number of tokens of an event depends on time."""

    source: str
    body: Mapping[str, object]
    check: Callable[[dict[int, Choice]], None]
    has_guesses: bool = False


def _tool(name: str, properties: Mapping[str, object]) -> Json:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_CITY = {"type": "string", "minLength": 2, "maxLength": 30}
_WEATHER = _tool("weather", {"city": _CITY, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer"}})
_TIME = _tool("clock", {"city": _CITY})
_TOOLS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (_WEATHER, _TIME)}
_WORDS = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 4, "maxItems": 6}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}, "likes": _WORDS},
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON, "strict": True}}
_NUM_TOKENS = 120


def _chat(text: str | Sequence[object], **more: object) -> Json:
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": _NUM_TOKENS, "seed": 7, **more}


def _call(name: str, **arguments: object) -> Json:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _asked_twice(*cities: str) -> list[Json]:
    """A chat whose turns have two calls each, so that a small model goes on like this."""
    messages: list[Json] = []
    for city in cities:
        messages.append({"role": "user", "content": f"Weather and time in {city}?"})
        calls = [_call("weather", city=city, unit="celsius", days=3), _call("clock", city=city)]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "unknown"} for call in calls]
        messages += [*results, {"role": "assistant", "content": "I do not know."}]
    return messages[:-4] if cities else messages


def _has_person(choices: dict[int, Choice]) -> None:
    validate(json.loads(choices[0].text), _PERSON)
    assert choices[0].finish_reason == "stop"


def _has_calls(least: int) -> Callable[[dict[int, Choice]], None]:
    def check(choices: dict[int, Choice]) -> None:
        calls = choices[0].calls
        assert len(calls) >= least
        assert choices[0].finish_reason == "tool_calls"
        for name, arguments in calls.values():
            validate(json.loads(arguments), _TOOLS[name])

    return check


def _is_long(choices: dict[int, Choice]) -> None:
    assert choices[0].finish_reason == "length"
    assert len(choices[0].text) > 50


def _has_four(choices: dict[int, Choice]) -> None:
    assert sorted(choices) == [0, 1, 2, 3]
    assert len({choice.text for choice in choices.values()}) == 4


def _has_logprobs(choices: dict[int, Choice]) -> None:
    places = choices[0].logprobs
    assert len(places) == _NUM_TOKENS
    assert all(place["top_logprobs"][0]["logprob"] >= place["logprob"] for place in places)


def _has_reasoning(choices: dict[int, Choice]) -> None:
    assert len(choices[0].reasoning) > 50


_INVENT = "Invent a person who lives in Paris. Answer in JSON."
_ASKS = "What is the weather in Paris?"
_REPEATS = "Repeat this three times: the red fox, the blue fox, the green fox and the old brown dog went to the river."
_PICTURE = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
_THINK = {"chat_template_kwargs": {"open_thinking": True}}

FEATURES: dict[str, Feature] = {
    "schema": Feature("plain", _chat(_INVENT, response_format=_SCHEMA), _has_person),
    "forced tool": Feature(
        "plain",
        _chat(_ASKS, tools=[_WEATHER, _TIME], tool_choice={"type": "function", "function": {"name": "weather"}}),
        _has_calls(1),
    ),
    "n = 4": Feature("plain", _chat("Tell me a story about a dog.", n=4, temperature=0.9), _has_four),
    "logprobs": Feature(
        "plain", _chat("Name some rivers.", logprobs=True, top_logprobs=3, ignore_eos=True), _has_logprobs
    ),
    "parallel calls": Feature(
        "calling",
        _chat("", tools=[_WEATHER, _TIME]) | {"messages": _asked_twice("Paris", "Rome", "Oslo")},
        _has_calls(2),
    ),
    "reasoning": Feature("thinking", _chat("Why do rivers bend?", **_THINK), _has_reasoning),
    "adapter": Feature("adapter", _chat("Name some rivers.", model="poet", ignore_eos=True), _is_long),
    "prompt lookup": Feature("lookup", _chat(_REPEATS, ignore_eos=True), _is_long, has_guesses=True),
    "draft model": Feature("draft", _chat(_REPEATS, ignore_eos=True), _is_long, has_guesses=True),
    "image": Feature(
        "seeing",
        _chat([_PICTURE, {"type": "text", "text": "What is in it?"}], ignore_eos=True) | {"max_tokens": 3_000},
        _is_long,
    ),  # of a tiny model, whose tokens take no time
}
