"""The default settings: exact, with the prefix cache. The cache never changes an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.plugins.openvino.pairs import PIECES, tiny_tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.types import Sampling

pytestmark = pytest.mark.timeout(300)  # of which nearly all is for a machine that has to fetch the model first

Bits = list[tuple[int, float]]


@pytest.fixture(scope="module", params=["tiny", pytest.param("default", marks=pytest.mark.deep)])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def spec(request: pytest.FixtureRequest, model: str) -> EngineSpec:
    small: EngineSpec = request.getfixturevalue("tiny_spec" if model == "tiny" else "openvino_spec")
    return msgspec.structs.replace(small, context_tokens=1024, exact=True, never_alone=True)


@pytest.fixture(scope="module")
def ids(model: str) -> Callable[[int, int], tuple[int, ...]]:
    """Return ids of the model, from a number to before another."""
    vocab_size = PIECES if model == "tiny" else 40_000
    return lambda first, end: tuple(1 + number % (vocab_size - 1) for number in range(first, end))


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, model: str) -> Callable[[str], tuple[int, ...]]:
    """Return the ids of a text."""
    if model == "tiny":
        tokenizer = tiny_tokenizer()
        return lambda text: tuple(tokenizer.encode(text).ids)
    chat: Callable[[str], tuple[int, ...]] = request.getfixturevalue("chat")
    return chat


@pytest.fixture(scope="module")
def cached(spec: EngineSpec) -> Iterator[Engine]:
    engine = load_engine(spec)
    if not engine.capabilities.exact:
        engine.close()
        pytest.skip("the engine does not promise it on this processor")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(spec: EngineSpec) -> Iterator[Callable[[tuple[int, ...], int | None], Bits]]:
    """Return the answer of an engine without a cache that processes each prompt in one step."""
    engine = load_engine(msgspec.structs.replace(spec, prefix_cache=False, max_step_tokens=1024))
    yield lambda prompt_ids, seed: _run(engine, [prompt_ids], [seed])[0]
    engine.close()


_next_id = iter(range(1, 2**31))


def _submit(engine: Engine, prompt_ids: tuple[int, ...], seed: int | None, max_tokens: int = 16) -> int:
    sequence_id = next(_next_id)
    temperature = 0.0 if seed is None else 1.0
    sampling = Sampling(temperature=temperature, seed=seed or 0, max_tokens=max_tokens, ignore_eos=True, logprobs=True)
    engine.submit(Sequence(sequence_id, (prompt_ids,), sampling))
    return sequence_id


def _run(engine: Engine, prompts: list[tuple[int, ...]], seeds: list[int | None], *, apart: int = 0) -> list[Bits]:
    """The answers to prompts that come so many steps apart."""
    deltas: list[Delta] = []
    started = []
    for prompt_ids, seed in zip(prompts, seeds, strict=True):
        started.append(_submit(engine, prompt_ids, seed))
        for _ in range(apart):
            deltas += engine.step()
    while sum(delta.finish_reason is not None for delta in deltas) < len(started):
        deltas += engine.step()
    engine.step()
    return [
        [pair for delta in deltas if delta.sequence_id == each for pair in zip(delta.token_ids, delta.logprobs)]  # noqa: B905
        for each in started
    ]


_LENGTHS = (33, *(pytest.param(length, marks=pytest.mark.deep) for length in (5, 32, 64, 65, 129, 160, 257, 300)))


@pytest.mark.parametrize("length", _LENGTHS)
def test_repeated_prompt(
    cached: Engine, alone: Callable[..., Bits], ids: Callable[[int, int], tuple[int, ...]], length: int
) -> None:
    """Among them those of which one token is left, and those that take several steps."""
    prompt = ids(1000 + length, 1000 + 2 * length)
    expected = alone(prompt, None)
    for apart in (0, 1, 4):
        assert _run(cached, [prompt, (5, 6, 7), prompt], [None, 1, None], apart=apart)[::2] == [expected] * 2


@pytest.mark.parametrize("apart", [1, *(pytest.param(steps, marks=pytest.mark.deep) for steps in (0, 2))])
def test_same_prompt_with_several_seeds(
    cached: Engine, alone: Callable[..., Bits], told: Callable[[str], tuple[int, ...]], apart: int
) -> None:
    prompt = told(f"Tell me {apart + 2} things about rivers, about mills and about the dogs that sleep beside them.")
    seeds = [3, 4, None, 5]
    assert _run(cached, [prompt] * 4, seeds, apart=apart) == [alone(prompt, seed) for seed in seeds]


def test_follow_up_turn(cached: Engine, alone: Callable[..., Bits], told: Callable[[str], tuple[int, ...]]) -> None:
    prompt = told("What is bread?")
    for question in ("And tea?", "Why?"):
        (answer,) = _run(cached, [prompt], [None])
        assert answer == alone(prompt, None)
        prompt = (*prompt, *(token_id for token_id, _ in answer), *told(question))


@pytest.mark.deep
def test_prompt_that_was_aborted_in_the_middle(
    cached: Engine, alone: Callable[..., Bits], ids: Callable[[int, int], tuple[int, ...]]
) -> None:
    for place in range(2):
        prompt = ids(3000 + 400 * place, 3300 + 400 * place)
        neighbours = [_submit(cached, (7, 8, 9, place + number), None, 64) for number in range(3)]
        cached.step()
        cached.step()
        victim = _submit(cached, prompt, None)
        cached.step()
        for each in (victim, *neighbours):
            cached.abort(each)
        while cached.step():
            pass
        assert _run(cached, [prompt], [None]) == [alone(prompt, None)]


def test_a_short_prompt_does_not_wait_for_a_long_one(
    cached: Engine, ids: Callable[[int, int], tuple[int, ...]]
) -> None:
    long = _submit(cached, ids(7000, 7900), None, 1)
    cached.step()
    short = _submit(cached, (5, 6, 7, 8, 9), None, 1)
    assert [[delta.sequence_id for delta in cached.step()] for _ in range(2)] == [[short], []]
    assert [delta.sequence_id for _ in range(9) for delta in cached.step()] == [long]
