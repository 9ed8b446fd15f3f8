"""Chat templates: the Jinja dialect of published models, in a sandbox.

A template belongs to the model and is not trusted: it can only compute a string. These limits stop runaway templates:
the sandbox limits `range()`, the interpreter limits recursion, `_Environment` limits `*` and `**`, and the output is
limited to `MAX_OUTPUT_CHARS` plus `MAX_GROWTH` times the input. Nested loops without output are not limited, so the
number of messages should be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
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


Turn = dict[str, Any]  # Any: templates of different models read different fields


def turn_of(message: Message, reasoning_name: str = "") -> Turn:
    """Return a message in the form that templates expect: arguments of tool calls are values, not text. Its reasoning
    has the template's name for it; without a name it is omitted."""
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


def _num_characters(content: str | list[dict[str, str]]) -> int:
    """Return the size of a message, which is a text or a list of parts."""
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def is_deeper(value: object, depth: int = _MAX_DEPTH) -> bool:
    """Return whether foreign JSON is nested deeper than `depth`. Recursive code has to reject it."""
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
    """`{% generation %}` marks the model's text for training (in SmolLM3). Here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    # Any: operands are whatever the template computes.
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Limit the two operators that can make huge values."""
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
    return datetime.now().strftime(format)  # local time, as templates expect


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON. Jinja's own filter escapes HTML, which models were not trained on."""
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
        except Exception as error:  # the compiler can also raise others, such as RecursionError
            raise ModelError(f"The chat template cannot be compiled: {type(error).__name__}.") from error
        # Templates test `tools is not none` or `if tools`; an undefined value would pass the first test.
        self._names = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        used = find_undeclared_variables(environment.parse(source))
        self.takes_tools = "tools" in used
        given = {*self._names, *environment.globals, "add_generation_prompt", "messages"}
        self.names = used - given  # values that callers may set
        found = _REASONING.search(source)
        self.reasoning_name = found[1] or found[2] if found else ""  # of a message's reasoning; "" if it asks for none

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Render the prompt for these messages, with control tokens as text. Raises: as `render_turns`."""
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
        """Render the prompt for messages in the templates' form. `values` are for its `names`.

        Control tokens in messages look like the template's own in the result; `ChatEncoder` distinguishes them.

        Raises: TemplateError for every failure in the template. Its message contains only the template's own text from
        `raise_exception`.
        """
        num_given = sum(_num_characters(turn["content"]) + len(turn.get(self.reasoning_name, "")) for turn in turns)
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
        except Exception as error:  # a template can raise anything; the message may contain the client's text
            name = type(error).__name__
            raise TemplateError(f"The model's chat template failed ({name}).", param="messages") from None
        return "".join(parts)
