"""How models write tool calls: four syntaxes, each with the parameters in which families differ.

A syntax reads the calls after its opening marker as a generator (`incoming`), and passes on each call as soon as it is
certain: its name, then pieces of its arguments as JSON. Text that turns out to be no call raises `NotACall` before
anything of it was passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tailrace.text.calls.incoming import Incoming, Wait, run
from tailrace.text.calls.literals import LiteralReader, json_string, json_text

__all__ = ["CallOutput", "JsonCalls", "NamedCalls", "NotACall", "PythonCalls", "Syntax", "TaggedCalls"]

_MAX_NAME = 256  # characters of a call's name
_MAX_HEAD = 400  # characters between a marker and the arguments
_MAX_HELD = 65_536  # characters of arguments that come before their call's name
_FENCES = ("```json", "```python", "```")
_TAG_NAME = re.compile(r"[^\s<>{}\"']+")
_PYTHON_NAME = re.compile(r"[^\W\d][\w.-]*")


class NotACall(Exception):
    """The text after a marker is no call."""


class CallOutput(Protocol):
    """Where a syntax reads, and what it does with the calls that it finds."""

    source: Incoming

    def accepts(self, name: str) -> bool:
        """Return whether a call of this name is possible."""

    def parameters(self, name: str) -> Mapping[str, bool]:
        """Return the parameters of a tool, in order, and whether each of them is text."""

    def begin(self, name: str) -> None:
        """A call begins. From here on its text is no longer kept."""

    def write(self, json: str) -> None:
        """More of the arguments of the last call."""

    def end(self) -> None:
        """The last call is complete."""


class Syntax(Protocol):
    """One way to write calls. `opens` are the markers after which they come. With `bare`, calls may also stand at the
    beginning of a line without a marker, beginning with one of these brackets; then only calls of known tools count."""

    @property
    def opens(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> tuple[str, ...]: ...
    @property
    def markers(self) -> tuple[str, ...]:
        """All markers that may be control tokens of the model."""

    @property
    def signature(self) -> tuple[str, ...]:
        """Markers by which a template that describes this syntax is known."""

    def read(self, output: CallOutput) -> Wait[None]:
        """Take the calls after a marker. Raises: NotACall."""

    def write(self, name: str, arguments: str) -> str:
        """Return a call as its model writes it. `arguments` is an object as JSON."""


def _held(parts: list[str], most: int) -> Callable[[str], None]:
    """Return a function that collects text up to a limit, beyond which it is no call."""
    size = 0

    def write(text: str) -> None:
        nonlocal size
        size += len(text)
        if size > most:
            raise NotACall
        parts.append(text)

    return write


def _ignore(text: str) -> None:
    pass


def _begin(output: CallOutput, name: str) -> None:
    if not 0 < len(name) <= _MAX_NAME or not output.accepts(name):
        raise NotACall
    output.begin(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListedCalls:
    """Calls that may be in a list, and in a fence."""

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opens + self.closes

    @property
    def signature(self) -> tuple[str, ...]:
        return self.opens

    def read(self, output: CallOutput) -> Wait[None]:
        """Take the calls. Raises: NotACall if the first one is none."""
        source, is_first = output.source, True
        yield from source.space()
        if (yield from source.skip(*_FENCES)):
            yield from source.space()
        in_list = yield from source.skip("[")
        while (yield from _took(source, self._call(output), is_first=is_first)):
            is_first = False
            source.mark()
            yield from _separators(source)
        yield from source.space()
        if in_list:
            yield from source.skip("]")
        yield from _leave(source, self.closes)

    def _call(self, output: CallOutput) -> Wait[None]:
        """Take one call. Raises: NotACall."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(_ListedCalls):
    """`{"name": …, "arguments": {…}}`, alone, one after another, or in a list. The keys may have any order, and others
    may stand beside them. With `keyed`, a call is `{NAME: {…}}`."""

    keyed: bool = False

    _NAMES = ("name", "tool_name", "function_name")
    _ARGUMENTS = ("arguments", "parameters", "args", "input")
    _OTHERS = ("type", "function", "id", "tool_call_id")  # keys that may come before the name in a call without marker

    def write(self, name: str, arguments: str) -> str:
        named = f'{{"name": {json_string(name)}, "arguments": {arguments}}}'
        call = f"[{{{json_string(name)}: {arguments}}}]" if self.keyed else named
        space = "\n" if self.closes and self.closes[0].startswith("</") else ""
        return "".join([*self.opens[:1], space, call, space, *self.closes[:1]])

    def _call(self, output: CallOutput) -> Wait[None]:
        """Take one object. Raises: NotACall."""
        source = output.source
        yield from source.space()
        if not (yield from source.skip("{")):
            raise NotACall
        name, has_begun, arguments = "", False, list[str]()
        while True:
            yield from _separators(source)
            char = yield from source.char()
            if not char or char == "}" or (yield from source.upcoming(*self.closes)):
                yield from source.skip("}")
                break
            if char not in "\"'" and has_begun:
                break
            key = yield from self._text(output)
            yield from source.space()
            if not (yield from source.skip(":")):
                raise NotACall
            yield from source.space()
            if self.keyed and not has_begun:
                has_begun = yield from self._arguments(output, key, arguments)
            elif key in self._NAMES and not name:
                name = yield from self._text(output)
                if arguments:
                    _begin(output, name)
                    output.write("".join(arguments))
                    output.end()
                    has_begun = True
            elif key in self._ARGUMENTS and not has_begun and not arguments:
                has_begun = yield from self._arguments(output, name, arguments)
            elif key == "function" and not name and (yield from source.char()) == "{":
                yield from self._call(output)
                name, has_begun = key, True
            elif self.bare and not name and key not in self._OTHERS:
                raise NotACall
            else:
                yield from LiteralReader(source, _ignore if has_begun else _held([], _MAX_HELD), self.closes).read()
        if not has_begun:
            if not name or arguments or (source.is_cut and not char):
                raise NotACall
            _begin(output, name)
            output.write("{}")
            output.end()

    def _text(self, output: CallOutput) -> Wait[str]:
        """Take a string. Raises: NotACall for another value, or if the string does not end."""
        held: list[str] = []
        if (yield from output.source.char()) not in ("'", '"'):
            raise NotACall
        reader = LiteralReader(output.source, _ignore, self.closes)
        is_whole, _ = yield from reader.scalar(_held(held, 6 * _MAX_NAME))
        if not is_whole:
            raise NotACall
        return msgspec.json.decode("".join(held), type=str)

    def _arguments(self, output: CallOutput, name: str, held: list[str]) -> Wait[bool]:
        """Take the arguments. Without a name they are held. Returns whether the call has begun. Raises: NotACall if
        they are no object, nor text or nothing that means one."""
        source = output.source
        char = yield from source.char()
        write = output.write if name else _held(held, _MAX_HELD)
        if char == "{":
            if name:
                _begin(output, name)
            if not (yield from LiteralReader(source, write, self.closes).read()):
                return bool(name)
        else:
            value: list[str] = []
            if not (yield from LiteralReader(source, _held(value, _MAX_HELD), self.closes).read()):
                raise NotACall
            text = _object_in("".join(value))
            if name:
                _begin(output, name)
            write(text)
        if name:
            output.end()
        return bool(name)


def _object_in(value: str) -> str:
    """Return the object that a JSON value means: text that has one, or nothing. Raises: NotACall."""
    if value == "null":
        return "{}"
    text = msgspec.json.decode(value, type=str).strip() if value.startswith('"') else value
    if text in ("", "null"):
        return "{}"
    if not text.startswith("{"):
        raise NotACall
    parts: list[str] = []
    run(LiteralReader(Incoming(text, is_complete=True), parts.append).read())
    return "".join(parts)


def _took(source: Incoming, call: Wait[None], *, is_first: bool) -> Wait[bool]:
    """Take a call. Returns False if there is none after the first one, and goes back to the mark. Raises: NotACall if
    the first one is none."""
    try:
        yield from call
    except NotACall:
        if is_first:
            raise
        source.rewind()
        return False
    return True


def _separators(source: Incoming) -> Wait[None]:
    """Take what may stand between two calls, or two entries of an object."""
    while (yield from source.space()) or (yield from source.skip(",", ";")):
        pass


def _leave(source: Incoming, closes: tuple[str, ...]) -> Wait[None]:
    """Take what may stand behind the last call: a bracket too many, the end of a fence, the closing marker and line
    ends."""
    yield from source.space()
    yield from source.skip("}")
    yield from source.space()
    yield from source.skip("```")
    yield from source.space()
    if closes:
        yield from source.skip(*closes)
    while (yield from source.skip("\n")):
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """A name, then an object: `[TOOL_CALLS]name[ARGS]{…}`. `head` finds the name in the text before the object, which
    may also have an id, a recipient and so on. `form` is that text with `{}` for the name."""

    opens: tuple[str, ...]
    head: re.Pattern[str]
    form: str
    closes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # markers inside of the head
    quotes: tuple[str, ...] = ('"', "'")
    bare: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opens + self.inner + self.closes + tuple(one for one in self.quotes if len(one) > 1)

    @property
    def signature(self) -> tuple[str, ...]:
        return self.opens + self.inner

    def write(self, name: str, arguments: str) -> str:
        if len(self.quotes[0]) > 1:
            parts: list[str] = []
            _rewrite(msgspec.json.decode(arguments), self.quotes[0], parts.append)
            arguments = "".join(parts)
        return "".join([self.opens[0], self.form.replace("{}", name), arguments, *self.closes[:1]])

    def read(self, output: CallOutput) -> Wait[None]:
        source = output.source
        head, stop = yield from source.until("{", *self.closes, most=_MAX_HEAD)
        match = self.head.fullmatch(head.strip()) if stop else None
        if match is None:
            raise NotACall
        _begin(output, match["name"])
        if stop != "{":
            output.write("{}")
            output.end()
            return
        source.at -= 1
        if not (yield from LiteralReader(source, output.write, self.closes, self.quotes).read()):
            return
        output.end()
        yield from _leave(source, self.closes)


def _rewrite(value: object, quote: str, write: Callable[[str], None]) -> None:
    """Write a value in the notation of Gemma: keys without quotes, and quotes of its own."""
    if isinstance(value, dict):
        for number, (key, item) in enumerate(value.items()):
            write(f"{',' if number else '{'}{key}:")
            _rewrite(item, quote, write)
        write("}" if value else "{}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            write("," if number else "[")
            _rewrite(item, quote, write)
        write("]" if value else "[]")
    else:
        write(f"{quote}{value}{quote}" if isinstance(value, str) else msgspec.json.encode(value).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Names and values between tags: `<function=name><parameter=key>value</parameter></function>`.

    The text of a value is the value, without quotes: the tool's schema says whether it is text. A closing tag counts
    only if a tag follows that may follow it, since the value may be a file with such tags.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    name_open: str = ""
    name_closes: tuple[str, ...] = (">",)
    call_close: str = ""  # "": the call ends at `closes`
    key_open: str
    key_close: str
    value_open: str  # after attributes
    value_close: str
    bare: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        tags = (self.name_open, *self.name_closes, self.call_close, self.key_open, self.key_close, self.value_open)
        return (*self.opens, *self.closes, *(tag for tag in tags if tag), self.value_close)

    @property
    def signature(self) -> tuple[str, ...]:
        return tuple(one for one in (*self.opens, self.name_open, self.key_open) if one)

    @property
    def _call_closes(self) -> tuple[str, ...]:
        return (self.call_close,) if self.call_close else self.closes

    def write(self, name: str, arguments: str) -> str:
        line = "\n" if self.name_closes[0] == "\n" or not self.value_open else ""
        parts = [self.opens[0], line if self.name_open else "", self.name_open, name, self.name_closes[0]]
        for key, value in msgspec.json.decode(arguments, type=dict[str, object]).items():
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            parts += [line, self.key_open, key, self.key_close, self.value_open, line, text, line, self.value_close]
        return "".join([*parts, line, self.call_close, line if self.call_close else "", *self.closes[:1]])

    def read(self, output: CallOutput) -> Wait[None]:
        source, is_first = output.source, True
        yield from source.space()
        while (yield from _took(source, self._call(output), is_first=is_first)):
            is_first = False
            if not self.name_open:  # each call has a marker of its own
                break
            source.mark()
            yield from source.space()
        yield from _leave(source, self.closes)

    def _call(self, output: CallOutput) -> Wait[None]:
        source = output.source
        if self.name_open and not (yield from source.skip(self.name_open)):
            raise NotACall
        stops = (*self.name_closes, self.key_open, *self._call_closes)
        name, stop = yield from source.until(*stops, most=_MAX_NAME)
        if not stop or not _TAG_NAME.fullmatch(name.strip()):
            raise NotACall
        _begin(output, name.strip())
        if stop not in self.name_closes:
            source.at -= len(stop)
        output.write("{")
        if (yield from self._parameters(output, output.parameters(name.strip()))):
            output.write("}")
            output.end()

    def _parameters(self, output: CallOutput, kinds: Mapping[str, bool]) -> Wait[bool]:
        """Take the parameters and the end of the call. Returns whether it is whole."""
        source, separator = output.source, ""
        while True:
            yield from source.space()
            tag = yield from source.skip(self.key_open, *self._call_closes, *self.closes)
            if tag == self.key_open:
                key, stop = yield from source.until(self.key_close, most=_MAX_HEAD)
                attributes = ""
                if stop and self.value_open:
                    attributes, stop = yield from source.until(self.value_open, most=_MAX_HEAD)
                if not stop:
                    return not source.is_cut
                output.write(f"{separator}{json_string(key.strip())}: ")
                separator = ", "
                if not (yield from self._value(output, _kind(attributes, kinds.get(key.strip())))):
                    return False
            elif tag or not (yield from source.char()):
                return bool(tag) or not source.is_cut
            else:  # text between tags means nothing
                source.take(1)

    def _value(self, output: CallOutput, is_text: bool | None) -> Wait[bool]:
        """Take a value and its closing tag. Returns whether it is whole."""
        source, held = output.source, list[str]()
        write = (lambda text: output.write(json_text(text))) if is_text else held.append
        if is_text:
            output.write('"')
        if (yield from source.upcoming("\n")):
            source.take(1)
        is_whole = yield from self._raw(source, write)
        if is_text:
            if is_whole or not source.is_cut:
                output.write('"')
        elif is_whole or not source.is_cut:
            output.write(_json_of("".join(held), may_be_text=is_text is None))
        else:
            output.write("".join(held))
        return is_whole or not source.is_cut

    def _raw(self, source: Incoming, write: Callable[[str], None]) -> Wait[bool]:
        """Take the text of a value, without a line end before its closing tag. Returns whether there is one."""
        ends = (self.value_close, *self._call_closes)
        while True:
            text, end = yield from source.pieces(*("\n" + one for one in ends), *ends)
            if text:
                write(text)
            elif not end:
                return False
            elif (yield from self._ends_here(source, end.removeprefix("\n"))):
                if end.removeprefix("\n") != self.value_close:
                    source.at -= len(end.removeprefix("\n"))
                return True
            else:
                write(end)

    def _ends_here(self, source: Incoming, end: str) -> Wait[bool]:
        """Return whether a tag ends the value: whether a tag follows that may follow it."""
        source.mark()
        yield from source.space()
        if end == self.value_close:
            found = yield from source.upcoming(self.key_open, *self._call_closes, *self.closes)
        elif self.call_close:
            found = yield from source.upcoming(*self.closes, self.name_open)
        else:
            found = yield from source.upcoming(*self.opens)
        ended = bool(found) or not (yield from source.char())
        source.rewind()
        return ended


def _kind(attributes: str, known: bool | None) -> bool | None:
    """Return whether a value is text; None if this is not known. Some families say it in the tag."""
    if 'string="true"' in attributes or 'type="string"' in attributes:
        return True
    if 'string="false"' in attributes or "type=" in attributes:
        return False
    return known


def _json_of(text: str, *, may_be_text: bool) -> str:
    """Return a value as JSON. Without `may_be_text` the tool's schema has no text here, so it is read as leniently as
    possible."""
    text = text.strip() if not may_be_text else text
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        if may_be_text:
            return json_string(text)
    else:
        return text.strip()
    parts: list[str] = []
    source = Incoming(text, is_complete=True)
    run(LiteralReader(source, parts.append).read())
    return "".join(parts) if not source.text[source.at :].strip() else json_string(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls(_ListedCalls):
    """Calls in Python: `[name(key=value), …]`, or one in each line."""

    def write(self, name: str, arguments: str) -> str:
        values = msgspec.json.decode(arguments, type=dict[str, object])
        written = ", ".join(f"{key}={value!r}" for key, value in values.items())
        return "".join([*self.opens[:1], f"[{name}({written})]", *self.closes[:1]])

    def _call(self, output: CallOutput) -> Wait[None]:
        source = output.source
        yield from source.space()
        name, stop = yield from source.until("(", "\n", *self.closes, most=_MAX_NAME)
        if stop != "(" or not _PYTHON_NAME.fullmatch(name):
            raise NotACall
        _begin(output, name)
        source.at -= 1
        names: Sequence[str] = list(output.parameters(name))
        reader = LiteralReader(source, output.write, self.closes, ('"""', "'''", '"', "'"), arguments=names)
        if (yield from reader.read()):
            output.end()
