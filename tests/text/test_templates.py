from __future__ import annotations

import re
from datetime import datetime

import pytest

from tailrace.errors import ModelError, RequestError
from tailrace.text import ChatTemplate, TemplateError
from tailrace.text.templates import turn_of
from tailrace.types import Message

SECRET = "client-secret"
USER = (Message("user", SECRET),)


def render(source: str, *messages: Message, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(messages, add_generation_prompt=add_generation_prompt)


def test_features_of_published_templates() -> None:
    source = """{{ bos_token }}
{%- if tools is not none or documents is not none %}{{ raise_exception('no tools here') }}{% endif %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% continue %}
    {% endif %}
[{{ message.role }}] {{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
    chat = (Message("system", "x"), Message("user", " <b> & 'q' "), Message("assistant", "ok"))
    assert render(source, *chat) == "<s>[user] <b> & 'q'</s>\n[assistant] ok</s>\n[assistant]"
    assert render(source, *chat, add_generation_prompt=False) == "<s>[user] <b> & 'q'</s>\n[assistant] ok</s>\n"


def test_values_that_a_template_uses() -> None:
    source = (
        "{% set shown = messages[0].content %}{{ shown }}{% if enable_thinking is defined and not enable_thinking %}"
        "<think></think>{% endif %}{% if tools %}{{ raise_exception(strftime_now('%Y')) }}{% endif %}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.names == {"enable_thinking"}
    turns = [turn_of(Message("user", "Hi"))]
    assert template.render_turns(turns) == template.render_turns(turns, values={"enable_thinking": True}) == "Hi"
    assert template.render_turns(turns, values={"enable_thinking": False}) == "Hi<think></think>"


def test_tojson_does_not_escape_for_html() -> None:
    assert render("{{ messages[0].content | tojson }}", Message("user", "<é> & 'x'")) == "\"<é> & 'x'\""
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_strftime_now_is_the_local_time() -> None:
    before = datetime.now().replace(microsecond=0)
    shown = datetime.strptime(render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"), "%Y-%m-%d %H:%M:%S")
    assert before <= shown <= datetime.now()


def test_generation_marks_are_ignored() -> None:
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_errors_raised_by_a_template_are_passed_on_and_cut() -> None:
    with pytest.raises(TemplateError, match=r"refused: Roles must alternate\.$") as caught:
        render("{{ raise_exception('Roles must alternate.') }}", *USER)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "template_error", "messages")
    assert isinstance(caught.value, RequestError)
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('x' * 5000) }}", *USER)
    assert caught.value.message.count("x") < 210


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.here }}",  # undefined
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages.append(1) }}",  # the sandbox
        "{{ ''.__class__.__mro__ }}",
        "{{ {}[messages[0].content] . x }}",
        "{{ nothing | tojson }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages[0].content) }}",  # never ends
        "{% for i in range(100000) %}{{ messages[0].content * 100 }}{% endfor %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ messages[0].content * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ (9 ** 32) ** 32 }}",
        "{{ strftime_now(messages) }}",
    ],
)
def test_failures_in_a_template_are_one_error_that_repeats_nothing(source: str) -> None:
    with pytest.raises(TemplateError, match=r"failed \(\w+\)\.$") as caught:
        render(source, *USER)
    assert SECRET not in caught.value.message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_ordinary_arithmetic_is_allowed() -> None:
    assert render("{{ 2 * 3 }} {{ 2 ** 10 }} {{ '-' * 5 }} {{ 2.5 * 2 }} {{ [1] * 2 }}") == "6 1024 ----- 5.0 [1, 1]"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for m in messages %}", "{{ x | no_such_filter }}", "(" * 3 + "{{" * 3]
)
def test_an_invalid_template_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, bos_token="", eos_token="")


def test_a_template_too_deep_for_the_compiler_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=re.escape("cannot be compiled")):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}", bos_token="", eos_token="")
