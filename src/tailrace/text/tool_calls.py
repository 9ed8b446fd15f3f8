"""Parses tool calls in streamed text.

The format is that of most open models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times,
with text before, between and after. The name is passed on as soon as it is complete, the arguments piece by piece.
Invalid calls are passed on as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from tailrace.text.stops import overlap
from tailrace.text.tool_prompt import CALL_CLOSE, CALL_OPEN

__all__ = ["CallPart", "ToolCallReader", "WholeCall", "WholeCallReader"]

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BEHIND = re.compile(r"\s*\}?\s*")
_MAX_HEAD = 400  # characters within which the name, or the marker after a call, has to be complete
_SLICE = 1024  # characters per pass, so that the work is linear


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of tool call number `index`: first its name, then pieces of its arguments as JSON text."""

    index: int
    name: str = ""
    arguments: str = ""


class ToolCallReader:
    """Splits text into plain text and tool calls. With `forced`, the whole text is one call without markers. With
    `single`, everything after the first call is dropped.

    The combined result does not depend on how the text is split into pieces.
    """

    def __init__(self, *, forced: bool = False, single: bool = False) -> None:
        self.num_calls = 0
        self._single = single
        self._held = ""  # undecided text
        self._state = "head" if forced else "text"
        self._opener = "" if forced else CALL_OPEN  # of the call whose head is being read
        self._depth = 0
        self._in_string = self._is_escaped = False

    @property
    def is_over(self) -> bool:
        """Whether the only call is complete. Everything after it is dropped."""
        return self._state == "over"

    def push(self, text: str) -> list[str | CallPart]:
        """Return the new pieces of plain text and parts of calls, in order."""
        parts: list[str | CallPart] = []
        for start in range(0, len(text), _SLICE):
            self._held += text[start : start + _SLICE]
            parts += self._advance()
        return parts

    def flush(self) -> list[str | CallPart]:
        """Return the rest at the end of the answer."""
        parts: list[str | CallPart] = []
        while self._state not in ("text", "over"):  # each pass drops at least one marker
            opener = self._opener if self._state == "head" else ""
            if self._state == "end":
                self._leave_call()
            self._state = "text"
            parts += ([opener] if opener else []) + self._advance()
        held, self._held = self._held, ""
        return [*parts, held] if held else parts

    def _advance(self) -> list[str | CallPart]:
        parts: list[str | CallPart] = []
        while self._held:
            before = (self._state, self._held)
            part = getattr(self, f"_in_{self._state}")()
            if part:
                parts.append(part)
            if before == (self._state, self._held):
                break
        return parts

    def _in_text(self) -> str:
        text, opener, rest = self._held.partition(CALL_OPEN)
        if opener:
            self._held, self._state, self._opener = rest, "head", CALL_OPEN
            return text
        keep = overlap(text, CALL_OPEN)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _in_head(self) -> str | CallPart | None:
        head, closer, _ = self._held[:_MAX_HEAD].partition(CALL_CLOSE)
        match = _HEAD.match(head)
        name = _decoded(match[1]) if match is not None else None
        if match is None or not name:  # a call needs a name
            if match is None and not closer and len(self._held) < _MAX_HEAD:
                return None
            self._state = "text"
            return self._opener
        self._held, self._state = self._held[match.end() :], "arguments"
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.num_calls += 1
        return CallPart(self.num_calls - 1, name=name)

    def _in_arguments(self) -> CallPart | None:
        for end, character in enumerate(self._held, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return self._pass_on(end, "over" if self._single else "end")
        return self._pass_on(len(self._held), "arguments")

    def _pass_on(self, length: int, state: str) -> CallPart | None:
        arguments, self._held, self._state = self._held[:length], self._held[length:], state
        return CallPart(self.num_calls - 1, arguments=arguments) if arguments else None

    def _in_end(self) -> None:
        """Parse the end of a call after its arguments: the closing brace and the marker. Without the marker, the rest
        is text."""
        window = self._held[:_MAX_HEAD]
        behind, closer, _ = window.partition(CALL_CLOSE)
        if CALL_OPEN in behind or (not closer and len(window) == _MAX_HEAD):
            self._leave_call()
        elif closer:
            self._held, self._state = self._held[len(behind) + len(CALL_CLOSE) :], "gap"

    def _leave_call(self) -> None:
        self._held = _BEHIND.sub("", self._held[:_MAX_HEAD], count=1) + self._held[_MAX_HEAD:]
        self._state = "text"

    def _in_over(self) -> None:
        """Drop text after the only call."""
        self._held = ""

    def _in_gap(self) -> None:
        """Drop line ends after a call."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "text"


def _decoded(name: str) -> str | None:
    """Decode the contents of a JSON string. Returns None if they are invalid."""
    try:
        return msgspec.json.decode(f'"{name}"', type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A complete tool call."""

    name: str
    arguments: dict[str, Any]  # Any: JSON, as the model wrote it


class WholeCallReader:
    """Like `ToolCallReader`, for wires that send a call in one piece. Incomplete calls are passed on as text, without
    their closing marker."""

    def __init__(self, *, forced: bool = False, single: bool = False) -> None:
        self._reader = ToolCallReader(forced=forced, single=single)
        self._opener = "" if forced else CALL_OPEN
        self._name: str | None = None
        self._arguments: list[str] = []

    @property
    def is_over(self) -> bool:
        """As in `ToolCallReader`."""
        return self._reader.is_over

    def push(self, text: str) -> list[str | WholeCall]:
        """Return the new pieces of plain text and calls, in order."""
        return self._gather(self._reader.push(text))

    def flush(self) -> list[str | WholeCall]:
        """Return the rest at the end of the answer."""
        return self._gather(self._reader.flush()) + self._complete()

    def _gather(self, parts: list[str | CallPart]) -> list[str | WholeCall]:
        found: list[str | WholeCall] = []
        for part in parts:
            if isinstance(part, str):
                found += [*self._complete(), part]
            elif part.arguments:
                self._arguments.append(part.arguments)
            else:
                found += self._complete()
                self._name = part.name
        return found

    def _complete(self) -> list[str | WholeCall]:
        """Return the collected call, if there is one. Called when something else follows."""
        name, arguments = self._name, "".join(self._arguments)
        self._name, self._arguments = None, []
        if name is None:
            return []
        try:
            return [WholeCall(name, msgspec.json.decode(arguments, type=dict[str, Any]))]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return [f'{self._opener}{{"name": "{name}", "arguments": {arguments}']
