"""What models write as values is rewritten as JSON that always parses. Valid JSON stays as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from tailrace.text.calls.incoming import Incoming
from tailrace.text.calls.literals import LiteralReader, json_string

END = "</tool_call>"
_OVER = object()


def rewritten(
    pieces: Sequence[str], *, is_cut: bool = False, ends: tuple[str, ...] = (END,), **options: Any
) -> tuple[str, str]:  # Any: options of a reader
    """Return a value as JSON, and the text behind it."""
    source, written = Incoming(), list[str]()
    parser = LiteralReader(source, written.append, ends, **options).read()
    is_over = next(parser, _OVER) is _OVER
    for piece in pieces:
        source.add(piece)
        is_over = is_over or next(parser, _OVER) is _OVER
    source.end(is_cut=is_cut)
    assert is_over or next(parser, _OVER) is _OVER
    return "".join(written), source.text[source.at :]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from(["}", '"', "\\", END, "'", "\ud7ff\ue000", "\x00\x1f\x7f"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(json_values, st.booleans(), st.sampled_from([None, 1]), st.integers(1, 30))
def test_json_stays_as_it_is(value: object, is_ascii: bool, indent: int | None, step: int) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    assert rewritten(pieces) == (text, "")


@settings(max_examples=examples(200), deadline=None)
@given(json_values)
def test_python_becomes_json(value: object) -> None:
    text, rest = rewritten(list(repr(value)), quotes=('"""', "'''", '"', "'"))
    assert (json.loads(text), rest) == (value, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": 1,,"b": 2}', '{"a": 1,"b": 2}'),
        ('{"a": 1 "b": 2}', '{"a": 1, "b": 2}'),
        ('{"a": x\n}', '{"a": "x"\n}'),
        ('{"a": "x\ny\t\x01"}', '{"a": "x\\ny\\t\\u0001"}'),
        ("{'a': 'it\\'s \"b\"'}", '{"a": "it\'s \\"b\\""}'),
        ('{"a": True, "b": None, "c": NaN, "d": undefined}', '{"a": true, "b": null, "c": null, "d": null}'),
        ("{a: New York, b: 007}", '{"a": "New York", "b": "007"}'),
        ('{"a" 1, "b" {"c" "d"}}', '{"a": 1, "b": {"c": "d"}}'),
        ('{"a"}', '{"a": null}'),
        ('{"a": }', '{"a": null}'),
        ("{1: 2}", '{"1": 2}'),
        ('{"a": [1, 2}', '{"a": [1, 2]}'),
        ('{"a": "\\d+\\/"}', '{"a": "\\\\d+\\/"}'),
        ('{"a": "\\ud83d\\ude00 \\ud83d \\ude00"}', '{"a": "\\ud83d\\ude00 \\ufffd \\ufffd"}'),
        ('{"a": "\\x41\\xzz\\u00"}', '{"a": "A\\\\xzz\\\\u00"}'),
        ("{}", "{}"),
        ("(1, 2)", "[1, 2]"),
        ("{", "{}"),
        ('{"a', '{"a": null}'),
        ('{"a":', '{"a":null}'),
        ('{"a": "b', '{"a": "b"}'),
        ('{"a": tru', '{"a": "tru"}'),
        ('{"a": 1, ', '{"a": 1}'),
        ('{"a": [{"b": ', '{"a": [{"b": null}]}'),
    ],
)
def test_mistakes(text: str, expected: str) -> None:
    assert rewritten([text]) == rewritten(list(text)) == (expected, "")
    json.loads(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1' + END, '{"a": 1}'),
        ('{"a": [1, {"b": x' + END, '{"a": [1, {"b": "x"}]}'),
        ('{"a": ' + END, '{"a": null}'),
    ],
)
def test_the_end_of_the_call_closes_brackets(text: str, expected: str) -> None:
    assert rewritten([text]) == rewritten(list(text)) == (expected, END)


def test_the_end_of_the_call_inside_of_a_string_is_text() -> None:
    text = f'{{"a": "{END}"}}'
    assert rewritten([text + END]) == rewritten([*text, *END]) == (text, END)


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": [1, 2', '{"a', '{"a": "\\', '{"a": "\\ud83d', '{"a": {"b": {}'])
def test_what_a_limit_cuts_does_not_parse(text: str) -> None:
    found, _ = rewritten([text], is_cut=True)
    assert found == rewritten(list(text), is_cut=True)[0]
    with pytest.raises(ValueError, match=r".+"):
        json.loads(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(city='Paris', days=3)", '{"city": "Paris", "days": 3}'),
        ("('Paris', 3, 4)", '{"city": "Paris", "days": 3, "4": null}'),
        ("('Paris', days=3)", '{"city": "Paris", "days": 3}'),
        ("(at=date(2024, 1, 2), pair=(1, 2))", '{"at": "date(2024, 1, 2)", "pair": [1, 2]}'),
        ('(text="""a "b"\nc""")', '{"text": "a \\"b\\"\\nc"}'),
        ("()", "{}"),
    ],
)
def test_arguments_of_a_call_in_python(text: str, expected: str) -> None:
    options: dict[str, Any] = {"arguments": ("city", "days"), "quotes": ('"""', "'''", '"', "'")}
    assert rewritten([text], **options) == rewritten(list(text), **options) == (expected, "")


def test_quotes_of_a_family_know_no_escapes() -> None:
    text = '{city:<|"|>C:\\new "x" <|"|>,n:1,list:[<|"|>a<|"|>]}'
    expected = '{"city":"C:\\\\new \\"x\\" ","n":1,"list":["a"]}'
    assert rewritten([text], quotes=('<|"|>',)) == rewritten(list(text), quotes=('<|"|>',)) == (expected, "")


fragments = st.sampled_from(
    ["{", "}", "[", "]", "(", ")", '"', "'", ",", ":", "=", "\\", "\\u", "\\ud83d", " ", "\n", "a", "1", "-", "true",
     "None", '"a": ', END, "</", ";", "\U0001f30a"]
)  # fmt: skip
anything = st.lists(fragments | st.text(max_size=3), max_size=24).map("".join)


@settings(max_examples=examples(500), deadline=None)
@given(anything, st.integers(1, 5), st.booleans())
@example("{{{", 1, True)
@example("{(:=}", 1, True)
def test_whatever_a_model_writes_parses(text: str, step: int, is_object: bool) -> None:
    text = "{" + text if is_object else text
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    found, rest = rewritten([text])
    assert (found, rest) == rewritten(pieces)
    if found or is_object:
        json.loads(found)
    assert text.endswith(rest)


@given(st.text())
def test_json_strings(text: str) -> None:
    assert json.loads(json_string(text)) == text
