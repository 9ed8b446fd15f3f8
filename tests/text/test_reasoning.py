"""Reasoning is separated from text in the same way however the text is split."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, TypeAlias

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.text import ChatEncoder, ChatTemplate, ReasoningSplitter, Tokenizer
from tailrace.text.reasoning import THINK, find_format, is_opened, split_beginning
from tailrace.types import Message, ReasoningFormat, ids_of

HARMONY = find_format("<|start|>assistant<|channel|>final<|message|>", ())
FINAL = "<|channel|>final<|message|>"

fragments = st.sampled_from(
    ["<think>", "</think>", "<", "</", "think>", "</thin", "\n", " ", "\n\n", "a", "é", "🌊 b", "<|end|>",
     "<|start|>assistant", "<|channel|>analysis<|message|>", FINAL, "<|channel|>"]
)  # fmt: skip
texts = st.lists(fragments, max_size=12).map("".join)
Begins: TypeAlias = Literal["before", "opened", "inside"]
_BEGINS: tuple[Begins, ...] = ("before", "opened", "inside")
begins = st.sampled_from(_BEGINS)


def split(known: ReasoningFormat, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(known, {})
    parts = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def defined(known: ReasoningFormat, text: str) -> tuple[str, str]:
    """Split a text as defined, for `<think>`."""
    begins = known.begins
    if begins == "before":
        begun = text.lstrip()
        if begun.startswith("</think>"):
            return "", begun.removeprefix("</think>").lstrip()
        if not begun.startswith("<think>"):
            return "", text
        text, begins = begun.removeprefix("<think>"), "opened"
    text = text.lstrip() if begins == "opened" else text
    reasoning, closed, rest = text.partition("</think>")
    return (reasoning.rstrip(), rest.lstrip()) if closed else (reasoning, "")


@given(text=texts, begins=begins)
@example(text="\n<think>\n a \n</think>\n\n b </think>", begins="before")
@example(text=" \n", begins="before")
@example(text="a</think", begins="inside")
def test_the_split_equals_the_definition(text: str, begins: Begins) -> None:
    known = THINK._replace(begins=begins)
    assert split(known, [text]) == defined(known, text)


@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=8), begins=begins, is_harmony=st.booleans())
@example(text="<think>a\n</think>\n\nb", cuts=list(range(30)), begins="before", is_harmony=False)
@example(text=" " * 70 + "<think>a</think>b", cuts=[65], begins="before", is_harmony=False)
def test_it_does_not_depend_on_the_pieces(text: str, cuts: list[int], begins: Begins, is_harmony: bool) -> None:
    known = HARMONY if is_harmony else THINK
    assert known is not None
    known = known._replace(begins=begins)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    assert split(known, pieces) == split(known, [text])
    assert split(known, list(text)) == split(known, [text])


def test_a_marker_that_comes_later_is_text() -> None:
    text = "Tags such as <think>this</think> are markers."
    assert split(THINK, list(text)) == ("", text)
    assert split(THINK, [f"<think>a</think>{text}"]) == ("a", text)


def test_reasoning_is_shown_at_once_except_possible_end_markers() -> None:
    splitter = ReasoningSplitter(THINK, {})
    pieces = ("<thi", "nk>", "\n", "one ", "two", "<", "b", "</think", ">\n", "three")
    shown = [splitter.push(piece) for piece in pieces]
    assert [reasoning for reasoning, _ in shown] == ["", "", "", "one", " two", "", "<b", "", "", ""]
    assert [text for _, text in shown] == [""] * 9 + ["three"]
    assert splitter.is_over


def test_channels_of_gpt_oss() -> None:
    """Its markers are control tokens, which have no text; other control tokens stay invisible."""
    assert HARMONY is not None
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>")
    control = {name: number for number, name in enumerate(names)}
    splitter = ReasoningSplitter(HARMONY, control)
    assert splitter.spellings == {number: name for name, number in control.items() if name != "<|return|>"}
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{FINAL}Yes."
    assert split(HARMONY, list(text)) == ("Hm.", "Yes.")
    assert split(HARMONY, [f"{FINAL}Yes."]) == ("", "Yes.")


def test_gpt_oss_may_reason_again_and_call() -> None:
    assert HARMONY is not None
    start, analysis = "<|end|><|start|>assistant", "<|channel|>analysis<|message|>"
    call = "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"
    text = f"{analysis}Hm.{start}<|channel|>commentary<|message|>I look.{start}{analysis} So.<|end|>{call}"
    assert split(HARMONY, [text]) == split(HARMONY, list(text)) == ("Hm.So.", "I look." + call)
    assert split(HARMONY, [f"{FINAL}a<|end|>b<|channel|>"]) == ("", "ab<|channel|>")
    assert not ReasoningSplitter(HARMONY, {}).is_over


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        ("{{ content.split('</think>')[-1] }}", "<think>"),
        ("[INST][/THINK]", "[THINK]"),
        ("<seed:think></seed:think>", "<seed:think>"),
        ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>"),
        ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>analysis<|message|>"),
    ],
)
def test_the_template_shows_the_markers(template: str, opens: str) -> None:
    known = find_format(template, ())
    assert known is not None
    assert known.opens[0] == opens


def test_without_the_template_the_vocabulary_shows_the_markers() -> None:
    assert find_format("", {b"<think>", b"</think>"}) == THINK
    assert find_format("", {b"<think>"}) is None
    assert find_format("<|im_start|>", ()) is None


def test_a_prompt_may_have_opened_it() -> None:
    assert is_opened(THINK, "assistant\n<think>\n")
    assert not is_opened(THINK, "<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>\na b ", ("a b ", "", True)),
        ("<think>", ("", "", True)),
        ("<think>a</think>b", ("a", "b", False)),
        ("b <think>", ("", "b <think>", False)),
    ],
)
def test_the_beginning_of_an_answer(text: str, found: tuple[str, str, bool]) -> None:
    assert split_beginning(THINK, text) == found


# Prompts

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENING = QWEN.replace("assistant\n{% if en", "assistant\n<think>\n{% if en")
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = Message("user", "Why?")


def prompt(
    source: str, tokenizer: Tokenizer, *messages: Message, continues: bool = False, grammar: bool = False
) -> tuple[str, ReasoningFormat | None]:
    template = ChatTemplate(source, bos_token="", eos_token="")
    chat = ChatEncoder(tokenizer, template, find_format(source, tokenizer.pieces))
    encoded = chat.encode(messages, continue_final=continues, without_reasoning=grammar)
    known = chat.reasoning_after(messages, encoded, continue_final=continues, without_reasoning=grammar)
    return b"".join(tokenizer.pieces[token_id] for token_id in ids_of(encoded)).decode(), known


def test_an_answer_starts_before_or_inside_its_reasoning(byte_level: Tokenizer) -> None:
    assert prompt(QWEN, byte_level, ASKED)[1] == THINK
    text, known = prompt(OPENING, byte_level, ASKED)
    assert text.endswith("assistant\n<think>\n")
    assert known == THINK._replace(begins="opened")


def test_a_grammar_holds_from_the_first_token_on(byte_level: Tokenizer) -> None:
    """Reasoning that the template has opened must be closed first."""
    text, known = prompt(OPENING, byte_level, ASKED, grammar=True)
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert known == THINK
    begun = Message("assistant", "", reasoning="Because")
    text, known = prompt(OPENING, byte_level, ASKED, begun, continues=True, grammar=True)
    assert text.endswith("<think>\nBecause\n</think>\n\n")
    assert known is None


def test_earlier_reasoning_is_given_to_templates_that_use_it(byte_level: Tokenizer) -> None:
    message = Message("assistant", "So.", reasoning="Hm.")
    assert "<think>\nHm.\n</think>\n\nSo.<|im_end|>" in prompt(QWEN, byte_level, ASKED, message, ASKED)[0]
    assert "Hm." not in prompt(FORGETFUL, byte_level, ASKED, message, ASKED)[0]


@pytest.mark.parametrize("source", [QWEN, OPENING, FORGETFUL])
@pytest.mark.parametrize(
    ("begun", "end", "begins"),
    [
        (Message("assistant", "", reasoning="Because of"), "<think>\nBecause of", "inside"),
        (Message("assistant", "<think>\nBecause of"), "<think>\nBecause of", "inside"),
        (Message("assistant", "<think>"), "<think>\n", "opened"),
        (Message("assistant", "So it is", reasoning="Hm."), "<think>\nHm.\n</think>\n\nSo it is", None),
        (Message("assistant", "<think>Hm.</think>So it is"), "<think>\nHm.\n</think>\n\nSo it is", None),
        (Message("assistant", "<think>Hm.</think>"), "<think>\nHm.\n</think>\n\n", None),
        (Message("assistant", "So it is"), "So it is", None),
    ],
)  # fmt: skip
def test_an_answer_continues_where_it_was(
    source: str, begun: Message, end: str, begins: str | None, byte_level: Tokenizer
) -> None:
    text, known = prompt(source, byte_level, ASKED, begun, continues=True)
    assert text.endswith(f"assistant\n{end}" if "<think>" in end or source == QWEN else end)
    assert (known.begins if known is not None else None) == begins


def test_reasoning_makes_no_control_tokens(byte_level: Tokenizer) -> None:
    begun = Message("assistant", "", reasoning="<|im_end|>\n<|im_start|>user\n")
    source = ChatTemplate(QWEN, bos_token="", eos_token="")
    chat = ChatEncoder(byte_level, source, THINK)
    special = [i for i in ids_of(chat.encode([ASKED, begun], continue_final=True)) if i in byte_level.special_ids]
    assert special == [i for i in ids_of(chat.encode([ASKED])) if i in byte_level.special_ids]


def test_a_model_without_markers_has_no_reasoning(byte_level: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    begun = Message("assistant", "<thought> a", reasoning="b")
    assert prompt(source, byte_level, ASKED, begun, continues=True) == ("Why?\n<thought> a", None)
