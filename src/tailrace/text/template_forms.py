"""What a chat template takes: found out by rendering small conversations when a model is loaded.

Published templates differ in what they accept: content as text or as a list of parts, system messages anywhere or only
first, two messages of one role in a row, ids of calls of nine characters, arguments as an object or as text. Some
refuse what they do not take, others leave it out without a word. `probe` tells one from the other by markers, which
have to be in the rendered text. `adapt` brings a conversation into a form that the template takes. What the template
takes as it is stays as it is.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import Literal

from tailrace.text.calls.call_formats import CallFormat
from tailrace.text.calls.detect import detect, detect_by_markers
from tailrace.text.templates import ChatTemplate, TemplateError, Turn, turn_of
from tailrace.types import IMAGE_MARK, Image, Message, ToolCall

__all__ = ["TemplateForms", "adapt", "probe", "strictest", "turn_in"]

_ID_LENGTH = 9
_LETTERS = string.ascii_letters + string.digits
_LONG_IDS, _SHORT_IDS = ("call_marker_0_0", "call_marker_0_1"), ("a1b2c3d4e", "f5g6h7i8j")
_SYSTEM, _QUESTION, _ANSWER, _SECOND = "SystemMarker", "QuestionMarker", "AnswerMarker", "SecondMarker"
_TOOL, _VALUE, _RESULT = "tool_marker", "ValueMarker", "ResultMarker"
_PRINTED = re.compile("""['"]image['"]""")  # a template that takes only text prints the list of parts
_PARAMETERS = {_TOOL: {"first": True, "second": False}}
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"first": {"type": "string"}, "second": {"type": "integer"}},
                "required": ["first"],
            },
        },
    },
)


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """What a template takes. The defaults are what most templates take."""

    content: Literal["text", "parts", "none"] = "text"  # none: it shows no message
    system: Literal["anywhere", "first", "none"] = "anywhere"
    alone: bool = True  # a system message without one of a user
    neighbours: bool = True  # two messages of one role in a row
    tools: Literal["always", "with system", "never"] = "never"  # when it describes tools
    arguments: Literal["object", "text", "none"] = "object"  # of calls; none: it shows no calls
    parallel_calls: bool = True  # two calls in one message
    results: bool = True  # messages of role `tool`
    short_ids: bool = False  # call ids have to be nine letters and digits
    calls: CallFormat | None = None  # how its model writes calls; None if this is not known
    images: bool = False  # it marks where an image is, as a part of a message


def probe(template: ChatTemplate, control_tokens: Collection[str] = ()) -> TemplateForms:
    """Return what a template takes. `control_tokens` are those of its model."""
    forms = TemplateForms()
    user, other = Message("user", _QUESTION), Message("user", _SECOND)
    if not _shows(template, forms, [user], _QUESTION):
        forms = replace(forms, content="parts")
        if not _shows(template, forms, [user], _QUESTION):
            return replace(forms, content="none")
    seen = Message("user", IMAGE_MARK + _QUESTION, images=(Image(b""),))
    shown = _rendered(template, forms, [seen], tools=())
    is_marked = _QUESTION in shown and shown != _rendered(template, forms, [user], tools=())
    if is_marked and not _PRINTED.search(shown):
        forms = replace(forms, images=True)
    system, answer = Message("system", _SYSTEM), Message("assistant", _ANSWER)
    more = Message("system", _SECOND)
    if not _shows(template, forms, [system, user], _SYSTEM, _QUESTION):
        forms = replace(forms, system="none")
    elif not (
        _shows(template, forms, [system, user, answer, more, user], _SYSTEM, _SECOND)
        and _shows(template, forms, [system, more, user], _SYSTEM, _SECOND)
    ):
        forms = replace(forms, system="first")
    # Without tools: some refuse only these without a question. Such a chat is then rendered in the strictest form.
    if forms.system != "none" and _SYSTEM not in _rendered(template, forms, [system], tools=()):
        forms = replace(forms, alone=False)
    if not _shows(template, forms, [user, other], _QUESTION, _SECOND):
        forms = replace(forms, neighbours=False)
    return _with_tools(template, forms, control_tokens) if template.takes_tools else forms


def _with_tools(template: ChatTemplate, forms: TemplateForms, control_tokens: Collection[str]) -> TemplateForms:
    """Return the forms with what a template takes of tools, calls and results: the first way in which its own calls can
    be read back, or else the first that shows them."""
    user = Message("user", _QUESTION)
    tools: Literal["always", "with system", "never"] = "always"
    if not _shows(template, forms, [user], _TOOL):
        tools = "with system" if _shows(template, forms, [Message("system", _SYSTEM), user], _TOOL) else "never"
        if tools == "never" and _rendered(template, forms, [user]) != _rendered(template, forms, [user], tools=()):
            tools = "always"  # it does something else with them
    forms = replace(forms, tools=tools, arguments="none", results=False)
    shown: TemplateForms | None = None
    shows_results = False
    kinds: tuple[Literal["object", "text"], ...] = ("object", "text")
    for short_ids, is_parallel, arguments in product((False, True), (True, False), kinds):
        tried = replace(forms, short_ids=short_ids, parallel_calls=is_parallel, arguments=arguments)
        turns = _call_turns(2 if is_parallel else 1, _SHORT_IDS if short_ids else _LONG_IDS)
        text = _rendered(template, tried, [user, *turns])
        shows_results |= _RESULT in text
        if _VALUE not in text:
            continue
        tried = replace(tried, results=_RESULT in text)
        behind = text.rpartition(_QUESTION)[2], _added(_rendered(template, tried, [user]), text)
        found = detect(behind, turns[0].tool_calls, _PARAMETERS)
        if found is not None:
            return replace(tried, calls=found)
        shown = shown or tried
    shown = shown or replace(forms, results=shows_results)
    return replace(shown, calls=detect_by_markers(template.source, control_tokens))


def _call_turns(num_calls: int, ids: Sequence[str]) -> list[Message]:
    """Return an answer with calls, and their results."""
    arguments = [f'{{"first": "{_VALUE}", "second": {number}}}' for number in range(num_calls)]
    calls = tuple(ToolCall(call_id, _TOOL, text) for call_id, text in zip(ids, arguments, strict=False))
    return [Message("assistant", "", calls), *(Message("tool", _RESULT, (), call.call_id) for call in calls)]


def _rendered(
    template: ChatTemplate, forms: TemplateForms, messages: Sequence[Message], tools: Sequence[Turn] = _TOOLS
) -> str:
    """Return the prompt for messages; "" if the template refuses them."""
    turns = [turn_in(forms, message, template.reasoning_name) for message in messages]
    try:
        return template.render_turns(turns, tools=tools if template.takes_tools else ())
    except TemplateError:
        return ""


def _shows(template: ChatTemplate, forms: TemplateForms, messages: Sequence[Message], *markers: str) -> bool:
    text = _rendered(template, forms, messages)
    return all(marker in text for marker in markers)


def _added(before: str, after: str) -> str:
    """Return what `after` has beyond the common beginning with `before`."""
    pairs = zip(before, after, strict=False)
    return after[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def turn_in(forms: TemplateForms, message: Message, reasoning_name: str) -> Turn:
    """Return a message as the template expects it."""
    turn = turn_of(message, reasoning_name)
    if message.images:
        texts = message.content.split(IMAGE_MARK)
        parts = [[{"type": "text", "text": text}] if text else [] for text in texts]
        turn["content"] = parts[0] + [part for after in parts[1:] for part in ({"type": "image"}, *after)]
    elif forms.content == "parts":
        turn["content"] = [{"type": "text", "text": message.content}] if message.content else []
    if forms.arguments == "text":
        for call, given in zip(turn.get("tool_calls", ()), message.tool_calls, strict=False):
            call["function"]["arguments"] = given.arguments
    return turn


def adapt(messages: Sequence[Message], forms: TemplateForms) -> Sequence[Message]:
    """Return the conversation in a form that the template takes. What it does not show at all stays."""
    if forms.system != "anywhere":
        messages = _with_systems_first(messages)
    if forms.system == "none":
        messages = _with_system_in_question(messages)
    if not forms.alone and all(message.role not in ("user", "tool") for message in messages):
        messages = _with_system_asking(messages)
    if any(message.tool_calls or message.role == "tool" for message in messages):
        if not forms.parallel_calls:
            messages = list(_one_call_each(messages))
        if forms.short_ids:
            messages = [_with_short_ids(message) for message in messages]
    return messages if forms.neighbours else _with_neighbours_joined(messages)


def strictest(messages: Sequence[Message], forms: TemplateForms) -> Sequence[Message]:
    """Return the conversation in the form that the most templates take, for one that a template refuses: one system
    message, users and assistants in turn, ids of nine characters."""
    strict = replace(forms, alone=False, neighbours=False, short_ids=True)
    adapted = adapt(messages, strict if forms.system == "none" else replace(strict, system="first"))
    joined: list[Message] = []
    for message in adapted:
        if message.role == "user" and joined and joined[-1].role == "tool":
            joined[-1] = _join(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _with_systems_first(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the texts of all system messages in the first."""
    if all(message.role != "system" for message in messages[1:]):
        return messages
    text = "\n\n".join(message.content for message in messages if message.role == "system")
    return [Message("system", text), *(message for message in messages if message.role != "system")]


def _with_system_in_question(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the text of the system message, which is the first, in the next message of a user."""
    if messages[0].role != "system":
        return messages
    rest = list(messages[1:])
    at = next((i for i, message in enumerate(rest) if message.role == "user"), None)
    if at is None:
        return [replace(messages[0], role="user"), *rest]
    rest[at] = replace(rest[at], content=f"{messages[0].content}\n\n{rest[at].content}")
    return rest


def _with_system_asking(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the last of the system as one of a user."""
    at = max((i for i, message in enumerate(messages) if message.role == "system"), default=None)
    if at is None:
        return messages
    return [*messages[:at], replace(messages[at], role="user"), *messages[at + 1 :]]


def _with_neighbours_joined(messages: Sequence[Message]) -> Sequence[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role and message.role != "tool" and not joined[-1].tool_calls:
            joined[-1] = _join(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _join(first: Message, second: Message) -> Message:
    return replace(
        first,
        content="\n\n".join(filter(None, (first.content, second.content))),
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning="\n\n".join(filter(None, (first.reasoning, second.reasoning))),
        images=first.images + second.images,
    )


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with each call in a message of its own, followed by its result."""
    results = {message.tool_call_id: message for message in messages if message.role == "tool"}
    moved: set[str] = set()
    for message in messages:
        if len(message.tool_calls) < 2:
            if message.role != "tool" or message.tool_call_id not in moved:
                yield message
            continue
        for number, call in enumerate(message.tool_calls):
            yield replace(message, content="" if number else message.content, tool_calls=(call,))
            if call.call_id in results:
                moved.add(call.call_id)
                yield results[call.call_id]


def _with_short_ids(message: Message) -> Message:
    if not message.tool_calls and not message.tool_call_id:
        return message
    calls = tuple(replace(call, call_id=_short_id(call.call_id)) for call in message.tool_calls)
    return replace(message, tool_calls=calls, tool_call_id=message.tool_call_id and _short_id(message.tool_call_id))


def _short_id(call_id: str) -> str:
    """Return nine letters and digits for an id: the same for the same id."""
    if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    number, letters = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()), ""
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_LETTERS))
        letters += _LETTERS[digit]
    return letters
