"""Tool calls are found however the text is split, and no text is lost or added."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from tailrace.text.calls import CallPart, ToolCallReader, WholeCall, WholeCallReader
from tailrace.types import CallReading

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Found = list[str | tuple[str, str]]  # text, and calls with their names and arguments


def read(pieces: Sequence[str], *, is_cut: bool = False, **reading: Any) -> Found:  # Any: fields of a reading
    """Return the parts, with adjacent parts of the same kind joined."""
    reader = ToolCallReader(CallReading(**reading))
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.flush(is_cut=is_cut)
    found: Found = []
    num_calls = 0
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str):
            assert part
            if isinstance(last, str):
                found[-1] = last + part
            else:
                found.append(part)
        elif part.name:
            assert (part.index, part.arguments) == (num_calls, "")
            found.append((part.name, ""))
            num_calls += 1
        else:
            assert part.index == num_calls - 1
            assert isinstance(last, tuple)
            found[-1] = (last[0], last[1] + part.arguments)
    assert reader.num_calls == num_calls
    return found


def call(name: str, arguments: str, *, close: str = CLOSE) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{close}'


HARD = '{"a": "}{\\"\\\\", "</tool_call>": ["<tool_call>", {"b": "\\u007d]"}], "c": "\U0001f30a\\n"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("no call", ["no call"]),
        (call("a", "{}"), [("a", "{}")]),
        (f'{OPEN}{{"name":"a","arguments":{{}}}}{CLOSE}', [("a", "{}")]),
        (f'{OPEN} {{ "name" :\n"a" , "arguments" : {{"b": 1}} }} {CLOSE}', [("a", '{"b": 1}')]),
        (f'{OPEN}{{"name": "a", "parameters": {{"b": 1}}}}{CLOSE}', [("a", '{"b": 1}')]),
        (call("a", HARD), [("a", HARD)]),
        ("before " + call("a", "{}") + " after", ["before ", ("a", "{}"), " after"]),
        (call("a", "{}") + call("b", '{"c": []}'), [("a", "{}"), ("b", '{"c": []}')]),
        (call("a", "{}") + "\n\n" + call("b", "{}"), [("a", "{}"), ("b", "{}")]),
        (call("a", "{}") + "\nand\n" + call("b", "{}"), [("a", "{}"), "and\n", ("b", "{}")]),
        (call("\\u0061\\n", "{}"), [("a\n", "{}")]),
        # Not closed, or not properly.
        (call("a", "{}", close=""), [("a", "{}")]),
        (f'{OPEN}{{"name": "a", "arguments": {{"b": [1, 2', [("a", '{"b": [1, 2]}')]),
        (f'{OPEN}{{"name": "a", "arguments": {{"b": 1}}{CLOSE}.', [("a", '{"b": 1}'), "."]),
        (f'{OPEN}{{"name": "a", "arguments": {{"b": [1{CLOSE}.', [("a", '{"b": [1]}'), "."]),
        (call("a", "{}", close="") + call("b", "{}"), [("a", "{}"), ("b", "{}")]),
        (f'{OPEN}{{"name": "a", "arguments": {{}}, "id": 7}}{CLOSE}.', [("a", "{}"), "."]),
        (f'{OPEN}{{"name": "a", "arguments": {{}}}} and so on', [("a", "{}"), "and so on"]),
        (call("a", "{}", close="x" * 500), [("a", "{}"), "x" * 500]),
        # What is no call.
        (OPEN, [OPEN]),
        (OPEN + CLOSE, [OPEN + CLOSE]),
        (f"{OPEN}a{CLOSE}b", [f"{OPEN}a{CLOSE}b"]),
        (f'{OPEN}{{"arguments": {{}}}}{CLOSE}', [f'{OPEN}{{"arguments": {{}}}}{CLOSE}']),
        (f'{OPEN}{{"name": "a", "arguments": [1]}}{CLOSE}', [f'{OPEN}{{"name": "a", "arguments": [1]}}{CLOSE}']),
        (f'{OPEN}{{"name": "a", "arguments": "b"}}{CLOSE}', [f'{OPEN}{{"name": "a", "arguments": "b"}}{CLOSE}']),
        (f'{OPEN}{{"name": 1, "arguments": {{}}}}{CLOSE}', [f'{OPEN}{{"name": 1, "arguments": {{}}}}{CLOSE}']),
        # Without arguments, with text instead, in another order, with other keys, in a fence, with a mistake.
        (f'{OPEN}{{"name": "a"}}{CLOSE}', [("a", "{}")]),
        (call("a", "null"), [("a", "{}")]),
        (call("a", '""'), [("a", "{}")]),
        (call("a", '"{\\"b\\": 1}"'), [("a", '{"b": 1}')]),
        (f'{OPEN}{{"arguments": {{"b": 1}}, "name": "a"}}{CLOSE}', [("a", '{"b": 1}')]),
        (f'{OPEN}{{"id": "7", "type": "function", "name": "a", "arguments": {{}}}}{CLOSE}', [("a", "{}")]),
        (f'{OPEN}{{"type": "function", "function": {{"name": "a", "arguments": {{}}}}}}{CLOSE}', [("a", "{}")]),
        (f'{OPEN}\n```json\n{{"name": "a", "arguments": {{}}}}\n```\n{CLOSE}', [("a", "{}")]),
        (f'{OPEN}[{{"name": "a"}}, {{"name": "b"}}]{CLOSE}', [("a", "{}"), ("b", "{}")]),
        (f"{OPEN}{{'name': 'a', 'arguments': {{'b': None}}}}{CLOSE}", [("a", '{"b": null}')]),
        (call("a", '{"b": 1,}'), [("a", '{"b": 1}')]),
        (call("a", '{"b": "x\ny"}'), [("a", '{"b": "x\\ny"}')]),
        (call("", "{}"), [call("", "{}")]),
        (f"{CLOSE} <tool_call {OPEN[:-1]}", [f"{CLOSE} <tool_call {OPEN[:-1]}"]),
        # A call behind what is none.
        (f"{OPEN}a{CLOSE}" + call("b", "{}"), [f"{OPEN}a{CLOSE}", ("b", "{}")]),
        (OPEN + OPEN + call("b", "{}"), [OPEN + OPEN, ("b", "{}")]),
        (OPEN + "x" * 500 + call("b", "{}"), [OPEN + "x" * 500, ("b", "{}")]),
        (f"{OPEN} no {OPEN}" + '{"name": "b", "arguments": {}}', [f"{OPEN} no ", ("b", "{}")]),
        # How long a head may be.
        (call("n" * 256, "{}"), [("n" * 256, "{}")]),
        (call("n" * 500, "{}"), [call("n" * 500, "{}")]),
    ],
)  # fmt: skip
def test_calls_that_are_found(text: str, expected: Found) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected


def test_a_text_in_two_pieces() -> None:
    text = f"One <tool {OPEN}no{CLOSE}\n" + call("a", HARD) + "\n\n two <" + call("b", "{}", close="") + call("c", "{}")
    expected = read([text])
    assert [part[0] for part in expected if isinstance(part, tuple)] == ["a", "b", "c"]
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]]) == expected, text[:place]


fragments = st.sampled_from(
    [OPEN, CLOSE, "<tool", "_call>", "</", "<", "\n", " ", "{", "}", '"', "\\", '\\"', "a", "\U0001f30a",
     '{"name": "', '"name"', '", "arguments": {', '"arguments": ', '{"name": "a", "arguments": {', "}}", ": ", ",",
     '{"name":"b","arguments":{}}', "x" * 450]
)  # fmt: skip
anything = st.lists(fragments | st.text(max_size=3), max_size=24).map("".join)


@settings(max_examples=examples(150), deadline=None)
@given(anything, st.data(), st.booleans())
def test_a_text_in_any_pieces(text: str, data: st.DataObject, forced: bool) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(pieces, forced=forced) == read([text], forced=forced) == read(list(text), forced=forced)


@settings(max_examples=examples(100), deadline=None)
@given(anything)
@example(OPEN * 3 + CLOSE)
def test_text_without_calls_is_unchanged(text: str) -> None:
    found = read([text])
    if not any(isinstance(part, tuple) for part in found):
        assert "".join(part for part in found if isinstance(part, str)) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["}", '"', "\\", OPEN, CLOSE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), json_values, max_size=4)
names = st.from_regex("[a-zA-Z0-9_-]{1,64}", fullmatch=True)
plain = st.text(st.characters(codec="utf-8", exclude_characters="<\n"), min_size=1, max_size=10)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(plain | st.tuples(names, arguments, st.booleans(), st.sampled_from([None, 1])), max_size=6), st.data())
def test_calls_and_text_are_separated(given: list[Any], data: st.DataObject) -> None:  # Any: what is drawn
    """Texts consist of known parts, and are split at random."""
    text, expected = "", Found()
    for part in given:
        if isinstance(part, str):
            text += part
            if expected and isinstance(expected[-1], str):
                expected[-1] += part
            else:
                expected.append(part)
        else:
            name, values, is_ascii, indent = part
            source = json.dumps(values, ensure_ascii=is_ascii, indent=indent)
            text += call(name, source)
            expected.append((name, source))
    step = data.draw(st.integers(1, 20))
    assert read([text[start : start + step] for start in range(0, len(text), step)]) == expected


# Where nothing but a call can come


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "a", "arguments": {"b": "}"}}', [("a", '{"b": "}"}')]),
        ('\n {"name":"a","arguments":{}} \n', [("a", "{}")]),
        ('{"name": "a", "arguments": {"b": "x', [("a", '{"b": "x"}')]),
        ('{"name": "a', ['{"name": "a']),  # the limit came first
        ("", []),
        ("{}", ["{}"]),
        ("x" * 900, ["x" * 900]),
        ("no" + call("a", "{}"), ["no", ("a", "{}")]),
    ],
)
def test_a_forced_call_has_no_markers(text: str, expected: Found) -> None:
    assert read([text], forced=True) == expected
    assert read(list(text), forced=True) == expected


# One call and no more


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", ["no call"]),
        ("a" + call("b", "{}") + call("c", "{}") + "d", ["a", ("b", "{}")]),
        (call("b", HARD) + "\n" + call("c", "{}"), [("b", HARD)]),
        (OPEN + "no " + call("b", "{}") + "d", [OPEN + "no ", ("b", "{}")]),
        (OPEN + '{"name": "b", "arguments": {"c": "d', [("b", '{"c": "d"}')]),
        (OPEN + '{"name": "b", "arguments": {}', [("b", "{}")]),
    ],
)
def test_text_after_a_single_call_is_dropped(text: str, expected: Found) -> None:
    assert read([text], single=True) == expected
    assert read(list(text), single=True) == expected


# As soon as it is known


def test_parts_come_as_soon_as_they_are_certain() -> None:
    reader = ToolCallReader()
    assert reader.push("Well <") == ["Well "]
    assert reader.push("b>") == ["<b>"]
    assert reader.push(OPEN + '{"name": "a", "arguments"') == []
    assert reader.push(': {"b": "') == [CallPart(0, name="a"), CallPart(0, arguments='{"b": "')]
    assert reader.push("x") == [CallPart(0, arguments="x")]
    assert reader.push('"}') == [CallPart(0, arguments='"}')]
    assert reader.push("}") == []
    assert reader.push(CLOSE) == []
    assert reader.push("\n") == []
    assert reader.push("Done") == ["Done"]
    assert reader.flush() == []


@pytest.mark.parametrize("beginning", [OPEN, OPEN + '{"name": "', OPEN + '{"name": "a", "arguments": {}', OPEN[:-1]])
def test_only_the_start_of_a_call_is_held_back(beginning: str) -> None:
    reader = ToolCallReader()
    reader.push(beginning)
    shown = [part for _ in range(2_000) for part in reader.push("y") if isinstance(part, str)]
    assert len("".join(shown)) > 1_500


LONG = {
    "text": "The river runs. ",
    "openers": OPEN,
    "halves": "<tool_",
    "heads": OPEN + '{"name": "',
    "calls": call("a", '{"b": 1}'),
    "braces": "{",
    "not closed": call("a", "{}", close=""),
    "newlines": "\n",
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize(
    "start", ["", OPEN + '{"name": "a", "arguments": {"b": "', call("a", "{}"), call("a", "{}")[:-1]]
)
def test_the_time_is_linear_in_the_text(kind: str, start: str) -> None:
    def work(length: int, step: int) -> int:
        """Return how many characters were held, summed over the pieces. Each of them may be looked at once more."""
        text = start + (LONG[kind] * length)[:length]
        reader = ToolCallReader()
        num_held = 0
        for place in range(0, len(text), step):
            reader.push(text[place : place + step])
            num_held += len(reader.source.text) + step
        reader.flush()
        return num_held

    for step in (7, 1_000):
        assert work(12_000, step) < 3.5 * work(4_000, step) + 10_000


# Whole calls, for wires that do not show them in pieces


def test_whole_calls() -> None:
    reader = WholeCallReader()
    assert reader.push("a" + OPEN + '{"name": "b", "arguments": {"c": [1, "\U0001f30a"') == ["a"]
    assert reader.push("]}}" + CLOSE + "d") == [WholeCall("b", {"c": [1, "\U0001f30a"]}), "d"]
    assert reader.push(call("e", "{}")) == []
    assert reader.push(call("f", "{}")) == [WholeCall("e", {})]
    assert reader.flush() == [WholeCall("f", {})]


def test_a_call_that_a_limit_cuts_stays_unfinished() -> None:
    text = OPEN + '{"name": "b", "arguments": {"c": [1, "d'
    assert read([text], is_cut=True) == read(list(text), is_cut=True) == [("b", '{"c": [1, "d')]
    assert read([text[:19]], is_cut=True) == [text[:19]]


def test_a_call_that_a_limit_cuts_is_whole_or_text() -> None:
    text = OPEN + '{"name": "b", "arguments": {"c": [1, "d'
    reader = WholeCallReader()
    assert reader.push(text) + reader.flush(is_cut=True) == [WholeCall("b", {"c": [1, "d"]})]
    reader = WholeCallReader(cut_is_text=True)
    assert reader.push(text) + reader.flush(is_cut=True) == ['{"name": "b", "arguments": {"c": [1, "d']


def test_a_call_whose_arguments_are_nested_too_deeply_is_text() -> None:
    reader = WholeCallReader()
    source = '{"a": ' * 20_000 + "1" + "}" * 20_000
    found = reader.push(call("b", source)) + reader.flush()
    assert found == ['{"name": "b", "arguments": ' + source]
