"""Keeps GGUF files in OpenVINO's own form in the cache directory, and makes them once (`conversion`).

Several versions of tailrace and of the library may share a cache directory. Each keeps its own form of a file, and a
form is removed when no version has used it for a long time.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import openvino_genai as genai

from tailrace.child import how_it_ended
from tailrace.engines.openvino.facts import least_bits
from tailrace.engines.scratch import scratch_directory
from tailrace.errors import ModelError
from tailrace.models.shards import model_stem, parts_of

__all__ = ["FORM", "MADE", "prepare", "prepared_path", "remove_unused"]

MADE = "made"  # the directory that a conversion makes
FORM = 6  # of what `conversion` writes; another number makes another directory
_UNUSED_S = 30 * 86_400.0
_NAME = re.compile(r"(-form\d+)?-[0-9a-f]{16}")  # after the file's stem; forms 1 to 3 have no number
_MODEL = "openvino_model.xml"
_ORIGIN = "tailrace_origin.json"  # names the source file and its state; form 1 lacks the file, 2 and 3 the state


def prepared_path(path: Path, cache: Path) -> Path:
    """Return the directory of a GGUF file's converted form, which may not exist yet. Raises: OSError."""
    # With the bits, because machines with different processors may share a cache directory.
    facts = f"{path.resolve()} {_state(path)} {_least_bits(path)} {genai.__version__}"
    return cache / f"{model_stem(path)}-form{FORM}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def prepare(path: Path, cache: Path, *, again: bool = False) -> Path:
    """Return the directory of a GGUF file's converted form; make it if it does not exist, or `again`.

    Raises: ModelError.
    """
    try:
        prepared = prepared_path(path, cache)
        if again or not prepared.is_dir():
            with scratch_directory("preparing-", cache) as work:
                made = _convert(path, work)
                with suppress(OSError):  # there is none, or another worker was faster
                    if again:
                        prepared.rename(work / "replaced")
                with suppress(OSError):  # another worker was faster
                    made.rename(prepared)
            if not prepared.is_dir():
                raise OSError(f"{prepared} cannot be written")
        with suppress(OSError):  # a cache that only another user may write
            os.utime(prepared / _MODEL)
        remove_unused(path, prepared)
        return prepared
    except OSError as error:
        raise ModelError(f"{path.name} cannot be prepared for OpenVINO: {error.strerror or error}.") from error


def _least_bits(path: Path) -> int:
    return least_bits(sum(part.stat().st_size for part in parts_of(path)))


def remove_unused(path: Path, prepared: Path) -> None:
    """Remove what was made of an earlier state of the file, and other forms that were not used for 30 days.

    Processes that have loaded them keep their mappings of the removed files.
    """
    stem = model_stem(path)
    for other in prepared.parent.glob(f"{glob.escape(stem)}-*"):
        if other == prepared or not _NAME.fullmatch(other.name.removeprefix(stem)):
            continue
        file, state = _origin(other)
        if file not in ("", str(path.resolve())):
            continue
        if (state and state != _state(path)) or time.time() - _used_s(other) > _UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)


def _convert(path: Path, work: Path) -> Path:
    """Convert a file within a directory, and return the directory of the result. Raises: ModelError; OSError."""
    module = "tailrace.engines.openvino.conversion"
    command = [sys.executable, "-m", module, str(path), str(work), str(os.getpid()), str(_least_bits(path))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ModelError(done.stdout.decode(errors="replace") or _killed(path, done.returncode))
    made = work / MADE
    (made / _ORIGIN).write_text(json.dumps({"file": str(path.resolve()), "state": _state(path)}))
    return made


def _killed(path: Path, status: int) -> str:
    return f"{path.name} cannot be prepared for OpenVINO: the converting process ended ({how_it_ended(status)})."


def _state(path: Path) -> str:
    states = [part.stat() for part in parts_of(path)]
    return " ".join(f"{state.st_size} {state.st_mtime_ns}" for state in states)


def _origin(directory: Path) -> tuple[str, str]:
    """Return the file and the state of it that a directory was made of; "" for what is not known."""
    try:
        origin = json.loads((directory / _ORIGIN).read_text())
        return str(origin["file"]), str(origin.get("state", ""))
    except (OSError, ValueError, LookupError):
        return "", ""


def _used_s(directory: Path) -> float:
    """Return when a directory was used last, since the epoch. Older versions only read it, which most systems note
    once a day."""
    try:
        state = (directory / _MODEL).stat()
    except OSError:
        return 0.0
    return max(state.st_mtime, state.st_atime)
