"""Files of ShareGPT."""

from __future__ import annotations

from tailrace.conversations.items import messages_of
from tailrace.types import Message, ToolCall
from tailrace_outer.conversations.files import read_file


def test_a_file_of_sharegpt() -> None:
    messages = [
        {"from": "human", "value": "Look!"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "a river"},
        {"from": "gpt", "value": None},
        {"from": "observation", "value": "of nothing"},
        {"from": "gpt", "value": "A river.\0"},
        {"from": "function_call", "value": "look!"},
    ]
    (draft,) = read_file({"id": 5, "system": "Be brief.", "conversations": messages})
    assert messages_of(draft.items[:-1]) == (
        Message("system", "Be brief."),
        Message("user", "Look!"),
        Message("assistant", "", (ToolCall(draft.items[2].call_id, "look", '{"a":1}'),)),
        Message("tool", "a river", tool_call_id=draft.items[2].call_id),
        Message("assistant", "A river.\ufffd"),
    )
    assert (draft.items[-1].kind, draft.items[-1].text) == ("message", "look!")
    assert draft.num_left_out == 2
