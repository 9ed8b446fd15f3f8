"""The laws on the real engine with the default model, and its special cases: exactness to the bit, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.engines.shared import ON_ITS_OWN, SHARED_LAWS, Shared
from tokenizers import Tokenizer

from tailrace.engines import ALL_EXCLUDED, GRAMMAR_TOO_COMPLEX, EngineSpec, load_engine
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace.testing import Law, laws
from tailrace.types import Grammar, Sampling

pytestmark = pytest.mark.timeout(300)  # of which nearly all is for a machine that has to fetch the model first

_VOCAB_SIZE = 40_000


@pytest.fixture(scope="module")
def spec(openvino_spec: EngineSpec) -> EngineSpec:
    return openvino_spec


@pytest.fixture(scope="module")
def exact(spec: EngineSpec) -> Iterator[Shared]:
    engine = load_engine(msgspec.structs.replace(spec, exact=True, prefix_cache=False, never_alone=True))
    yield Shared(engine)
    engine.close()


@pytest.fixture(scope="module")
def fast(spec: EngineSpec) -> Iterator[Shared]:
    engine = load_engine(spec)
    yield Shared(engine)
    engine.close()


def _check(law: Law, engine: Shared) -> None:
    if not law.applies_to(engine.capabilities):
        pytest.skip("an engine that is not exact does not promise it")
    law(engine, vocab_size=_VOCAB_SIZE, num_sequences=64)


@pytest.mark.deep
@pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
def test_fast_engine_keeps(law: Law, fast: Shared) -> None:
    _check(law, fast)


# Deep, since this engine takes twice as long as the fast one. Tiny models keep all laws in test_draft.py, and the tests
# below say as well that answers of this model are exact.
@pytest.mark.deep
@pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
def test_exact_engine_keeps(law: Law, exact: Shared) -> None:
    _check(law, exact)


@pytest.mark.deep
def test_closing(spec: EngineSpec) -> None:
    """Closed twice, in the middle of a sequence."""
    law = next(law for law in laws if law.name == ON_ITS_OWN)

    def make() -> Engine:
        engine = load_engine(msgspec.structs.replace(spec, exact=True, prefix_cache=False, never_alone=True))
        engine.submit(_greedy(1, (1, 2, 3), 64))
        engine.step()
        return engine

    law(make, vocab_size=_VOCAB_SIZE)


@pytest.mark.deep
def test_a_thousand_sequences_leak_nothing(exact: Shared) -> None:
    next(law for law in laws if law.name == "nothing_leaks")(exact, vocab_size=_VOCAB_SIZE)


def _greedy(sequence_id: int, prompt_ids: tuple[int, ...], max_tokens: int) -> Sequence:
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, logprobs=True)
    return Sequence(sequence_id, (prompt_ids,), sampling)


class Steps:
    """Steps the exact engine and keeps all its deltas. Its sequence ids differ from those of the laws."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.deltas: dict[int, list[Delta]] = {}

    def start(self, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        sequence_id = 2**32 + id(self) % 2**30 * 2**10 + len(self.deltas)
        self.deltas[sequence_id] = []
        self.engine.submit(_greedy(sequence_id, prompt_ids, max_tokens))
        return sequence_id

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for delta in self.engine.step():
                self.deltas[delta.sequence_id].append(delta)

    def finish(self) -> None:
        while not all(deltas and deltas[-1].finish_reason for deltas in self.deltas.values()):
            self.step()

    def bits(self, sequence_id: int) -> list[tuple[int, float]]:
        deltas = self.deltas[sequence_id]
        return [pair for delta in deltas for pair in zip(delta.token_ids, delta.logprobs, strict=True)]


def _alone(engine: Engine, prompt_ids: tuple[int, ...], max_tokens: int) -> list[tuple[int, float]]:
    steps = Steps(engine)
    sequence_id = steps.start(prompt_ids, max_tokens)
    steps.finish()
    return steps.bits(sequence_id)


_QUESTIONS = [
    "What is a river?",
    "Tell me about bread.",
    "Who was Ada Lovelace?",
    "Why is the sky blue?",
    "Count to ten.",
]


def test_a_batch_changes_no_bit(exact: Shared, chat: Callable[[str], tuple[int, ...]]) -> None:
    prompts = [chat(question) for question in _QUESTIONS]
    alone = [_alone(exact, prompt, 24) for prompt in prompts]
    steps = Steps(exact)
    staggered = []
    for prompt in prompts:
        staggered.append(steps.start(prompt, 24))
        steps.step(3)
    steps.finish()
    assert [steps.bits(sequence_id) for sequence_id in staggered] == alone


@pytest.mark.deep
def test_neighbour_that_is_aborted_changes_no_bit(exact: Shared, chat: Callable[[str], tuple[int, ...]]) -> None:
    """A step with one aborted sequence is a step alone."""
    prompts = [chat(question) for question in _QUESTIONS]
    alone = [_alone(exact, prompt, 24) for prompt in prompts]
    for prompt, expected in zip(prompts, alone, strict=True):
        steps = Steps(exact)
        kept = steps.start(prompt, 24)
        for _ in range(3):
            victim = steps.start(prompts[0][::-1], 64)
            steps.step(4)
            exact.abort(victim)
            steps.step(2)
        steps.finish()
        assert steps.bits(kept) == expected


@pytest.mark.parametrize("num_neighbours", [9, *(pytest.param(number, marks=pytest.mark.deep) for number in (1, 4))])
def test_prompt_in_pieces_changes_no_bit(exact: Shared, num_neighbours: int) -> None:
    """The cuts of a prompt that takes several steps depend on how many run beside it."""
    if not exact.capabilities.exact:
        pytest.skip("the engine does not promise it on this processor")
    prompt = tuple(range(1000, 1300))
    expected = _alone(exact, prompt, 8)
    steps = Steps(exact)
    for number in range(num_neighbours):
        steps.start((2000 + number, 3, 5, 7), 32)
    steps.step(2)
    pieces = steps.start(prompt, 8)
    steps.finish()
    assert steps.bits(pieces) == expected


@pytest.mark.deep
def test_end_of_text_ends_it_unless_it_is_ignored(exact: Shared, chat: Callable[[str], tuple[int, ...]]) -> None:
    prompt = chat("Answer with one word: is water wet?")
    ends = []
    for number, ignore_eos in enumerate((False, True)):
        sampling = Sampling(temperature=0.0, seed=0, max_tokens=120, ignore_eos=ignore_eos)
        exact.submit(Sequence(number + 1, (prompt,), sampling))
        deltas: list[Delta] = []
        while not deltas or deltas[-1].finish_reason is None:
            deltas += exact.step()
        ends.append((deltas[-1].finish_reason, sum(len(delta.token_ids) for delta in deltas) == 120))
    assert ends == [("stop", False), ("length", True)]


def _answer(engine: Engine, sampling: Sampling, prompt: tuple[int, ...] = (1, 2, 3)) -> list[Delta]:
    deltas: list[Delta] = []
    engine.submit(Sequence(1, (prompt,), sampling))
    while not deltas or deltas[-1].finish_reason is None:
        deltas += engine.step()
    return deltas


def _obeyed(engine: Engine, grammar: Grammar, card: ModelCard, prompt: tuple[int, ...] = (1, 2, 3)) -> str:
    deltas = _answer(engine, Sampling(temperature=0.0, seed=3, max_tokens=60, grammar=grammar), prompt)
    assert deltas[-1].finish_reason == "stop"
    return Tokenizer.from_str(card.tokenizer_json).decode(_ids(deltas))


def test_grammar_is_obeyed(exact: Shared, card: ModelCard, chat: Callable[[str], tuple[int, ...]]) -> None:
    schema = '{"type":"object","properties":{"wet":{"type":"boolean"}},"required":["wet"],"additionalProperties":false}'
    assert "grammar" in exact.capabilities.parameters
    assert re.fullmatch("[a-c]{5}", _obeyed(exact, Grammar("regex", "[a-c]{5}"), card))
    answer = _obeyed(exact, Grammar("json_schema", schema), card, chat("Is water wet? Answer in JSON."))
    assert list(json.loads(answer)) == ["wet"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_without_a_choice_need_no_steps_of_their_own(exact: Shared, temperature: float) -> None:
    """If it is asked how likely each is, they do. The text is the same."""
    text = "The quick brown fox jumps over the lazy dog"
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=60, grammar=Grammar("regex", f"{text}( yes| no)"))
    quick, slow = _answer(exact, sampling), _answer(exact, replace(sampling, logprobs=True))
    assert _ids(quick) == _ids(slow)
    assert len(_ids(slow)) - 1 <= len(slow) <= len(_ids(slow))
    assert len(quick) < len(slow) / 2


@pytest.mark.parametrize("field", ["bad_words", "allowed_token_ids"])
def test_a_token_that_the_request_excludes_is_not_forced(exact: Shared, field: str) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=60, grammar=Grammar("regex", "The quick brown fox"))
    ids = _ids(_answer(exact, sampling))
    excluded: list[Any] = [(ids[2],)] if field == "bad_words" else ids[:2]
    deltas = _answer(exact, replace(sampling, **{field: tuple(excluded)}))
    assert (_ids(deltas), deltas[-1].finish_reason, deltas[-1].failure) == (ids[:2], "error", ALL_EXCLUDED)


def test_a_token_that_ends_the_answer_is_not_forced_too_early(exact: Shared) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=60, grammar=Grammar("regex", "The quick brown fox"))
    ids = _ids(_answer(exact, sampling))
    deltas = _answer(exact, replace(sampling, stop_token_ids=(ids[1],), min_tokens=3))
    assert (_ids(deltas), deltas[-1].failure) == (ids[:1], ALL_EXCLUDED)


def test_an_ambiguous_grammar_ends_its_answer(exact: Shared) -> None:
    """Each of its tokens would take longer than the one before, up to 0.3 s, and the other rows would wait."""
    grammar = Grammar("lark", 'start: ""+ | /[^,]/ start{3}')
    deltas = _answer(exact, Sampling(seed=1, max_tokens=200, grammar=grammar))
    assert (deltas[-1].finish_reason, deltas[-1].failure) == ("error", GRAMMAR_TOO_COMPLEX)


def test_a_grammar_that_nothing_completes_ends_its_answer(exact: Shared) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    source = json.dumps({"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "$defs": {"d": schema}})
    deltas = _answer(exact, Sampling(seed=1, max_tokens=200, grammar=Grammar("json_schema", source)))
    assert (deltas[-1].finish_reason, deltas[-1].failure) == ("error", GRAMMAR_TOO_COMPLEX)


def _ids(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.mark.deep
def test_a_grammar_is_obeyed_when_the_model_is_prepared_and_later(
    spec: EngineSpec, card: ModelCard, tmp_path: Path
) -> None:
    for _ in range(2):
        engine = load_engine(msgspec.structs.replace(spec, cache_path=str(tmp_path)))
        assert re.fullmatch("[a-c]{5}", _obeyed(engine, Grammar("regex", "[a-c]{5}"), card))
        engine.close()


def test_invalid_model_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError):
        load_engine(EngineSpec(engine="openvino", path=str(tmp_path / "model.gguf")))
