"""Keeps the packed weights of a model in the cache directory, and makes them once.

Several versions of tailrace may share a cache directory. Each keeps its own form of a model, and a form is removed when
no version has used it for a long time.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace.models.safetensors import read_head, weight_files
from tailrace.models.shards import model_stem, parts_of
from tailrace_kit.scratch import scratch_directory
from tailrace_plugins.openvino.families import Decoder
from tailrace_plugins.openvino.model_files import Bits, least_bits
from tailrace_plugins.openvino.packer import DTYPES, MATRICES_FILE, WEIGHTS_FILE, Packer
from tailrace_plugins.openvino.sources import TensorSource, open_source
from tailrace_plugins.openvino.weights import Form, Packed

__all__ = ["FORM", "Matrix", "Weights", "prepare", "prepared_path", "remove_unused"]

FORM = 7  # of what `packer.py` writes; another number makes another directory
_ORIGIN = "tailrace_origin.json"  # names the source and its state
_NAME = re.compile(r"(-(form|packed)\d+)?-[0-9a-f]{16}")  # after the model's name; forms 1 to 3 have no number
_UNUSED_S = 30 * 86_400.0
_RELEASE_S = 0.1  # in which the library copies 20 to 100 MB


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
        self.path = directory / WEIGHTS_FILE
        tensors, start = read_head(self.path)
        with self.path.open("rb") as file:  # a copy on write: never written, but the library takes no other
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        content = np.frombuffer(self._content, np.uint8)
        self._arrays: dict[str, npt.NDArray[Any]] = {
            name: content[start + tensor.data_offsets[0] : start + tensor.data_offsets[1]]
            .view(DTYPES[tensor.dtype])
            .reshape(tensor.shape)
            for name, tensor in tensors.items()
        }
        self._matrices: dict[str, dict[str, Any]] = json.loads((directory / MATRICES_FILE).read_text())

    def matrices(self, names: tuple[str, ...]) -> Iterator[Matrix]:
        """Yield the matrices that together have these layers, in this order."""
        left = names
        while left:
            key = next(key for key in _prefixes(left) if key in self._matrices)
            described = self._matrices[key]
            own = tuple(key.split("+"))
            packed = Packed(self._arrays[f"{key}.codes"], self._arrays.get(f"{key}.scales", np.empty((0, 0, 0))))
            yield Matrix(own, tuple(described["sizes"]), Form(*described["form"]), described["num_columns"], packed)
            left = left[len(own) :]

    def shape(self, name: str) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of a linear layer. Raises: KeyError."""
        for key, described in self._matrices.items():
            if name in (names := key.split("+")):
                return described["sizes"][names.index(name)], described["num_columns"]
        raise KeyError(name)

    @property
    def num_bytes(self) -> int:
        return len(self._content)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give back the memory of the mapped file again and again, while the library copies the weights out of it.
        Otherwise all of them would be in memory twice. What is needed later, such as rows of the embedding, is read
        from the file again."""
        ended = threading.Event()
        thread = threading.Thread(target=self._release_until, args=(ended,), name="release")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _release_until(self, ended: threading.Event) -> None:
        is_last = not hasattr(mmap, "MADV_DONTNEED")
        while not is_last:
            is_last = ended.wait(_RELEASE_S)
            self._content.madvise(mmap.MADV_DONTNEED)

    def vector(self, name: str) -> npt.NDArray[np.float32] | None:
        return self._arrays.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._matrices


def _prefixes(names: tuple[str, ...]) -> Iterator[str]:
    return ("+".join(names[:count]) for count in range(len(names), 0, -1))


def prepared_path(path: Path, cache: Path, bits: Bits = 0, head: str = "") -> Path:
    """Return the directory of a model's packed weights, which may not exist yet. `head` distinguishes what a model has
    instead of a head for text. Raises: OSError."""
    # With the least bits, because machines with different processors may share a cache directory.
    source = f"{path.resolve()} {_state(path)} {bits} {_least_bits(path)}{head}"
    return cache / f"{_stem(path)}-packed{FORM}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def prepare(
    path: Path,
    cache: Path,
    context_tokens: int,
    *,
    bits: Bits = 0,
    say: Callable[[str], object] = print,
    card: ModelCard | None = None,
) -> tuple[Decoder, Weights]:
    """Return a model's shape and its packed weights, which are made if they do not exist. `card`: that of a model that
    embeds or ranks. Raises: ModelError."""
    try:
        source = open_source(path, context_tokens, card)
        prepared = prepared_path(path, cache, bits, f" {card.task} {card.score_tokens}" if card is not None else "")
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
        Packer(path.name, source, bits, _least_bits(path), say).write(made)
        (made / _ORIGIN).write_text(json.dumps({"file": str(path.resolve()), "state": _state(path)}))
        with suppress(OSError):  # another worker was faster
            made.rename(prepared)
    if not prepared.is_dir():
        raise OSError(f"{prepared} cannot be written")


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
    for name in (WEIGHTS_FILE, "openvino_model.xml"):
        with suppress(OSError):
            state = (directory / name).stat()
            return max(state.st_mtime, state.st_atime)
    return 0.0
