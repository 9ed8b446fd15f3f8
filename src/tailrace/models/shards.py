"""GGUF models in several files, as `llama-gguf-split` makes them, and the choice among the files of a directory.

All parts are in one directory, and are named `NAME-00001-of-00003.gguf`. The first part has the metadata; a model is
named by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["gguf_choices", "model_stem", "part_names", "part_of", "parts_of", "some_of"]

_MAX_LISTED = 12
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PROJECTOR = re.compile(r"(^|[-_.])mmproj([-_.]|$)", re.IGNORECASE)


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


def model_stem(path: Path) -> str:
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


def some_of(names: list[str]) -> str:
    """Return names for an error: all, or the first twelve and how many more."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
