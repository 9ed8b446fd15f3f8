"""Separates tool calls from the text of an answer, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tailrace.text.calls.call_formats import FORMATS, UNKNOWN, CallFormat
from tailrace.text.calls.incoming import Incoming, Wait, run
from tailrace.text.calls.literals import LiteralReader, json_string
from tailrace.text.calls.syntaxes import JsonCalls, NotACall, Syntax
from tailrace.types import CallReading

__all__ = ["CallPart", "ToolCallReader", "WholeCall", "WholeCallReader"]

_SLICE = 1024  # characters per pass, so that the work is linear
_FENCES = ("```json", "```python", "```")
_FORCED = JsonCalls()
_HERMES = CallReading()


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of tool call number `index`: first its name, then pieces of its arguments as JSON text."""

    index: int
    name: str = ""
    arguments: str = ""


class _Over(Exception):
    """The only call is complete."""


class ToolCallReader:
    """Splits text into plain text and tool calls. The combined result does not depend on how the text is split into
    pieces."""

    def __init__(self, reading: CallReading = _HERMES) -> None:
        self.num_calls = 0
        self.is_over = False  # whether the only call is complete; everything after it is dropped
        self.source = Incoming()
        self._reading = reading
        self._format: CallFormat = FORMATS.get(reading.format, UNKNOWN)
        self._parts: list[str | CallPart] = []
        self._is_line_start = True
        self._needs_known = False  # whether the call that is read must be of a known tool
        self._by_marker = _syntaxes_by_marker(self._format)
        self._parser = self._read()
        self._advance()

    def push(self, text: str) -> list[str | CallPart]:
        """Return the new pieces of plain text and parts of calls, in order."""
        for start in range(0, len(text), _SLICE):
            self.source.add(text[start : start + _SLICE])
            self._advance()
        return self._take_parts()

    def flush(self, *, is_cut: bool = False) -> list[str | CallPart]:
        """Return the rest at the end of the answer. `is_cut`: it ended at a limit. Arguments that the model has not
        finished then stay unfinished, so that nobody takes half a call for a whole one."""
        self.source.end(is_cut=is_cut)
        self._advance()
        return self._take_parts()

    # What a syntax does

    def accepts(self, name: str) -> bool:
        return not self._needs_known or name in self._reading.tools

    def parameters(self, name: str) -> Mapping[str, bool]:
        return self._reading.tools.get(name, {})

    def begin(self, name: str) -> None:
        self.source.forget()
        self.num_calls += 1
        self._parts.append(CallPart(self.num_calls - 1, name=name))

    def write(self, json: str) -> None:
        if json:
            self._parts.append(CallPart(self.num_calls - 1, arguments=json))

    def end(self) -> None:
        if self._reading.single or self._reading.forced:
            raise _Over

    # Parsing

    def _advance(self) -> None:
        next(self._parser, None)

    def _take_parts(self) -> list[str | CallPart]:
        """Return the parts since the last time. Adjacent ones of the same kind are one."""
        parts, self._parts = self._parts, []
        joined: list[str | CallPart] = []
        for part in parts:
            last = joined[-1] if joined else None
            if isinstance(part, str) and isinstance(last, str):
                joined[-1] = last + part
            elif isinstance(part, CallPart) and isinstance(last, CallPart) and not part.name and not last.name:
                joined[-1] = CallPart(part.index, arguments=last.arguments + part.arguments)
            else:
                joined.append(part)
        return joined

    def _read(self) -> Wait[None]:
        try:
            if self._reading.forced:
                yield from self._try("", (_FORCED,))
            yield from self._read_text()
        except _Over:
            self.is_over = True
            while True:
                self.source.at = len(self.source.text)
                yield

    def _read_text(self) -> Wait[None]:
        while True:
            text, marker = yield from self.source.pieces(*self._by_marker)
            if text:
                self._say(text)
            elif not marker:
                return
            elif marker not in self._format.around:
                yield from self._try(marker, self._by_marker[marker])

    def _try(self, marker: str, syntaxes: tuple[Syntax, ...]) -> Wait[None]:
        """Read calls after a marker. If they are none, the marker is text."""
        for syntax in syntaxes:
            self._needs_known = bool(marker) and marker not in syntax.opens
            if self._needs_known and not self._is_line_start:
                continue
            if marker in syntax.bare:
                self.source.at -= len(marker)
            self.source.mark()
            try:
                yield from syntax.read(self)
            except NotACall:
                if self.source.rewind():
                    self.source.at += len(marker) if marker in syntax.bare else 0
                    continue
            self.source.forget()
            self._is_line_start = True
            return
        self._say(marker)

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(text)
            _, line_end, line = text.rpartition("\n")
            self._is_line_start = not line.strip() and (bool(line_end) or self._is_line_start)


def _syntaxes_by_marker(format: CallFormat) -> dict[str, tuple[Syntax, ...]]:  # noqa: A002
    found: dict[str, tuple[Syntax, ...]] = dict.fromkeys(format.around, ())
    for syntax in format.syntaxes:
        fences = _FENCES if syntax.bare else ()
        for marker in (*syntax.opens, *syntax.bare, *fences):
            found[marker] = (*found.get(marker, ()), syntax)
    return found


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A tool call in one piece."""

    name: str
    arguments: dict[str, Any]  # Any: JSON, as the model wrote it


class WholeCallReader:
    """Like `ToolCallReader`, for wires that send a call in one piece.

    If a limit ended the answer inside of a call, it has the arguments up to there. With `cut_is_text` it is text, for
    wires whose clients run every call, even if the answer ended at a limit.
    """

    def __init__(self, reading: CallReading = _HERMES, *, cut_is_text: bool = False) -> None:
        self._cut_is_text = cut_is_text
        self._reader = ToolCallReader(reading)
        self._name: str | None = None
        self._arguments: list[str] = []

    @property
    def is_over(self) -> bool:
        """As in `ToolCallReader`."""
        return self._reader.is_over

    def push(self, text: str) -> list[str | WholeCall]:
        """Return the new pieces of plain text and calls, in order."""
        return self._gather(self._reader.push(text))

    def flush(self, *, is_cut: bool = False) -> list[str | WholeCall]:
        """Return the rest at the end of the answer, as in `ToolCallReader`."""
        return self._gather(self._reader.flush(is_cut=is_cut)) + self._complete()

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
        parts: list[str] = []
        run(LiteralReader(Incoming(arguments, is_complete=True), parts.append).read())
        whole = "".join(parts)
        try:
            values = msgspec.json.decode(whole, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):  # nested too deeply
            values = None
        if values is None or (self._cut_is_text and whole != arguments):
            return [f'{{"name": {json_string(name)}, "arguments": {arguments}']
        return [WholeCall(name, values)]
