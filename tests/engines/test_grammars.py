"""On every engine with grammars, answers match their grammar, and other sequences are not affected."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from tailrace.dialects.grammar_fields import grammar_of_schema
from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.errors import SequenceFailed
from tailrace.models import ModelCard
from tailrace.text.calls.written import AnswerParts
from tailrace.types import Grammar, Sampling

pytestmark = pytest.mark.timeout(300)  # of which nearly all is for a machine that has to fetch the model first

_DATE = r"\d{4}-[01]\d-[0-3]\d"


def _is(kind: type, low: float = -1e99, high: float = 1e99) -> Callable[[object], bool]:
    return lambda value: type(value) is kind and (not isinstance(value, int | float) or low <= value <= high)


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


# For each kind of schema, what holds of all answers to it.
SCHEMAS: dict[str, tuple[dict[str, object], Callable[[object], bool]]] = {
    "integer": ({"type": "integer", "minimum": 3, "maximum": 77}, _is(int, 3, 77)),
    "boolean": ({"type": "boolean"}, _is(bool)),
    "null": ({"type": "null"}, lambda value: value is None),
    "types": ({"type": ["boolean", "null"]}, lambda value: value is None or isinstance(value, bool)),
    "maxLength": (
        {"type": "string", "minLength": 2, "maxLength": 6},
        lambda value: isinstance(value, str) and 2 <= len(value) <= 6,
    ),
    "pattern": ({"type": "string", "pattern": "[a-c]{2,4}"}, _matches("[a-c]{2,4}")),
    "anchored": ({"type": "string", "pattern": "^x|y$"}, _matches("x|y")),
    "format": ({"type": "string", "format": "date"}, _matches(_DATE)),
    "enum": ({"enum": ["red", 5, None]}, lambda value: value in ("red", 5, None)),
    "const": ({"const": "blue/green"}, lambda value: value == "blue/green"),
    "anyOf": ({"anyOf": [{"const": 1}, {"const": "one"}]}, lambda value: value in (1, "one")),
    "items": (
        {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
        lambda value: isinstance(value, list) and 2 <= len(value) <= 3 and set(value) <= {1, 2},
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2},
        lambda value: value == [1, 2],
    ),
    "properties": (
        {"type": "object", "properties": {"a b": {"const": 1}, "title": {"type": "null"}}, "required": ["a b"]},
        lambda value: value in ({"a b": 1}, {"a b": 1, "title": None}),
    ),
    "$ref": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": "T",
            "type": "object",
            "properties": {"n": {"$ref": "#/definitions/a b"}},
            "required": ["n"],
            "definitions": {"a b": {"enum": [7, 8]}},
        },
        lambda value: value in ({"n": 7}, {"n": 8}),
    ),
}
REGEXES = ["[ab]{3}", "^(?:yes|no)$", r"\d{2}/[\d-]\w\S", r"[^\W\d]{2}\s?", "[一-龥]{2}", r"a\$|b\\|\"c\'|d\-e"]


_ids = itertools.count(1)


@dataclass(frozen=True)
class Speaker:
    """An engine, and the text of its ids."""

    engine: Engine
    tokenizer: Tokenizer

    def ask(self, *asked: Sampling) -> list[tuple[str, Delta]]:
        """Run all requests at the same time; returns the text and the last delta of each answer."""
        ids: dict[int, list[int]] = {}
        ends: dict[int, Delta] = {}
        for sampling in asked:
            number = next(_ids)  # never used twice
            self.engine.submit(Sequence(number, ((1, 2, 40, 77),), sampling))
            ids[number] = []
        while len(ends) < len(ids):
            for delta in self.engine.step():
                ids[delta.sequence_id] += delta.token_ids
                if delta.finish_reason is not None:
                    ends[delta.sequence_id] = delta
        return [(self.tokenizer.decode(ids[number]), ends[number]) for number in ids]


@pytest.fixture(scope="module", params=[pytest.param("llamacpp", marks=pytest.mark.deep), "transformers"])
def speaker(request: pytest.FixtureRequest) -> Iterator[Speaker]:
    pytest.importorskip("xllamacpp" if request.param == "llamacpp" else "torch")
    if request.param == "llamacpp":
        card: ModelCard = request.getfixturevalue("card")
        spec = EngineSpec("llamacpp", str(card.path), eos_token_ids=card.eos_token_ids)
        tokenizer = Tokenizer.from_str(card.tokenizer_json)
    else:
        path: Path = request.getfixturevalue("tiny_gpt2_dir")
        spec = EngineSpec("transformers", str(path))
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    small = {"context_tokens": 128, "kv_tokens": 1024, "max_sequences": 6, "max_step_tokens": 128, "exact": True}
    engine = load_engine(msgspec.structs.replace(spec, **small))
    yield Speaker(engine, tokenizer)
    engine.close()


def _asked(grammar: Grammar | None, **sampling: object) -> list[Sampling]:
    """Return the same request, greedy and with a seed."""
    plain = replace(Sampling(max_tokens=60, grammar=grammar), **sampling)
    return [replace(plain, temperature=0.0, seed=0), replace(plain, seed=1, top_p=0.9)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_conform_to_a_schema(name: str, speaker: Speaker) -> None:
    schema, holds = SCHEMAS[name]
    for text, end in speaker.ask(*_asked(grammar_of_schema(schema, "schema"))):
        assert end.finish_reason == "stop", (text, end)
        assert holds(json.loads(text)), text


def test_calls_in_the_form_of_a_model(speaker: Speaker) -> None:
    """The marker is a control token, which has no characters of its own."""
    ends = ("<|im_end|>", "<|endoftext|>")
    special = sorted((i, one.content) for i, one in speaker.tokenizer.get_added_tokens_decoder().items() if one.special)
    marker = next(((text, number) for number, text in special if text not in ends), ("<call>", 0))
    arguments = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    parts = [marker[0], '{"name": "f", "arguments": ', {"json": arguments}, "}"]
    answer = AnswerParts([parts], tokens=dict([marker] if marker[1] else []))
    for text, end in speaker.ask(*_asked(Grammar("parts", msgspec.json.encode(answer).decode()))):
        assert end.finish_reason == "stop"
        call = json.loads(text.replace(marker[0], ""))
        assert (call["name"], call["arguments"]["n"] in (1, 2)) == ("f", True)


def test_white_space_is_bounded(speaker: Speaker) -> None:
    """A model that would write only white space can write one space after a colon or a comma."""
    vocabulary = speaker.tokenizer.get_vocab(with_added_tokens=False)
    spaces = [token_id for piece, token_id in vocabulary.items() if set(piece) <= set("\u0120\u010a\u010d\u0109")]
    bias = tuple((token_id, 90.0) for token_id in spaces)
    schema = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"type": "array", "items": {"enum": [2]},
              "minItems": 2, "maxItems": 2}}, "required": ["a", "b"]}  # fmt: skip
    for text, end in speaker.ask(*_asked(grammar_of_schema(schema, "schema"), logit_bias=bias)):
        assert (text, end.finish_reason) == ('{"a": 1, "b": [2, 2]}', "stop")


@pytest.mark.parametrize("regex", REGEXES)
def test_answers_conform_to_a_regular_expression(regex: str, speaker: Speaker) -> None:
    for text, end in speaker.ask(*_asked(Grammar("regex", regex))):
        assert end.finish_reason == "stop", (text, end)
        assert re.fullmatch(regex, text, re.ASCII), text


def test_an_answer_continues_as_long_as_the_grammar_allows(speaker: Speaker) -> None:
    for (bounded, end), (open_ended, cut) in zip(
        speaker.ask(*_asked(Grammar("regex", "[ab]{3,5}"), ignore_eos=True)),
        speaker.ask(*_asked(Grammar("regex", "[0-9]+"), ignore_eos=True, max_tokens=10)),
        strict=True,
    ):
        assert (len(bounded), end.finish_reason) == (5, "stop")
        assert (cut.finish_reason, open_ended.isdigit()) == ("length", True)


def test_an_answer_may_end_when_its_grammar_allows(speaker: Speaker) -> None:
    for text, end in speaker.ask(*_asked(Grammar("regex", "[0-9]{2,12}"), max_tokens=14)):
        assert end.finish_reason == "stop"
        assert re.fullmatch("[0-9]{2,12}", text)


def test_sequences_without_a_grammar_are_not_affected(speaker: Speaker) -> None:
    free = _asked(None, max_tokens=8, ignore_eos=True)[0]
    held = _asked(Grammar("regex", "[ab]{6}"))
    ((alone, _),) = speaker.ask(free)
    (beside, _), *answers = speaker.ask(free, *held)
    assert beside == alone
    assert all(re.fullmatch("[ab]{6}", text) for text, _ in answers)


def test_a_seed_repeats_its_answer_under_a_grammar(speaker: Speaker) -> None:
    asked = _asked(Grammar("regex", "[a-z]{6}"))
    assert [text for text, _ in speaker.ask(*asked)] == [text for text, _ in speaker.ask(*asked)]


@pytest.mark.parametrize("grammar", [Grammar("regex", "(?=a)"), Grammar("json_schema", '{"type":"nonsense"}')])
def test_a_grammar_that_does_not_compile_fails_its_sequence_alone(grammar: Grammar, speaker: Speaker) -> None:
    deltas: list[Delta] = []
    try:
        speaker.engine.submit(Sequence(next(_ids), ((1, 2),), Sampling(seed=0, max_tokens=4, grammar=grammar)))
    except SequenceFailed as error:  # an engine may know at once
        failure = str(error)
    else:
        while not deltas:
            deltas += speaker.engine.step()
        (delta,) = deltas
        assert (delta.finish_reason, delta.is_refused) == ("error", True)
        failure = delta.failure
    assert failure == "the grammar does not compile"
    assert speaker.engine.step() == []
