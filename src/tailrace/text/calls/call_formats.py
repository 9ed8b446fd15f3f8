"""The formats in which models write tool calls, by the names of `--tool-format`.

A format has one or more syntaxes, since models of one family mix them. Which format a model has is found out by its
chat template (`detect`). Formats whose calls have no marker come last, because their syntax also fits behind the
markers of others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tailrace.text.calls.syntaxes import JsonCalls, NamedCalls, PythonCalls, Syntax, TaggedCalls

__all__ = ["FORMATS", "UNKNOWN", "CallFormat"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls. `families` is for people. `around` are markers around all calls of an answer, which
    have no meaning."""

    name: str
    families: str
    syntaxes: tuple[Syntax, ...]
    around: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers that may be control tokens of the model, and have to stay in its text."""
        return self.around + tuple(marker for syntax in self.syntaxes for marker in syntax.markers)

    def write(self, name: str, arguments: str) -> str:
        """Return a call as the model writes it. `arguments` is an object as JSON."""
        return self.syntaxes[0].write(name, arguments)


def _json(opens: str, closes: str = "", *, bare: tuple[str, ...] = (), keyed: bool = False) -> JsonCalls:
    return JsonCalls(opens=(opens,), closes=(closes,) if closes else (), bare=bare, keyed=keyed)


def _functions(opens: str, closes: str) -> TaggedCalls:
    """The tags of Qwen3-Coder: `<function=…><parameter=…>`."""
    return TaggedCalls(
        opens=(opens,), closes=(closes,), name_open="<function=", call_close="</function>",
        key_open="<parameter=", key_close=">", value_open="", value_close="</parameter>",
    )  # fmt: skip


def _invocations(opens: str, closes: str, *, prefix: str = "") -> TaggedCalls:
    """The tags of MiniMax and DeepSeek: `<invoke name="…"><parameter name="…">`."""
    return TaggedCalls(
        opens=(opens,), closes=(closes,),
        name_open=f'<{prefix}invoke name="', name_closes=('">',), call_close=f"</{prefix}invoke>",
        key_open=f'<{prefix}parameter name="', key_close='"', value_open=">", value_close=f"</{prefix}parameter>",
    )  # fmt: skip


def _keys_and_values(opens: str, closes: str, *, suffix: str = "", name_close: str = "\n") -> TaggedCalls:
    """The tags of GLM: the name, then `<arg_key>` and `<arg_value>` in turn."""
    return TaggedCalls(
        opens=(opens,), closes=(closes,), name_closes=(name_close,),
        key_open=f"<arg_key{suffix}>", key_close=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>", value_close=f"</arg_value{suffix}>",
    )  # fmt: skip


def _gemma(opens: str, closes: str, quote: str) -> NamedCalls:
    """`call:name{key:value}`, with quotes that are tokens."""
    head = re.compile(r"call:(?P<name>[^\s{]+)")
    return NamedCalls(opens=(opens,), closes=(closes,), form="call:{}", quotes=(quote, '"', "'"), head=head)


def _deepseek(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


_HERMES = _json("<tool_call>", "</tool_call>")
_BRACES = NamedCalls(opens=("<function=",), closes=("</function>",), form="{}>", head=re.compile(r"(?P<name>[^>\s]+)>"))
_MISTRAL = NamedCalls(
    opens=("[TOOL_CALLS]",), form="{}[ARGS]", inner=("[ARGS]", "[CALL_ID]"),
    head=re.compile(r"(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?"),
)  # fmt: skip
_SEP = _deepseek("sep")
_DEEPSEEK = NamedCalls(
    opens=(_deepseek("call\u2581begin"),), closes=(_deepseek("call\u2581end"),), form=f"{{}}{_SEP}", inner=(_SEP,),
    head=re.compile(rf"(?:function{_SEP})?(?P<name>[^\s<]+)\s*(?:{_SEP})?\s*(?:```json)?"),
)  # fmt: skip
_DSML = "\uff5cDSML\uff5c"
_KIMI = NamedCalls(
    opens=("<|tool_call_begin|>",), closes=("<|tool_call_end|>",), inner=("<|tool_call_argument_begin|>",),
    form="functions.{}:0<|tool_call_argument_begin|>",
    head=re.compile(r"(?:functions\.)?(?P<name>.+?)(?::[0-9]+)?\s*(?:<\|tool_call_argument_begin\|>)?"),
)  # fmt: skip
_KIMI_3 = TaggedCalls(
    opens=("<|open|>tools<|sep|>",), closes=("<|close|>tools<|sep|>",),
    name_open='<|open|>call tool="', name_closes=('"',), call_close="<|close|>call<|sep|>",
    key_open='<|open|>argument key="', key_close='"', value_open="<|sep|>", value_close="<|close|>argument<|sep|>",
)  # fmt: skip
_HARMONY = NamedCalls(
    # The prompt ends where the first message of an answer begins, so its head may begin with the recipient.
    opens=("<|channel|>commentary to=", "<|start|>assistant to=", " to="), closes=("<|call|>", "<|end|>"),
    inner=("<|channel|>", "<|constrain|>", "<|message|>"), form="functions.{} <|constrain|>json<|message|>",
    head=re.compile(r"(?:functions\.)?(?P<name>[^\s<]+).*<\|message\|>", re.DOTALL),
)  # fmt: skip
_SOLAR = NamedCalls(
    opens=("<|tool_call:begin|>",), closes=("<|tool_call:end|>",), inner=("<|tool_call:name|>", "<|tool_call:args|>"),
    form="0<|tool_call:name|>{}<|tool_call:args|>",
    head=re.compile(r".*<\|tool_call:name\|>(?P<name>.+?)(?:<\|tool_call:args\|>)?"),
)  # fmt: skip
_MINICPM = TaggedCalls(
    opens=('<function name="',), name_closes=('">',), call_close="</function>",
    key_open='<param name="', key_close='"', value_open=">", value_close="</param>",
)  # fmt: skip
_LFM_MARKERS = "<|tool_call_start|>", "<|tool_call_end|>"

_FORMATS = (
    CallFormat("hermes", "Hermes 2 and 3, Qwen 2.5 and 3, QwQ, Granite 4, SmolLM3, MiMo, Reka, Bielik", (_HERMES,)),
    CallFormat(
        "qwen3-coder",
        "Qwen3-Coder, Qwen 3.5 and later, Nemotron 3, Step 3.5",
        (_functions("<tool_call>", "</tool_call>"), _HERMES),
    ),
    CallFormat(
        "glm", "GLM 4.5 to 4.7, Ling 3, Laguna, Spark 2.5", (_keys_and_values("<tool_call>", "</tool_call>"), _HERMES)
    ),
    CallFormat("seed", "Seed-OSS", (_functions("<seed:tool_call>", "</seed:tool_call>"),)),
    CallFormat(
        "lfm2",
        "LFM2, LFM2.5",
        (PythonCalls(opens=_LFM_MARKERS[:1], closes=_LFM_MARKERS[1:]), _json(*_LFM_MARKERS)),
    ),
    CallFormat("olmo3", "OLMo 3", (PythonCalls(opens=("<function_calls>",), closes=("</function_calls>",)),)),
    CallFormat(
        "mistral",
        "Mistral 7B v0.3, Nemo, Small, Large, Devstral, Magistral, Ministral",
        (_MISTRAL, _json("[TOOL_CALLS]")),
    ),
    CallFormat(
        "deepseek",
        "DeepSeek V3, R1, V3.1",
        (_DEEPSEEK,),
        around=(_deepseek("calls\u2581begin"), _deepseek("calls\u2581end")),
    ),
    CallFormat(
        "deepseek-v3.2",
        "DeepSeek V3.2, V4",
        tuple(
            _invocations(f"<{_DSML}{name}>", f"</{_DSML}{name}>", prefix=_DSML)
            for name in ("function_calls", "tool_calls")
        ),
    ),
    CallFormat("kimi-k2", "Kimi K2", (_KIMI,), around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    CallFormat("kimi-k3", "Kimi K3", (_KIMI_3,)),
    CallFormat("harmony", "gpt-oss", (_HARMONY,)),
    CallFormat("granite3", "Granite 3, Phi-4-mini", (_json("<|tool_call|>", "<|/tool_call|>"),)),
    CallFormat("granite-20b", "Granite 20B for function calls", (_json("<function_call>"),)),
    CallFormat("gemma4", "Gemma 4", (_gemma("<|tool_call>", "<tool_call|>", '<|"|>'),)),
    CallFormat("functiongemma", "FunctionGemma", (_gemma("<start_function_call>", "<end_function_call>", "<escape>"),)),
    CallFormat("command-r", "Command R7B, Command A", (_json("<|START_ACTION|>", "<|END_ACTION|>"),)),
    CallFormat("minimax-m1", "MiniMax M1, Hunyuan A13B, Jamba, Apriel", (_json("<tool_calls>", "</tool_calls>"),)),
    CallFormat("minimax-m2", "MiniMax M2", (_invocations("<minimax:tool_call>", "</minimax:tool_call>"),)),
    CallFormat("nemotron", "Nemotron Nano 2", (_json("<TOOLCALL>", "</TOOLCALL>"),)),
    CallFormat("internlm2", "InternLM 2", (_json("<|action_start|><|plugin|>", "<|action_end|>"),)),
    CallFormat("apertus", "Apertus", (_json("<|tools_prefix|>", "<|tools_suffix|>", keyed=True),)),
    CallFormat("gigachat3", "GigaChat 3", (_json("<|function_call|>"), _json("function call<|role_sep|>"))),
    CallFormat("longcat", "LongCat", (_json("<longcat_tool_call>", "</longcat_tool_call>"),)),
    CallFormat(
        "hunyuan3",
        "Hunyuan 3",
        (
            _keys_and_values(
                "<tool_call:opensource>",
                "</tool_call:opensource>",
                suffix=":opensource",
                name_close="<tool_sep:opensource>",
            ),
        ),
        around=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    CallFormat("solar", "Solar Open", (_SOLAR,), around=("<|tool_calls|>", "<|calls|>")),
    CallFormat(
        "muse", "Muse Glimmer", (_invocations("<atem:function_calls>", "</atem:function_calls>", prefix="atem:"),)
    ),
    CallFormat("minicpm5", "MiniCPM 5", (_MINICPM,)),
    CallFormat(
        "llama3",
        "Llama 3.1, 3.2, 3.3 and 4 with JSON, xLAM, Phi-4-mini with a template of vLLM, Functionary 3.1",
        (_json("<|python_tag|>", bare=("{", "[")), _BRACES),
    ),
    CallFormat(
        "pythonic",
        "Llama 3.2 and 4 with Python, ToolACE, Gemma 3 with such a prompt",
        (PythonCalls(opens=("<|python_start|>",), closes=("<|python_end|>",), bare=("[",)),),
    ),
)

FORMATS: Mapping[str, CallFormat] = {one.name: one for one in _FORMATS}

# For a model on another server, whose template is not known. A plain text may have " to=".
_KNOWN_SYNTAXES = (syntax for one in _FORMATS for syntax in one.syntaxes if syntax is not _HARMONY)
UNKNOWN = CallFormat(
    "any",
    "models on another server",
    (*dict.fromkeys(_KNOWN_SYNTAXES), replace(_HARMONY, opens=_HARMONY.opens[:1])),
    tuple(marker for one in _FORMATS for marker in one.around),
)
