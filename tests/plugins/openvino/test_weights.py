"""Packed weights are the numbers of the file, in their own bits where it has four or eight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.plugins.openvino.tiny_models import EXACT, Tiny, logits, make, random_rows, write_gguf
from tests.plugins.openvino.unpacking import unpacked, unpacked_model

from tailrace.models.gguf_header import read_metadata
from tailrace_plugins.openvino import model_files
from tailrace_plugins.openvino.decoder import build
from tailrace_plugins.openvino.openvino_adapters import Branches
from tailrace_plugins.openvino.prepared import prepare
from tailrace_plugins.openvino.runner import Piece, Runner
from tailrace_plugins.openvino.sources import Raw
from tailrace_plugins.openvino.weights import Form, floats, form_of, pack

Numbers = NDArray[np.float32]

_TYPES = sorted(model_files.TENSOR_TYPES)
_ROWS, _COLUMNS = 6, 512


def _raw(kind: str, *, scale: float | None = None, columns: int = _COLUMNS) -> Raw:
    return Raw("blk.0.attn_q.weight", kind, columns, random_rows(kind, _ROWS, columns, scale=scale))


def _numbers(raw: Raw) -> Numbers:
    return np.asarray(gguf.dequantize(raw.rows, gguf.GGMLQuantizationType[raw.kind]), np.float32)


def _groups(values: Numbers, size: int) -> Numbers:
    return values.reshape(len(values), -1, size)


@pytest.mark.parametrize("kind", _TYPES)
def test_the_bits_of_the_file(kind: str) -> None:
    raw = _raw(kind)
    form = form_of(raw, 0)
    found, expected = unpacked(pack(raw, form), form, _COLUMNS), _numbers(raw)
    assert form.bits == (4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8)
    if kind in ("Q4_0", "Q8_0"):
        assert np.array_equal(found, expected)
    elif form.has_sums:
        # Both columns of a correction have codes from -7 to 7, so the second leaves half of a 49th of the largest one.
        low = _groups(expected, 32).min(-1)
        step = _groups(expected, 32).max(-1) - low
        largest = np.abs(low + 8 / 15 * step).max(-1)  # of a row, if a group has all codes
        assert (np.abs(found - expected).max(-1) < largest / 98).all()
    else:
        largest = np.abs(_groups(expected, form.group)).max(-1, keepdims=True)
        assert (np.abs(_groups(found - expected, form.group)) <= largest / 254 * 1.05 + 1e-6).all()


@pytest.mark.parametrize(
    ("kind", "bits"),
    [(kind, bits) for kind in _TYPES for bits in (4, 8, 16) if bits > 4 or kind not in model_files.FOUR_BITS],
)
def test_other_bits(kind: str, bits: Any) -> None:  # Any: a literal type
    raw = _raw(kind)
    form = form_of(raw, bits)
    assert form.bits == bits
    found, expected = unpacked(pack(raw, form), form, _COLUMNS), _numbers(raw)
    if bits == 16:
        assert np.array_equal(found, expected.astype(np.float16).astype(np.float32))
    else:
        largest = np.abs(_groups(expected, form.group)).max(-1, keepdims=True)
        share = 1 / 8 if bits == 4 else 1 / 254  # the largest weight of the other sign becomes 7, not 8
        assert (np.abs(_groups(found - expected, form.group)) <= largest * share * 1.05 + 1e-6).all()


@pytest.mark.parametrize("kind", _TYPES)
def test_rows_are_read_as_numbers(kind: str) -> None:
    raw = _raw(kind)
    assert np.array_equal(floats(raw), _numbers(raw))
    assert np.array_equal(floats(raw.part(1, 3)), _numbers(raw)[1:3])


@pytest.mark.parametrize("columns", [32, 96, 20])
def test_columns_that_are_no_multiple_of_a_group(columns: int) -> None:
    raw = _raw("F16", columns=columns)
    for bits in (4, 8):
        form = form_of(raw, bits)
        found = unpacked(pack(raw, form), form, columns)
        assert np.abs(found - _numbers(raw)).max() < np.abs(_numbers(raw)).max() / 7


def test_an_embedding_has_eight_bits_at_least() -> None:
    assert form_of(_raw("Q4_K"), 0, is_embedding=True) == form_of(_raw("Q4_K"), 4, is_embedding=True) == Form(8, 64)


def test_a_group_of_zeros() -> None:
    zeros = Raw("zeros", "F16", 64, np.zeros((2, 128), np.uint8))
    for bits in (4, 8, 16):
        form = form_of(zeros, bits)
        assert not unpacked(pack(zeros, form), form, 64).any()


@pytest.mark.parametrize("kind", _TYPES)
def test_rows_are_packed_alone(kind: str) -> None:
    raw = _raw(kind)
    for bits in (0, 4, 8, 16):
        form = form_of(raw, bits)
        whole, parts = pack(raw, form), [pack(raw.part(*rows), form) for rows in ((0, 4), (4, 6))]
        assert np.array_equal(np.concatenate([part.codes for part in parts]), whole.codes)
        assert np.array_equal(np.concatenate([part.scales for part in parts]), whole.scales)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [kind for kind in _TYPES if kind != "MXFP4"])
def test_numbers_that_are_none(kind: str, scale: float) -> None:
    for bits in (0, 4, 8, 16):
        raw = _raw(kind, scale=scale)
        with pytest.raises(FloatingPointError):
            pack(raw, form_of(raw, bits))


def test_a_number_that_is_too_large_for_sixteen_bits() -> None:
    raw = _raw("F32", scale=1e6)
    with pytest.raises(FloatingPointError):
        pack(raw, Form(16))
    assert pack(raw, Form(8, 64)).scales.max() > 7000


# As in files of the type Q4_K_M: some layers have more bits than their neighbours.
_MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_0", "token_embd": "Q6_K", "output.weight": "Q6_K", "ffn_up": "Q4_0"}
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *((kind, {}) for kind in ("Q4_0", "Q6_K", "Q8_0", "F16", "mixed")),
        *(pytest.param(kind, {}, marks=pytest.mark.deep) for kind in ("Q4_1", "Q4_K", "Q5_K", "BF16", "IQ4_XS")),
        pytest.param("Q4_1", {"hidden_size": 96, "intermediate_size": 2048}, id="sums in parts"),
        pytest.param("Q4_1", {"tie_word_embeddings": True}, id="tied"),
    ],
)
@pytest.mark.parametrize("least_bits", [4, pytest.param(8, marks=pytest.mark.deep)])
def test_a_model_computes_with_the_packed_numbers(
    kind: str, config: dict[str, Any], least_bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "processor_flags", lambda: {"avx2", *(("avx_vnni",) if least_bits == 4 else ())})
    tiny = Tiny("Llama", "llama", _WIDE | config)
    model = make(tiny, tmp_path / "model")

    def kind_of(name: str) -> str:
        return next((_MIXED[part] for part in _MIXED if part in name), "Q4_K") if kind == "mixed" else kind

    file = write_gguf(tiny, model, tmp_path / "tiny.gguf", kind_of)
    decoder, weights = prepare(file, tmp_path / "cache", 128)
    packed = unpacked_model(weights, decoder.num_layers)
    _check_order(file, packed, kind_of)
    import torch

    for name, values in packed.items():
        parameter = model.get_submodule(name).weight
        parameter.data.copy_(torch.from_numpy(values))
    prompt = [int(token_id) for token_id in np.random.default_rng(3).integers(3, 96, 40)]
    runner = Runner(build(decoder, weights, Branches()), "CPU", EXACT, 8, has_lone_form=True)
    for is_batch in (True, False):
        pieces = [Piece(prompt, 0, (2, 4), is_sampled=True)]
        found = runner.run(pieces if is_batch else _filled(runner, prompt), is_batch=is_batch)[0]
        np.testing.assert_allclose(found, logits(model, prompt)[-1], atol=2e-3, rtol=2e-3)


def _filled(runner: Runner, prompt: list[int]) -> list[Piece]:
    """Compute all but the last token, and return the piece of that one."""
    runner.run([Piece(prompt[:-1], 0, (2, 4), is_sampled=False)], is_batch=True)
    return [Piece(prompt[-1:], len(prompt) - 1, (2, 4), is_sampled=True)]


def _check_order(file: Path, packed: dict[str, Numbers], kind_of: Any) -> None:
    """Each matrix is near the one of the file, so none has changed places. Queries and keys are in another order."""
    tensors = {tensor.name: tensor for tensor in read_metadata(file).tensors}
    for name, values in packed.items():
        own = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 9).get_name(name)
        tensor = tensors[f"{own}.weight"]
        content = np.fromfile(file, np.uint8, tensor.num_bytes, offset=tensor.start).reshape(tensor.shape[0], -1)
        expected = np.asarray(gguf.dequantize(content, gguf.GGMLQuantizationType[tensor.type]), np.float32)
        if name.endswith(("q_proj", "k_proj")):
            heads = 4 if name.endswith("q_proj") else 2
            pairs = expected.reshape(heads, -1, 2, expected.shape[1])
            expected = pairs.swapaxes(1, 2).reshape(expected.shape)
        assert np.abs(values - expected).max() < np.abs(expected).max() / 60, name
