"""Adapters in OpenVINO have exactly the right effect. Adapters of another model are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import openvino as ov
import pytest
from tests.engines.lora import random_pairs, save

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.adapters import read_adapter
from tailrace.engines.interface import Delta, Sequence
from tailrace.engines.openvino.adapters import named_layers, write_adapted
from tailrace.engines.openvino.merging import linear_layers
from tailrace.errors import ModelError
from tailrace.models import ModelCard, models_path
from tailrace.types import Sampling

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
    assert not (spec.adapter and engine.capabilities.exact)
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=8, ignore_eos=True, logprobs=True)
    engine.submit(Sequence(1, PROMPT, sampling))
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += engine.step()
    engine.close()
    return [pair for delta in deltas for pair in zip(delta.token_ids, delta.logprobs, strict=True)]


@pytest.mark.deep
def test_it_changes_answers_and_with_scale_zero_it_does_not(spec: EngineSpec, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", random_pairs(SHAPES, 1.0))
    plain, adapted, none_of_it = (
        _answer(msgspec.structs.replace(spec, adapter=adapter, adapter_scale=scale))
        for adapter, scale in (("", 1.0), (str(directory), 1.0), (str(directory), 0.0))
    )
    assert none_of_it == plain
    assert [token_id for token_id, _ in adapted] != [token_id for token_id, _ in plain]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.30.self_attn.q_proj", "no linear layer model.layers.30"),
        ("transformer.h.0.attn.c_attn", "no linear layer transformer"),
        ("model.layers.0.self_attn.k_proj", "the shape 576 x 576, but the model's has 192 x 576"),
    ],
)
def test_another_models(name: str, reason: str, spec: EngineSpec, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", random_pairs({name: (576, 576)}, 1.0))
    with pytest.raises(ModelError, match=rf"adapter_model\.safetensors cannot be used: .*{reason}"):
        load_engine(msgspec.structs.replace(spec, adapter=str(directory)))


@pytest.mark.deep
def test_it_is_merged_weights(smollm2_dir: Path, spec: EngineSpec, tmp_path: Path) -> None:
    """The same as transformers in float32 computes with the library's own weights, which are not those of the file to
    the bit: the layers are found by their order, and that no two changed places is seen here."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tailrace.engines.transformers.adapters import merge

    load_engine(msgspec.structs.replace(spec, cache_path=str(tmp_path / "prepared"))).close()
    (prepared,) = (tmp_path / "prepared").iterdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for name, weight in _weights(prepared).items():
        own = model.get_submodule(name).weight
        assert np.corrcoef(weight.ravel(), own.detach().numpy().ravel())[0, 1] > 0.99, name
        own.data.copy_(torch.from_numpy(weight))
    directory = save(tmp_path / "adapter", random_pairs(SHAPES, 1.0))
    for adapter in ("", str(directory)):
        if adapter:
            merge(model, read_adapter(adapter, 1.0))
        answer = _answer(msgspec.structs.replace(spec, adapter=adapter, exact=True))
        ids = torch.tensor([[*PROMPT, *(token_id for token_id, _ in answer)]])
        with torch.no_grad():
            likely = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1], -1)
        for place, (token_id, logprob) in enumerate(answer):
            assert abs(likely[place, token_id].item() - logprob) < 0.4, f"token {place}, adapter {adapter!r}"


def _weights(directory: Path) -> dict[str, np.ndarray]:
    model = ov.Core().read_model(directory / "openvino_model.xml")
    layers = named_layers(model)
    (embedding,) = (layer for layer in linear_layers(model) if layer.name == _last(model))
    layers["model.embed_tokens"] = embedding
    sources = [layer.node.input_value(1) for layer in layers.values()]
    values = ov.Core().compile_model(ov.Model(sources, []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([])
    weights = {}
    for place, (name, layer) in enumerate(layers.items()):
        rows = np.array(values[place])[layer.first : layer.first + layer.num_outputs]
        weights[name] = _without_sums(rows, layer.shape[1])
    return weights


def _without_sums(weight: np.ndarray, size: int) -> np.ndarray:
    """Add the columns behind the inputs, which multiply sums of 32 inputs, to those of these inputs."""
    if weight.shape[1] == size:
        return weight
    first, second = np.split(weight[:, size:], 2, 1)
    return np.asarray(weight[:, :size] + np.repeat((first + second)[:, : size // 32], 32, 1))


def _last(model: ov.Model) -> str:
    """The layer that makes logits."""
    named = [node.get_friendly_name() for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    return str(named[-1])


def test_layers_of_an_export_have_names(tmp_path: Path) -> None:
    """A model whose layers are called as optimum-intel calls them."""
    given = ov.opset13.parameter([-1, 8], np.float32)
    weight = ov.opset13.constant(np.eye(6, 8, dtype=np.float32))
    node = ov.opset13.matmul(given, weight, False, True)
    node.set_friendly_name("__module.model.layers.0.self_attn.q_proj/ov_ext::linear/MatMul")
    export, target = tmp_path / "export", tmp_path / "adapted"
    target.mkdir()
    ov.save_model(ov.Model([node], [given]), export / "openvino_model.xml", compress_to_fp16=False)
    (export / "config.json").write_text("{}")
    pairs = random_pairs({"model.layers.0.self_attn.q_proj": (6, 8)}, 1.0)
    write_adapted(export, read_adapter(str(save(tmp_path / "adapter", pairs)), 1.0), target)
    adapted = ov.Core().compile_model(target / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    ((a, b),) = pairs.values()
    rows = np.arange(24, dtype=np.float32).reshape(3, 8)
    np.testing.assert_allclose(adapted([rows])[0], rows @ (np.eye(6, 8) + b @ a).T, rtol=1e-4, atol=1e-4)
    assert (target / "config.json").read_text() == "{}"
