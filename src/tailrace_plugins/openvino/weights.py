"""Packs tensors as the integers that OpenVINO multiplies fast.

OpenVINO is fastest with weights `code * scale`, where the code is a signed integer of four bits: a zero for each group
costs time and memory, on processors without VNNI a third of a layer's time. Q4_1 and Q4_K are `code * scale + minimum`,
with codes from 0 to 15. We subtract 8 from each code. The correction of a group is then one number, `minimum + 8 *
scale`, which is multiplied by the sum of the group's inputs. The corrections are stored as further columns of the same
matrix (`decoder.py`). Four bits are too few for them, so each correction has two columns: the second stores the
rounding error of the first. The perplexity is then that of the file (docs/engines.md).

All other types become integers of eight bits: Q8_0 as it is, the others in groups of 64 weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tailrace_plugins.openvino.model_files import FOUR_BITS, Bits
from tailrace_plugins.openvino.sources import Raw

__all__ = ["GROUP", "Form", "Packed", "floats", "form_of", "pack"]

GROUP = 32  # weights that share a scale
_EIGHT_BITS_GROUP = 64
_BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144)}  # weights and bytes

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Numbers = npt.NDArray[np.float32]
Floats = TypeVar("Floats", Halves, Numbers)


class Form(NamedTuple):
    """How a matrix is packed. The rows of matrices of one form can be put together."""

    bits: int  # 4, 8, 16 or 32
    group: int = 0  # weights that share a scale; 0 with 16 and 32 bits
    has_sums: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of a matrix: `codes * scales`. With four bits, the columns of the inputs come first, and then twice those of
    the inputs' sums, if there are any; a byte has two codes, the first in its low half."""

    codes: npt.NDArray[Any]  # uint8 (rows, groups, 16), int8 (rows, groups, group), float16 or float32 (rows, columns)
    scales: Numbers  # (rows, groups, 1); with 16 and 32 bits (0, 0, 0)


def form_of(raw: Raw, bits: Bits, *, least_bits: int = 4, is_embedding: bool = False) -> Form:
    """Choose the form of a tensor. Rows of an embedding are read one by one, for which four bits do not pay."""
    if bits == 32 and raw.kind == "F32":
        return Form(32)
    if bits >= 16:
        return Form(16)
    own: int = 4 if raw.kind in FOUR_BITS else 8
    wanted: int = bits or max(own, least_bits)
    if wanted == 4 and not is_embedding and raw.columns % GROUP == 0:
        return Form(4, GROUP, raw.kind in FOUR_BITS and raw.kind != "Q4_0")
    if raw.columns % GROUP:
        return Form(8, raw.columns)
    return Form(8, GROUP if raw.kind == "Q8_0" or raw.columns % _EIGHT_BITS_GROUP else _EIGHT_BITS_GROUP)


def pack(raw: Raw, form: Form) -> Packed:
    """Pack a tensor. Raises: NotImplementedError or ValueError for an unknown type; FloatingPointError for a weight
    that is NaN or infinite."""
    if form.bits >= 16:
        return Packed(floats(raw) if form.bits == 32 else _halves(raw), np.empty((0, 0, 0), np.float32))
    if form.bits == 4:
        return _own_four_bits(raw) if raw.kind in FOUR_BITS else _four_bits(raw)
    return _own_eight_bits(raw) if raw.kind == "Q8_0" else _eight_bits(raw, form.group)


def floats(raw: Raw) -> Numbers:
    """Return rows as float32. Raises: as `pack`."""
    rows = np.ascontiguousarray(raw.rows)
    if raw.kind == "F32":
        return _finite(rows.view(np.float32))
    if raw.kind == "F16":
        return _finite(rows.view(np.float16).astype(np.float32))
    if raw.kind == "BF16":
        return _finite((rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    if raw.kind == "Q6_K":
        return _q6_k(rows)
    import gguf  # only here: its import takes 0.2 s

    with np.errstate(all="ignore"):
        return _finite(np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType[raw.kind]), np.float32))


def _halves(raw: Raw) -> Halves:
    with np.errstate(over="ignore"):
        return _finite(floats(raw).astype(np.float16))


def _own_eight_bits(raw: Raw) -> Packed:
    blocks = raw.rows.reshape(len(raw.rows), raw.columns // GROUP, 2 + GROUP)
    scales = _finite(np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32))
    return Packed(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), scales)


def _eight_bits(raw: Raw, size: int) -> Packed:
    groups = floats(raw).reshape(-1, raw.columns // size, size)
    scales = _rounded(np.abs(groups).max(-1, keepdims=True) / 127)
    groups = groups / _divisors(scales)
    return Packed(np.clip(np.rint(groups, out=groups), -127, 127, out=groups).astype(np.int8), scales)


def _four_bits(raw: Raw) -> Packed:
    """Return codes from -8 to 7: the largest weight of a group, with its sign, becomes -8."""
    groups = floats(raw).reshape(-1, raw.columns // GROUP, GROUP)
    scales = _rounded(np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1) / -8)
    return Packed(_in_bytes(np.clip(np.rint(groups / _divisors(scales)), -8, 7)), scales)


def _own_four_bits(raw: Raw) -> Packed:
    """Return a tensor with its own codes and scales."""
    num_weights, num_bytes = _BLOCKS[raw.kind]
    blocks = raw.rows.reshape(len(raw.rows), raw.columns // num_weights, num_bytes)
    with np.errstate(invalid="ignore"):
        codes, scales, minima = _READERS[raw.kind](blocks)
    _finite(scales)
    if minima is None:
        return Packed(codes, scales[..., None])
    more, more_scales = _twice(_finite(minima) + 8 * scales)
    return Packed(np.concatenate([codes, more], 1), np.concatenate([scales[..., None], more_scales], 1))


def _twice(values: Numbers) -> tuple[Bytes, Numbers]:
    """Return numbers of any size as codes and scales, and then what these leave over in the same way. In both, zeros
    fill the last group of a row."""
    rows, columns = values.shape
    left = np.zeros((rows, -(-columns // GROUP), GROUP), np.float32)
    left.reshape(rows, -1)[:, :columns] = values
    both_codes, both_scales = [], []
    for _ in range(2):
        scales = _rounded(np.abs(left).max(-1, keepdims=True) / 7)
        codes = np.clip(np.rint(left / _divisors(scales)), -8, 7)
        left -= codes * scales
        both_codes.append(_in_bytes(codes))
        both_scales.append(scales)
    return np.concatenate(both_codes, 1), np.concatenate(both_scales, 1)


def _in_bytes(codes: Numbers) -> Bytes:
    """Return two codes in each byte, along the last axis."""
    whole = codes.astype(np.int8).view(np.uint8)
    joined: Bytes = np.bitwise_or(whole[..., 0::2] & 15, whole[..., 1::2] << 4, dtype=np.uint8)
    return joined


def _rounded(scales: npt.NDArray[Any]) -> Numbers:
    """Return scales as float16 can store them, which files do."""
    return scales.astype(np.float16).astype(np.float32)


def _divisors(scales: Numbers) -> Numbers:
    return np.where(scales == 0, np.float32(1), scales)


def _finite(values: Floats) -> Floats:
    if not np.isfinite(values).all():
        raise FloatingPointError("NaN or infinite numbers")
    return values


def _half(blocks: Bytes, first: int) -> Numbers:
    """Return the float16 that each block has at an offset."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the low and the high halves of bytes, two of them in each byte, each with 8 subtracted."""
    pairs = np.ascontiguousarray(packed).view("<u2")
    shifted = pairs >> 4
    low: Bytes = (pairs & 0x000F | shifted & 0x00F0).astype(np.uint8)
    high: Bytes = (shifted & 0x000F | pairs >> 8 & 0x00F0).astype(np.uint8)
    low ^= 0x88
    high ^= 0x88
    return low, high  # in four bits, to subtract 8 is to change the first bit


def _q4_0(blocks: Bytes) -> tuple[Bytes, Numbers, None]:
    return np.concatenate(_nibbles(blocks[..., 2:]), -1), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> tuple[Bytes, Numbers, Numbers]:
    return np.concatenate(_nibbles(blocks[..., 4:]), -1), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Bytes) -> tuple[Bytes, Numbers, Numbers]:
    """Blocks of 256 weights: two scales, eight scales and eight minima in six bits, then the codes."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], -1)
    minima = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], -1)
    rows, num_blocks = blocks.shape[:2]
    codes = np.stack(_nibbles(blocks[..., 16:].reshape(rows, num_blocks, 4, GROUP)), 3)
    return (
        codes.reshape(rows, num_blocks * 8, GROUP // 2),
        (_half(blocks, 0)[..., None] * scales).reshape(rows, -1),
        -(_half(blocks, 2)[..., None] * minima).reshape(rows, -1),
    )


def _q6_k(rows: Bytes) -> Numbers:
    """Return rows as numbers. Blocks of 256 weights: the low four bits of the codes, the high two, a scale for each 16
    weights, and the scale of the scales. gguf's function takes twice as long."""
    blocks = rows.reshape(len(rows), -1, 210)
    low, high = blocks[..., :128].reshape(-1, 2, 2, 32), blocks[..., 128:192].reshape(-1, 2, 32)
    codes = np.empty((len(low), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=codes[:, :, :2])
    np.right_shift(low, 4, out=codes[:, :, 2:])
    for index in range(4):
        codes[:, :, index] |= (high >> 2 * index & 3) << 4
    signed = codes.view(np.int8)
    signed -= 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    with np.errstate(invalid="ignore"):
        values = _half(blocks, 208)[..., None] * scales
        numbers: Numbers = np.multiply(signed.reshape(-1, 16), values.reshape(-1, 1), dtype=np.float32)
    return _finite(numbers).reshape(len(rows), -1)


_READERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
