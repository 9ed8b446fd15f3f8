"""Converts GGUF files to OpenVINO's own form, once, and keeps the result in the cache directory."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import shutil
import time
from pathlib import Path

import gguf
import openvino as ov
import openvino_genai as genai

from tailrace.engines.openvino.graph import fill_blanks, is_quantised, write_blanks
from tailrace.engines.openvino.merging import merge_layers
from tailrace.engines.scratch import scratch_directory
from tailrace.errors import ModelError

__all__ = ["prepare", "prepared_path", "remove_older"]

_FORM = 3  # of what this module writes; another number makes older results useless
_ORIGIN = "tailrace_origin.json"  # names the file that a directory was made of; results of form 1 lack it
_SAVE = {"enable_save_ov_model": True}
_BYTES_PER_WEIGHT = 3  # disk space: the blanks, the library's copy of them, and the result
_REPORT_S = 5.0

logger = logging.getLogger("tailrace.engine")


def prepared_path(path: Path, cache: Path) -> Path:
    """Return the directory of a GGUF file's converted form, which may not exist yet. Raises: OSError."""
    state = path.stat()
    facts = f"form {_FORM} {path.resolve()} {state.st_size} {state.st_mtime_ns} {genai.__version__}"
    return cache / f"{path.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def prepare(path: Path, cache: Path, *, again: bool = False) -> Path:
    """Return the directory of a GGUF file's converted form; make it if it does not exist, or `again`.

    Raises: ModelError; the library's RuntimeError; NotImplementedError or ValueError for an unknown tensor type.
    """
    try:
        prepared = prepared_path(path, cache)
        if prepared.is_dir() and not again:
            return prepared
        with scratch_directory("preparing-", cache) as work:
            made = _convert(path, work)
            if again:
                shutil.rmtree(prepared, ignore_errors=True)
            with contextlib.suppress(OSError):  # another worker was faster
                made.rename(prepared)
        if not prepared.is_dir():
            raise OSError(f"{prepared} cannot be written")
        remove_older(path, prepared)
        return prepared
    except OSError as error:
        raise ModelError(f"{path.name} cannot be prepared for OpenVINO: {error.strerror or error}.") from error


def _convert(path: Path, work: Path) -> Path:
    """Convert a file within a directory, and return the directory of the result.

    Memory: the weights of the result, and one tensor more.
    """
    source = gguf.GGUFReader(path)
    _check_space(source, work)
    logger.info("Preparing %s for OpenVINO (only once) …", path.name)
    blank = work / "blank" / path.name  # the library writes its files beside it
    blank.parent.mkdir()
    write_blanks(source, blank)
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 1
    genai.ContinuousBatchingPipeline(str(blank), scheduler, "CPU", _SAVE, _SAVE)
    blank.unlink()
    model = ov.Core().read_model(blank.parent / "openvino_model.xml")
    fill_blanks(model, source, _Progress(path.name))
    merge_layers(model)
    made = work / "made"
    ov.save_model(model, made / "openvino_model.xml", compress_to_fp16=False)
    for file in blank.parent.iterdir():
        if not (made / file.name).exists():
            file.rename(made / file.name)
    (made / _ORIGIN).write_text(json.dumps({"file": str(path.resolve())}))
    return made


def _check_space(source: gguf.GGUFReader, work: Path) -> None:
    wanted_bytes = sum(
        _BYTES_PER_WEIGHT * int(tensor.n_elements) if is_quantised(tensor) else 3 * int(tensor.n_bytes)
        for tensor in source.tensors
    )
    if shutil.disk_usage(work).free < wanted_bytes:
        raise OSError(f"{work.parent} has less than {wanted_bytes >> 20:,} MiB of free space")


def remove_older(path: Path, prepared: Path) -> None:
    """Remove what was made of an earlier state of the file, by another version of the library, or in form 1.

    Processes that have loaded it keep their mappings of the removed files.
    """
    for other in prepared.parent.glob(f"{glob.escape(path.stem)}-" + "[0-9a-f]" * 16):
        if other != prepared and _origin(other) in ("", str(path.resolve())):
            shutil.rmtree(other, ignore_errors=True)


def _origin(directory: Path) -> str:
    try:
        return str(json.loads((directory / _ORIGIN).read_text())["file"])
    except (OSError, ValueError, LookupError):
        return ""


class _Progress:
    """Logs the part that is done, every few seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told_s = time.monotonic()

    def __call__(self, part: float) -> None:
        if time.monotonic() - self._told_s > _REPORT_S:
            self._told_s = time.monotonic()
            logger.info("Preparing %s: %.0f %%", self._name, 100 * part)
