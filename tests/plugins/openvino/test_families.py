"""Each family computes what transformers computes, from its Hugging Face directory and from a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.missing import needs
from tests.plugins.openvino.tiny_models import CONTEXT_TOKENS, EXACT, TINY, greedy, logits, make, write_gguf

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Sequence
from tailrace.errors import ModelError
from tailrace.types import Sampling
from tailrace_plugins.openvino.decoder import build
from tailrace_plugins.openvino.families import ARCHITECTURES, GGUF_ARCHITECTURES, read_decoder
from tailrace_plugins.openvino.openvino_adapters import Branches
from tailrace_plugins.openvino.prepared import prepare
from tailrace_plugins.openvino.runner import Piece, Runner

pytestmark = needs("torch", "transformers")

_PROMPT = [int(token_id) for token_id in np.random.default_rng(3).integers(3, 96, 70)]
_TABLE = (5, 0, 3, 1)  # blocks need not be in order
_COUNT = 20


class _Expected(NamedTuple):
    path: Path
    model: Any  # Any: transformers' model
    logits: NDArray[np.float32]
    tokens: list[int]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], _Expected]:
    made: dict[str, _Expected] = {}

    def find(name: str) -> _Expected:
        if name not in made:
            path = tmp_path_factory.mktemp("tiny") / "model"
            model = make(TINY[name], path)
            made[name] = _Expected(path, model, logits(model, _PROMPT), greedy(model, _PROMPT, _COUNT))
        return made[name]

    return find


def test_every_family_is_here() -> None:
    assert {tiny.architecture for tiny in TINY.values() if tiny.architecture} == set(GGUF_ARCHITECTURES)
    assert {tiny.kind.lower() for tiny in TINY.values()} == {name.removesuffix("_text") for name in ARCHITECTURES}


_QUICK = ("llama", "qwen2", "gemma3", "phi3 long", "granite")  # the others differ from one of these in a setting or two


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.deep) for name in TINY]
)
def test_a_directory(name: str, expected: Callable[[str], _Expected], tmp_path: Path) -> None:
    _check(expected(name), expected(name).path, tmp_path)


_GGUF = [name for name, tiny in TINY.items() if tiny.architecture]
_DEEP = [pytest.param(name, marks=() if name in ("llama", "gemma3") else pytest.mark.deep) for name in _GGUF]


@pytest.mark.parametrize("name", _DEEP)
def test_a_gguf_file(name: str, expected: Callable[[str], _Expected], tmp_path: Path) -> None:
    file = write_gguf(TINY[name], expected(name).model, tmp_path / "tiny.gguf")
    _check(expected(name), file, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("name", _GGUF)
def test_llama_cpp_reads_the_file_in_the_same_way(
    name: str, expected: Callable[[str], _Expected], tmp_path: Path
) -> None:
    """So these files are as its own conversion would write them."""
    pytest.importorskip("tailrace_plugins.llamacpp.llamacpp_engine")
    model = expected(name).model
    file = write_gguf(TINY[name], model, tmp_path / "tiny.gguf")
    engine = load_engine(
        EngineSpec(
            engine="llamacpp",
            path=str(file),
            context_tokens=CONTEXT_TOKENS,
            kv_tokens=CONTEXT_TOKENS,
            max_sequences=1,
            threads=1,
        )
    )
    engine.submit(Sequence(1, (tuple(_PROMPT),), Sampling(temperature=0.0, seed=0, max_tokens=_COUNT, ignore_eos=True)))
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += engine.step()
    engine.close()
    tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    likely = logits(model, [*_PROMPT, *tokens])[len(_PROMPT) - 1 : -1]
    likely[:, model.config.eos_token_id] = -np.inf
    assert len(tokens) == _COUNT
    for token_id, row in zip(tokens, likely, strict=True):
        assert row.max() - row[token_id] < 0.05  # it rounds keys and values to 16 bits


_SHAPE = {
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
_LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [float(number) for number in range(1, 9)]}
_OLDER: dict[str, dict[str, Any]] = {  # as earlier versions of transformers wrote them. Any: JSON
    "llama": {"rope_theta": 500_000.0, "rope_scaling": _LLAMA3, "head_dim": None, "hidden_act": "silu"},
    "mistral": {"rope_theta": 1_000_000.0, "sliding_window": 512},
    "qwen2": {"rope_theta": 1_000_000.0, "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 5},
    "qwen3": {"rope_theta": 1_000_000.0, "use_sliding_window": False, "sliding_window": None, "head_dim": 32},
    "gemma3_text": {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 20_000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 4,
        "sliding_window": 512,
        "head_dim": 32,
        "query_pre_attn_scalar": 168,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi3": {"rope_theta": 10_000.0, "rope_scaling": _LONG, "original_max_position_embeddings": 1024},
    "granite": {"rope_theta": 10_000.0, "rope_scaling": None, "logits_scaling": 8.0, "attention_multiplier": 0.25},
    "smollm3": {"rope_theta": 5_000_000.0, "no_rope_layer_interval": 3},
    "olmo2": {"rope_theta": 500_000.0},
}


@pytest.mark.parametrize("context_tokens", [1024, 4096])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_older_configurations(family: str, context_tokens: int) -> None:
    """transformers reads them, and writes them in its present form."""
    import transformers

    older = {"model_type": family} | _SHAPE | _OLDER[family]
    present = transformers.AutoConfig.for_model(family, **deepcopy(_SHAPE | _OLDER[family])).to_dict()
    assert read_decoder(older, context_tokens) == read_decoder(present, context_tokens)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "type gpt2"),
        ({"hidden_act": "relu"}, "activation relu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "positions of the type dynamic"),
        ({"rms_norm_eps": None}, "incomplete"),
        (
            {"model_type": "gemma3_text", "sliding_window": 4, "final_logit_softcapping": 30.0},
            "final_logit_softcapping",
        ),
    ],
)
def test_what_is_not_computed(changes: dict[str, Any], reason: str) -> None:  # Any: JSON
    with pytest.raises(ModelError, match=reason):
        read_decoder({"model_type": "llama"} | _SHAPE | changes, 1024)


def _check(expected: _Expected, path: Path, tmp_path: Path) -> None:
    """In one piece, in several, and token by token, as steps of one row."""
    runner = _runner(path, tmp_path)
    for cuts, is_batch in (((), True), ((1, 32, 33, 40), True), (range(1, len(_PROMPT)), False)):
        for first, last in pairwise([0, *cuts, len(_PROMPT)]):
            found = _next(runner, first, _PROMPT[first:last], is_batch=is_batch)
            wanted = expected.logits[last - 1]
            np.testing.assert_allclose(found, wanted, atol=1e-3, rtol=1e-3, err_msg=f"{first}:{last}")
        tokens: list[int] = []
        while len(tokens) < _COUNT:
            tokens.append(int(found.argmax()))
            found = _next(runner, len(_PROMPT) + len(tokens) - 1, tokens[-1:], is_batch=is_batch)
        assert tokens == expected.tokens


def _runner(path: Path, tmp_path: Path) -> Runner:
    decoder, weights = prepare(path, tmp_path / "cache", CONTEXT_TOKENS, bits=16)
    return Runner(build(decoder, weights, Branches()), "CPU", EXACT, 8, has_lone_form=True)


def _next(runner: Runner, past: int, token_ids: list[int], *, is_batch: bool = True) -> NDArray[np.float32]:
    return np.array(runner.run([Piece(token_ids, past, _TABLE, is_sampled=True)], is_batch=is_batch)[0])
