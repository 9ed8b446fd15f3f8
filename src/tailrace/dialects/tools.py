"""Tools in OpenAI's format, to which other wires convert theirs: the tools shown to the model, and forced calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.grammars import grammar_of_schema
from tailrace.errors import RequestError
from tailrace.types import Grammar

__all__ = [
    "ChosenFunction",
    "ChosenTool",
    "Function",
    "FunctionName",
    "Tool",
    "ToolChoice",
    "choice_of",
    "choose_tools",
]

_MAX_TOOLS = 128
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


class Function(msgspec.Struct):
    name: FunctionName
    description: str | None = None
    parameters: JsonBody | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: Function
    type: Literal["function"] = "function"


class ChosenFunction(msgspec.Struct):
    name: FunctionName


class ChosenTool(msgspec.Struct):
    function: ChosenFunction
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools of a request."""

    shown: tuple[JsonBody, ...] = ()  # to the model
    forced: Grammar | None = None  # its answers are exactly one call
    ignored: tuple[str, ...] = ()  # names of ignored fields

    @property
    def allows_several_calls(self) -> bool:
        """Whether the model may make more than one call. An answer with a forced call ends after it."""
        return bool(self.shown) and self.forced is None


def choice_of(choice: str | ChosenTool | None) -> str | None:
    """Return the name of the function to call, or <none>, <auto> or <required>, which cannot be names."""
    return choice.function.name if isinstance(choice, ChosenTool) else f"<{choice or 'auto'}>"


def choose_tools(tools: list[Tool], choice: str | None, server: ServerFacts) -> ToolChoice:
    """Return the tools to show to the model, and a grammar if a call is forced.

    With "auto" and a chat template without tools, tools are left out and named as ignored: such a model was not trained
    to call functions, and their descriptions make answers worse. Open WebUI sends 36 tools with every chat. In the
    prompt they took 6,630 of the default model's 8,192 tokens, and the first answer of 60 tokens took 39 s instead of
    2 s. None of 84 answers (three ways to describe tools) was a call, even if the prompt asked for one (two shared AMD
    EPYC cores, 2026-11-22).

    Raises: RequestError.
    """
    names = [tool.function.name for tool in tools]
    if len(tools) > _MAX_TOOLS or len(set(names)) < len(names):
        raise RequestError(f"tools may have at most {_MAX_TOOLS} entries, with different names.", param="tools")
    if choice == "<none>" or not tools:
        if choice not in ("<none>", "<auto>"):
            raise RequestError("tool_choice needs a tool, but tools is empty.", param="tool_choice")
        return ToolChoice()
    if choice == "<auto>":
        return ToolChoice(_shown(tools)) if server.takes_tools else ToolChoice(ignored=("tools",))
    callable_functions = [tool.function for tool in tools if choice in ("<required>", tool.function.name)]
    if not callable_functions:
        raise RequestError("Tool error: tool_choice names a function that is not among the tools.", param="tool_choice")
    return ToolChoice(_shown(tools), _grammar_of_calls(callable_functions))


def _shown(tools: list[Tool]) -> tuple[JsonBody, ...]:
    shown: tuple[JsonBody, ...] = tuple(msgspec.to_builtins(tool) for tool in tools)
    for one in shown:
        one["function"] = {name: value for name, value in one["function"].items() if value is not None}
    return shown


def _grammar_of_calls(functions: list[Function]) -> Grammar:
    """Return a grammar for one call of one of these functions."""
    calls: list[JsonBody] = []
    definitions: JsonBody = {}
    for function in functions:
        arguments = dict(function.parameters or {"type": "object"})
        if isinstance(arguments.get("$defs"), dict):  # otherwise `grammar_of_schema` refuses it
            for name, one in arguments.pop("$defs").items():
                if definitions.setdefault(name, one) != one:
                    raise RequestError("Two tools have different $defs with the same name.", param="tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return grammar_of_schema(schema | ({"$defs": definitions} if definitions else {}), "tools")
