"""Weights that OpenVINO would round or refuse are converted to eight bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from tailrace.engines.kinds import KINDS
from tailrace.engines.openvino.weights import has_other_types, write_in_eight_bits
from tailrace.models import ModelCard

_CARD = ModelCard("m", Path("m.gguf"), "gguf", "", None, "", "", False, (), 128, "llama", "gpt2")
_KINDS = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0")


def _file(path: Path, kinds: tuple[str, ...]) -> Path:
    draw = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.context_length", 128)
    writer.add_string("tokenizer.chat_template", "{{ messages }} ä")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ä"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for name in kinds:
        kind = gguf.GGMLQuantizationType[name]
        weights = draw.normal(0.3, 1, (6, 64)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_are_not_rounded(tmp_path: Path) -> None:
    source, target = _file(tmp_path / "source.gguf", _KINDS), tmp_path / "target.gguf"
    write_in_eight_bits(source, target)
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(target)
    assert [tensor.tensor_type.name for tensor in new.tensors] == ["F32", "F16", "Q4_0", "Q8_0", "Q8_0", "Q8_0"]
    for before, after in zip(old.tensors, new.tensors, strict=True):
        assert (after.name, list(after.shape)) == (before.name, list(before.shape))
        was, now = (gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in (before, after))
        assert np.abs(now - was).max() <= np.abs(was).max() / 250  # half of one of 127 steps
    values = [{name: field.contents() for name, field in file.fields.items()} for file in (old, new)]
    assert {k: v for k, v in values[0].items() if "GGUF" not in k} == {
        k: v for k, v in values[1].items() if "GGUF" not in k
    }


@pytest.mark.parametrize(
    ("kinds", "expected"), [(("F32", "Q4_0", "Q8_0"), False), (("F32", "Q4_1"), True), (("Q5_0",), True)]
)
def test_which_files_are_converted(tmp_path: Path, kinds: tuple[str, ...], expected: bool) -> None:
    assert has_other_types(_file(tmp_path / "model.gguf", kinds)) is expected


@pytest.mark.parametrize("name", [kind.name for kind in gguf.GGMLQuantizationType])
def test_supported_files_can_be_read(name: str) -> None:
    card = replace(_CARD, tensor_types=(name,))
    if KINDS["openvino"].why_not(card):
        pytest.skip("not taken")
    kind = gguf.GGMLQuantizationType[name]
    if kind.name in ("F32", "F16"):
        return
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert gguf.dequantize(np.zeros((2, num_bytes), np.uint8), kind).shape == (2, num_weights)
