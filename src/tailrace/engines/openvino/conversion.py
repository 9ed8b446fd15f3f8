"""Converts a GGUF file to OpenVINO's own form, in a process that frees all memory at its end.

    python -m tailrace.engines.openvino.conversion FILE DIRECTORY PARENT_PID BITS

The result is the directory "made" in DIRECTORY. BITS is 4, or 8 if weights of four bits get eight. Progress goes to
standard error. If the conversion fails, standard output has the reason, and the exit status is 1.

Memory, for a file of 804 MB: 2.3 GB at most, while the library reads the copy with blanks; then the weights of the
result, and parts of a tensor.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import openvino as ov
import openvino_genai as genai

from tailrace.child import begin_child
from tailrace.engines.openvino.graph import fill_blanks, fix_attention_width, is_quantised, write_blanks
from tailrace.engines.openvino.merging import merge_layers
from tailrace.engines.openvino.prepared import MADE
from tailrace.errors import ModelError
from tailrace.models.shards import parts_of

__all__ = ["main"]

_SAVE = {"enable_save_ov_model": True}
_BYTES_PER_WEIGHT = 3  # disk space: the blanks, the library's copy of them, and the result
_REPORT_S = 5.0


def main() -> int:
    path, work = Path(sys.argv[1]), Path(sys.argv[2])
    begin_child(int(sys.argv[3]))
    least_bits = int(sys.argv[4])
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to stdout
    try:
        _convert(path, work, least_bits)
        return 0
    except ModelError as error:
        reason = error.message
    except OSError as error:
        reason = f"{path.name} cannot be prepared for OpenVINO: {error.strerror or error}."
    except (RuntimeError, LookupError, ValueError, MemoryError) as error:  # RuntimeError: the library's, too
        *_, last = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"{path.name} cannot be prepared for OpenVINO: {last.strip().rstrip('.')[:200]}."
    answer.write(reason)
    answer.flush()
    return 1


def _convert(path: Path, work: Path, least_bits: int) -> None:
    sources = [gguf.GGUFReader(part) for part in parts_of(path)]
    tensors = [tensor for source in sources for tensor in source.tensors]
    _check_space(tensors, work)
    _say(f"Preparing {path.name} for OpenVINO (only once) …")
    blank = work / "blank" / "blank.gguf"  # the library writes its files beside it
    blank.parent.mkdir()
    write_blanks(sources[0].fields, tensors, blank)
    sources[0].fields.clear()  # a vocabulary of 128,256 tokens takes 320 MB there
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 1
    genai.ContinuousBatchingPipeline(str(blank), scheduler, "CPU", _SAVE, _SAVE)
    blank.unlink()
    model = ov.Core().read_model(blank.parent / "openvino_model.xml")
    fill_blanks(model, tensors, _Progress(path.name), least_bits=least_bits)
    fix_attention_width(model)
    merge_layers(model)
    made = work / MADE
    ov.save_model(model, made / "openvino_model.xml", compress_to_fp16=False)
    for file in blank.parent.iterdir():
        if not (made / file.name).exists():
            file.rename(made / file.name)


def _check_space(tensors: Sequence[gguf.ReaderTensor], work: Path) -> None:
    wanted_bytes = sum(
        _BYTES_PER_WEIGHT * int(tensor.n_elements) if is_quantised(tensor) else 3 * int(tensor.n_bytes)
        for tensor in tensors
    )
    if shutil.disk_usage(work).free < wanted_bytes:
        raise OSError(f"{work.parent} has less than {wanted_bytes >> 20:,} MiB of free space")


class _Progress:
    """Reports the part that is done, every few seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told_s = time.monotonic()

    def __call__(self, part: float) -> None:
        if time.monotonic() - self._told_s > _REPORT_S:
            self._told_s = time.monotonic()
            _say(f"Preparing {self._name}: {100 * part:.0f} %")


def _say(text: str) -> None:
    sys.stderr.write(f"tailrace: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
