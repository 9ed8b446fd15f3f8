"""Conversations as files in each format, and invalid files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tailrace.conversations.drafts import Draft
from tailrace.conversations.items import Conversation, Item, chained, items_of, messages_of
from tailrace.errors import RequestError
from tailrace.types import Message, ToolCall
from tailrace_outer.conversations.files import file_formats, read_file

Json = dict[str, Any]  # Any: of JSON

_TALK = items_of(
    (
        Message("system", "Be brief."),
        Message("user", "Look!"),
        Message("assistant", "So:", (ToolCall("c1", "look", '{"a":1}'),)),
        Message("tool", "a river", tool_call_id="c1"),
        Message("assistant", "A river.\u2028😀"),
    )
)


def _written(form: str, *conversations: tuple[Conversation, list[Item]]) -> object:
    """Return the file of these conversations, as parsed JSON."""
    before, behind = file_formats()[form].frame
    pieces = [json.dumps(file_formats()[form].write(*one)).encode() for one in conversations]
    return json.loads(before + b",".join(pieces) + behind)


def _line(*items: Item) -> tuple[Conversation, list[Item]]:
    placed = chained(items, map(str, range(99)), None, 5.5)
    return Conversation(conversation_id="conv_a", title="T", created_s=1.5, head=placed[-1].item_id), placed


def _again(form: str, *conversations: tuple[Conversation, list[Item]]) -> list[Draft]:
    return read_file(_written(form, *conversations))


def _shape(items: list[Item]) -> list[object]:
    """Return a tree without item ids: the position of each item's parent, and its content."""
    places = {item.item_id: place for place, item in enumerate(items)}
    return [
        (places.get(item.parent_id or ""), item.kind, item.role, item.text, item.name, item.status) for item in items
    ]


@st.composite
def _trees(draw: st.DrawFn) -> tuple[Conversation, list[Item]]:
    items: list[Item] = []
    for number in range(draw(st.integers(0, 8))):
        item = Item(
            item_id=f"i{number}",
            parent_id=draw(st.sampled_from([None, *(one.item_id for one in items)])),
            role=draw(st.sampled_from(["system", "developer", "user", "assistant"])),
            text=draw(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
            status=draw(st.sampled_from(["completed", "incomplete"])),
            created_s=draw(st.floats(0, 1e10)),
        )
        items.append(item)
    head = draw(st.sampled_from([None, *(one.item_id for one in items)]))
    metadata = draw(st.dictionaries(st.text("abc", min_size=1, max_size=64), st.text("xyz", max_size=9), max_size=16))
    title = draw(st.text("Title ", max_size=200))
    return Conversation(title=title, created_s=1.0, updated_s=2.0, metadata=metadata, head=head), items


@given(_trees())
def test_our_file_loses_nothing(tree: tuple[Conversation, list[Item]]) -> None:
    (draft,) = _again("tailrace", tree)
    assert (draft.conversation, draft.items, draft.num_left_out) == (*tree, 0)


def test_a_file_turns_no_tools_on() -> None:
    metadata = {"tools": "files", "mcp_response": "../x", "model": "m"}
    (draft,) = _again("tailrace", (Conversation(metadata=metadata), []))
    assert draft.conversation.metadata == {"model": "m"}


def test_our_file_has_calls_and_knows_no_stream() -> None:
    conversation, items = _line(*_TALK, Item(role="assistant", status="in_progress", stream_id="s"))
    (draft,) = _again("tailrace", (conversation, items))
    assert draft.items == [*items[:-1], replace(items[-1], status="incomplete", stream_id="")]


@given(_trees())
def test_chatgpts_file_keeps_the_tree_of_messages_with_text(tree: tuple[Conversation, list[Item]]) -> None:
    conversation, items = tree
    items = [replace(item, text=item.text + ".") for item in items]
    (draft,) = _again("chatgpt", (conversation, items))
    assert sorted(map(str, _paths(draft.items))) == sorted(map(str, _paths(items)))
    if conversation.head is not None:
        assert _path(draft.items, draft.conversation.head) == _path(items, conversation.head)
    assert draft.conversation.title == conversation.title


def _path(items: list[Item], item_id: str | None) -> list[object]:
    by_id = {item.item_id: item for item in items}
    path: list[object] = []
    while item_id is not None:
        item = by_id[item_id]
        path.append((item.kind, item.role, item.text, item.status, item.created_s))
        item_id = item.parent_id
    return path


def _paths(items: list[Item]) -> list[list[object]]:
    return [_path(items, item.item_id) for item in items]


@pytest.mark.parametrize("form", file_formats())
def test_the_prompt_is_the_same_in_every_format(form: str) -> None:
    one, other = _line(*_TALK), _line(Item(role="user", text="Hi"))
    drafts = _again(form, one, other)
    for (_, items), draft in zip((one, other), drafts, strict=True):
        ours, theirs = messages_of(items), messages_of(draft.items)
        assert [(message.role, message.content) for message in ours] == [
            (message.role, message.content) for message in theirs
        ]
        for written, read in zip(ours, theirs, strict=True):
            assert [(call.name, json.loads(call.arguments)) for call in written.tool_calls] == [
                (call.name, json.loads(call.arguments)) for call in read.tool_calls
            ]
        assert draft.conversation.title == "T"
        assert draft.conversation.head == draft.items[-1].item_id
    calls = [item.call_id for item in drafts[0].items if item.kind != "message"]
    assert len(calls) == 2
    assert len(set(calls)) == 1  # the output is still the call's


@pytest.mark.parametrize("form", file_formats())
def test_no_conversations_are_a_file(form: str) -> None:
    assert _again(form) == []


_OURS: Json = {"format": "tailrace.conversations", "version": 1}
_ITEM: Json = {"id": "a", "role": "user", "text": "kanarienvogel"}


@pytest.mark.parametrize(
    ("file", "param"),
    [
        (5, "[0]"),
        ("kanarienvogel", "[0]"),
        (None, "[0]"),
        ({}, "[0]"),
        ([{}], "[0]"),
        ([[]], "[0]"),
        ([{"mapping": {}}, {"kanarienvogel": 1}], "[1]"),
        ([{"mapping": []}], "[0].mapping"),
        ([{"mapping": {"kanarienvogel": 5}}], "[0].mapping[…]"),
        ([{"mapping": {"kanarienvogel": {"message": {"author": 5}}}}], "[0].mapping[…].message.author"),
        ([{"mapping": {"a": {"parent": "b"}, "b": {"parent": "a"}}}], "[0].mapping"),
        ([{"mapping": {"a": {"parent": "a"}}}], "[0].mapping"),
        ([{"conversations": 5}], "[0].conversations"),
        ([{"conversations": [{"from": "kanarienvogel", "value": "a"}]}], "[0].conversations[0].from"),
        ([{"conversations": [{"value": "a"}]}], "[0].conversations[0]"),
        ([{"conversations": [{"from": "human", "value": 5}]}], "[0].conversations[0].value"),
        ({**_OURS, "version": 2}, "version"),
        (_OURS, "conversations"),
        ({**_OURS, "conversations": [{}]}, "conversations[0]"),
        ({**_OURS, "conversations": [{"items": [{**_ITEM, "id": ""}]}]}, "conversations[0].items[0]"),
        ({**_OURS, "conversations": [{"items": [{**_ITEM, "id": "a b"}]}]}, "conversations[0].items[0]"),
        ({**_OURS, "conversations": [{"items": [_ITEM, _ITEM]}]}, "conversations[0].items[1]"),
        ({**_OURS, "conversations": [{"items": [{**_ITEM, "parent_id": "a"}]}]}, "conversations[0].items[0]"),
        ({**_OURS, "conversations": [{"items": [{**_ITEM, "role": ""}]}]}, "conversations[0].items[0]"),
        ({**_OURS, "conversations": [{"items": [{"id": "a", "role": "kanarienvogel"}]}]},
         "conversations[0].items[0].role"),
        ({**_OURS, "conversations": [{"items": [{**_ITEM, "type": "function_call"}]}]}, "conversations[0].items[0]"),
        ({**_OURS, "conversations": [{"items": [], "head": "a"}]}, "conversations[0].head"),
        ({**_OURS, "conversations": [{"items": [], "metadata": {"a": 5}}]}, "conversations[0].metadata[…]"),
        ({**_OURS, "conversations": [{"items": [], "metadata": {"a": "x" * 513}}]}, "conversations[0].metadata"),
        ({**_OURS, "conversations": [{"items": [{**_ITEM, "images": [{"at": 0, "id": "i"}] * 17}]}]},
         "conversations[0].items[0]"),
        ([{"conversations": []}] * 1001, "conversations"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_files_that_are_wrong(file: object, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_file(file)
    assert refused.value.param == param
    assert "kanarienvogel" not in refused.value.message
