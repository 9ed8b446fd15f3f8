"""A prepared GGUF file computes with the numbers of the file, in their own bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from tests.models.parts import split

from tailrace.engines.kinds import KINDS
from tailrace.engines.openvino import weights as openvino_weights
from tailrace.engines.openvino.graph import fill_blanks, fix_attention_width, write_blanks
from tailrace.engines.openvino.merging import linear_layers, merge_layers
from tailrace.engines.openvino.weights import eight_bits, four_bits
from tailrace.errors import ModelError
from tailrace.models import ModelCard

_CARD = ModelCard("m", Path("m.gguf"), "gguf", "", None, "", "", False, (), 128, "llama", "gpt2")
_KINDS = ("F32", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K")
_ROWS, _COLUMNS = 6, 512


def _q4_k(random: np.random.Generator, columns: int) -> np.ndarray:
    blocks = random.integers(0, 256, (_ROWS * columns // 256, 144), dtype=np.uint8)
    blocks[:, 0:4] = np.frombuffer(np.array([0.02, 0.1], np.float16).tobytes(), np.uint8)
    return blocks.reshape(_ROWS, -1)


def _file(path: Path, kinds: tuple[str, ...] = _KINDS, columns: int = _COLUMNS) -> Path:
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.context_length", 128)
    writer.add_string("tokenizer.chat_template", "{{ messages }} ä")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ä"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for name in kinds:
        kind = gguf.GGMLQuantizationType[name]
        values = random.normal(0.3, 1, (_ROWS, columns)).astype(np.float32)
        values[:, 160:] *= np.float32(0.1)  # groups of different sizes
        writer.add_tensor(
            f"{name}.weight", _q4_k(random, columns) if name == "Q4_K" else gguf.quantize(values, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _library_graph(blanks: gguf.GGUFReader, columns: int = _COLUMNS) -> ov.Model:
    """What the library makes of blanks: one layer for each, with the rows in another order."""
    given = ops.parameter([-1, -1, columns], np.float32)
    results = []
    for tensor in blanks.tensors:
        if tensor.tensor_type.name != "Q4_0":
            continue
        packed = tensor.data.reshape(_ROWS, -1, 18)[::-1, :, 2:]
        codes = np.concatenate([packed & 15, packed >> 4], -1)
        constant = ov.Tensor(ov.Type.u4, ov.Shape(list(codes.shape)))
        constant.data.reshape(-1)[:] = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(-1)
        weight = ops.multiply(ops.convert(ops.constant(constant), "f16"), np.float16(1))
        weight = ops.convert(ops.reshape(weight, np.array([_ROWS, columns]), False), "f32")
        results.append(ops.matmul(given, weight, False, True))
    return ov.Model(results, [given])


@pytest.mark.parametrize(
    ("columns", "least_bits"),
    [(_COLUMNS, 4), (2048, 4), (_COLUMNS, 8)],
    ids=["inputs in one part", "inputs in two parts", "eight bits"],
)
def test_layers_compute_with_the_numbers_of_the_file(columns: int, least_bits: int, tmp_path: Path) -> None:
    source = gguf.GGUFReader(_file(tmp_path / "source.gguf", columns=columns))
    write_blanks(source.fields, source.tensors, tmp_path / "blanks.gguf")
    model = _library_graph(gguf.GGUFReader(tmp_path / "blanks.gguf"), columns)
    parts: list[float] = []
    fill_blanks(model, source.tensors, parts.append, least_bits=least_bits)
    assert parts[-1] == 1
    types = {node.get_element_type() for node in model.get_ordered_ops() if node.get_type_name() == "Constant"}
    assert (ov.Type.i4 in types) == (least_bits == 4)
    compiled = ov.Core().compile_model(model, "CPU", {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0})
    found = compiled([np.eye(columns, dtype=np.float32)[None]])
    quantised = [tensor for tensor in source.tensors if tensor.tensor_type.name != "F32"]
    for place, tensor in enumerate(quantised):
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)[::-1]
        weights = found[place][0].T
        assert np.abs(weights - expected).max() < np.abs(expected).max() / 100, tensor.name
        error = np.sqrt(np.mean((weights - expected) ** 2) / np.mean(expected**2))
        assert error < 0.01, (tensor.name, error)


def test_merged_layers_compute_the_same(tmp_path: Path) -> None:
    """Layers with the same inputs and the same kind of weights become one; the others stay."""
    kinds = ("Q4_1", "Q8_0", "Q4_K", "Q4_0")
    source = gguf.GGUFReader(_file(tmp_path / "source.gguf", kinds))
    write_blanks(source.fields, source.tensors, tmp_path / "blanks.gguf")
    model = _library_graph(gguf.GGUFReader(tmp_path / "blanks.gguf"))
    fill_blanks(model, source.tensors, lambda part: None)
    names = sorted(layer.name for layer in linear_layers(model))
    inputs = np.random.default_rng(5).normal(0, 1, (2, 1, _COLUMNS)).astype(np.float32)
    exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    before = ov.Core().compile_model(model, "CPU", exact)([inputs])
    before = [np.array(before[place]) for place in range(len(kinds))]
    merge_layers(model)
    after = ov.Core().compile_model(model, "CPU", exact)([inputs])
    for place, result in enumerate(before):
        assert np.abs(after[place] - result).max() < np.abs(result).max() / 1e4, kinds[place]
    layers = list(linear_layers(model))
    assert sorted(layer.name for layer in layers) == names
    assert all(layer.shape == (_ROWS, _COLUMNS) for layer in layers)
    assert sorted(layer.first for layer in layers) == [0, 0, 0, _ROWS]
    assert len({layer.node.get_friendly_name() for layer in layers}) == 3


def test_the_width_of_attention_is_a_constant() -> None:
    given = [ops.parameter([-1, 2, -1, 4], np.float32) for _ in range(3)]
    turned = ops.transpose(ops.scaled_dot_product_attention(*given, causal=True), np.array([0, 2, 1, 3]))
    computed = ops.concat([ops.gather(ops.shape_of(given[0]), np.array([0, 2]), np.int64(0)), np.array([-1])], 0)
    model = ov.Model([ops.reshape(turned, computed, False)], given)
    inputs = list(np.random.default_rng(7).normal(0, 1, (3, 2, 2, 5, 4)).astype(np.float32))
    before = np.array(ov.Core().compile_model(model, "CPU")(inputs)[0])
    assert model.outputs[0].partial_shape[2].is_dynamic
    fix_attention_width(model)
    assert model.outputs[0].partial_shape[2] == 8
    assert (ov.Core().compile_model(model, "CPU")(inputs)[0] == before).all()


def test_four_bits_keep_their_codes(tmp_path: Path) -> None:
    for tensor in gguf.GGUFReader(_file(tmp_path / "model.gguf", ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q5_0"))).tensors:
        weights = four_bits(tensor)
        if tensor.tensor_type.name in ("Q8_0", "Q5_0"):
            assert weights is None
            continue
        assert weights is not None
        assert weights.num_sums == (0 if tensor.tensor_type.name == "Q4_0" else _COLUMNS // 32)
        assert weights.codes.min() == -8
        assert weights.codes.max() == 7


def test_q8_0_is_kept_as_it_is(tmp_path: Path) -> None:
    (tensor,) = gguf.GGUFReader(_file(tmp_path / "model.gguf", ("Q8_0",))).tensors
    weights = eight_bits(tensor)
    values = weights.codes * weights.scales.astype(np.float32)[..., None]
    assert np.array_equal(values.reshape(_ROWS, -1), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tensor,) = gguf.GGUFReader(_file(tmp_path / "model.gguf", ("Q5_0",))).tensors
    whole = eight_bits(tensor)
    monkeypatch.setattr(openvino_weights, "AT_ONCE", 4 * _COLUMNS)  # of six rows
    parts = eight_bits(tensor)
    assert np.array_equal(parts.codes, whole.codes)
    assert np.array_equal(parts.scales, whole.scales)


def test_the_copy_with_blanks_has_the_same_metadata(tmp_path: Path) -> None:
    source = gguf.GGUFReader(_file(tmp_path / "source.gguf"))
    write_blanks(source.fields, source.tensors, tmp_path / "blanks.gguf")
    blanks = gguf.GGUFReader(tmp_path / "blanks.gguf")
    values = [{name: field.contents() for name, field in file.fields.items()} for file in (source, blanks)]
    assert {k: v for k, v in values[0].items() if "GGUF" not in k} == {
        k: v for k, v in values[1].items() if "GGUF" not in k
    }
    assert [list(tensor.shape) for tensor in blanks.tensors] == [list(tensor.shape) for tensor in source.tensors]


def test_a_damaged_file(tmp_path: Path) -> None:
    path = _file(tmp_path / "model.gguf", ("Q4_1",))
    (tensor,) = gguf.GGUFReader(path).tensors
    offset = tensor.data_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(np.float16("nan").tobytes())
    source = gguf.GGUFReader(path)
    write_blanks(source.fields, source.tensors, tmp_path / "blanks.gguf")
    with pytest.raises(ModelError, match=r"Q4_1\.weight contains NaN"):
        fill_blanks(_library_graph(gguf.GGUFReader(tmp_path / "blanks.gguf")), source.tensors, lambda part: None)


def test_a_graph_without_a_blank(tmp_path: Path) -> None:
    source = gguf.GGUFReader(_file(tmp_path / "model.gguf", ("Q4_1", "Q8_0")))
    one = gguf.GGUFReader(_file(tmp_path / "one.gguf", ("Q4_1",)))
    write_blanks(one.fields, one.tensors, tmp_path / "blanks.gguf")
    with pytest.raises(RuntimeError, match=r"no place for Q8_0\.weight"):
        fill_blanks(_library_graph(gguf.GGUFReader(tmp_path / "blanks.gguf")), source.tensors, lambda part: None)


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


def test_the_blanks_of_a_model_in_parts_are_one_file(tmp_path: Path) -> None:
    """The library would look for the other parts beside it."""
    whole = _file(tmp_path / "source.gguf", ("Q4_1", "Q8_0", "Q4_K"))
    sources = [gguf.GGUFReader(part) for part in split(whole, tmp_path / "a")]
    tensors = [tensor for source in sources for tensor in source.tensors]
    write_blanks(sources[0].fields, tensors, tmp_path / "blanks.gguf")
    blanks = gguf.GGUFReader(tmp_path / "blanks.gguf")
    assert not [name for name in blanks.fields if name.startswith("split.")]
    names = {tensor.name for tensor in gguf.GGUFReader(whole).tensors}
    assert {tensor.name for tensor in blanks.tensors} == names
