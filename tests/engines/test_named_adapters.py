"""Rows of different adapters in one step, chosen by name: each has the tokens that it has alone with only its own
adapter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from tests.engines.lora import random_pairs, save
from tests.plugins.openvino.tiny_models import TINY, make
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Engine, Sequence
from tailrace.types import Sampling

_NUMBERS = itertools.count(1)
PROMPT = tuple(range(5, 75))
LLAMA = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.down_proj": (64, 96)}
GPT2 = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.mlp.c_fc": (128, 32)}


@pytest.fixture(params=["openvino", pytest.param("transformers", marks=pytest.mark.deep)])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> EngineSpec:
    """A tiny model with the adapters a, b, and one of all requests that name none."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    name: str = request.param
    if name == "openvino":
        make(TINY["llama"], tmp_path / "model")
        words = WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0")
        Tokenizer(words).save(str(tmp_path / "model" / "tokenizer.json"))
        path, shapes = tmp_path / "model", LLAMA
    else:
        path, shapes = request.getfixturevalue("tiny_gpt2_dir"), GPT2
    strengths = {"": 1.5, "a": 3.0, "b": -2.0}
    adapters = {
        key: str(save(tmp_path / f"adapter{key}", random_pairs(shapes, strength)))
        for key, strength in strengths.items()
    }
    return EngineSpec(
        name, str(path), context_tokens=128, kv_tokens=2048, max_sequences=8, threads=1, adapters=adapters,
        cache_path=str(tmp_path), eos_token_ids=(2,), exact=True,
        never_alone=True, weight_bits=16, kv_precision="f32" if name == "openvino" else "",
    )  # fmt: skip


def _run(engine: Engine, *adapters: str) -> list[tuple[list[int], int]]:
    """Run the same prompt with several adapters at once. Returns the tokens, and how much of the prompt was cached."""
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=8, ignore_eos=True)
    ids: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    for adapter, number in zip(adapters, _NUMBERS, strict=False):
        engine.submit(Sequence(number, (PROMPT,), sampling, adapter=adapter))
        ids[number] = []
    left = set(ids)
    while left:
        for delta in engine.step():
            ids[delta.sequence_id] += delta.token_ids
            cached[delta.sequence_id] = cached.get(delta.sequence_id, 0) + (delta.num_cached_tokens or 0)
            if delta.finish_reason is not None:
                left.remove(delta.sequence_id)
    return [(ids[number], cached[number]) for number in ids]


def _load(spec: EngineSpec, adapters: Mapping[str, str]) -> Engine:
    return load_engine(msgspec.structs.replace(spec, adapters=dict(adapters)))


def test_each_row_has_its_own(spec: EngineSpec) -> None:
    alone = {}
    for name, path in spec.adapters.items():
        engine = _load(spec, {"": path})
        ((alone[name], _),) = _run(engine, "")
        engine.close()
    assert len(set(map(tuple, alone.values()))) == 3, "the adapters change the answer"
    engine = _load(spec, spec.adapters)
    wanted = ("a", "", "b", "a", "")
    for _ in range(2):  # the second time, prompts may be cached
        assert [ids for ids, _ in _run(engine, *wanted)] == [alone[name] for name in wanted]
    engine.close()


def test_without_a_name_there_is_none(spec: EngineSpec) -> None:
    plain = _load(spec, {})
    expected = _run(plain, "")[0][0]
    plain.close()
    engine = _load(spec, {"a": spec.adapters["a"]})
    found = [ids for ids, _ in _run(engine, "", "a")]
    engine.close()
    assert found[0] == expected != found[1]


def test_no_other_row_has_cached_its_prompt(spec: EngineSpec) -> None:
    engine = _load(spec, spec.adapters)
    _run(engine, "a")
    same, *others = [num_cached for _, num_cached in _run(engine, "a", "b", "")]
    engine.close()
    assert others == [0, 0]
    assert same == (64 if spec.engine == "openvino" else 0)
