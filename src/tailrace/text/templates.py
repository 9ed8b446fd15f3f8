"""Chat templates: the Jinja dialect that models are published with, in a sandbox.

A template belongs to the model and is trusted no further than its weights: it computes a string and can touch nothing
else. Against runaway templates: `range()` is bounded by the sandbox, recursion by the interpreter, `*` and `**` by
`_Environment`, and the output by `MAX_OUTPUT_CHARS` plus `MAX_GROWTH` times what went in. Nested loops that print
nothing are not bounded, so the number of messages should be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tailrace.errors import ModelError, TemplateError
from tailrace.types import Message, TemplateValue, ToolCall

__all__ = ["ChatTemplate", "TemplateError", "Turn", "is_deeper", "turn_of"]

_MAX_DEPTH = 64
_REASONING = re.compile(r"\b(reasoning_content)\b|message\.(thinking)\b")  # gpt-oss has the second
MAX_OUTPUT_CHARS = 1 << 20
MAX_GROWTH = 8
MAX_MESSAGE_CHARS = 200


Turn = dict[str, Any]  # Any: what templates look into, which differs from model to model


def turn_of(message: Message, reasoning_name: str = "") -> Turn:
    """A message in the form that templates are written for: arguments of tool calls as values, not as text. Its
    reasoning has the name by which the template asks for it, if it does."""
    turn: Turn = {"role": message.role, "content": message.content}
    if message.reasoning and reasoning_name:
        turn[reasoning_name] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def is_deeper(value: object, depth: int = _MAX_DEPTH) -> bool:
    """Whether JSON that came from elsewhere is nested more than `depth` deep: what walks through it is recursive."""
    if not isinstance(value, dict | list):
        return False
    if not depth:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(is_deeper(item, depth - 1) for item in items if isinstance(item, dict | list))


def _arguments(call: ToolCall) -> object:
    try:
        value: object = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        return call.arguments
    return call.arguments if is_deeper(value) else value


class _Refused(Exception):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training (SmolLM3 has it). Here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    # Any: operands are whatever the template computes.
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse the two operators that make something huge out of nothing."""
        if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 32):
            raise SecurityError("power too large")
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if hasattr(repeated, "__len__") and len(repeated) * times > MAX_OUTPUT_CHARS:
                    raise SecurityError("repetition too long")
        return super().call_binop(context, operator, left, right)


def _refuse(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    return datetime.now().strftime(format)  # local time, as the templates' authors expect


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's chat template, compiled once. Threads may share it.

    Raises: ModelError if the source is not a template.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"The chat template, line {error.lineno}: {error.message}") from error
        except Exception as error:  # a source can break the compiler in more ways than syntax (RecursionError)
            raise ModelError(f"The chat template cannot be compiled: {type(error).__name__}.") from error
        # Templates ask `tools is not none` as well as `if tools`; undefined would pass the first.
        self._names = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        asked = find_undeclared_variables(environment.parse(source))
        self.takes_tools = "tools" in asked
        given = {*self._names, *environment.globals, "add_generation_prompt", "messages"}
        self.names = asked - given  # which others may give it
        found = _REASONING.search(source)
        self.reasoning_name = found[1] or found[2] if found else ""  # of a message's reasoning; "" if it asks for none

    @cached_property
    def takes_system(self) -> bool:
        """A system message reaches the model. Some templates refuse one, and some leave it out."""
        marker = "system-message-marker"
        try:
            return marker in self.render([Message("system", marker), Message("user", "Hi")])
        except TemplateError:
            return False

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt for these messages, control tokens spelled out. Raises: as `render_turns`."""
        return self.render_turns(
            [turn_of(message, self.reasoning_name) for message in messages],
            add_generation_prompt=add_generation_prompt,
        )

    def render_turns(
        self,
        turns: Sequence[Turn],
        *,
        tools: Sequence[Turn] = (),
        values: Mapping[str, TemplateValue] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for messages as templates know them. `values` are of its `names`.

        Spelling inside of messages looks just like the template's own; `ChatEncoder` tells them apart.

        Raises: TemplateError for anything that goes wrong in the template. Only the text that the template itself gave
        to `raise_exception` is repeated.
        """
        num_given = sum(len(turn["content"]) + len(turn.get(self.reasoning_name, "")) for turn in turns)
        num_given += len(repr(tools)) if tools else 0
        limit = MAX_OUTPUT_CHARS + MAX_GROWTH * num_given
        names = self._names | ({"tools": list(tools)} if tools else {}) | dict(values or {})
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(names, messages=turns, add_generation_prompt=add_generation_prompt):
                num_chars += len(part)
                if num_chars > limit:
                    raise SecurityError("output too long")
                parts.append(part)
        except _Refused as refusal:
            reason = str(refusal)[:MAX_MESSAGE_CHARS]
            raise TemplateError(f"The model's chat template refused: {reason}", param="messages") from None
        except Exception as error:  # a template can raise anything; its text may hold what the client sent
            name = type(error).__name__
            raise TemplateError(f"The model's chat template failed ({name}).", param="messages") from None
        return "".join(parts)
