"""Writes the packed weights of a model into one file, in the format safetensors.

All offsets are known before the first array is packed. So the matrices are packed in parts of a few rows, in as many
threads as processors, and a part is written when it is packed: only a few parts are in memory.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tailrace.errors import ModelError
from tailrace.system.processors import usable_processors
from tailrace_plugins.openvino.model_files import Bits
from tailrace_plugins.openvino.sources import Raw, TensorSource
from tailrace_plugins.openvino.weights import Form, Packed, floats, form_of, pack

__all__ = ["DTYPES", "MATRICES_FILE", "MERGED", "WEIGHTS_FILE", "Packer"]

MERGED = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # layers with the same inputs become one matrix
WEIGHTS_FILE = "weights.safetensors"
MATRICES_FILE = "matrices.json"
LARGE_BYTES = 2**28  # of tensors, from which on the preparation is announced
REPORT_S = 2.0
PART = 2**19  # weights that a thread packs at once
# glibc gives free memory back to the system where it is more than twice the largest block that was freed so far
# (mallopt(3)). Then each intermediate result is new memory, which the system clears: packing 1.2 billion weights took
# 5.4 s of processor time instead of 3.7 s.
_FREED_BYTES = 8 * 2**20
_ALIGNMENT = 64
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8}  # Any: numpy's types
_NAMES = {np.dtype(kind).name: name for name, kind in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Planned:
    names: tuple[str, ...]
    raws: tuple[Raw, ...]
    form: Form

    def parts(self) -> Iterator[_Part]:
        first_row = 0
        for raw in self.raws:
            step = max(1, PART // raw.columns)
            for first in range(0, len(raw.rows), step):
                yield _Part("+".join(self.names), self.form, first_row + first, raw.part(first, first + step))
            first_row += len(raw.rows)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a matrix."""

    key: str
    form: Form
    first_row: int  # in the packed matrix
    raw: Raw


class _Offsets:
    """Where each array begins in the file."""

    def __init__(self, start: int) -> None:
        self.head: dict[str, Any] = {}
        self._start = self.end = start
        self._offsets: dict[str, tuple[int, int]] = {}  # the first byte, and the bytes of a row

    def add(self, name: str, like: npt.NDArray[Any], num_rows: int) -> int:
        """Add an array whose rows are those of another one. Returns its first byte."""
        first, row_bytes = -(-self.end // _ALIGNMENT) * _ALIGNMENT, like.nbytes // len(like)
        self._offsets[name] = first, row_bytes
        self.end = first + num_rows * row_bytes
        self.head[name] = {
            "dtype": _NAMES[like.dtype.name],
            "shape": [num_rows, *like.shape[1:]],
            "data_offsets": [first - self._start, self.end - self._start],
        }
        return first

    def of_row(self, name: str, row: int) -> int:
        first, row_bytes = self._offsets[name]
        return first + row * row_bytes


class Packer:
    """Packs all tensors of a source and writes them into one file."""

    def __init__(self, name: str, source: TensorSource, bits: Bits, least: int, say: Callable[[str], object]) -> None:
        self._name = name
        self._source = source
        self._bits = bits
        self._least_bits = least
        self._say = say

    def write(self, directory: Path) -> None:
        """Raises: ModelError if the source lacks a tensor, has others, or has a weight that is no number."""
        planned, vectors = list(self._plan()), dict(self._vectors())
        if unused := self._source.unused():
            raise ModelError(
                f"OpenVINO cannot run {self._name}: it has tensors that the model's family does not have, such as "
                f"{unused[0]}."
            )
        total = sum(raw.rows.nbytes for one in planned for raw in one.raws)
        if shutil.disk_usage(directory).free < 3 * total:
            raise OSError(f"{directory.parent.parent} has less than {3 * total >> 20:,} MiB of free space")
        if total > LARGE_BYTES:
            self._say(f"Preparing {self._name} for OpenVINO (only once) …")
        # More than the head needs; spaces fill the rest.
        head_bytes = _ALIGNMENT * (1 + 5 * (len(vectors) + 2 * len(planned))) - 8
        with (directory / WEIGHTS_FILE).open("wb") as file:
            file.seek(8 + head_bytes)
            head, matrices = self._write_body(file, planned, vectors, total)
            file.seek(0)
            file.write(head_bytes.to_bytes(8, "little") + json.dumps(head).encode().ljust(head_bytes))
        (directory / MATRICES_FILE).write_text(json.dumps(matrices))

    def _plan(self) -> Iterator[_Planned]:
        yield self._planned(("embedding",), is_embedding=True)
        for layer in range(self._source.decoder.num_layers):
            for group in MERGED:
                yield from self._same_forms(tuple(f"layers.{layer}.{kind}" for kind in group))
        if self._source.find("head") is not None:
            yield self._planned(("head",))

    def _same_forms(self, names: tuple[str, ...]) -> Iterator[_Planned]:
        """Yield layers as few matrices: neighbours of one form are put together."""
        together: list[_Planned] = []
        for name in names:
            one = self._planned((name,))
            if together and together[-1].form == one.form:
                last = together.pop()
                one = _Planned((*last.names, name), (*last.raws, *one.raws), one.form)
            together.append(one)
        yield from together

    def _planned(self, names: tuple[str, ...], *, is_embedding: bool = False) -> _Planned:
        raw = self._found(names[0])
        form = form_of(raw, self._bits, least_bits=self._least_bits, is_embedding=is_embedding)
        return _Planned(names, (raw,), form)

    def _found(self, name: str) -> Raw:
        raw = self._source.find(name)
        if raw is None:
            raise ModelError(f"OpenVINO cannot run {self._name}: it has no tensor for {name}.")
        wanted, found = self._shape(name, raw), (len(raw.rows), raw.columns)
        if found != wanted:
            raise ModelError(
                f"OpenVINO cannot run {self._name}: {raw.name} has the shape {found[0]} x {found[1]}, but the model "
                f"needs {wanted[0]} x {wanted[1]}."
            )
        return raw

    def _shape(self, name: str, raw: Raw) -> tuple[int, int]:
        """Return the rows and columns that a tensor must have. A vocabulary may have any size."""
        decoder, kinds = self._source.decoder, name.split(".")
        matrices = decoder.matrix_shapes()
        if kinds[-1] == "bias":
            return matrices[kinds[-2]][0], 1
        size = decoder.norm_sizes().get(kinds[-1], decoder.hidden_size)
        return matrices.get(kinds[-1], (len(raw.rows), size))

    def _vectors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        for layer in range(self._source.decoder.num_layers):
            for norm in self._source.decoder.norm_sizes():
                yield self._vector(f"layers.{layer}.{norm}")
            for kind in self._source.decoder.matrix_shapes():
                if self._source.find(f"layers.{layer}.{kind}.bias") is not None:
                    yield self._vector(f"layers.{layer}.{kind}.bias")
        yield self._vector("final_norm")
        if self._source.find("score") is not None:
            yield self._vector("score")

    def _vector(self, name: str) -> tuple[str, npt.NDArray[np.float32]]:
        raw = self._found(name)
        return name, self._checked(raw, lambda: floats(raw).reshape(-1))

    def _checked(self, raw: Raw, read: Callable[[], Any]) -> Any:  # Any: an array, or packed rows
        try:
            return read()
        except FloatingPointError as error:
            raise ModelError(
                f"The model file is damaged: {raw.name} contains {error}. Delete it (tailrace rm), and fetch it."
            ) from error

    def _write_body(
        self, file: BinaryIO, planned: list[_Planned], vectors: dict[str, npt.NDArray[np.float32]], total: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write all arrays. Returns the head, and the descriptions of all matrices."""
        offsets = _Offsets(file.tell())
        for name, vector in vectors.items():
            file.seek(offsets.add(name, vector, len(vector)))
            file.write(vector.data)
        matrices: dict[str, Any] = {}
        for one in planned:
            key = "+".join(one.names)
            row, num_rows = self._pack(one.raws[0].part(0, 1), one.form), sum(len(raw.rows) for raw in one.raws)
            offsets.add(f"{key}.codes", row.codes, num_rows)
            if one.form.bits < 16:
                offsets.add(f"{key}.scales", row.scales, num_rows)
            sizes = [len(raw.rows) for raw in one.raws]
            matrices[key] = {"sizes": sizes, "form": list(one.form), "num_columns": one.raws[0].columns}
        done, told_s = 0, time.monotonic()
        for part, packed in self._packed(planned):
            for name, array in (("codes", packed.codes), ("scales", packed.scales)):
                if array.size:
                    file.seek(offsets.of_row(f"{part.key}.{name}", part.first_row))
                    file.write(array.data)
            done += part.raw.rows.nbytes
            if time.monotonic() - told_s > REPORT_S:
                told_s = time.monotonic()
                self._say(f"Preparing {self._name}: {100 * done / total:.0f} %")
        file.truncate(offsets.end)
        return offsets.head, matrices

    def _packed(self, planned: list[_Planned]) -> Iterator[tuple[_Part, Packed]]:
        """Yield the packed parts of all matrices, in order. Some parts are packed ahead, in as many threads as
        processors."""
        np.empty(_FREED_BYTES, np.uint8)
        parts = (part for one in planned for part in one.parts())
        workers = usable_processors()
        with ThreadPoolExecutor(workers) as pool:
            ahead: deque[tuple[_Part, Future[Packed]]] = deque()
            for part in parts:
                ahead.append((part, pool.submit(self._pack, part.raw, part.form)))
                if len(ahead) > 4 * workers:
                    done, packed = ahead.popleft()
                    yield done, packed.result()
            for done, packed in ahead:
                yield done, packed.result()

    def _pack(self, raw: Raw, form: Form) -> Packed:
        packed: Packed = self._checked(raw, lambda: pack(raw, form))
        return packed
