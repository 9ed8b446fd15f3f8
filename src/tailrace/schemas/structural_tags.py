"""Structural tags: an answer of texts and tags, whose contents have a form. The formats are those of XGrammar, which
vLLM and SGLang take, and the older list of `structures` with their `triggers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.plain import plain_form
from tailrace.schemas.reach import Reach
from tailrace.schemas.regexes import regex_fault

__all__ = ["StructuralTag", "TagParts", "read_structural_tag"]

_MOST_PARTS = 1_000
_DEEPEST = 20
_Parts: TypeAlias = list[Any]  # JSON: see `text.calls.written`


class _Format(msgspec.Struct, tag_field="type"):
    pass


class _ConstString(_Format, tag="const_string"):
    value: str


class _JsonSchema(_Format, tag="json_schema"):
    json_schema: Any


class _AnyText(_Format, tag="any_text"):
    pass


class _Regex(_Format, tag="regex"):
    pattern: str


class _Sequence(_Format, tag="sequence"):
    elements: list[AnyFormat]


class _Or(_Format, tag="or"):
    elements: list[AnyFormat]


class _Tag(_Format, tag="tag"):
    begin: str
    content: AnyFormat
    end: str | list[str]


class _TriggeredTags(_Format, tag="triggered_tags"):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class _TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


AnyFormat: TypeAlias = (
    _ConstString | _JsonSchema | _AnyText | _Regex | _Sequence | _Or | _Tag | _TriggeredTags | _TagsWithSeparator
)


class _Structure(msgspec.Struct):
    begin: str
    schema: Any
    end: str


class StructuralTag(msgspec.Struct):
    """The field as clients send it: a format, or structures with triggers."""

    format: AnyFormat | None = None
    structures: list[_Structure] | None = None
    triggers: list[str] | None = None


def read_structural_tag(value: object) -> StructuralTag:
    """Raises: SchemaError that names the position."""
    try:
        tag = msgspec.convert(value, StructuralTag)
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except msgspec.ValidationError as error:
        where = str(error).rpartition("`$")[2].rstrip("`")  # the rest has what the client sent
        raise SchemaError(f"{where or 'this'} is not as in a structural tag") from None
    if (tag.format is None) == (tag.structures is None):
        raise SchemaError("it needs a format, or structures with triggers")
    return tag


class TagParts:
    """The parts of an answer with tags, of this reach. `left_open` are paths in the value. Raises: SchemaError."""

    def __init__(self, tag: StructuralTag, reach: Reach) -> None:
        self._reach = reach
        self._num_parts = 0
        self.left_open: list[str] = []
        self.texts: list[str] = []  # all fixed ones
        if tag.format is not None:
            self.parts = self._of(tag.format, "#/format", is_last=True)
            return
        tags = [_Tag(one.begin, _JsonSchema(one.schema), one.end) for one in tag.structures or ()]
        self.parts = self._triggered(_TriggeredTags(tag.triggers or [], tags), "#", is_last=True)

    def _of(self, given: AnyFormat, where: str, *, is_last: bool) -> _Parts:
        """Return the parts of a format. `is_last`: nothing follows in the answer, so any text may come."""
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS or where.count("/") > 2 * _DEEPEST:
            raise SchemaError("it has too many parts")
        match given:
            case _ConstString(value):
                return self._fixed(value)
            case _JsonSchema(schema):
                return self._json(schema, where)
            case _Regex(pattern):
                if fault := regex_fault(pattern):
                    raise SchemaError(f"{where}/pattern: {fault}")
                return [{"regex": pattern}]
            case _AnyText():
                if not is_last:
                    raise SchemaError(f"{where}: any_text needs a fixed text behind it, or the end of the answer")
                return [{"free": True}]
            case _Sequence(elements):
                return self._sequence(elements, where, is_last=is_last)
            case _Or(elements):
                if not elements:
                    raise SchemaError(f"{where}: or needs elements")
                each = enumerate(elements)
                return [{"either": [self._of(one, f"{where}/elements/{n}", is_last=is_last) for n, one in each]}]
            case _Tag():
                return self._fixed(given.begin) + self._inside(given, where)
            case _TriggeredTags():
                return self._triggered(given, where, is_last=is_last)
            case _TagsWithSeparator():
                return self._separated(given, where)

    def _fixed(self, text: str) -> _Parts:
        self.texts.append(text)
        return [text]

    def _json(self, schema: object, where: str) -> _Parts:
        try:
            plain = plain_form(schema, self._reach)
        except SchemaError as error:
            raise SchemaError(f"{where}: {error}") from None
        self.left_open += [where + path.removeprefix("#") for path in plain.left_open]
        return [{"json": plain.schema}]

    def _sequence(self, elements: Sequence[AnyFormat], where: str, *, is_last: bool) -> _Parts:
        parts: _Parts = []
        rest = list(elements)
        while rest:
            given, here = rest.pop(0), f"{where}/elements/{len(elements) - len(rest) - 1}"
            following = rest[0] if rest else None
            if isinstance(given, _AnyText) and isinstance(following, _ConstString) and following.value:
                parts += self._until(following.value)
                del rest[0]
            else:
                parts += self._of(given, here, is_last=is_last and not rest)
        return parts

    def _until(self, text: str) -> _Parts:
        self.texts.append(text)
        return [{"until": text}]

    def _inside(self, tag: _Tag, where: str) -> _Parts:
        """Return the parts of a tag behind its beginning."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if not ends:
            raise SchemaError(f"{where}: end needs a text")
        if isinstance(tag.content, _AnyText):
            if not all(ends):
                raise SchemaError(f"{where}: any_text in a tag needs an end")
            until = [self._until(end) for end in ends]
            return until[0] if len(ends) == 1 else [{"either": until}]
        content = self._of(tag.content, f"{where}/content", is_last=False)
        return content + (self._fixed(ends[0]) if len(ends) == 1 else [{"either": [self._fixed(end) for end in ends]}])

    def _triggered(self, given: _TriggeredTags, where: str, *, is_last: bool) -> _Parts:
        """Any text, in which a trigger begins a tag."""
        if not given.tags:
            raise SchemaError(f"{where}: there are no tags")
        if not (is_last or given.stop_after_first):
            raise SchemaError(f"{where}: triggered_tags must end the answer, or stop after the first tag")
        first, later = list[_Parts](), list[_Parts]()
        for number, tag in enumerate(given.tags):
            trigger = next((one for one in given.triggers if one and tag.begin.startswith(one)), None)
            if trigger is None:
                raise SchemaError(f"{where}: no trigger begins tag {number}")
            inside = self._inside(tag, f"{where}/tags/{number}")
            first.append([*self._fixed(tag.begin), *inside])
            later.append([*self._until(trigger), tag.begin.removeprefix(trigger), *inside])
        if given.stop_after_first:
            without: list[_Parts] = [[{"free": True}]] if is_last else []
            return [{"either": first if given.at_least_one else later + without}]
        more = [{"repeat": [{"either": later}]}, {"free": True}]
        return [{"either": first}, *more] if given.at_least_one else more

    def _separated(self, given: _TagsWithSeparator, where: str) -> _Parts:
        if not given.tags:
            raise SchemaError(f"{where}: there are no tags")
        each = enumerate(given.tags)
        tag = {"either": [self._of(one, f"{where}/tags/{number}", is_last=False) for number, one in each]}
        more = [] if given.stop_after_first else [{"repeat": [*self._fixed(given.separator), tag]}]
        return [tag, *more] if given.at_least_one else [{"maybe": [tag, *more]}]
