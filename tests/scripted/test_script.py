"""A script says what the scripted engine answers, so that it plays the model of an agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.assembly.source import find_source
from tailrace.engines.interface import Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.text import ChatEncoder, ChatTemplate, Tokenizer
from tailrace.types import Message, Sampling, ToolCall, ids_of
from tailrace_outer.scripted.script import SCRIPT_TEMPLATE, read_script
from tailrace_outer.scripted.scripted_engine import EOS_ID, ScriptedEngine, tokenizer_json

LOOK = {"name": "look_up", "arguments": {"city": "$1", "days": 3, "list": ["$1", None]}}
RULES: list[dict[str, Any]] = [  # Any: JSON
    {"when": "weather in (\\w+)", "say": "I look.", "calls": [LOOK]},
    {"when": "<tool_response>\n(.*)\n</tool_response>", "reasoning": "So.", "say": "It is $1$2."},
    {"when": "again", "turn": 1, "say": "Once more."},
]


def write(folder: Path, rules: object) -> Path:
    path = folder / "script.json"
    path.write_text(json.dumps({"rules": rules}))
    return path


def prompt(*messages: Message) -> tuple[int, ...]:
    template = ChatTemplate(SCRIPT_TEMPLATE, bos_token="", eos_token="")
    encoder = ChatEncoder(Tokenizer.from_json(tokenizer_json()), template)
    assert encoder.calls is not None
    assert encoder.calls.name == "hermes"
    return ids_of(encoder.encode(messages, tools=[{"type": "function", "function": {"name": "look_up"}}]))


def answered(path: Path, *messages: Message) -> str:
    spec = EngineSpec("scripted", str(path), context_tokens=4096)
    engine = ScriptedEngine(spec)
    engine.submit(Sequence(1, (prompt(*messages),), Sampling(seed=1, max_tokens=1000)))
    ids: list[int] = []
    while deltas := engine.step():
        ids += [one for delta in deltas for one in delta.token_ids]
    assert ids[-1] == EOS_ID
    return bytes(ids[:-1]).decode()


def test_the_last_message_chooses_the_rule(tmp_path: Path) -> None:
    path = write(tmp_path, RULES)
    question = Message("user", "The weather in Rome?")
    said = answered(path, Message("system", "again"), question)
    call = '{"name": "look_up", "arguments": {"city": "Rome", "days": 3, "list": ["Rome", null]}}'
    assert said == f"I look.\n<tool_call>\n{call}\n</tool_call>"
    asks = Message("assistant", "I look.", (ToolCall("c", "look_up", '{"city": "Rome"}'),))
    result = Message("tool", "sunny", (), "c")
    assert answered(path, question, asks, result) == "<think>\nSo.\n</think>\n\nIt is sunny."


def test_system_messages_after_the_users_choose_no_rule(tmp_path: Path) -> None:
    path = write(tmp_path, [{"when": "hello", "say": "The user."}, {"when": "reminder", "say": "The system."}])
    assert answered(path, Message("user", "hello"), Message("system", "reminder")) == "The user."


def test_a_rule_may_be_for_one_turn(tmp_path: Path) -> None:
    path = write(tmp_path, RULES)
    again = Message("user", "again")
    assert answered(path, again) == "The script has no rule for this message."
    assert answered(path, again, Message("assistant", "a"), again) == "Once more."


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([{"when": "("}], "rule 0: `when` is not a regular expression"),
        ([{"saw": ""}], "unknown field `saw`"),
        ("no", "is not a script"),
    ],
)
def test_what_is_no_script(tmp_path: Path, rules: object, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        find_source(f"scripted:script={write(tmp_path, rules)}", NoProgress())


def test_a_script_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be read: No such file"):
        find_source(f"scripted:script={tmp_path / 'none'}", NoProgress())
    source = find_source(f"scripted:script={write(tmp_path, RULES)},tokens_per_s=5", NoProgress())
    assert (source.options, source.card.path) == ({"tokens_per_s": 5.0}, tmp_path / "script.json")
    assert read_script(source.card.path).rules
