"""OpenVINO with prompt lookup: the laws, several tokens per step, and no tokens after an end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.engines.shared import ON_ITS_OWN, SHARED_LAWS, Shared
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Sequence
from tailrace.engines.schedule import FREE, Schedule
from tailrace.models import ModelCard
from tailrace.testing import Law, laws
from tailrace.types import Grammar, Sampling

pytestmark = pytest.mark.timeout(300)  # of which nearly all is for a machine that has to fetch the model first

TEXT = (
    "The river rises in the hills above the town. It flows past three old mills, a stone bridge and a small harbour. "
    "In spring the water is high and brown; in summer children swim below the bridge."
)


@pytest.fixture(scope="module")
def spec(openvino_spec: EngineSpec) -> EngineSpec:
    return msgspec.structs.replace(openvino_spec, prompt_lookup_tokens=5, exact=True)


@pytest.fixture(scope="module")
def engine(spec: EngineSpec) -> Iterator[Shared]:
    engine = load_engine(spec)
    yield Shared(engine)
    engine.close()


@pytest.mark.deep
@pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
def test_engine_keeps(law: Law, engine: Shared) -> None:
    if not law.applies_to(engine.capabilities):
        pytest.skip("an engine that is not exact does not promise it")
    law(engine, vocab_size=40_000, num_sequences=64)


@pytest.mark.deep
def test_closing(spec: EngineSpec) -> None:
    next(law for law in laws if law.name == ON_ITS_OWN)(lambda: load_engine(spec), vocab_size=40_000)


@pytest.mark.deep
@pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
def test_engine_without_a_prefix_cache_keeps(law: Law, spec: EngineSpec) -> None:
    engine = load_engine(msgspec.structs.replace(spec, prefix_cache=False))
    if law.applies_to(engine.capabilities):
        law(Shared(engine), vocab_size=40_000, num_sequences=64)
    engine.close()


def _answer(engine: Shared, prompt_ids: tuple[int, ...], sampling: Sampling, schedule: Schedule = FREE) -> list[Delta]:
    deltas: list[Delta] = []
    engine.submit(Sequence(1, (prompt_ids,), sampling, schedule))
    while not deltas or deltas[-1].finish_reason is None:
        deltas += engine.step()
    return deltas


def _ids(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.mark.deep
def test_it_gives_several_tokens_and_none_after_an_end(
    engine: Shared, card: ModelCard, chat: Callable[[str], tuple[int, ...]]
) -> None:
    """Answers that repeat an earlier turn up to its end."""
    tokenizer = Tokenizer.from_str(card.tokenizer_json)
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=100)
    most = 0
    for text in (TEXT, f"Look. {TEXT}", f"Look here. {TEXT}", f"Look over here. {TEXT}"):
        turn = chat(f"Repeat this text word for word: {text}")
        answered = (*turn, *tokenizer.encode(f"{text}<|im_end|>\n", add_special_tokens=False).ids)
        deltas = _answer(engine, (*answered, *turn), sampling)
        *before, end = (token_id in card.eos_token_ids for token_id in _ids(deltas))
        assert (deltas[-1].finish_reason, any(before), end) == ("stop", False, True)
        most = max(most, *(len(delta.token_ids) for delta in deltas))
    assert most == 6


@pytest.mark.deep
def test_grammar_is_obeyed(engine: Shared, card: ModelCard, chat: Callable[[str], tuple[int, ...]]) -> None:
    sampling = Sampling(temperature=0.0, seed=3, max_tokens=60, grammar=Grammar("regex", "(river mill ){4}bridge"))
    deltas = _answer(engine, chat(f"river mill river mill river mill. {TEXT}"), sampling)
    text = Tokenizer.from_str(card.tokenizer_json).decode(_ids(deltas))
    assert deltas[-1].finish_reason == "stop"
    assert re.fullmatch("(river mill ){4}bridge", text)
    assert max(len(delta.token_ids) for delta in deltas) > 1


@pytest.mark.deep
def test_a_seed_repeats_its_answer(engine: Shared, chat: Callable[[str], tuple[int, ...]]) -> None:
    prompt = chat(f"Repeat this text word for word: {TEXT}")
    first, again, other = (
        _ids(_answer(engine, prompt, Sampling(temperature=0.7, seed=seed, max_tokens=40))) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.deep
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guesses_change_no_token(
    engine: Shared, openvino_spec: EngineSpec, chat: Callable[[str], tuple[int, ...]], temperature: float
) -> None:
    """A row with guesses runs in a batch, so it is compared with one that never runs alone."""
    if not engine.capabilities.exact:
        pytest.skip("an engine that is not exact does not promise it")
    prompts = [
        chat(f"Repeat this text word for word: {TEXT}"),
        chat("Count to ten, twice."),
        tuple(range(500, 540)) * 2,
    ]
    sampling = [Sampling(temperature=temperature, seed=seed, max_tokens=48, logprobs=True) for seed in range(3)]
    plain = load_engine(msgspec.structs.replace(openvino_spec, exact=True, never_alone=True))
    try:
        without = [_answer(Shared(plain), *asked) for asked in zip(prompts, sampling, strict=True)]
    finally:
        plain.close()
    # The first engine runs a row alone when it has no guess, unless the schedule says otherwise.
    guessed = [_answer(engine, *asked, Schedule((48,))) for asked in zip(prompts, sampling, strict=True)]
    assert [_ids(deltas) for deltas in guessed] == [_ids(deltas) for deltas in without]
    assert max(len(delta.token_ids) for deltas in guessed for delta in deltas) > 1
