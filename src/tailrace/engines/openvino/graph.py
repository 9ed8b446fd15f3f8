"""Makes an OpenVINO model from a GGUF file: the library makes the graph, and tailrace puts the weights into it.

The library gets a copy of the file in which each quantised tensor is a *blank* of type Q4_0. The first codes of each
row of a blank are the numbers of the tensor and of the row. The library keeps codes as they are, so a blank in its
graph tells which tensor belongs there, and in which order of rows (the library reorders those of Llama's queries and
keys).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from tailrace.engines.openvino.weights import GROUP, EightBits, FourBits, eight_bits, four_bits
from tailrace.errors import ModelError

__all__ = [
    "fill_blanks",
    "fix_attention_width",
    "has_weight",
    "inputs_of",
    "is_quantised",
    "num_inputs_of",
    "weight_node",
    "write_blanks",
]

_BLANK = gguf.GGMLQuantizationType.Q4_0
_BLANK_BYTES = 18  # a scale, then 32 codes
_SUMS = "sums_of_groups"
_WITH_SUMS = f"with_{_SUMS}"

Tensors = Sequence[gguf.ReaderTensor]
Rows = npt.NDArray[np.int64]


def is_quantised(tensor: gguf.ReaderTensor) -> bool:
    return tensor.tensor_type.name not in ("F32", "F16", "BF16")


def write_blanks(fields: Mapping[str, gguf.ReaderField], tensors: Tensors, target: Path) -> None:
    """Write a copy of a GGUF model with blanks, as one file. Raises: OSError."""
    writer = gguf.GGUFWriter(target, str(fields["general.architecture"].contents()))
    for name, field in fields.items():
        if not name.startswith(("GGUF.", "split.")) and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        kind = _BLANK if is_quantised(tensor) else tensor.tensor_type
        num_bytes = gguf.quant_shape_to_byte_shape(shape, kind) if kind is _BLANK else None
        writer.add_tensor_info(
            tensor.name,
            num_bytes or shape,
            np.dtype(np.uint8) if num_bytes else tensor.data.dtype,
            int(np.prod(num_bytes)) if num_bytes else tensor.data.nbytes,
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, tensor in enumerate(tensors):
        writer.write_tensor_data(_blank(tensor, number) if is_quantised(tensor) else tensor.data)
    writer.close()


def fill_blanks(
    model: Any, tensors: Tensors, report: Callable[[float], object], *, least_bits: int = 4
) -> None:  # Any: the library's model
    """Put the weights of a GGUF model into the graph that the library has made of its blanks.

    `report` gets the part that is done, from 0 to 1. With 8 as `least_bits`, weights of four bits get eight.

    Raises: ModelError if a weight is NaN or infinite; RuntimeError if a blank is not found, which another version of
    the library may cause; NotImplementedError or ValueError for an unknown type.
    """
    sums = _Sums()
    missing = {number for number, tensor in enumerate(tensors) if is_quantised(tensor)}
    total, done = sum(tensors[number].n_bytes for number in missing), 0
    for number, rows, readers in list(_blanks(model)):
        if number not in missing:
            raise RuntimeError("the library changed the codes of a tensor")
        tensor = tensors[number]
        try:
            _fill(tensor, rows, readers, sums, least_bits)
        except FloatingPointError as error:
            raise ModelError(
                f"The model file is damaged: {tensor.name} contains {error}. Delete it (tailrace rm), and fetch it."
            ) from error
        missing.remove(number)
        done += tensor.n_bytes
        report(done / total)
    if missing:
        raise RuntimeError(f"the library made no place for {tensors[min(missing)].name}")
    model.validate_nodes_and_infer_types()


def fix_attention_width(model: Any) -> None:  # Any: the library's model
    """Give the width of attention's results as a constant. The library's graph computes it in each step and layer.

    All nodes behind such a shape wait for it: with SmolLM2-135M and one row, a step takes 2 to 3 % longer.
    """
    for node in model.get_ordered_ops():
        before = node.input_value(0).get_node() if node.get_type_name() == "Reshape" else None
        if before is None or before.get_type_name() != "Transpose":
            continue
        attention = before.input_value(0)
        if attention.get_node().get_type_name() != "ScaledDotProductAttention":
            continue
        _, heads, _, size = attention.get_partial_shape()
        if heads.is_static and size.is_static:
            shape = ops.constant(np.array([0, 0, heads.get_length() * size.get_length()]))
            node.set_attribute("special_zero", True)  # 0: as it is, which are the sequences and the tokens
            node.input(1).replace_source_output(shape.output(0))
    model.validate_nodes_and_infer_types()


def has_weight(product: Any) -> bool:  # Any: the library's nodes
    """Return whether a product is a layer of the model, and not one that sums its inputs."""
    return not product.get_friendly_name().startswith(_SUMS)


def inputs_of(layer: Any) -> Any:  # Any: the library's nodes
    """Return what a linear layer multiplies, without the sums that belong to its weights."""
    given = layer.input_value(0)
    return given.get_node().input_value(0) if _has_sums(given) else given


def num_inputs_of(layer: Any) -> int:
    """Return the number of inputs of a linear layer, without the sums."""
    columns = int(layer.input_value(1).get_shape()[1])
    given = layer.input_value(0)
    if not _has_sums(given):
        return columns
    return columns - 2 * int(given.get_node().input_value(1).get_partial_shape()[-1].get_length())


def _has_sums(given: Any) -> bool:
    return bool(given.get_node().get_friendly_name().startswith(_WITH_SUMS))


def _blank(tensor: gguf.ReaderTensor, number: int) -> npt.NDArray[np.uint8]:
    columns = int(tensor.shape[0])
    rows = int(tensor.n_elements) // columns
    blocks = np.zeros((rows, columns // GROUP, _BLANK_BYTES), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    for place in range(8):
        blocks[:, 0, 2 + place] = number >> 4 * place & 15
        blocks[:, 0, 10 + place] = np.arange(rows) >> 4 * place & 15
    return blocks.reshape(rows, -1)


def _blanks(model: Any) -> Iterator[tuple[int, Rows, list[Any]]]:
    """Yield each blank: the number of its tensor, the numbers of its rows, and the inputs of nodes that read it."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.u4:
            continue
        shape = list(node.get_shape())
        if len(shape) == 3 and shape[2] == GROUP:  # else the zeros of a blank
            marks = np.array(node.data.reshape(shape[0], -1)[:, :8]).view("<u4").astype(np.int64)
            yield int(marks[0, 0]), marks[:, 1], _readers(node)


def _readers(node: Any) -> list[Any]:
    """Follow the arithmetic of a weight to the inputs that read its result."""
    readers = list(node.output(0).get_target_inputs())
    while len(readers) == 1 and readers[0].get_node().get_type_name() not in ("MatMul", "Gather"):
        readers = list(readers[0].get_node().output(0).get_target_inputs())
    return readers


def _fill(tensor: gguf.ReaderTensor, rows: Rows, readers: list[Any], sums: _Sums, least_bits: int) -> None:
    is_linear = all(reader.get_node().get_type_name() == "MatMul" for reader in readers)
    weights = four_bits(tensor) if is_linear and least_bits <= 4 else None
    weight = _four_bits_node(weights, rows) if weights else _eight_bits_node(eight_bits(tensor), rows)
    for reader in readers:
        if weights and weights.num_sums:
            given = reader.get_node().input(0)
            given.replace_source_output(sums.behind(reader.get_node().input_value(0), weights))
        reader.replace_source_output(weight)


class _Sums:
    """The inputs of layers with the sums of their groups behind them. Layers with the same inputs share them."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}  # Any: the library's outputs
        self._matrices: dict[int, Any] = {}  # by number of groups; the library keeps a copy of each in its own form

    def behind(self, given: Any, weights: FourBits) -> Any:
        name = given.get_node().get_friendly_name()
        if name.startswith(_WITH_SUMS):
            raise RuntimeError("the library's layers share their weights in an unknown way")
        key = (name, given.get_index())
        if key not in self._made:
            summed = self._sums(given, weights.num_sums)
            together = ops.concat([given, summed, summed], 2)
            together.set_friendly_name(f"{_WITH_SUMS}_{len(self._made)}")
            self._made[key] = together.output(0)
        return self._made[key]

    def _sums(self, given: Any, count: int) -> Any:
        """Return the sum of each group of inputs, with zeros behind them up to the next multiple of a group.

        They are a product with a matrix, because the library takes longer for its own reduction. Wide inputs are cut
        into parts with the same matrix: a matrix for 8,192 inputs would have 8 MB, which each step would read in each
        layer.
        """
        part = GROUP if count % GROUP == 0 else count
        if part == count:
            return self._product(given, part)
        parts = ops.reshape(given, np.array([0, 0, count // part, part * GROUP]), True)
        return ops.reshape(self._product(parts, part), np.array([0, 0, count]), True)

    def _product(self, given: Any, part: int) -> Any:
        if part not in self._matrices:
            matrix = np.zeros((-(-part // GROUP) * GROUP, part * GROUP), np.float32)
            inputs = np.arange(part * GROUP)
            matrix[inputs // GROUP, inputs] = 1
            self._matrices[part] = ops.constant(matrix)
        product = ops.matmul(given, self._matrices[part], False, True)
        product.set_friendly_name(f"{_SUMS}_{len(self._made)}")
        return product


def weight_node(codes: Any, scales: Any) -> Any:  # Any: the library's nodes and outputs
    """Return the weight that constants of codes and scales make."""
    groups = ops.multiply(ops.convert(codes, "f32"), scales)
    rows, num_groups, size = groups.get_output_shape(0)
    return ops.reshape(groups, np.array([rows, num_groups * size]), False).output(0)


def _eight_bits_node(weights: EightBits, rows: Rows) -> Any:
    codes = ops.constant(np.ascontiguousarray(weights.codes[rows]))
    return weight_node(codes, _scales(weights.scales[rows]))


def _four_bits_node(weights: FourBits, rows: Rows) -> Any:
    codes = weights.codes[rows].view(np.uint8)
    packed = ov.Tensor(ov.Type.i4, ov.Shape(list(codes.shape)))
    packed.data.view(np.uint8).reshape(-1)[:] = (codes[..., 0::2] & 15 | codes[..., 1::2] << 4).reshape(-1)
    return weight_node(ops.constant(packed), _scales(weights.scales[rows]))


def _scales(values: npt.NDArray[np.float16]) -> Any:
    """Return a constant in float32. The library computes with float32, and of float16 it would keep a copy in memory;
    this one stays in the file."""
    return ops.constant(values[..., None].astype(np.float32))
