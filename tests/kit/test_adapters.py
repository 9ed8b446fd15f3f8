"""Reading LoRA adapters, and refusals with the name of the file and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.lora import RANK, random_pairs, save, save_tensors

from tailrace.errors import ModelError
from tailrace_kit.adapters import read_adapter

LAYER = "model.layers.0.self_attn.q_proj"
A, B = f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight"
PAIRS = random_pairs({LAYER: (6, 8)}, 0.5)


@pytest.mark.parametrize(("config", "factor"), [({}, 1), ({"lora_alpha": 8}, 2), ({"use_rslora": True}, 2)], ids=str)
def test_its_weights_are_scaled(config: dict[str, Any], factor: float, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", PAIRS, **config)
    for path in (directory, directory / "adapter_model.safetensors"):
        added = read_adapter(str(path), 0.5).layers[LAYER]
        a, b = PAIRS[LAYER]
        np.testing.assert_allclose(added.b @ added.a, 0.5 * factor * b @ a, rtol=1e-5)
        assert added.shape == (6, 8)


def test_halves_of_floats_are_read(tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", PAIRS)
    a, b = PAIRS[LAYER]
    file = directory / "adapter_model.safetensors"
    save_tensors(file, {A: a.astype(np.float16), B: b.astype(np.float16)})
    np.testing.assert_allclose(read_adapter(str(file), 1.0).layers[LAYER].b, b, rtol=1e-3)
    save_tensors(file, {A: (a.view(np.uint32) >> 16).astype(np.uint16), B: np.zeros((6, RANK), np.uint16)}, "BF16")
    np.testing.assert_allclose(read_adapter(str(file), 1.0).layers[LAYER].a, a, rtol=1e-2)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "LOHA"}, "only plain LoRA"),
        ({"use_dora": True}, "only plain LoRA"),
        ({"bias": "all"}, "only plain LoRA"),
        ({"use_qalora": True}, "only plain LoRA"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"rank_pattern": {"q_proj": 2}}, "for single layers"),
        ({"alpha_pattern": {"q_proj": 2}}, "for single layers"),
        ({"r": 0}, "its rank is 0"),
        ({"r": 8}, "not have rank 8"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
    ids=str,
)
def test_a_config_of_something_else(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", PAIRS, **config)
    with pytest.raises(ModelError, match=rf"adapter.*{reason}"):
        read_adapter(str(directory), 1.0)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "it is empty"),
        ({A: PAIRS[LAYER][0]}, "only one of"),
        ({"base_model.model.lm_head.weight": PAIRS[LAYER][0]}, "not part of a plain LoRA"),
        ({A: PAIRS[LAYER][0], B: np.zeros((6, RANK), np.int32)}, "I32 tensors"),
        ({A: PAIRS[LAYER][0], B: np.zeros((6, 3), np.float32)}, "not have rank 4"),
        ({A: PAIRS[LAYER][0], B: np.zeros(6, np.float32)}, "not have rank 4"),
        ({A: PAIRS[LAYER][0], B: np.zeros((0, RANK), np.float32)}, "has 0 bytes"),
        ({A: PAIRS[LAYER][0], B: np.full((6, RANK), np.nan, np.float32)}, "infinite numbers or NaN"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_other_layers(tensors: dict[str, Any], reason: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", PAIRS)
    save_tensors(directory / "adapter_model.safetensors", tensors)
    with pytest.raises(ModelError, match=rf"adapter_model\.safetensors cannot be used: .*{reason}"):
        read_adapter(str(directory), 1.0)


def test_files_that_are_none(tmp_path: Path) -> None:
    directory = save(tmp_path / "adapter", PAIRS)
    pickled = directory / "adapter_model.bin"
    pickled.write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"adapter_model\.bin cannot be used: .*Pickles are not read"):
        read_adapter(str(pickled), 1.0)
    with pytest.raises(ModelError, match="there is no such file"):
        read_adapter(str(tmp_path), 1.0)
    file = directory / "adapter_model.safetensors"
    whole = file.read_bytes()
    for length in (0, 7, 40, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors .*cut short"):
            read_adapter(str(file), 1.0)
    file.write_bytes(whole)
    (directory / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter_config\.json in the same directory cannot be read"):
        read_adapter(str(file), 1.0)


def test_another_models(tmp_path: Path) -> None:
    adapter = read_adapter(str(save(tmp_path / "adapter", PAIRS)), 1.0)
    adapter.check(LAYER, (6, 8))
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors .*the shape 6 x 8, but the model's has 8 x 6"):
        adapter.check(LAYER, (8, 6))
    with pytest.raises(ModelError, match=rf"adapter_model\.safetensors .*no linear layer {LAYER}"):
        adapter.check(LAYER, None)
