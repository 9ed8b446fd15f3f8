"""The tools of responses: functions, custom tools, and namespaces of both.

A tool in a namespace is shown to the model as `namespace__name`. Its call has both names again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.shapes import Other
from tailrace.dialects.tools import Offer, ToolChoice, custom_offer, left_out
from tailrace.errors import RequestError
from tailrace_outer.responses.responses_items import flat_name

__all__ = [
    "ResponseChoice",
    "ResponseTool",
    "namespaces_of",
    "read_response_choice",
    "read_response_tools",
    "repeated_tool",
]


class ResponseFunction(msgspec.Struct, tag="function"):
    name: str
    description: str | None = None
    parameters: JsonBody | None = None
    strict: bool | None = None


class ResponseCustomTool(msgspec.Struct, tag="custom"):
    name: str
    description: str | None = None
    format: JsonBody | None = None


class Namespace(msgspec.Struct, tag="namespace"):
    name: str
    tools: list[ResponseFunction | ResponseCustomTool | Other]
    description: str | None = None


class _Chosen(msgspec.Struct):
    name: str
    namespace: str | None = None


class ChosenFunction(_Chosen, tag="function"):
    pass


class ChosenCustom(_Chosen, tag="custom"):
    pass


class ResponseAllowedTools(msgspec.Struct, tag="allowed_tools"):
    tools: list[ChosenFunction | ChosenCustom | Other]
    mode: Literal["auto", "required"] = "auto"


ResponseTool: TypeAlias = ResponseFunction | ResponseCustomTool | Namespace | Other
ResponseChoice: TypeAlias = str | ChosenFunction | ChosenCustom | ResponseAllowedTools | Other


def read_response_tools(tools: Sequence[ResponseTool], notes: list[str]) -> list[Offer]:
    """Return the tools for the model. Tools of other kinds are left out, and named."""
    return [offer for index, tool in enumerate(tools) for offer in _offers(tool, f"tools[{index}]", None, notes)]


def _offers(tool: ResponseTool, where: str, namespace: str | None, notes: list[str]) -> list[Offer]:
    match tool:
        case ResponseFunction():
            name = flat_name(namespace, tool.name)
            return [Offer(name, where, tool.description, tool.parameters, tool.strict)]
        case ResponseCustomTool():
            return [custom_offer(flat_name(namespace, tool.name), where, tool.description, tool.format, notes)]
        case Namespace():
            inner = [_offers(one, f"{where}.tools[{index}]", tool.name, notes) for index, one in enumerate(tool.tools)]
            return [offer for offers in inner for offer in offers]
    notes.append(left_out(where, tool.kind))
    return []


def namespaces_of(tools: Sequence[ResponseTool]) -> dict[str, tuple[str, str]]:
    """Return namespace and name of the tools in namespaces, by the name that the model sees."""
    return {
        flat_name(tool.name, one.name): (tool.name, one.name)
        for tool in tools
        if isinstance(tool, Namespace)
        for one in tool.tools
        if not isinstance(one, Other)
    }


def repeated_tool(tool: ResponseTool, as_given: JsonBody) -> JsonBody:
    """Return a tool as a response shows it. A function has all fields (Open Responses, `FunctionTool`)."""
    if not isinstance(tool, ResponseFunction):
        return as_given
    return as_given | {name: None for name in ("description", "parameters", "strict") if name not in as_given}


def read_response_choice(choice: ResponseChoice | None) -> ToolChoice:
    """Raises: RequestError for a tool that this server does not have."""
    match choice:
        case None:
            return ToolChoice()
        case ChosenFunction() | ChosenCustom():
            return ToolChoice("required", frozenset({flat_name(choice.namespace, choice.name)}))
        case ResponseAllowedTools():
            named = (one for one in choice.tools if not isinstance(one, Other))
            return ToolChoice(choice.mode, frozenset(flat_name(one.namespace, one.name) for one in named))
        case Other():
            raise RequestError("tool_choice names a tool that this server does not have.", param="tool_choice")
        case "none" | "auto" | "required":
            return ToolChoice(choice)
    return ToolChoice("required", frozenset({choice}))
