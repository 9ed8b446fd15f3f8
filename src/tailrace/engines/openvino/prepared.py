"""Keeps the packed weights of a model in the cache directory, and makes them once.

The file is in the format safetensors. Several versions of tailrace may share a cache directory. Each keeps its own form
of a model, and a form is removed when no version has used it for a long time.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailrace.engines.openvino.facts import least_bits
from tailrace.engines.openvino.families import Decoder
from tailrace.engines.openvino.sources import Raw, TensorSource, open_source
from tailrace.engines.openvino.weights import Bits, Form, Packed, floats, form_of, pack
from tailrace.engines.scratch import scratch_directory
from tailrace.errors import ModelError
from tailrace.models.safetensors import read_head, weight_files
from tailrace.models.shards import model_stem, parts_of

__all__ = ["FORM", "Matrix", "Weights", "prepare", "prepared_path", "remove_unused"]

FORM = 7  # of what this module writes; another number makes another directory
MERGED = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # layers with the same inputs become one matrix
_FILE = "weights.safetensors"
_ORIGIN = "tailrace_origin.json"  # names the source and its state
_NAME = re.compile(r"(-(form|packed)\d+)?-[0-9a-f]{16}")  # after the model's name; forms 1 to 3 have no number
_UNUSED_S = 30 * 86_400.0
LARGE_BYTES = 2**28  # of tensors, from which on the preparation is announced
REPORT_S = 2.0
_ALIGNMENT = 64
_DTYPES: dict[str, tuple[str, Any]] = {  # Any: numpy's scalar types
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
}
_NUMPY: dict[str, Any] = dict(_DTYPES.values())


@dataclass(frozen=True, slots=True)
class Matrix:
    """The packed rows of one or several linear layers with the same inputs, mapped from the file."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of each
    form: Form
    num_columns: int  # of the model's matrix, without those for sums
    packed: Packed


class Weights:
    """The packed weights of a model."""

    def __init__(self, directory: Path) -> None:
        """Raises: ModelError or KeyError for a damaged file; OSError."""
        self.path = directory / _FILE
        tensors, start = read_head(self.path)
        self._content = content = np.memmap(self.path, np.uint8, "c")  # never written, but the library takes no other
        self._arrays: dict[str, npt.NDArray[Any]] = {
            name: content[start + tensor.data_offsets[0] : start + tensor.data_offsets[1]]
            .view(_NUMPY[tensor.dtype])
            .reshape(tensor.shape)
            for name, tensor in tensors.items()
        }
        self._matrices: dict[str, dict[str, Any]] = json.loads((directory / "matrices.json").read_text())

    def matrices(self, names: tuple[str, ...]) -> Iterator[Matrix]:
        """Yield the matrices that together have these layers, in this order."""
        left = names
        while left:
            key = next(key for key in _prefixes(left) if key in self._matrices)
            facts = self._matrices[key]
            own = tuple(key.split("+"))
            packed = Packed(self._arrays[f"{key}.codes"], self._arrays.get(f"{key}.scales", np.empty((0, 0, 0))))
            yield Matrix(own, tuple(facts["sizes"]), Form(*facts["form"]), facts["num_columns"], packed)
            left = left[len(own) :]

    def shape(self, name: str) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of a linear layer. Raises: KeyError."""
        for key, facts in self._matrices.items():
            if name in (names := key.split("+")):
                return facts["sizes"][names.index(name)], facts["num_columns"]
        raise KeyError(name)

    @property
    def num_bytes(self) -> int:
        return len(self._content)

    def release(self) -> None:
        """Give back the memory of the mapped file, after the library has copied the weights out of it. Rows of the
        embedding are read from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._content._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def vector(self, name: str) -> npt.NDArray[np.float32] | None:
        return self._arrays.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._matrices


def _prefixes(names: tuple[str, ...]) -> Iterator[str]:
    return ("+".join(names[:count]) for count in range(len(names), 0, -1))


def prepared_path(path: Path, cache: Path, bits: Bits = 0) -> Path:
    """Return the directory of a model's packed weights, which may not exist yet. Raises: OSError."""
    # With the least bits, because machines with different processors may share a cache directory.
    facts = f"{path.resolve()} {_state(path)} {bits} {_least_bits(path)}"
    return cache / f"{_stem(path)}-packed{FORM}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def prepare(
    path: Path, cache: Path, context_tokens: int, *, bits: Bits = 0, say: Callable[[str], object] = print
) -> tuple[Decoder, Weights]:
    """Return a model's shape and its packed weights, which are made if they do not exist. Raises: ModelError."""
    try:
        source = open_source(path, context_tokens)
        prepared = prepared_path(path, cache, bits)
        weights = _open(prepared)
        if weights is None:
            _make(path, source, prepared, bits, say)
            weights = Weights(prepared)
        with suppress(OSError):  # a cache that only another user may write
            os.utime(weights.path)
        remove_unused(path, prepared)
        return source.decoder, weights
    except OSError as error:
        raise ModelError(f"{path.name} cannot be prepared for OpenVINO: {error.strerror or error}.") from error
    except (ValueError, LookupError, NotImplementedError, MemoryError) as error:
        raise ModelError(f"{path.name} cannot be prepared for OpenVINO: {type(error).__name__} {error}.") from error


def remove_unused(path: Path, prepared: Path) -> None:
    """Remove what was made of an earlier state of the model, and other forms that were not used for 30 days.

    Processes that have loaded them keep their mappings of the removed files.
    """
    stem = _stem(path)
    for other in prepared.parent.glob(f"{glob.escape(stem)}-*"):
        if other == prepared or not _NAME.fullmatch(other.name.removeprefix(stem)):
            continue
        file, state = _origin(other)
        if file not in ("", str(path.resolve())):
            continue
        if (state and state != _state(path)) or time.time() - _used_s(other) > _UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)


def _open(prepared: Path) -> Weights | None:
    """Return None if the directory does not exist or is damaged."""
    try:
        return Weights(prepared)
    except (OSError, ModelError, ValueError, LookupError):
        shutil.rmtree(prepared, ignore_errors=True)
        return None


def _make(path: Path, source: TensorSource, prepared: Path, bits: Bits, say: Callable[[str], object]) -> None:
    with scratch_directory("preparing-", prepared.parent) as work:
        made = work / "made"
        made.mkdir()
        _Writer(path.name, source, bits, _least_bits(path), say).write(made)
        (made / _ORIGIN).write_text(json.dumps({"file": str(path.resolve()), "state": _state(path)}))
        with suppress(OSError):  # another worker was faster
            made.rename(prepared)
    if not prepared.is_dir():
        raise OSError(f"{prepared} cannot be written")


@dataclass(frozen=True, slots=True)
class _Planned:
    names: tuple[str, ...]
    raws: tuple[Raw, ...]
    form: Form


class _Writer:
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
        with (directory / _FILE).open("wb") as file:
            file.seek(8 + head_bytes)
            head, matrices = self._write_body(file, planned, vectors, total)
            file.seek(0)
            file.write(head_bytes.to_bytes(8, "little") + json.dumps(head).encode().ljust(head_bytes))
        (directory / "matrices.json").write_text(json.dumps(matrices))

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
        self, file: Any, planned: list[_Planned], vectors: dict[str, npt.NDArray[np.float32]], total: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        head: dict[str, Any] = {}
        matrices: dict[str, Any] = {}

        first = file.tell()

        def put(name: str, *arrays: npt.NDArray[Any]) -> None:
            start = file.tell() - first
            for array in arrays:
                file.write(np.ascontiguousarray(array).data)
            shape = [sum(len(array) for array in arrays), *arrays[0].shape[1:]]
            head[name] = {
                "dtype": _DTYPES[arrays[0].dtype.name][0],
                "shape": shape,
                "data_offsets": [start, file.tell() - first],
            }
            file.write(bytes(-file.tell() % _ALIGNMENT))

        for name, vector in vectors.items():
            put(name, vector)
        done, told_s = 0, time.monotonic()
        for one, parts in zip(planned, self._packed(planned), strict=True):
            key = "+".join(one.names)
            put(f"{key}.codes", *(part.codes for part in parts))
            if one.form.bits < 16:
                put(f"{key}.scales", *(part.scales for part in parts))
            sizes = [len(raw.rows) for raw in one.raws]
            matrices[key] = {"sizes": sizes, "form": list(one.form), "num_columns": one.raws[0].columns}
            done += sum(raw.rows.nbytes for raw in one.raws)
            if time.monotonic() - told_s > REPORT_S:
                told_s = time.monotonic()
                self._say(f"Preparing {self._name}: {100 * done / total:.0f} %")
        return head, matrices

    def _packed(self, planned: list[_Planned]) -> Iterator[list[Packed]]:
        """Yield the packed parts of each matrix. A few matrices are packed ahead, in as many threads as processors."""
        workers = os.cpu_count() or 1

        def work(one: _Planned) -> list[Packed]:
            return [self._checked(raw, lambda raw=raw: pack(raw, one.form)) for raw in one.raws]  # type: ignore[misc]

        with ThreadPoolExecutor(workers) as pool:
            ahead = [pool.submit(work, one) for one in planned[: workers + 1]]
            for index in range(len(planned)):
                parts = ahead.pop(0).result()
                if index + workers + 1 < len(planned):
                    ahead.append(pool.submit(work, planned[index + workers + 1]))
                yield parts


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return [path / "config.json", *weight_files(path)]
    return parts_of(path)


def _stem(path: Path) -> str:
    return path.resolve().name if path.is_dir() else model_stem(path)


def _least_bits(path: Path) -> int:
    return least_bits(sum(file.stat().st_size for file in _files(path)))


def _state(path: Path) -> str:
    states = [file.stat() for file in _files(path)]
    return " ".join(f"{state.st_size} {state.st_mtime_ns}" for state in states)


def _origin(directory: Path) -> tuple[str, str]:
    """Return the source and the state of it that a directory was made of; "" for what is not known."""
    try:
        origin = json.loads((directory / _ORIGIN).read_text())
        return str(origin["file"]), str(origin.get("state", ""))
    except (OSError, ValueError, LookupError):
        return "", ""


def _used_s(directory: Path) -> float:
    """Return when a directory was used last, since the epoch. Older versions only read it, which most systems note
    once a day."""
    for name in (_FILE, "openvino_model.xml"):
        with suppress(OSError):
            state = (directory / name).stat()
            return max(state.st_mtime, state.st_atime)
    return 0.0
