"""Tools: functions that are shown to the model, and forced calls. Each wire reads its tools as `Offer`s."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from tailrace.dialects.bodies import JsonBody, printable
from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.shapes import Other, note
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.schemas.calls import AskedCalls, AskedTool
from tailrace.text.calls import UNKNOWN, parameters_of
from tailrace.text.custom_calls import CUSTOM_INPUT
from tailrace.types import CallReading, Grammar

__all__ = [
    "AllowedTools",
    "ChosenCustomTool",
    "ChosenTool",
    "ChosenTools",
    "CustomTool",
    "Function",
    "Offer",
    "Tool",
    "choose_tools",
    "custom_offer",
    "left_out",
    "read_choice",
    "read_tools",
]

MAX_TOOLS = 1_024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ANY_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,256}")


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: JsonBody | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag="function"):
    function: Function


class Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: JsonBody | None = None


class CustomTool(msgspec.Struct, tag="custom"):
    custom: Custom


class Named(msgspec.Struct):
    name: str


class ChosenTool(msgspec.Struct, tag="function"):
    function: Named


class ChosenCustomTool(msgspec.Struct, tag="custom"):
    custom: Named


class _Allowed(msgspec.Struct):
    tools: list[ChosenTool | ChosenCustomTool | Other]
    mode: Literal["auto", "required"] = "auto"


class AllowedTools(msgspec.Struct, tag="allowed_tools"):
    allowed_tools: _Allowed


ChatChoice: TypeAlias = str | ChosenTool | ChosenCustomTool | AllowedTools | Other


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as a function for the model. `where` is its position in the request."""

    name: str
    where: str
    description: str | None = None
    parameters: JsonBody | None = None
    strict: bool | None = None
    is_custom: bool = False  # its call is a text, not a JSON object


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may or must call: all of them, or those in `names`."""

    kind: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The tools of a request."""

    shown: tuple[JsonBody, ...] = ()  # to the model
    callable: tuple[Offer, ...] = ()  # those that it may call
    is_forced: bool = False  # the answer is exactly one call
    custom: frozenset[str] = frozenset()  # names of the tools whose call is a text
    format: str = "hermes"  # of the model's calls

    def calls(self, *, single: bool) -> CallReading | None:
        """Return how calls are read from the answer; None if the model was shown no tools."""
        if not self.shown:
            return None
        return CallReading(self.format, self.is_forced, single, parameters_of(self.shown))

    @property
    def allows_several_calls(self) -> bool:
        """Whether the model may make more than one call. An answer with a forced call ends after it."""
        return bool(self.shown) and not self.is_forced

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the answer: a forced call, or calls or a text of the grammar `answer`.

        Raises: UnsupportedParameter for tools beside another grammar than a schema, which a whole answer cannot be
        checked for.
        """
        if not self.shown or (answer is None and not self.is_forced):
            return answer
        if answer is not None and answer.kind != "json_schema" and not self.is_forced:
            raise UnsupportedParameter(
                f"{answer.param}: tools can be used with a JSON schema, but not with another grammar.",
                param=answer.param,
            )
        asked = AskedCalls(
            [AskedTool(one.name, one.where, one.parameters) for one in self.callable],
            None if answer is None else msgspec.json.decode(answer.source),
            "" if answer is None else answer.param,
            self.is_forced,
        )
        param = "tools" if answer is None or self.is_forced else answer.param
        return Grammar("calls", msgspec.json.encode(asked).decode(), param)


def read_tools(tools: Sequence[Tool | CustomTool | Other], notes: list[str], *, name: str = "tools") -> list[Offer]:
    """Read the tools of chat completions, in the field `name`. Tools of other kinds are left out, and named."""
    offers = []
    for index, tool in enumerate(tools):
        where = f"{name}[{index}]"
        match tool:
            case Tool(function):
                offers.append(Offer(function.name, where, function.description, function.parameters, function.strict))
            case CustomTool(custom):
                offers.append(custom_offer(custom.name, where, custom.description, custom.format, notes))
            case Other(kind):
                notes.append(left_out(where, kind))
    return offers


def left_out(where: str, kind: str) -> str:
    """Return the note about a tool that this server does not have."""
    return note(where, printable(kind))


def custom_offer(name: str, where: str, description: str | None, form: JsonBody | None, notes: list[str]) -> Offer:
    """Return a custom tool as a function with one text. The model is told the grammar of the text, and may break it."""
    text: JsonBody = {"type": "string"}
    if form is not None and form.get("type") == "grammar":
        inner = form.get("grammar")
        grammar: JsonBody = inner if isinstance(inner, dict) else form
        syntax, definition = grammar.get("syntax"), grammar.get("definition")
        if isinstance(syntax, str) and isinstance(definition, str):
            text["description"] = f"A text of this grammar ({printable(syntax)}):\n{definition}"
        notes.append(note(f"{where}.format", "shown to the model"))
    parameters: JsonBody = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return Offer(name, where, description, parameters, is_custom=True)


def read_choice(choice: ChatChoice | None) -> ToolChoice:
    """Read the `tool_choice` of chat completions. Raises: RequestError."""
    match choice:
        case None:
            return ToolChoice()
        case ChosenTool(chosen) | ChosenCustomTool(chosen):
            return ToolChoice("required", frozenset({chosen.name}))
        case AllowedTools(allowed):
            return ToolChoice(allowed.mode, frozenset(name for one in allowed.tools if (name := _name_of(one))))
        case Other():
            raise RequestError("tool_choice names a tool that this server does not have.", param="tool_choice")
        case "none" | "auto" | "required":
            return ToolChoice(choice)
        case "any":  # another name of required
            return ToolChoice("required")
    return ToolChoice("required", frozenset({choice}))  # TGI's form


def _name_of(chosen: ChosenTool | ChosenCustomTool | Other) -> str | None:
    match chosen:
        case ChosenTool(named) | ChosenCustomTool(named):
            return named.name
    return None


def choose_tools(
    offers: Sequence[Offer], choice: ToolChoice, server: ServerFacts, notes: list[str], *, any_name: bool = False
) -> ChosenTools:
    """Return the tools to show to the model, and which of them it may or must call.

    With "auto" and a chat template without tools, tools are left out and named as ignored: such a model was not trained
    to call functions, and their descriptions make answers worse. Open WebUI sends 36 tools with every chat. In the
    prompt they took 6,630 of the default model's 8,192 tokens, and the first answer of 60 tokens took 39 s instead of
    2 s. None of 84 answers (three ways to describe tools) was a call, even if the prompt asked for one (two shared AMD
    EPYC cores, 2026-11-22). A template that describes tools gets them also if its format of calls is not known: then
    calls are read in all known formats, and what they do not read stays text.

    With `any_name`, names may have any printable characters. Raises: RequestError.
    """
    if choice.kind == "none" or (choice.kind == "auto" and not offers):
        return ChosenTools()
    if choice.kind == "auto" and not (server.chat.call_format or server.chat.describes_tools):
        notes[:] = [one for one in notes if not one.startswith("tools[")]  # none of them has an effect
        notes.append("tools")
        return ChosenTools()
    if not offers:
        raise RequestError("tool_choice needs a tool, but tools has none that this server knows.", param="tool_choice")
    offers = _distinct(offers, notes, _ANY_NAME if any_name else _NAME)
    allowed = [one for one in offers if choice.names is None or one.name in choice.names]
    if not allowed and choice.kind == "required":
        raise RequestError("Tool error: tool_choice names a function that is not among the tools.", param="tool_choice")
    shown = offers if choice.kind == "required" else allowed
    custom = frozenset(one.name for one in shown if one.is_custom)
    known = server.chat.call_format
    if not known and server.chat.describes_tools:
        notes.append(note("tools", "how this model writes calls is not known"))
        known = UNKNOWN.name
    return ChosenTools(_shown(shown), tuple(allowed), choice.kind == "required", custom, known or "hermes")


def _distinct(offers: Sequence[Offer], notes: list[str], allowed: re.Pattern[str]) -> list[Offer]:
    """Return the tools with different names; equal ones count once. Raises: RequestError that names the position of a
    tool."""
    if len(offers) > MAX_TOOLS:
        raise RequestError(f"tools has more than {MAX_TOOLS} entries.", param="tools")
    by_name: dict[str, Offer] = {}
    for one in offers:
        if not allowed.fullmatch(one.name):
            what = "1 to 128 letters, digits and _ - . : /" if allowed is _NAME else "1 to 256 printable characters"
            raise RequestError(f"{one.where}: the name of a tool has {what}.", param=one.where)
        same = by_name.setdefault(one.name, one)
        if same is one:
            continue
        if _shown([same]) != _shown([one]):
            raise RequestError(f"{one.where}: {same.where} has the same name.", param=one.where)
        notes.append(note(one.where, f"the same as {same.where}"))
    return list(by_name.values())


def _shown(offers: Sequence[Offer]) -> tuple[JsonBody, ...]:
    """Return tools as templates expect them: `type` comes first, as in the data on which models were trained."""
    shown = []
    for one in offers:
        fields = (("description", one.description), ("parameters", one.parameters), ("strict", one.strict))
        function = {"name": one.name} | {name: value for name, value in fields if value is not None}
        shown.append({"type": "function", "function": function})
    return tuple(shown)
