"""A merged adapter gives the same results as PEFT's separate branch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.engines.lora import answer, random_pairs, save

from tailrace.engines import EngineSpec, load_engine
from tailrace.errors import ModelError
from tailrace_kit.adapters import read_adapter

SHAPES = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.mlp.c_fc": (128, 32), "lm_head": (320, 32)}


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    """Import the libraries in tests only, because each test process collects the tests, and the import takes
    seconds."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.mark.deep
def test_a_merged_adapter_equals_the_separate_branch(tiny_gpt2_dir: Path, tmp_path: Path) -> None:
    """GPT-2 has some transposed weights, and its last layer is also the embedding, which must not change."""
    import torch
    import transformers

    from tailrace_plugins.transformers.transformers_adapters import merge

    pairs = random_pairs(SHAPES, 0.5)
    adapter = read_adapter(str(save(tmp_path / "adapter", pairs)), 1.0)
    plain, merged = (transformers.AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir) for _ in range(2))
    merge(merged, adapter)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = plain(ids).logits
        for name, pair in pairs.items():
            a, b = map(torch.tensor, pair)
            plain.get_submodule(name).register_forward_hook(lambda _, given, out, a=a, b=b: out + given[0] @ a.T @ b.T)
        expected = plain(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.1


@pytest.mark.deep
def test_an_engine_with_one(tiny_gpt2_dir: Path, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", random_pairs({"transformer.h.0.attn.c_attn": (96, 32)}, 5.0))
    spec = EngineSpec("transformers", str(tiny_gpt2_dir), context_tokens=64, kv_tokens=512, max_sequences=2, threads=1)
    answers = [
        answer(spec),
        answer(msgspec.structs.replace(spec, adapters={"": str(directory)})),
        answer(msgspec.structs.replace(spec, adapters={"": str(directory)}, adapter_scale=0.0)),
    ]
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize("name", ["transformer.h.7.attn.c_attn", "transformer.ln_f"])
def test_another_models(name: str, tiny_gpt2_dir: Path, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", random_pairs({name: (96, 32)}, 1.0))
    spec = EngineSpec(
        "transformers", str(tiny_gpt2_dir), context_tokens=64, kv_tokens=512, adapters={"": str(directory)}
    )
    with pytest.raises(ModelError, match=rf"adapter_model\.safetensors .*no linear layer {name}"):
        load_engine(spec)
