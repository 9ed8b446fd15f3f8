"""Measures the memory and the processor time of OpenVINO's engine for one GGUF file: first load, load of the packed
model, first answer.

    python bench/memory.py GGUF [--cache DIRECTORY] [--weights auto|4|8|16]

Each load is a new process. Without --cache, or with an empty one, the first load packs the model. `anonymous` memory is
what the engine needs: the system can only give it to others by swapping. `file` is mapped from files and unchanged,
mostly programs and the packed model: the system drops it when memory is short. `resident` is the sum, as `ps` and
container limits show it. `cpu` is the processor time of all threads since the process began: unlike the time on the
clock, other programs change it little. The answer has 32 tokens, its prompt 60. Linux only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
from pathlib import Path
from typing import Any

PROMPT_TOKENS, ANSWER_TOKENS = 60, 32


def say(step: str, *, of: int) -> None:
    """Print the memory of this process, in MB and as a multiple of a number of bytes, and its processor time in s."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    fields = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, file, most = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM"))
    print(
        f"{step:24s}{anonymous / 1e6:10,.0f}{anonymous / of:8.2f} x{file / 1e6:8,.0f}{(anonymous + file) / 1e6:10,.0f}"
        f"{(anonymous + file) / of:8.2f} x{most / 1e6:10,.0f}{usage.ru_utime + usage.ru_stime:8.1f}",
        flush=True,
    )


def measure(path: str, cache: str, weights: str) -> None:
    """Load the model in this process, and answer once."""
    of = Path(path).stat().st_size
    from tailrace.engines import EngineSpec
    from tailrace.engines.interface import Sequence
    from tailrace.types import Sampling
    from tailrace_plugins.openvino.openvino_engine import OpenVINOEngine

    say("library imported", of=of)
    bits: Any = 0 if weights == "auto" else int(weights)
    engine = OpenVINOEngine(EngineSpec("openvino", path, cache_path=cache, exact=True, weight_bits=bits))
    say("model loaded", of=of)
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    engine.submit(Sequence(1, (tuple(range(100, 100 + PROMPT_TOKENS)),), sampling))
    while not any(delta.finish_reason for delta in engine.step()):
        pass
    say("after an answer", of=of)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the memory of OpenVINO's engine for a GGUF file.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--cache", type=Path, help="the directory of packed models; default: an empty one")
    parser.add_argument("--weights", choices=("auto", "4", "8", "16"), default="auto")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tailrace-memory-") as directory:
        cache = str(options.cache or directory)
        print(f"{options.gguf.name}: {options.gguf.stat().st_size / 1e6:,.0f} MB")
        names = ("anonymous", "÷ file", "file", "resident", "÷ file", "peak", "cpu")
        widths = (10, 10, 8, 10, 10, 10, 8)
        print(f"{'MB':24s}" + "".join(f"{name:>{width}s}" for name, width in zip(names, widths, strict=True)))
        for load in ("first load", "second load"):
            print(f"{load}:")
            process = processes.Process(target=measure, args=(str(options.gguf), cache, options.weights))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
