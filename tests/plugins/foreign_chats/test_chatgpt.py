"""Files of ChatGPT."""

from __future__ import annotations

from typing import Any

from tailrace.conversations import Conversation
from tailrace_outer.conversations.files import read_file

Json = dict[str, Any]  # Any: of JSON


def _node(parent: str | None, role: str, content: object, **more: object) -> Json:
    message = {"author": {"role": role}, "content": content, "create_time": 7.0, **more}
    return {"id": "x", "parent": parent, "children": [], "message": message}


def test_a_file_of_chatgpt() -> None:
    """The file has everything that ChatGPT's files have: a root, hidden and empty messages, images, unknown tools, two
    branches."""
    text = {"content_type": "text"}
    mapping = {
        "root": {"id": "root", "parent": None, "children": ["sys"], "message": None},
        "sys": _node(
            "root", "system", {**text, "parts": [""]}, metadata={"is_visually_hidden_from_conversation": True}
        ),
        "q": _node("sys", "user", {**text, "parts": ["What is", "this?"]}),
        "image": _node("q", "user", {"content_type": "multimodal_text", "parts": [{"asset_pointer": "a"}, "Look"]}),
        "only": _node("image", "user", {"content_type": "multimodal_text", "parts": [{"asset_pointer": "a"}]}),
        "think": _node("only", "assistant", {"content_type": "thoughts", "thoughts": [{"content": "Hm"}]}),
        "python": _node("think", "assistant", {"content_type": "code", "text": "1 + 1"}, recipient="python"),
        "out": _node("python", "tool", {"content_type": "execution_output", "text": "2"}),
        "call": _node("out", "assistant", {"content_type": "code", "text": '{"a": 1}'}, recipient="look"),
        "result": _node("call", "tool", {**text, "parts": ["a river"]}),
        "a": _node("result", "assistant", {**text, "parts": ["A river."]}, status="in_progress"),
        "b": _node("result", "assistant", {**text, "parts": ["Water."]}, status="finished_successfully"),
        "lost": _node("nowhere", "user", {**text, "parts": ["An orphan"]}),
    }
    (draft,) = read_file([{"title": "Rivers", "mapping": mapping, "current_node": "b", "create_time": 3.5, "x": 1}])
    by_text = {item.text: item for item in draft.items}
    assert list(by_text) == [
        "What is\nthis?",
        "Look",
        "1 + 1",
        '{"a": 1}',
        "a river",
        "A river.",
        "Water.",
        "An orphan",
    ]
    assert by_text["Look"].parent_id == by_text["What is\nthis?"].item_id
    assert by_text["1 + 1"].parent_id == by_text["Look"].item_id
    assert by_text["1 + 1"].kind == "message"
    assert (by_text['{"a": 1}'].kind, by_text['{"a": 1}'].name) == ("function_call", "look")
    assert by_text["a river"].call_id == by_text['{"a": 1}'].call_id
    assert by_text["A river."].parent_id == by_text["Water."].parent_id == by_text["a river"].item_id
    assert (by_text["A river."].status, by_text["Water."].status) == ("incomplete", "completed")
    assert by_text["An orphan"].parent_id is None
    assert draft.num_left_out == 2  # the image alone, and the tool's output without a call
    assert draft.conversation == Conversation(
        title="Rivers", created_s=3.5, updated_s=3.5, head=by_text["Water."].item_id
    )


def test_times_that_cannot_be() -> None:
    (draft,) = read_file([{"create_time": 1e300, "update_time": -5, "mapping": {
        "a": _node(None, "user", {"content_type": "text", "parts": ["Hi"]}, create_time=1e300),
    }}])  # fmt: skip
    assert (draft.conversation.created_s, draft.conversation.updated_s, draft.items[0].created_s) == (0, 0, 0)
