"""Scripts: what the scripted engine says in a chat, so that it plays the model of an agent.

A script is a JSON file:

    {"rules": [
        {"when": "weather in (\\\\w+)", "calls": [{"name": "look_up", "arguments": {"city": "$1"}}]},
        {"when": "<tool_response>", "say": "It is sunny.", "reasoning": "The tool has answered."}
    ]}

The first rule that fits says the answer. A rule fits if its regular expression `when` is found in the last message
that is no system message, and, if it has `turn`, if the chat has as many answers already. `$1` to `$9` in the texts of
a rule stand for the expression's groups. So an answer depends only on its prompt, as every answer of the scripted
engine.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from tailrace.errors import ModelError

__all__ = ["SCRIPT_TEMPLATE", "AgentScript", "read_script"]

_ROLES = re.compile(r"<\|(?:user|assistant|system)\|>")
_GROUP = re.compile(r"\$([1-9])")
_NO_RULE = "The script has no rule for this message."

# Like Hermes' template: tools in the system message, and calls and results between tags.
SCRIPT_TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}\n{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}<|user|><tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}  # Any: JSON of the script


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    when: str = ""
    turn: int | None = None  # the number of answers that the chat has already
    say: str = ""
    reasoning: str = ""
    calls: tuple[_Call, ...] = ()


class AgentScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a script, in order."""

    rules: tuple[_Rule, ...]

    def answer(self, prompt: str) -> str:
        """Return what the model says to a prompt of `SCRIPT_TEMPLATE`."""
        before, last = _last_message(prompt)
        turn = before.count("<|assistant|>")
        for rule in self.rules:
            match = re.search(rule.when, last, re.DOTALL)
            if match is not None and rule.turn in (None, turn):
                return _written(rule, match)
        return _NO_RULE


def _last_message(prompt: str) -> tuple[str, str]:
    """Return what stands before the last message, and its text. Agents add system messages after the user's."""
    text = prompt.removesuffix("<|assistant|>")
    marks = [*_ROLES.finditer(text)]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for mark, end in zip(reversed(marks), reversed(ends), strict=True):
        if mark[0] != "<|system|>":
            return text[: mark.start()], text[mark.end() : end]
    return "", text


def _written(rule: _Rule, match: re.Match[str]) -> str:
    def filled(text: str) -> str:
        return _GROUP.sub(lambda group: (match[int(group[1])] if int(group[1]) <= match.re.groups else "") or "", text)

    from tailrace.text.calls import FORMATS  # imports Jinja, which an engine without a script does not need

    parts = [f"<think>\n{filled(rule.reasoning)}\n</think>\n\n"] if rule.reasoning else []
    parts.append(filled(rule.say))
    for call in rule.calls:
        arguments = json.dumps(_filled(call.arguments, filled), ensure_ascii=False)
        parts.append(("\n" if parts[-1] else "") + FORMATS["hermes"].write(filled(call.name), arguments))
    return "".join(parts)


def _filled(value: Any, filled: Any) -> Any:  # Any: JSON, and a function of text
    if isinstance(value, str):
        return filled(value)
    if isinstance(value, list):
        return [_filled(one, filled) for one in value]
    if isinstance(value, dict):
        return {name: _filled(one, filled) for name, one in value.items()}
    return value


def read_script(path: Path) -> AgentScript:
    """Raises: ModelError if the file cannot be read, or is no script."""
    try:
        script = msgspec.json.decode(path.read_bytes(), type=AgentScript)
    except OSError as error:
        raise ModelError(f"The script {path} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is not a script: {error}.") from None
    for number, rule in enumerate(script.rules):
        try:
            re.compile(rule.when)
        except re.error as error:
            raise ModelError(f"{path}, rule {number}: `when` is not a regular expression: {error}.") from None
    return script
