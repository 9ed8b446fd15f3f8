"""How likely the tokens of a prompt are: as transformers computes it, whatever runs beside, and however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from tests.missing import needs
from tests.plugins.openvino.tiny_models import TINY, logits, make

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.types import Sampling

pytestmark = needs("torch", "transformers")

_PROMPT = tuple(int(token_id) for token_id in np.random.default_rng(3).integers(3, 96, 150))  # more than two pieces
_NEAR = 1e-3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(path: Path) -> Any:  # Any: transformers' model
    return make(TINY["llama"], path / "model")


@pytest.fixture(scope="module")
def engine(path: Path, model: Any) -> Iterator[Engine]:
    characters = {chr(0x21 + number): number for number in range(94)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(characters | {"aa": 94, "bb": 95}, []))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(path / "model" / "tokenizer.json"))
    spec = EngineSpec(
        "openvino",
        str(path / "model"),
        context_tokens=256,
        kv_tokens=2048,
        weight_bits=16,
        kv_precision="f32",
        cache_path=str(path),
    )
    engine = load_engine(spec)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(model: Any) -> NDArray[np.float64]:
    """The logprobs after each token, (tokens, vocabulary)."""
    found = logits(model, [*_PROMPT]).astype(np.float64)
    shifted = found - found.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _run(engine: Engine, *sequences: Sequence) -> dict[int, list[Delta]]:
    deltas: dict[int, list[Delta]] = {one.sequence_id: [] for one in sequences}
    for one in sequences:
        engine.submit(one)
    while not all(own and own[-1].finish_reason for own in deltas.values()):
        for delta in engine.step():
            deltas[delta.sequence_id].append(delta)
    return deltas


def _asked(count: int | None, *, max_tokens: int = 3) -> Sampling:
    return Sampling(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=count)


def test_they_are_those_of_transformers(engine: Engine, expected: NDArray[np.float64]) -> None:
    short = _PROMPT[:40]
    _run(engine, Sequence(1, (_PROMPT,), _asked(None)))  # whose blocks are cached now
    deltas = _run(
        engine,
        Sequence(2, (_PROMPT,), _asked(5)),
        Sequence(3, (short,), _asked(0)),
        Sequence(4, (short,), _asked(None)),
    )
    first, *others = deltas[2]
    assert not any(delta.prompt_logprobs for delta in (*others, *deltas[4]))
    for ids, found, count in ((_PROMPT, first.prompt_logprobs, 5), (short, deltas[3][0].prompt_logprobs, 0)):
        assert len(found) == len(ids) - 1
        for token_id, one, row in zip(ids[1:], found, expected, strict=False):
            assert one.logprob == pytest.approx(row[token_id], abs=_NEAR)
            assert abs(one.rank - (1 + int((row > row[token_id]).sum()))) <= 1
            assert [value for _, value in one.top] == pytest.approx(sorted(row)[::-1][:count], abs=_NEAR)
            assert all(value == pytest.approx(row[top_id], abs=_NEAR) for top_id, value in one.top)
    assert [delta.token_ids for delta in deltas[3]] == [delta.token_ids for delta in deltas[4]]


def test_a_prompt_of_one_token_has_none(engine: Engine) -> None:
    (delta,) = _run(engine, Sequence(5, ((7,),), _asked(2, max_tokens=1)))[5]
    assert (delta.prompt_logprobs, len(delta.token_ids)) == ((), 1)
