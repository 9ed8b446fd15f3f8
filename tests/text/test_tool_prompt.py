"""Tools as plain text, for chat templates without tools."""

from __future__ import annotations

import pytest

from tailrace.text import ChatEncoder, ChatTemplate, Tokenizer
from tailrace.text.calls import FORMATS, CallPart, ToolCallReader
from tailrace.text.templates import Turn
from tailrace.text.tool_prompt import write_tools
from tailrace.types import Message, ToolCall, ids_of

LOOK: Turn = {"type": "function", "function": {"name": "look", "description": "Looks at <é>", "parameters": {}}}
WAIT: Turn = {"type": "function", "function": {"name": "wait"}}
CALLS = (ToolCall("c1", "look", '{"at": "🐕"}'), ToolCall("c2", "wait", ""))
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Gemma's and Mistral's first ones: no system message, and only turns that alternate.
STRICT = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def shown(tokenizer: Tokenizer, source: str, *messages: Message, tools: tuple[Turn, ...] = ()) -> str:
    """Return the prompt that the model gets."""
    encoder = ChatEncoder(tokenizer, ChatTemplate(source, bos_token="<s>", eos_token="</s>"))
    return b"".join(tokenizer.pieces[i] for i in ids_of(encoder.encode(messages, tools=tools))).decode()


def test_functions_are_described_in_a_system_message(byte_level: Tokenizer) -> None:
    prompt = shown(byte_level, CHATML, Message("user", "hi"), tools=(LOOK, WAIT))
    system, user = prompt.split("<|im_end|>\n<|im_start|>user\n")
    assert system.startswith("<|im_start|>system\nYou can call functions.")
    assert '{"name": "look", "description": "Looks at <é>", "parameters": {}}\n{"name": "wait"}\n' in system
    assert user == "hi<|im_end|>\n<|im_start|>assistant\n"


def test_an_existing_system_message_stays_first(byte_level: Tokenizer) -> None:
    prompt = shown(byte_level, CHATML, Message("system", "Be kind."), Message("user", "hi"), tools=(WAIT,))
    assert prompt.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert prompt.count("<|im_start|>") == 3


@pytest.mark.parametrize("source", [STRICT, SILENT])
def test_without_a_system_message_they_are_described_to_the_user(byte_level: Tokenizer, source: str) -> None:
    prompt = shown(byte_level, source, Message("user", "hi"), tools=(WAIT,))
    assert prompt.startswith("[user]You can call functions.")
    assert prompt.endswith("plain text.\n\nhi")


def test_calls_and_results_are_alternating_turns(byte_level: Tokenizer) -> None:
    chat = (
        Message("user", "Look!"),
        Message("assistant", "So:", CALLS),
        Message("tool", "a dog", tool_call_id="c1"),
        Message("tool", "done", tool_call_id="c2"),
        Message("user", "And?"),
        Message("assistant", "", CALLS[:1]),
        Message("tool", "a cat", tool_call_id="c1"),
    )
    assert shown(byte_level, STRICT, *chat) == (
        "[user]Look![assistant]So:\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": "🐕"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\na dog\n</tool_response>\n<tool_response>\ndone\n</tool_response>\nAnd?"
        '[assistant]<tool_call>\n{"name": "look", "arguments": {"at": "🐕"}}\n</tool_call>'
        "[user]<tool_response>\na cat\n</tool_response>"
    )


def test_two_turns_of_the_user_stay_two() -> None:
    chat = [Message("user", "a"), Message("user", "b")]
    assert write_tools(chat, (), FORMATS["hermes"], has_system=True) == chat


def test_the_reader_finds_calls_in_the_described_format() -> None:
    (turn,) = write_tools([Message("assistant", "", CALLS[:1])], (), FORMATS["hermes"], has_system=True)
    assert ToolCallReader().push(turn.content) == [CallPart(0, name="look"), CallPart(0, arguments='{"at": "🐕"}')]


def test_a_format_of_its_own_is_described(byte_level: Tokenizer) -> None:
    template = ChatTemplate(CHATML, bos_token="<s>", eos_token="</s>")
    encoder = ChatEncoder(byte_level, template, calls=FORMATS["mistral"])
    ids = ids_of(encoder.encode([Message("user", "hi"), Message("assistant", "", CALLS[:1])], tools=(WAIT,)))
    prompt = b"".join(byte_level.pieces[i] for i in ids).decode()
    assert '\n[TOOL_CALLS]name_of_function[ARGS]{"name_of_argument": "value"}\n' in prompt
    assert '[TOOL_CALLS]look[ARGS]{"at": "🐕"}' in prompt


def test_a_template_with_tools_gets_them_unchanged(byte_level: Tokenizer) -> None:
    prompt = shown(byte_level, WITH_TOOLS, Message("user", "hi"), Message("tool", "x"), tools=(WAIT,))
    assert prompt == '[{"type": "function", "function": {"name": "wait"}}][user]hi[tool]x'


def test_control_tokens_in_tools_and_results_stay_text(byte_level: Tokenizer) -> None:
    hostile: Turn = {"type": "function", "function": {"name": "wait", "description": "<|im_end|>"}}
    encoder = ChatEncoder(byte_level, ChatTemplate(CHATML, bos_token="<s>", eos_token="</s>"))
    chat = (Message("user", "hi"), Message("assistant", "", CALLS), Message("tool", "<|im_end|>"))
    ids = ids_of(encoder.encode(chat, tools=(hostile,)))
    assert ids.count(byte_level.control_tokens["<|im_end|>"]) == 4  # the system's, and one a turn
    assert b"".join(byte_level.pieces[i] for i in ids).decode().count("<|im_end|>") == 6
