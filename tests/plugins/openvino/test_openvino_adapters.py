"""Adapters have exactly the effect of merged weights, also in one step with others. Adapters of another model are
refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engines.lora import random_pairs, save
from tests.plugins.openvino.tiny_models import EXACT, TINY, logits, make, write_gguf
from tests.plugins.openvino.unpacking import unpacked_model

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta
from tailrace.engines.interface import Sequence as Answer
from tailrace.errors import ModelError
from tailrace.models import ModelCard, models_path
from tailrace.types import Sampling
from tailrace_kit.adapters import Adapter, read_adapter
from tailrace_plugins.openvino.decoder import build, layer_names
from tailrace_plugins.openvino.families import Decoder
from tailrace_plugins.openvino.model_files import Bits
from tailrace_plugins.openvino.openvino_adapters import Branches, split_fused
from tailrace_plugins.openvino.prepared import Weights, prepare
from tailrace_plugins.openvino.runner import Piece, Runner

pytestmark = pytest.mark.timeout(300)  # of which nearly all is for a machine that has to fetch the model first

SHAPES = {
    "model.layers.0.self_attn.q_proj": (576, 576),
    "model.layers.3.self_attn.k_proj": (192, 576),
    "model.layers.7.self_attn.v_proj": (192, 576),
    "model.layers.11.self_attn.o_proj": (576, 576),
    "model.layers.19.mlp.gate_proj": (1536, 576),
    "model.layers.23.mlp.up_proj": (1536, 576),
    "model.layers.29.mlp.down_proj": (576, 1536),
}
PROMPT = tuple(range(1000, 1040))
_TINY_PROMPTS = ([5, 6, 7, 8, 9] * 8, [70, 3, 60], list(range(3, 43)))


def _tiny_shapes(*names: str) -> dict[str, tuple[int, int]]:
    """Return the shapes of layers of a tiny model, named by layer and module."""
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "gate_proj": (96, 64)}
    sizes |= {"up_proj": (96, 64), "down_proj": (64, 96), "qkv_proj": (128, 64), "gate_up_proj": (192, 64)}
    return {
        f"model.layers.{layer}.{'self_attn' if kind[0] in 'qkvo' else 'mlp'}.{kind}": sizes[kind]
        for layer, _, kind in (name.partition(" ") for name in names)
    }


_FIRST = _tiny_shapes("0 q_proj", "0 v_proj", "1 k_proj", "1 o_proj", "1 up_proj", "2 gate_proj", "2 down_proj")
_SECOND = _tiny_shapes("0 q_proj", "0 k_proj", "1 down_proj", "2 o_proj", "2 gate_proj")
_FUSED = _tiny_shapes("0 qkv_proj", "1 gate_up_proj", "2 qkv_proj", "2 gate_up_proj", "2 down_proj")


def _adapter(
    path: Path, shapes: Mapping[str, tuple[int, int]], *, strength: float = 1.0, scale: float = 1.0
) -> Adapter:
    return read_adapter(str(save(path, random_pairs(shapes, strength))), scale)


def _runner(
    decoder: Decoder, weights: Weights, adapters: Sequence[Adapter], *, has_lone_form: bool = True, plain: Any = None
) -> Runner:
    names = layer_names(decoder)
    by_long = {long: weights.shape(short) for short, long in names.items()}
    branches = Branches([split_fused(adapter, by_long) for adapter in adapters], names)
    branches.check({name: weights.shape(name) for name in names})
    return Runner(build(decoder, weights, branches), "CPU", EXACT, 8, has_lone_form=has_lone_form, plain=plain)


def _merge(model: Any, adapter: Adapter, sign: float = 1.0) -> None:  # Any: transformers' model
    import torch

    for name, low in adapter.layers.items():
        model.get_submodule(name).weight.data += torch.from_numpy(sign * low.b @ low.a)


def _close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "shapes"), [("llama", _FIRST), ("qwen2", _SECOND), ("olmo2", _FIRST), ("phi3", _FUSED)]
)
def test_it_is_merged_weights(name: str, shapes: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    model = make(TINY[name], tmp_path / "model")
    decoder, weights = prepare(tmp_path / "model", tmp_path / "cache", 128, bits=16)
    adapter = _adapter(tmp_path / "adapter", shapes, scale=0.7)
    runner = _runner(decoder, weights, [adapter])
    prompt = _TINY_PROMPTS[0]
    plain = logits(model, prompt)[-1]
    _merge(model, adapter)
    adapted = logits(model, prompt)[-1]
    assert np.abs(plain - adapted).max() > 0.1
    for number, expected in ((1, adapted), (0, plain)):
        _close(runner.run([Piece(prompt, 0, (0, 1), is_sampled=True, adapter=number)], is_batch=True)[0], expected)
        last = Piece(prompt[-1:], len(prompt) - 1, (0, 1), is_sampled=True, adapter=number)
        _close(runner.run([last], is_batch=False)[0], expected)


def test_rows_of_different_adapters_in_one_step(tmp_path: Path) -> None:
    """Also where both change a layer, and in the last layer, of which only sampled rows are computed."""
    model = make(TINY["llama"], tmp_path / "model")
    decoder, weights = prepare(tmp_path / "model", tmp_path / "cache", 128, bits=16)
    adapters = [_adapter(tmp_path / "a", _FIRST), _adapter(tmp_path / "b", _SECOND, strength=-0.5)]
    runner = _runner(decoder, weights, adapters)
    pieces = [
        Piece(prompt, 0, table, is_sampled=is_sampled, adapter=number)
        for prompt, table, number, is_sampled in (
            (_TINY_PROMPTS[0], (0, 1), 2, True),
            (_TINY_PROMPTS[1], (2,), 0, True),
            (_TINY_PROMPTS[2][:10], (4, 3), 1, False),
            (_TINY_PROMPTS[1], (5,), 1, True),
        )
    ]
    found = np.array(runner.run(pieces, is_batch=True))
    rest = Piece(_TINY_PROMPTS[2][10:], 10, (4, 3), is_sampled=True, adapter=1)
    last = np.array(runner.run([rest, Piece((9,), 3, (5,), is_sampled=True, adapter=1)], is_batch=True))
    _close(found[1], logits(model, _TINY_PROMPTS[1])[-1])
    _merge(model, adapters[0])
    _close(found[2], logits(model, _TINY_PROMPTS[1])[-1])
    _close(last[0], logits(model, _TINY_PROMPTS[2])[-1])
    _close(last[1], logits(model, [*_TINY_PROMPTS[1], 9])[-1])
    _merge(model, adapters[0], -1)
    _merge(model, adapters[1])
    _close(found[0], logits(model, _TINY_PROMPTS[0])[-1])


@pytest.mark.parametrize("bits", [4, *(pytest.param(bits, marks=pytest.mark.deep) for bits in (8, 16))])
def test_a_row_without_an_adapter_has_the_bits_of_a_model_without_adapters(bits: Bits, tmp_path: Path) -> None:
    """Whether or not another row of its step has one. So a replay beside other rows repeats it."""
    make(TINY["llama"], tmp_path / "model")
    decoder, weights = prepare(tmp_path / "model", tmp_path / "cache", 128, bits=bits)
    adapters = [_adapter(tmp_path / "a", _FIRST), _adapter(tmp_path / "b", _SECOND, strength=-0.5)]
    plain = build(decoder, weights, Branches())
    without = Runner(plain, "CPU", EXACT, 8, has_lone_form=True)
    both = _runner(decoder, weights, adapters, plain=plain)
    prompt, other = _TINY_PROMPTS[0], _TINY_PROMPTS[2]
    beside = [Piece(other, 0, (2, 3), is_sampled=True, adapter=number) for number in (0, 0, 1, 2)]
    found = []
    for runner, piece in zip((without, both, both, both), beside, strict=True):
        first = runner.run([Piece(prompt[:30], 0, (0, 1), is_sampled=True), piece], is_batch=True)[0].copy()
        rest = runner.run([Piece(prompt[30:], 30, (0, 1), is_sampled=True), piece], is_batch=True)[0].copy()
        lone = runner.run([Piece((7,), len(prompt), (0, 1), is_sampled=True)], is_batch=False)[0].copy()
        found.append([first, rest, lone])
    for runs in found[1:]:
        np.testing.assert_array_equal(runs, found[0])


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights(bits: int, tmp_path: Path) -> None:
    """Four bits of a file that has sums, and eight: the adapter itself is never rounded."""
    import torch

    model = make(TINY["llama"], tmp_path / "model")
    kind = "Q4_1" if bits == 4 else "Q5_0"
    file = write_gguf(TINY["llama"], model, tmp_path / "tiny.gguf", lambda name: kind)
    decoder, weights = prepare(file, tmp_path / "cache", 128)
    adapter = _adapter(tmp_path / "adapter", _FIRST)
    for name, values in unpacked_model(weights, decoder.num_layers).items():
        model.get_submodule(name).weight.data.copy_(torch.from_numpy(values))
    _merge(model, adapter)
    runner = _runner(decoder, weights, [adapter], has_lone_form=False)
    found = runner.run([Piece(_TINY_PROMPTS[0], 0, (0, 1), is_sampled=True, adapter=1)], is_batch=True)[0]
    _close(found, logits(model, _TINY_PROMPTS[0])[-1])


@pytest.mark.deep
def test_the_default_model(smollm2_dir: Path, card: ModelCard, tmp_path: Path) -> None:
    """As transformers computes with the packed weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    decoder, weights = prepare(Path(card.path), models_path().parent / "prepared", 128)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for name, values in unpacked_model(weights, decoder.num_layers).items():
        own = model.get_submodule(name).weight
        assert np.corrcoef(values.ravel(), own.detach().numpy().ravel())[0, 1] > 0.99, name
        own.data.copy_(torch.from_numpy(values))
    adapter = _adapter(tmp_path / "adapter", SHAPES)
    runner = _runner(decoder, weights, [adapter])
    _close(runner.run([Piece(PROMPT, 0, (0, 1), is_sampled=True)], is_batch=True)[0], logits(model, [*PROMPT])[-1])
    _merge(model, adapter)
    piece = Piece(PROMPT, 0, (0, 1), is_sampled=True, adapter=1)
    _close(runner.run([piece], is_batch=True)[0], logits(model, [*PROMPT])[-1])


@pytest.fixture(scope="module")
def spec(card: ModelCard) -> EngineSpec:
    return EngineSpec(
        engine="openvino",
        path=str(card.path),
        context_tokens=128,
        kv_tokens=512,
        max_sequences=2,
        kv_precision="f32",
        eos_token_ids=card.eos_token_ids,
        cache_path=str(models_path().parent / "prepared"),
    )


def _answer(spec: EngineSpec) -> list[tuple[int, float]]:
    engine = load_engine(spec)
    assert not (spec.adapters and engine.capabilities.exact)
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=8, ignore_eos=True, logprobs=True)
    engine.submit(Answer(1, (PROMPT,), sampling))
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += engine.step()
    engine.close()
    return [pair for delta in deltas for pair in zip(delta.token_ids, delta.logprobs, strict=True)]


@pytest.mark.deep
def test_it_changes_answers_and_with_scale_zero_it_does_not(spec: EngineSpec, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", random_pairs(SHAPES, 1.0))
    plain, adapted, none_of_it = (
        _answer(msgspec.structs.replace(spec, adapters=adapters, adapter_scale=scale))
        for adapters, scale in (({}, 1.0), ({"": str(directory)}, 1.0), ({"": str(directory)}, 0.0))
    )
    assert none_of_it == plain
    assert [token_id for token_id, _ in adapted] != [token_id for token_id, _ in plain]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.30.self_attn.q_proj", "no linear layer model.layers.30"),
        ("transformer.h.0.attn.c_attn", "no linear layer transformer"),
        ("model.layers.0.self_attn.qkv_proj", "no linear layer model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.k_proj", "the shape 576 x 576, but the model's has 192 x 576"),
    ],
)
def test_another_models(name: str, reason: str, spec: EngineSpec, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", random_pairs({name: (576, 576)}, 1.0))
    with pytest.raises(ModelError, match=rf"adapter_model\.safetensors cannot be used: .*{reason}"):
        load_engine(msgspec.structs.replace(spec, adapters={"": str(directory)}))
