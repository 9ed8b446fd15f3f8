"""Conversion between items and messages, titles, and the places where a request may continue."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.conversations.items import (
    MAX_CHARACTERS,
    Branch,
    Item,
    chained,
    check_items,
    items_of,
    messages_of,
    title_from,
)
from tailrace.errors import ConversationLocked, RequestError
from tailrace.types import Message, ToolCall

_TALK = (
    Message("system", "Be brief."),
    Message("user", "Look!"),
    Message("assistant", "So:", (ToolCall("c1", "look", '{"a": 1}'), ToolCall("c2", "look", "{}"))),
    Message("tool", "a river", tool_call_id="c1"),
    Message("tool", "a bank", tool_call_id="c2"),
    Message("assistant", "A river and a bank."),
)


def test_messages_become_items_and_messages_again() -> None:
    items = items_of(_TALK)
    assert [item.kind for item in items] == [
        "message", "message", "message", "function_call", "function_call", "function_call_output",
        "function_call_output", "message",
    ]  # fmt: skip
    assert messages_of(items) == _TALK


_ARGUMENTS = st.dictionaries(st.text(), st.text()).map(json.dumps)
_MESSAGES = st.lists(
    st.one_of(
        st.builds(Message, st.sampled_from(["system", "user"]), st.text()),
        st.builds(Message, st.just("tool"), st.text(), tool_call_id=st.text(min_size=1)),
        st.builds(
            Message,
            st.just("assistant"),
            st.text(min_size=1),
            st.lists(st.builds(ToolCall, st.text(), st.text(), _ARGUMENTS)).map(tuple),
        ),
    )
)


@given(_MESSAGES)
def test_any_messages_can_be_converted(messages: list[Message]) -> None:
    assert messages_of(items_of(messages)) == tuple(messages)


def test_a_call_that_was_cut_off_has_arguments_that_templates_can_render() -> None:
    (message,) = messages_of([Item(kind="function_call", name="look", call_id="c", text='{"at": "a')])
    assert message.tool_calls == (ToolCall("c", "look", '{"INVALID_JSON":"{\\"at\\": \\"a"}'),)


def test_a_call_without_text_is_one_item() -> None:
    message = Message("assistant", "", (ToolCall("c", "look", "{}"),))
    assert [item.kind for item in items_of([message])] == ["function_call"]
    assert messages_of(items_of([message])) == (message,)


def test_templates_see_a_developer_as_system() -> None:
    assert messages_of([Item(role="developer", text="Hm")]) == (Message("system", "Hm"),)


def test_items_follow_each_other() -> None:
    placed = chained(items_of(_TALK[:3]), "abcdef", "root", 5.0)
    assert [item.item_id for item in placed] == ["a", "b", "c", "d", "e"]
    assert [item.parent_id for item in placed] == ["root", "a", "b", "c", "d"]
    assert {item.created_s for item in placed} == {5.0}


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Hi", "Hi"),
        (" two\n\n lines\t", "two lines"),
        ("x" * 80, "x" * 80),
        ("word " * 40, ("word " * 40)[:79].rstrip() + "…"),
        ("  ", ""),
    ],
)
def test_titles(text: str, title: str) -> None:
    items = [Item(role="system", text="No"), Item(role="user", text=text), Item(role="assistant", text="Nor this")]
    assert title_from(items) == title


def test_an_answer_in_progress_is_waited_for() -> None:
    asked, answer = Item(item_id="a", role="user"), Item(item_id="b", role="assistant", status="in_progress")
    Branch(conversation_id="c").require_free()
    Branch(conversation_id="c", items=(asked,)).require_free()
    Branch(conversation_id="c", items=(answer, asked)).require_free()
    with pytest.raises(ConversationLocked):
        Branch(conversation_id="c", items=(asked, answer)).require_free()


def test_what_is_not_kept() -> None:
    check_items([Item(role="user", text="x" * MAX_CHARACTERS)])
    for items in (
        [Item(role="user", text="a\0b")],
        [Item(kind="function_call", name="a\0")],
        [Item(kind="function_call_output", call_id="\0")],
        [Item(role="user", text="x" * (MAX_CHARACTERS // 2 + 1))] * 2,
    ):
        with pytest.raises(RequestError) as refused:
            check_items(items)
        assert refused.value.param == "items"
