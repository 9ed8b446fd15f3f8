from __future__ import annotations

import io
from collections.abc import Iterable

import pytest
from rich.console import Console

from tailrace.cli.commands import PlainScreen
from tailrace_outer.scripted.texts import TEXTS
from tailrace_plugins.terminal_chat.screen import MarkdownScreen

_ANSWER = """\
# Rivers

Rivers **bend**
because water is quick outside.

1. one

   with a paragraph
2. two
    - inner

```python
def bend():

    return "x"
```

| a | b |
|---|---|
| 1 | 2 |

> said

The end.
"""


def _shown(pieces: Iterable[str], *, is_terminal: bool = False, height: int = 24) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=60, height=height, force_terminal=is_terminal, color_system=None, highlight=False,
        legacy_windows=False,
    )  # fmt: skip
    screen = MarkdownScreen(console)
    for piece in pieces:
        screen.show(piece)
    screen.close()
    return out.getvalue()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("text", [_ANSWER, *TEXTS.values()], ids=["an answer", *TEXTS])
def test_an_answer_looks_the_same_in_any_pieces(text: str) -> None:
    text = text[:3000]
    at_once = _lines(_shown([text]))
    assert _lines(_shown(text)) == at_once
    assert _lines(_shown(text[start : start + 7] for start in range(0, len(text), 7))) == at_once


def test_markdown_is_rendered() -> None:
    shown = _shown([_ANSWER])
    lines = [line.strip() for line in _lines(shown)]
    assert {"Rivers bend", "because water is quick outside.", '    return "x"'.strip()} <= set(lines)
    assert "**" not in shown
    assert "```" not in shown
    assert _shown(_ANSWER).count("The end.") == 1


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("&#27;[31mred &#x9b;", "[31mred"),
        ("<http://x/%1b]0;title%07>", "]0;title"),
        ("[here](http://x/%1b%5b31m)", "here"),
        ("`\x1b[2J`", "␛[2J"),
        ("a <b>bold</b> word\n\n<div>hidden</div>\n", "<div>hidden</div>"),
        ("[here](https://evil.example/)", "https://evil.example/"),
    ],
)
def test_control_characters_do_not_reach_the_terminal(text: str, seen: str) -> None:
    shown = _shown([text])
    assert seen in shown
    assert not [character for character in shown if not character.isprintable() and character != "\n"]


def test_a_block_higher_than_the_terminal_is_complete_at_the_end() -> None:
    code = "\n".join(f"line {number}" for number in range(100))
    shown = _shown((line + "\n" for line in f"```\n{code}\n```".splitlines()), is_terminal=True, height=10)
    rest = shown[shown.rindex("\x1b[2K") :]  # where the last of what was drawn anew is taken away
    assert [line.strip() for line in _lines(rest)][-100:] == code.splitlines()


def test_plain_text_ends_its_line() -> None:
    for pieces, shown in ((["a", "b"], "ab\n"), (["a\n"], "a\n"), ([], ""), (["**a**\x1b", ""], "**a**␛\n")):
        out = io.StringIO()
        screen = PlainScreen(out)
        for piece in pieces:
            screen.show(piece)
        screen.close()
        assert out.getvalue() == shown


def test_reasoning_is_removed_when_the_answer_starts() -> None:
    out = io.StringIO()
    screen = MarkdownScreen(Console(file=out, width=60, force_terminal=True, color_system=None, legacy_windows=False))
    screen.think("Hm, \x1b[31mrivers ")
    screen.think("bend")
    screen.show("They *do*.")
    screen.close()
    assert "\x1b[31m" not in out.getvalue()
    out = io.StringIO()
    alone = MarkdownScreen(Console(file=out, width=60, highlight=False))
    alone.think("Hm")
    alone.show("They *do*.")
    alone.close()
    assert _lines(out.getvalue()) == ["They do."]


def test_a_pipe_gets_only_the_answer() -> None:
    out = io.StringIO()
    screen = PlainScreen(out)
    screen.think("Hm")
    screen.show("Yes")
    screen.close()
    assert out.getvalue() == "Yes\n"
