"""GGUF models in several files, as `llama-gguf-split` makes them, and the choice among the files of a directory.

All parts are in one directory, and are named `NAME-00001-of-00003.gguf`. The first part has the metadata; a model is
named by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath

__all__ = ["gguf_choices", "model_stem", "part_names", "part_of", "parts_of", "projector_of", "some_of"]

_MAX_LISTED = 12
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PROJECTOR = re.compile(r"(^|[-_.])mmproj([-_.]|$)", re.IGNORECASE)
# The types of a projector's tensors, the best one first: 16 bits are exact enough, and quicker to load than 32.
_TYPES = ("f16", "bf16", "f32", "q8_0")
_TYPE = re.compile(r"[-_.]?(?<![a-z0-9])(b?f16|f32|q\d\w*)$", re.IGNORECASE)


def part_of(name: str) -> tuple[int, int]:
    """Return which part of how many a file is, by its name: (1, 1) for a whole model."""
    found = _PART.fullmatch(name)
    return (int(found["number"]), int(found["count"])) if found is not None else (1, 1)


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a model, given the name or path of one of them."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, in order. They need not exist."""
    return [path.with_name(name) for name in part_names(path.name)]


def model_stem(path: PurePath) -> str:
    """Return the name of a file's model: without the ending, and without the number of a part."""
    found = _PART.fullmatch(path.name)
    return found["stem"] if found is not None else path.stem


def gguf_choices(names: Iterable[str]) -> list[str]:
    """Return the models among files: GGUF files, of parts only the first one, and no projectors (mmproj), which read
    images for another model. Sorted."""
    paths = (PurePosixPath(name) for name in names)
    return sorted(
        str(path)
        for path in paths
        if path.suffix == ".gguf" and part_of(path.name)[0] == 1 and not _PROJECTOR.search(path.stem)
    )


def projector_of(model: str, names: Iterable[str]) -> str | None:
    """Return which of several files is the projector (mmproj) of a model: one in the same directory whose name, without
    `mmproj` and the type of its tensors, begins the model's. A projector without a name of its own is for all models
    there."""
    wanted = PurePosixPath(model)
    found = []
    for path in (PurePosixPath(name) for name in names):
        if path.suffix != ".gguf" or path.parent != wanted.parent or not _PROJECTOR.search(path.stem):
            continue
        kind = _TYPE.search(path.stem)
        own = _PROJECTOR.sub(" ", _TYPE.sub("", path.stem)).strip().lower()
        if own in ("", "model") or wanted.stem.lower().startswith(own):
            rank = _TYPES.index(kind[1].lower()) if kind and kind[1].lower() in _TYPES else len(_TYPES)
            found.append((-len(own), rank, str(path)))
    return min(found)[2] if found else None


def some_of(names: list[str]) -> str:
    """Return names for an error: all, or the first twelve and how many more."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
