"""Reads the quantised tensors of a GGUF file as the integers that OpenVINO multiplies fast.

OpenVINO is fastest with weights `code * scale`, where the code is a signed integer of four bits: a zero for each group
costs time and memory, on processors without VNNI a third of a layer's time. Q4_1 and Q4_K are `code * scale + minimum`,
with codes from 0 to 15. We subtract 8 from each code. The correction of a group is then one number, `minimum + 8 *
scale`, which is multiplied by the sum of the group's inputs. The corrections are stored as further columns of the same
matrix (`graph.py`). Four bits are too few for them, so each correction has two columns: the second stores the rounding
error of the first. The perplexity is then that of the file (docs/engines.md).

All other types become integers of eight bits: Q8_0 as it is, the others in groups of 64 weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tailrace.engines.openvino.facts import FOUR_BITS

__all__ = ["AT_ONCE", "GROUP", "EightBits", "FourBits", "eight_bits", "four_bits"]

GROUP = 32  # weights that share a scale
_EIGHT_BITS_GROUP = 64
AT_ONCE = 2**22  # weights in float32: an embedding of a quarter of a billion would take several GB

Codes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EightBits:
    """`codes * scales`."""

    codes: npt.NDArray[np.int8]  # (rows, groups, weights of a group)
    scales: npt.NDArray[np.float16]  # (rows, groups)


@dataclass(frozen=True, slots=True)
class FourBits:
    """`codes * scales`, with the columns of the inputs first, and then twice those of the inputs' sums."""

    codes: npt.NDArray[np.int8]  # (rows, groups, 32), each from -8 to 7
    scales: npt.NDArray[np.float16]  # (rows, groups)
    num_sums: int  # 0: none; their last group of columns may have more, which are zero


def eight_bits(tensor: gguf.ReaderTensor) -> EightBits:
    """Return a tensor of any type. Raises: NotImplementedError or ValueError for an unknown type; FloatingPointError
    for a weight that is NaN or infinite."""
    columns = int(tensor.shape[0])
    if tensor.tensor_type.name == "Q8_0":
        blocks = np.asarray(tensor.data).reshape(-1, columns // GROUP, 2 + GROUP)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        return EightBits(blocks[..., 2:].view(np.int8), _finite(scales))
    size = GROUP if columns % _EIGHT_BITS_GROUP else _EIGHT_BITS_GROUP
    rows = np.asarray(tensor.data).reshape(int(tensor.n_elements) // columns, -1)
    codes = np.empty((len(rows), columns // size, size), np.int8)
    scales = np.empty(codes.shape[:2], np.float16)
    num_rows = max(1, AT_ONCE // columns)
    for first in range(0, len(rows), num_rows):
        part = slice(first, first + num_rows)
        with np.errstate(all="ignore"):
            values = _finite(gguf.dequantize(rows[part], tensor.tensor_type))
        groups = values.reshape(-1, columns // size, size)
        scales[part] = np.abs(groups).max(-1) / 127
        divisors = np.where(scales[part] == 0, 1, scales[part]).astype(np.float32)
        codes[part] = np.clip(np.rint(groups / divisors[..., None]), -127, 127)
    return EightBits(codes, scales)


def four_bits(tensor: gguf.ReaderTensor) -> FourBits | None:
    """Return a tensor with its own codes and scales, or None if its type has not four bits. Raises: FloatingPointError
    for a scale that is NaN or infinite."""
    kind = tensor.tensor_type.name
    if kind not in FOUR_BITS:
        return None
    columns = int(tensor.shape[0])
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = np.asarray(tensor.data).reshape(-1, columns // block_weights, block_bytes)
    codes, scales, minima = _READERS[kind](blocks)
    _finite(scales)
    _finite(minima)
    signed = codes.astype(np.int8) - np.int8(8)
    rest = minima + 8 * scales
    if not rest.any():
        return FourBits(signed, scales.astype(np.float16), 0)
    more, more_scales = _twice(rest)
    return FourBits(
        np.concatenate([signed, more], 1),
        np.concatenate([scales.astype(np.float16), more_scales], 1),
        columns // GROUP,
    )


def _twice(values: Numbers) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Return numbers of any size as codes and scales, and then what these leave over in the same way. In both, zeros
    fill the last group of a row."""
    rows, columns = values.shape
    left = np.zeros((rows, -(-columns // GROUP), GROUP), np.float32)
    left.reshape(rows, -1)[:, :columns] = values
    both_codes, both_scales = [], []
    for _ in range(2):
        scales = (np.abs(left).max(-1) / 7).astype(np.float16)
        divisors = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
        codes = np.clip(np.rint(left / divisors), -8, 7)
        left -= codes * divisors
        both_codes.append(codes.astype(np.int8))
        both_scales.append(scales)
    return np.concatenate(both_codes, 1), np.concatenate(both_scales, 1)


def _finite(values: Any) -> Any:  # Any: an array of any float type
    if not np.isfinite(values).all():
        raise FloatingPointError("NaN or infinite numbers")
    return values


def _half(blocks: Codes, first: int) -> Numbers:
    """Return the float16 that each block has at an offset."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)[..., 0].astype(np.float32)


def _q4_0(blocks: Codes) -> tuple[Codes, Numbers, Numbers]:
    scales = _half(blocks, 0)
    return _in_halves(blocks[..., 2:]), scales, -8 * scales


def _q4_1(blocks: Codes) -> tuple[Codes, Numbers, Numbers]:
    return _in_halves(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Codes) -> tuple[Codes, Numbers, Numbers]:
    """Blocks of 256 weights: two scales, eight scales and eight minima in six bits, then the codes."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], -1)
    minima = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], -1)
    rows, num_blocks = blocks.shape[:2]
    codes = blocks[..., 16:].reshape(rows, num_blocks, 4, 1, GROUP)
    return (
        np.concatenate([codes & 15, codes >> 4], 3).reshape(rows, num_blocks * 8, GROUP),
        (_half(blocks, 0)[..., None] * scales).reshape(rows, -1),
        -(_half(blocks, 2)[..., None] * minima).reshape(rows, -1),
    )


def _in_halves(packed: Codes) -> Codes:
    """Return the codes of blocks that have their first half in the low bits."""
    return np.concatenate([packed & 15, packed >> 4], -1)


_READERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
