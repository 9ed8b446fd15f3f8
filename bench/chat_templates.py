"""Compare prompts with those of transformers, for a folder of chat templates.

    python bench/chat_templates.py FOLDER [-v]

FOLDER has files `*.jinja`, such as the templates of published models. Each conversation is rendered with each template
by tailrace and by transformers' `apply_chat_template`. Prints how many prompts are equal, how many differ and why, and
which conversations only one of the two refuses. Also reads back the calls that each template writes.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tailrace.errors import ModelError
from tailrace.text import ChatEncoder, ChatTemplate
from tailrace.types import Message, ToolCall
from tailrace_plugins.upstream.upstream_text import ByteTokenizer

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
_CALL = ToolCall("abcdefghi", "look_up", '{"city": "Paris", "days": 3}')
_OTHER = ToolCall("call_0123456789", "look_up", '{"city": "Rome", "days": 4}')
S, U, V, A, B = (
    Message("system", "Be kind."), Message("user", "Why do rivers bend?"), Message("user", "And lakes?"),
    Message("assistant", "Because of sand."), Message("assistant", "Also wind."),
)  # fmt: skip
_ASKS, _RESULT = Message("assistant", "", (_CALL,)), Message("tool", "sunny", (), _CALL.call_id)
_ASKS_BOTH, _SECOND = Message("assistant", "", (_CALL, _OTHER)), Message("tool", "rain", (), _OTHER.call_id)
CHATS: dict[str, list[Message]] = {
    "user": [U],
    "system, user": [S, U],
    "user, assistant, user": [U, A, V],
    "system, user, assistant, user": [S, U, A, V],
    "user, user": [U, V],
    "user, assistant, assistant, user": [U, A, B, V],
    "system later": [S, U, A, Message("system", "Be short."), V],
    "two systems": [S, Message("system", "Be short."), U],
    "tools": [S, U],
    "call, result": [U, _ASKS, _RESULT],
    "call, result, answer, user": [U, _ASKS, _RESULT, A, V],
    "call, result, user": [U, _ASKS, _RESULT, V],
    "two calls, two results": [U, _ASKS_BOTH, _RESULT, _SECOND],
    "other ids": [U, Message("assistant", "", (_OTHER,)), _SECOND],
}
_WITH_TOOLS = {"tools", "call, result", "call, result, answer, user", "call, result, user", "two calls, two results",
               "other ids"}  # fmt: skip


def ours(encoder: ChatEncoder, messages: list[Message], tools: list[Any]) -> str:
    parts = encoder._render(messages, tools, None, True, False, False)
    return "".join(str(part) for part in parts)


def theirs(source: str, messages: list[Message], tools: list[Any]) -> str:
    """Render as a user of transformers would who sends the same messages."""
    chat = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [
                {"id": call.call_id, "type": "function",
                 "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in message.tool_calls
            ]  # fmt: skip
        if message.tool_call_id:
            turn["tool_call_id"] = message.tool_call_id
        chat.append(turn)
    rendered = render_jinja_template(
        [chat], tools=tools or None, chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    return str(rendered[0][0])


def attempt(render: Callable[[], str]) -> str | None:
    """Return a prompt; None if it is refused. A template can raise anything."""
    try:
        return render()
    except Exception:
        return None


def main(folder: str, *, is_verbose: bool) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    by_chat: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in CHATS}
    formats: collections.Counter[str] = collections.Counter()
    for path in sorted(Path(folder).glob("*.jinja")):
        source = path.read_text()
        try:
            template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        except ModelError as error:
            print(f"{path.name}: {error}")
            continue
        encoder = ChatEncoder(ByteTokenizer(), template)
        shows_calls = encoder._forms.arguments != "none"
        how = "takes no tools" if not encoder.facts.describes_tools else "unknown"
        if encoder.calls is not None:
            how = f"{encoder.calls.name} ({'read back' if shows_calls else 'by its markers'})"
        formats[how] += 1
        for name, messages in CHATS.items():
            tools = _TOOLS if name in _WITH_TOOLS and template.takes_tools else []
            if name in _WITH_TOOLS and not encoder.facts.describes_tools:
                continue
            own = attempt(partial(ours, encoder, messages, tools))
            other = attempt(partial(theirs, source, messages, tools))
            if own is None or other is None:
                outcome = (
                    "both refuse" if own is other else "only transformers refuses" if own else "only tailrace refuses"
                )
            elif own == other:
                outcome = "equal"
            else:
                outcome = "differ"
                if is_verbose:
                    print(f"--- {path.name}: {name} ({'shows' if shows_calls else 'hides'} calls)\n{own!r}\n{other!r}")
            if is_verbose and outcome.startswith("only"):
                print(f"--- {path.name}: {name}: {outcome}")
            outcomes[outcome] += 1
            by_chat[name][outcome] += 1
    print(dict(outcomes))
    for name, counter in by_chat.items():
        print(f"  {name:35} {dict(counter)}")
    print(dict(formats.most_common()))


if __name__ == "__main__":
    main(sys.argv[1], is_verbose="-v" in sys.argv)
