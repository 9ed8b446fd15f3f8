"""Finds a model's safetensors files, reads their headers, and checks these against the files' sizes before a library
uses the files.

*Source:* the format's page in the safetensors repository.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tailrace.errors import ModelError
from tailrace.models.directories import expanded

__all__ = ["Tensor", "adapter_file", "chosen_files", "read_head", "weight_files"]

_WHOLE = "model.safetensors"
_ADAPTER = "adapter_model.safetensors"
_MAX_HEAD_BYTES = 100_000_000  # the library's own limit


class Tensor(msgspec.Struct):
    """A tensor in the header. Offsets count from the end of the header, at `8 + head_bytes` in the file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # the file of each tensor


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a Hugging Face model. Raises: ModelError."""
    return [
        directory / name for name in chosen_files(directory, [file.name for file in directory.glob("*.safetensors")])
    ]


def chosen_files(directory: Path, names: list[str]) -> list[str]:
    """Choose a model's files as transformers does: some directories have the same weights in a second form. The index,
    if there is one, must be in the directory; the files need not be there yet. Raises: ModelError."""
    if _WHOLE in names:
        return [_WHOLE]
    index = directory / f"{_WHOLE}.index.json"
    try:
        chosen = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except FileNotFoundError:
        return sorted(names)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read: {error}. Fetch the model again.") from error
    if strange := [name for name in chosen if Path(name).name != name]:
        raise ModelError(f"{index} is damaged: it names files of other directories, such as {strange[0]}.")
    return sorted(chosen)


def read_head(file: Path) -> tuple[dict[str, Tensor], int]:
    """Return the tensors by name, and the offset of their data in the file. Raises: ModelError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            head_bytes = int.from_bytes(content.read(8), "little")
            if size < 8 or head_bytes > min(size - 8, _MAX_HEAD_BYTES):
                raise ModelError(f"{file} is damaged or cut short: its head has {head_bytes:,} bytes. Fetch it again.")
            head = content.read(head_bytes)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        entries = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(entry, type=Tensor) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: {error}. Fetch it again.") from error
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if 8 + head_bytes + end > size:
        raise ModelError(f"{file} ({size:,} bytes) is cut short: its tensors need {end:,} bytes. Fetch it again.")
    return tensors, 8 + head_bytes


def adapter_file(path: str) -> Path:
    """Return the file with the weights of an adapter, which is given by its directory or by this file."""
    file = expanded(path)
    return file / _ADAPTER if file.is_dir() else file
