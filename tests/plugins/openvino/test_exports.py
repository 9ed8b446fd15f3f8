"""OpenVINO exports run with paged attention, and compute what transformers computes."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops
from tests.engines.lora import random_pairs, save
from tests.missing import needs
from tests.plugins.openvino.exporting import export
from tests.plugins.openvino.tiny_models import EXACT, TINY, greedy, logits, make

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Sequence
from tailrace.errors import ModelError
from tailrace.types import Sampling
from tailrace_kit.adapters import read_adapter
from tailrace_plugins.openvino.exports import read_export
from tailrace_plugins.openvino.runner import Piece, Runner

pytestmark = needs("torch", "transformers")

_PROMPT = [int(token_id) for token_id in np.random.default_rng(3).integers(3, 96, 40)]
_TABLE = (3, 1)


def _close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-3)


_OTHERS = ("llama", "qwen3", "granite", "smollm3", "olmo2")


@pytest.mark.parametrize(
    "name", ["llama with biases and wide heads", *(pytest.param(name, marks=pytest.mark.deep) for name in _OTHERS)]
)
def test_it_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """In one piece, in several, and in a step of one row."""
    model = make(TINY[name], tmp_path / "model")
    runner = Runner(read_export(export(model, tmp_path / "export")), "CPU", EXACT, 8, has_lone_form=True)
    assert runner.vocab_size == 96
    expected = logits(model, _PROMPT)
    for cuts in ([0, 40], [0, 7, 33, 40]):
        for first, last in pairwise(cuts):
            piece = Piece(_PROMPT[first:last], first, _TABLE, is_sampled=True)
            _close(runner.run([piece], is_batch=True)[0], expected[last - 1])
    for is_batch in (True, False):
        piece = Piece(_PROMPT[-1:], len(_PROMPT) - 1, _TABLE, is_sampled=True)
        _close(runner.run([piece], is_batch=is_batch)[0], expected[-1])
    pieces = [Piece(_PROMPT[:5], 0, (0,), is_sampled=True), Piece(_PROMPT[-1:], 39, _TABLE, is_sampled=True)]
    for found, last in zip(runner.run(pieces, is_batch=True), (4, 39), strict=True):
        _close(found, expected[last])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:  # Any: transformers' model
    """A model and its export."""
    directory = tmp_path_factory.mktemp("llama")
    model = make(TINY["llama"], directory / "model")
    return model, export(model, directory / "export")


@pytest.mark.deep
def test_adapters(llama: tuple[Any, Path], tmp_path: Path) -> None:
    import torch

    model, exported = llama
    shapes = {
        "model.layers.0.self_attn.q_proj": (64, 64),
        "model.layers.1.mlp.up_proj": (96, 64),
        "model.layers.2.mlp.down_proj": (64, 96),
    }
    adapters = [
        read_adapter(str(save(tmp_path / name, random_pairs(shapes, strength))), 1.0)
        for name, strength in (("a", 1.0), ("b", -0.5))
    ]
    runner = Runner(read_export(exported, adapters), "CPU", EXACT, 8, has_lone_form=False)
    pieces = [Piece(_PROMPT, 0, (2 * number, 2 * number + 1), is_sampled=True, adapter=number) for number in (0, 1, 2)]
    found = np.array(runner.run(pieces, is_batch=True))
    _close(found[0], logits(model, _PROMPT)[-1])
    for adapter, own in zip(adapters, found[1:], strict=True):
        changed = {name: model.get_submodule(name).weight for name in shapes}
        before = {name: weight.data.clone() for name, weight in changed.items()}
        for name, weight in changed.items():
            weight.data += torch.from_numpy(adapter.layers[name].b @ adapter.layers[name].a)
        _close(own, logits(model, _PROMPT)[-1])
        for name, weight in changed.items():
            weight.data.copy_(before[name])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.3.self_attn.q_proj", "no linear layer model.layers.3"),
        ("model.layers.0.self_attn.k_proj", "the shape 64 x 64, but the model's has 32 x 64"),
    ],
)
def test_another_models_adapter(name: str, reason: str, llama: tuple[Any, Path], tmp_path: Path) -> None:
    _, exported = llama
    adapter = read_adapter(str(save(tmp_path / "adapter", random_pairs({name: (64, 64)}, 1.0))), 1.0)
    with pytest.raises(ModelError, match=rf"adapter_model\.safetensors cannot be used: .*{reason}"):
        read_export(exported, [adapter])


@pytest.mark.deep
def test_an_export_without_its_cache(tmp_path: Path) -> None:
    exported = export(make(TINY["llama"], tmp_path / "model"), tmp_path / "export", has_cache=False)
    with pytest.raises(ModelError, match=r"export was exported without its cache.*text-generation-with-past\."):
        read_export(exported)


def test_a_model_that_is_no_decoder(tmp_path: Path) -> None:
    """It has a state, but no attention."""
    given = ops.parameter([-1, -1], np.float32, name="input_ids")
    given.output(0).get_tensor().set_names({"input_ids"})
    past = ops.read_value(ops.constant(np.zeros((1, 8), np.float32)), "past", np.float32, ov.PartialShape([1, 8]))
    sums = ops.softmax(ops.add(given, past), 1)
    ov.save_model(ov.Model([ops.result(sums)], [ops.assign(sums, "past")], [given]), tmp_path / "openvino_model.xml")
    with pytest.raises(ModelError, match=r"cannot be used: its attention is not that of a decoder"):
        read_export(tmp_path)


def test_the_engine(tiny_gpt2_dir: Path, tmp_path: Path) -> None:
    """A model of a family for which the engine has no graph of its own."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir, attn_implementation="eager")
    exported = export(model, tmp_path / "export")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_gpt2_dir / name, exported)
    engine = load_engine(
        EngineSpec(engine="openvino", path=str(exported), context_tokens=128, kv_tokens=512, kv_precision="f32")
    )
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
    prompts = [_PROMPT, _PROMPT[:3]]
    for number, prompt in enumerate(prompts):
        engine.submit(Sequence(number, (tuple(prompt),), sampling))
    deltas: list[Delta] = []
    while sum(delta.finish_reason is not None for delta in deltas) < len(prompts):
        deltas += engine.step()
    engine.close()
    for number, prompt in enumerate(prompts):
        found = [token_id for delta in deltas if delta.sequence_id == number for token_id in delta.token_ids]
        assert found == greedy(model, prompt, 12)
