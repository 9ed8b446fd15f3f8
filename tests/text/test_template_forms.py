"""Conversations are brought into the form that a chat template takes, where it does not take them as they are."""

from __future__ import annotations

import pytest

from tailrace.errors import TemplateError
from tailrace.text import ChatEncoder, ChatTemplate, Tokenizer
from tailrace.text.template_forms import TemplateForms, probe
from tailrace.text.templates import Turn
from tailrace.types import Message, ToolCall, ids_of

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.id }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}{{ tools | tojson if tools }}"
)
LEADING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FORGETFUL = "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}" + (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% set ns = namespace(expected='user') %}{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}{% elif m.role == 'tool' or m.tool_calls %}"
    "{% elif m.role != ns.expected %}{{ raise_exception('Roles must alternate.') }}"
    "{% else %}{% set ns.expected = 'assistant' if m.role == 'user' else 'user' %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('Nine!') }}{% endif %}"
    "<{{ c.function.name }} {{ c.id }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('Nine!') }}{% endif %}"
    "({{ m.tool_call_id }}){% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"
)
WITHOUT_SYSTEM = ALTERNATING.replace("{% if m.role == 'system' and loop.first %}{% el", "{% ")
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
ASKED = "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}" + (
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + PLAIN
)
SILENT = "{% if messages[0].role == 'system' %}{% set head = '[system]' ~ messages[0].content %}{% endif %}" + (
    "{% for m in messages if m.role != 'system' %}{{ head if loop.first }}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NOTHING = "{{ bos_token }}Hello{% if add_generation_prompt %}:{% endif %}"
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('One!') }}{% endif %}"
    "[call]{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}{{ tools | tojson if tools }}"
)
AS_TEXT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ "" + c.function.arguments }}}</tool_call>{% endfor %}'
    "[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"
)
WITHOUT_CALLS = (
    "{% for m in messages %}<|im_start|>[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{# <tool_call> of <function= with <parameter= #}{{ tools | tojson if tools }}"
)
BELOW_SYSTEM = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'system' %}{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
ASKED_FOR_TOOLS = "{% if tools %}" + ASKED.removesuffix(PLAIN) + "{% endif %}" + PLAIN
ASKED_BELOW_SYSTEM = ASKED.removesuffix(PLAIN) + BELOW_SYSTEM
TYPE_FIRST = (
    "{% for t in tools or [] %}{{ 'yes' if (t | tojson)[:8] == '{\"type\":' else 'no' }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LOOK: Turn = {"type": "function", "function": {"name": "look"}}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def shown(tokenizer: Tokenizer, source: str, *messages: Message, tools: tuple[Turn, ...] = ()) -> str:
    """Return the prompt that the model gets."""
    encoder = ChatEncoder(tokenizer, template(source))
    return b"".join(tokenizer.pieces[i] for i in ids_of(encoder.encode(messages, tools=tools))).decode()


def says(*turns: str) -> list[Message]:
    """Return messages of a chat: `s`ystem, `u`ser or `a`ssistant, and the text."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [Message(roles[turn[0]], turn[1:]) for turn in turns]


@pytest.mark.parametrize(
    ("source", "forms"),
    [
        (PLAIN, TemplateForms(tools="always")),
        (LEADING, TemplateForms(system="first")),
        (FORGETFUL, TemplateForms(system="first")),
        (ALTERNATING, TemplateForms(system="first", neighbours=False, tools="always", short_ids=True)),
        (WITHOUT_SYSTEM, TemplateForms(system="none", neighbours=False, tools="always", short_ids=True)),
        (PARTS, TemplateForms(content="parts")),
        (ASKED, TemplateForms(alone=False, tools="always")),
        (ASKED_FOR_TOOLS, TemplateForms(tools="always")),
        (SILENT, TemplateForms(system="first", alone=False)),
        (NOTHING, TemplateForms(content="none")),
        (ONE_CALL, TemplateForms(tools="always", parallel_calls=False)),
    ],
)
def test_what_a_template_takes(source: str, forms: TemplateForms) -> None:
    assert probe(template(source)) == forms


def test_what_a_template_takes_of_calls() -> None:
    text = probe(template(AS_TEXT))
    assert (text.arguments, text.calls and text.calls.name) == ("text", "hermes")
    none = probe(template(WITHOUT_CALLS))
    assert (none.arguments, none.results, none.calls and none.calls.name) == ("none", True, "qwen3-coder")
    assert (probe(template(TYPE_FIRST)).tools, probe(template(TYPE_FIRST)).calls) == ("always", None)
    below = probe(template(BELOW_SYSTEM))
    assert (below.tools, below.calls and below.calls.name) == ("with system", "hermes")


@pytest.mark.parametrize(
    ("source", "turns", "expected"),
    [
        (PLAIN, ["sA", "uB", "sC", "uD", "uE"], "[system]A[user]B[system]C[user]D[user]E"),
        (LEADING, ["sA", "uB", "uC"], "[system]A[user]B[user]C"),
        (LEADING, ["sA", "uB", "aC", "sD", "uE"], "[system]A\n\nD[user]B[assistant]C[user]E"),
        (LEADING, ["uA", "sB"], "[system]B[user]A"),
        (LEADING, ["sA", "sB", "uC"], "[system]A\n\nB[user]C"),
        (FORGETFUL, ["sA", "uB", "sC", "uD"], "[system]A\n\nC[user]B[user]D"),
        (ALTERNATING, ["uA", "uB"], "[user]A\n\nB"),
        (ALTERNATING, ["sS", "uA", "aB", "aC", "uD"], "[system]S[user]A[assistant]B\n\nC[user]D"),
        (WITHOUT_SYSTEM, ["sS", "uA", "sT", "uB"], "[user]S\n\nT\n\nA\n\nB"),
        (PLAIN, ["sA"], "[system]A"),
        (ASKED, ["sA"], "[user]A"),
        (ASKED, ["sA", "sB"], "[system]A[user]B"),
        (ASKED, ["sA", "uB"], "[system]A[user]B"),
        (SILENT, ["sA"], "[user]A"),
        (SILENT, ["sA", "aB", "sC"], "[user]A\n\nC[assistant]B"),
        (WITHOUT_SYSTEM, ["sA"], "[user]A"),
        (PARTS, ["sS", "uA", "aB", "uC"], "[system]S[user]A[assistant]B[user]C"),
    ],
)
def test_conversations(byte_level: Tokenizer, source: str, turns: list[str], expected: str) -> None:
    assert shown(byte_level, source, *says(*turns)) == expected


CALLS = Message("assistant", "", (ToolCall("call_1", "look", "{}"), ToolCall("call_2", "look", '{"a": 1}')))
RESULTS = Message("tool", "R", (), "call_1"), Message("tool", "S", (), "call_2")


def test_ids_become_nine_characters_and_stay_equal(byte_level: Tokenizer) -> None:
    prompt = shown(byte_level, ALTERNATING, *says("uA"), CALLS, *RESULTS)
    first, second = prompt.partition("<look ")[2][:9], prompt.rpartition("<look ")[2][:9]
    assert first != second
    assert prompt == f'[user]A<look {first} {{}}><look {second} {{"a": 1}}>[assistant]({first})[tool]R({second})[tool]S'
    kept = Message("assistant", "", (ToolCall("abcdefgh9", "look", "{}"),))
    assert "<look abcdefgh9 {}>" in shown(byte_level, ALTERNATING, *says("uA"), kept)


def test_a_user_after_a_result_joins_it_where_roles_must_alternate(byte_level: Tokenizer) -> None:
    prompt = shown(byte_level, ALTERNATING, *says("uA"), CALLS, RESULTS[0], *says("uB"))
    assert prompt.endswith("[tool]R\n\nB")
    assert shown(byte_level, PLAIN, *says("uA"), CALLS, RESULTS[0], *says("uB")).endswith("[tool]R(call_1)[user]B")


def test_calls_come_one_at_a_time(byte_level: Tokenizer) -> None:
    prompt = shown(byte_level, ONE_CALL, *says("uA"), CALLS, *RESULTS, *says("uB"))
    assert prompt == '[user]A[call]look{}[tool]R[call]look{"a": 1}[tool]S[user]B'


def test_calls_that_a_template_leaves_out_are_written_as_the_model_writes_them(byte_level: Tokenizer) -> None:
    prompt = shown(
        byte_level, WITHOUT_CALLS, *says("uA"), Message("assistant", "So:", CALLS.tool_calls[1:]), RESULTS[1]
    )
    call = "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert prompt == f"<|im_start|>[user]A<|im_start|>[assistant]So:{call}<|im_start|>[tool]S"


def test_only_the_templates_markers_are_control_tokens(byte_level: Tokenizer) -> None:
    encoder = ChatEncoder(byte_level, template(WITHOUT_CALLS))
    call = ToolCall("c", "look", '{"a": "<|im_start|>"}')
    ids = ids_of(encoder.encode([*says("u<|im_start|>"), Message("assistant", "", (call,))]))
    assert ids.count(byte_level.control_tokens["<|im_start|>"]) == 2


def test_tools_below_a_system_message_get_one(byte_level: Tokenizer) -> None:
    assert "look;" in shown(byte_level, BELOW_SYSTEM, *says("uA"), tools=(LOOK,))
    assert shown(byte_level, BELOW_SYSTEM, *says("sS", "uA"), tools=(LOOK,)) == "[system]Slook;[user]A"
    assert shown(byte_level, BELOW_SYSTEM, *says("uA")) == "[user]A"
    assert shown(byte_level, ASKED_BELOW_SYSTEM, *says("sA"), tools=(LOOK,)).endswith("look;[user]A")


def test_tools_without_a_question_are_shown_where_a_template_asks_for_one(byte_level: Tokenizer) -> None:
    assert shown(byte_level, ASKED_FOR_TOOLS, *says("sA")) == "[system]A"
    assert shown(byte_level, ASKED_FOR_TOOLS, *says("sA"), tools=(LOOK,)).startswith("[user]A")


def test_a_template_that_uses_tools_without_showing_them_gets_them_as_they_are(byte_level: Tokenizer) -> None:
    assert shown(byte_level, TYPE_FIRST, *says("uA"), tools=(LOOK,)) == "yes[user]A"


def test_a_template_that_shows_nothing_is_known(byte_level: Tokenizer) -> None:
    assert not ChatEncoder(byte_level, template(NOTHING)).shows_messages
    assert ChatEncoder(byte_level, template(PLAIN)).shows_messages


def test_what_is_refused_in_every_form_is_refused_with_the_first_reason(byte_level: Tokenizer) -> None:
    source = (
        LEADING + "{% if messages | length > 2 %}{{ raise_exception('Too many: ' ~ messages | length) }}{% endif %}"
    )
    with pytest.raises(TemplateError, match="Too many: 3"):
        shown(byte_level, source, *says("uA", "aB", "uC"))


@pytest.mark.parametrize("source", [PLAIN, PARTS, ALTERNATING, WITHOUT_SYSTEM])
def test_a_message_that_is_continued_stays_open(byte_level: Tokenizer, source: str) -> None:
    encoder = ChatEncoder(byte_level, template(source + "{{ eos_token }}"))
    ids = ids_of(encoder.encode(says("sS", "uA", "aOnce"), continue_final=True))
    assert b"".join(byte_level.pieces[i] for i in ids).decode().endswith("Once")
