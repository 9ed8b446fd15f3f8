"""Each format is read as its family writes it, however the text is cut, and found by a template that teaches it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.text import ChatTemplate
from tailrace.text.calls import FORMATS, UNKNOWN, CallFormat, WholeCall, WholeCallReader
from tailrace.text.template_forms import probe
from tailrace.types import CallReading

TOOLS = {"look_up": {"city": True, "days": False}, "now": {}}
PARIS, ROME = WholeCall("look_up", {"city": "Paris", "days": 3}), WholeCall("look_up", {"city": "Rome", "days": 4})


def read(name: str, text: str, step: int | None = None) -> list[str | WholeCall]:
    """Return calls and text, with neighbouring texts joined."""
    reader = WholeCallReader(CallReading(name, tools=TOOLS))
    size = step or len(text)
    parts = [part for start in range(0, len(text), size) for part in reader.push(text[start : start + size])]
    found: list[str | WholeCall] = []
    for part in parts + reader.flush():
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


# Two calls as each family writes them, with what its template puts around them.
_DEEPSEEK = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>{}<\uff5ctool\u2581sep\uff5c>{}<\uff5ctool\u2581call\u2581end\uff5c>"
)
_DSML = "<\uff5cDSML\uff5c{}>"
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look_up", "arguments": {"city": "Rome", "days": 4}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=look_up>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=look_up>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n4\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>look_up<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>days</arg_key><arg_value>4</arg_value></tool_call>",
    "seed": "<seed:tool_call>\n<function=look_up>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n<function=look_up>\n<parameter=city>Rome</parameter>\n<parameter=days>4</parameter>\n</function>\n"
    "</seed:tool_call>",
    "lfm2": "<|tool_call_start|>[look_up(city='Paris', days=3), look_up(city=\"Rome\", days=4)]<|tool_call_end|>",
    "olmo3": '<function_calls>\nlook_up(city="Paris", days=3)\nlook_up(city="Rome", days=4)\n</function_calls>',
    "mistral": '[TOOL_CALLS]look_up[ARGS]{"city": "Paris", "days": 3}'
    '[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"city": "Rome", "days": 4}',
    "deepseek": "<\uff5ctool\u2581calls\u2581begin\uff5c>"
    + _DEEPSEEK.format("function", 'look_up\n```json\n{"city": "Paris", "days": 3}\n```')
    + "\n"
    + _DEEPSEEK.format("look_up", '{"city": "Rome", "days": 4}')
    + "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "deepseek-v3.2": _DSML.format("function_calls")
    + "".join(
        "\n" + _DSML.format('invoke name="look_up"') + "\n" + _DSML.format('parameter name="city" string="true"') + city
        + _DSML.format("/parameter").replace("<\uff5cDSML\uff5c/", "</\uff5cDSML\uff5c")
        + "\n" + _DSML.format('parameter name="days" string="false"') + days
        + _DSML.format("/parameter").replace("<\uff5cDSML\uff5c/", "</\uff5cDSML\uff5c")
        + "\n</\uff5cDSML\uff5cinvoke>"
        for city, days in (("Paris", "3"), ("Rome", "4"))
    )
    + "\n</\uff5cDSML\uff5cfunction_calls>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.look_up:1<|tool_call_argument_begin|>'
    '{"city": "Rome", "days": 4}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi-k3": "<|open|>tools<|sep|>"
    + "".join(
        f'<|open|>call tool="look_up" index="{index}"<|sep|><|open|>argument key="city" type="string"<|sep|>{city}'
        f'<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>{days}<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        for index, city, days in ((1, "Paris", 3), (2, "Rome", 4))
    )
    + "<|close|>tools<|sep|>",
    "harmony": '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"city": "Paris", "days": 3}'
    '<|call|><|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>{"city": "Rome", "days": 4}'
    "<|call|>",
    "granite3": '<|tool_call|>[{"name": "look_up", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "look_up", "arguments": {"city": "Rome", "days": 4}}]',
    "granite-20b": '<function_call> {"name": "look_up", "arguments": {"city": "Paris", "days": 3}}\n'
    '<function_call> {"name": "look_up", "arguments": {"city": "Rome", "days": 4}}',
    "gemma4": '<|tool_call>call:look_up{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
    '<|tool_call>call:look_up{city:<|"|>Rome<|"|>,days:4}<tool_call|>',
    "functiongemma": "<start_function_call>call:look_up{city:<escape>Paris<escape>,days:3}<end_function_call>"
    "<start_function_call>call:look_up{city:<escape>Rome<escape>,days:4}<end_function_call>",
    "command-r": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look_up", "parameters": {"city": "Paris", '
    '"days": 3}},\n    {"tool_call_id": "1", "tool_name": "look_up", "parameters": {"city": "Rome", "days": 4}}\n]'
    "<|END_ACTION|>",
    "minimax-m1": '<tool_calls>\n{"name": "look_up", "arguments": {"city": "Paris", "days": 3}}\n'
    '{"name": "look_up", "arguments": {"city": "Rome", "days": 4}}\n</tool_calls>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="look_up">\n<parameter name="city">Rome'
    '</parameter>\n<parameter name="days">4</parameter>\n</invoke>\n</minimax:tool_call>',
    "nemotron": '<TOOLCALL>[{"name": "look_up", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "look_up", "arguments": {"city": "Rome", "days": 4}}]</TOOLCALL>',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "look_up", "parameters": {"city": "Paris", "days": 3}}'
    '<|action_end|><|action_start|><|plugin|>\n{"name": "look_up", "parameters": {"city": "Rome", "days": 4}}'
    "<|action_end|>",
    "apertus": '<|tools_prefix|>[{"look_up": {"city": "Paris", "days": 3}}, {"look_up": {"city": "Rome", "days": 4}}]'
    "<|tools_suffix|>",
    "gigachat3": '<|function_call|>{"name": "look_up", "arguments": {"city": "Paris", "days": 3}}\n'
    'function call<|role_sep|>\n{"name": "look_up", "arguments": {"city": "Rome", "days": 4}}',
    "longcat": '<longcat_tool_call>\n{"name": "look_up", "arguments": {"city": "Paris", "days": 3}}\n'
    '</longcat_tool_call>\n<longcat_tool_call>\n{"name": "look_up", "arguments": {"city": "Rome", "days": 4}}\n'
    "</longcat_tool_call>",
    "hunyuan3": "<tool_calls:opensource>\n"
    + "\n".join(
        "<tool_call:opensource>look_up<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n"
        f"<arg_value:opensource>{city}</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n"
        f"<arg_value:opensource>{days}</arg_value:opensource>\n</tool_call:opensource>"
        for city, days in (("Paris", 3), ("Rome", 4))
    )
    + "\n</tool_calls:opensource>",
    "solar": "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>look_up<|tool_call:args|>"
    '{"city": "Paris", "days": 3}'
    "<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>look_up<|tool_call:args|>"
    '{"city": "Rome", "days": 4}<|tool_call:end|><|calls|>',
    "muse": "<atem:function_calls>\n"
    + "\n".join(
        f'<atem:invoke name="look_up">\n<atem:parameter name="city">{city}</atem:parameter>\n'
        f'<atem:parameter name="days">{days}</atem:parameter>\n</atem:invoke>'
        for city, days in (("Paris", 3), ("Rome", 4))
    )
    + "\n</atem:function_calls>",
    "minicpm5": '<function name="look_up"><param name="city">Paris</param><param name="days">3</param></function>\n'
    '<function name="look_up"><param name="city">Rome</param><param name="days">4</param></function>',
    "llama3": '{"name": "look_up", "parameters": {"city": "Paris", "days": 3}}; '
    '{"name": "look_up", "parameters": {"city": "Rome", "days": 4}}',
    "pythonic": "[look_up(city='Paris', days=3), look_up(city='Rome', days=4)]",
}  # fmt: skip


def _without_line_ends(parts: list[str | WholeCall]) -> list[str | WholeCall]:
    """Return the parts without texts of white space: what stands between markers has no meaning."""
    return [part for part in parts if not isinstance(part, str) or part.strip()]


@pytest.mark.parametrize("name", FORMATS)
def test_two_calls_as_the_family_writes_them(name: str) -> None:
    text = WRITTEN[name]
    found = read(name, text)
    assert _without_line_ends(found) == [PARIS, ROME]
    for step in (1, 2, 3, 5, 8):
        assert read(name, text, step) == found


@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_in_two(name: str) -> None:
    text = WRITTEN[name]
    expected = read(name, text)
    for place in range(1, len(text)):
        reader = WholeCallReader(CallReading(name, tools=TOOLS))
        parts = reader.push(text[:place]) + reader.push(text[place:]) + reader.flush()
        assert [part for part in parts if isinstance(part, WholeCall)] == [PARIS, ROME], text[:place]
        shown = "".join(part for part in parts if isinstance(part, str))
        assert shown == "".join(part for part in expected if isinstance(part, str))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_does_not_read_another(name: str) -> None:
    """Except where one is a part of the other."""
    for other, text in WRITTEN.items():
        if other != name and not any(isinstance(part, WholeCall) for part in read(name, text)):
            assert "".join(part for part in read(name, text) if isinstance(part, str)) == text


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("llama3", "pythonic")])
def test_text_around_calls(name: str) -> None:
    text = f"I look it up.{WRITTEN[name]}"
    assert str(read(name, text)[0]).rstrip() == "I look it up."
    assert _without_line_ends(read(name, text))[1:] == [PARIS, ROME]
    assert read(name, text, 1) == read(name, text)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("harmony", "apertus")])
def test_a_server_whose_template_is_unknown(name: str) -> None:
    found = read(UNKNOWN.name, WRITTEN[name])
    assert [part for part in found if isinstance(part, WholeCall)] == [PARIS, ROME]
    assert read(UNKNOWN.name, WRITTEN[name], 1) == found


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["}", '"', "\\", "</parameter>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
# Tags and quotes of a family inside of a text of that family are not escaped, so nothing can tell them apart.
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="<"), max_size=20) | (
    st.sampled_from(["a\nb", "<b>x</b>", "{1}", "[2]", "it's", '"', "3", "null", " a ", "é🌊"])
)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda one: one.name)
@settings(max_examples=25, deadline=None)
@given(city=texts, days=json_values.filter(lambda value: not isinstance(value, str)), step=st.integers(1, 9))
def test_what_is_written_is_read(format: CallFormat, city: str, days: object, step: int) -> None:  # noqa: A002
    arguments = {"city": city, "days": days}
    text = format.write("look_up", json.dumps(arguments, ensure_ascii=False))
    assert read(format.name, text, step) == [WholeCall("look_up", arguments)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama3", 'A.\n```json\n{"name": "now", "parameters": {}}\n```\nB.', ["A.\n", WholeCall("now", {}), "B."]),
        ("llama3", '{"name": "unknown", "parameters": {}}', ['{"name": "unknown", "parameters": {}}']),
        ("llama3", '{"answer": 3, "name": "now"}', ['{"answer": 3, "name": "now"}']),
        ("llama3", 'It is {"name": "now", "parameters": {}}', ['It is {"name": "now", "parameters": {}}']),
        ("llama3", "```python\nprint({})\n```", ["```python\nprint({})\n```"]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', [WholeCall("now", {})]),
        ("llama3", '<function=look_up>{"city": "Rome", "days": 4}</function>', [ROME]),
        ("pythonic", "[1, 2, 3]", ["[1, 2, 3]"]),
        ("pythonic", "[now()]", [WholeCall("now", {})]),
        ("pythonic", "[unknown()]", ["[unknown()]"]),
        ("qwen3-coder", '<tool_call>{"name": "now"}</tool_call>', [WholeCall("now", {})]),
        ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>!", [WholeCall("now", {}), "!"]),
        ("glm", "<tool_call>now</tool_call>", [WholeCall("now", {})]),
        ("glm", "<tool_call>no call at all</tool_call>", ["<tool_call>no call at all</tool_call>"]),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]', [WholeCall("now", {})]),
        ("mistral", '[TOOL_CALLS]now{"a": 1}', [WholeCall("now", {"a": 1})]),
        ("mistral", "[TOOL_CALLS] nothing", ["[TOOL_CALLS] nothing"]),
        ("kimi-k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>",
         [WholeCall("now", {})]),
        ("harmony", ' to=functions.now<|channel|>commentary json<|message|>{}<|call|>', [WholeCall("now", {})]),
        ("harmony", "I come to=day.", ["I come to=day."]),
    ],
)  # fmt: skip
def test_borders(name: str, text: str, expected: list[str | WholeCall]) -> None:
    assert read(name, text) == read(name, text, 1) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\n</parameter>\nb", "a\n</parameter>\nb"),
        ("<parameter=x>\n1\n</parameter>", "<parameter=x>\n1\n</parameter>"),
        ("\n\na\n\n", "\n\na\n\n"),
        ("</function>", "</function>"),
        ("", ""),
        ('{"a": "b"}', '{"a": "b"}'),
        ("3", "3"),
    ],
)
def test_a_value_may_have_the_tags_of_its_format(value: str, expected: str) -> None:
    text = f"<tool_call>\n<function=look_up>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3-coder", text) == read("qwen3-coder", text, 1) == [WholeCall("look_up", {"city": expected})]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", 3), (" 3.5 ", 3.5), ("[1, 2]", [1, 2]), ("True", True), ("{'a': None}", {"a": None}), ("three", "three")],
)
def test_a_value_has_the_type_of_the_schema(value: str, expected: object) -> None:
    text = f"<tool_call>\n<function=look_up>\n<parameter=days>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3-coder", text) == read("qwen3-coder", text, 1) == [WholeCall("look_up", {"days": expected})]


def test_a_value_of_an_unknown_type_is_json_if_it_can_be() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3-coder", text.format("3")) == [WholeCall("f", {"a": 3})]
    assert read("qwen3-coder", text.format("True")) == [WholeCall("f", {"a": "True"})]


# Found by templates

_CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_BY_KEY = "{% for k, v in c.function.arguments | items %}PAIR{% endfor %}"
TEACHING = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=NAME>\n"
    + _BY_KEY.replace("PAIR", "<parameter={{ k }}>\n{{ v }}\n</parameter>\n") + "</function>\n</tool_call>",
    "glm": "<tool_call>NAME\n"
    + _BY_KEY.replace("PAIR", "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n") + "</tool_call>",
    "mistral": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "llama3": '{"name": "NAME", "parameters": ARGUMENTS}\n',
    "pythonic": "[NAME("
    + _BY_KEY.replace("PAIR", "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}") + ")]\n",
    "kimi-k2": "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
    "command-r": '<|START_ACTION|>[{"tool_name": "NAME", "parameters": ARGUMENTS}]<|END_ACTION|>',
}  # fmt: skip


@pytest.mark.parametrize("name", TEACHING)
def test_a_template_tells_the_format(name: str) -> None:
    call = TEACHING[name].replace("NAME", _NAME).replace("ARGUMENTS", _ARGUMENTS)
    forms = probe(ChatTemplate(_CHATML.replace("CALL", call), bos_token="", eos_token=""))
    assert forms.calls is FORMATS[name]
    assert (forms.tools, forms.arguments, forms.parallel_calls, forms.results) == ("always", "object", True, True)


def test_a_template_that_shows_no_calls_tells_it_by_markers() -> None:
    silent = ChatTemplate(_CHATML.replace("CALL", ""), bos_token="", eos_token="")
    assert probe(silent).calls is None
    assert probe(silent, ["<|tool_call_start|>", "<|tool_call_end|>"]).calls is FORMATS["lfm2"]
    described = '{# <minimax:tool_call> <invoke name=" <minimax:parameter> <parameter name=" #}' + silent.source
    assert probe(ChatTemplate(described, bos_token="", eos_token="")).calls is FORMATS["minimax-m2"]


def test_a_format_that_nobody_knows() -> None:
    odd = _CHATML.replace("CALL", "CALLING {{ c.function.name }} WITH {{ c.function.arguments | tojson }}")
    assert probe(ChatTemplate(odd, bos_token="", eos_token="")).calls is None
