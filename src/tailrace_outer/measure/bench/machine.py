"""The machine's hardware, and its maximum speeds as measured by `roofline`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tailrace.engines.protocol import EngineSpec
from tailrace.system.child import how_it_ended
from tailrace.system.memory import machine_memory
from tailrace.system.processors import processor, processor_flags, usable_processors

__all__ = ["Machine", "MeasurePlan", "look_at_machine", "measure_machine"]

_INTERESTING = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve")


class Machine(msgspec.Struct, frozen=True):
    """A machine, and its speeds if they were measured."""

    processor: str
    cores: int  # that this process may use
    features: tuple[str, ...]  # of the processor, as far as engines use them
    memory_bytes: int
    available_bytes: int
    gpus: tuple[str, ...]
    read_bytes_per_s: float = 0.0  # 0: not measured
    flops_per_s: float = 0.0  # float32
    engine_ops_per_s: float = 0.0  # of the engine's own kernels, in its own precision; 0: not measured


class MeasurePlan(msgspec.Struct, frozen=True):
    """What to measure."""

    weight_bytes: int = 0  # of the model; 0: not known
    engine: EngineSpec | None = None  # what the engine would load, if it measures its kernels
    in_eight_bits: bool = False  # the weights have eight bits or fewer


def look_at_machine() -> Machine:
    """Describe this machine, without its speeds."""
    memory, flags = machine_memory(), processor_flags()
    return Machine(
        processor=processor(),
        cores=usable_processors(),
        features=tuple(flag for flag in _INTERESTING if flag in flags),
        memory_bytes=memory.whole_bytes,
        available_bytes=memory.available_bytes,
        gpus=_gpus(),
    )


def measure_machine(plan: MeasurePlan) -> Machine:
    """Describe this machine with its speeds: measures for some seconds on all cores, in a separate process.

    Raises: RuntimeError if that process fails, for which memory may be too short.
    """
    # An argument instead of stdin, so that an interrupted parent cannot leave a partial input.
    command = [
        sys.executable, "-m", "tailrace_outer.measure.bench.roofline", str(os.getpid()),
        msgspec.json.encode(plan).decode(),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"the measuring process ended ({how_it_ended(done.returncode)})")
    read, flops, ops = msgspec.json.decode(done.stdout, type=tuple[float, float, float])
    return msgspec.structs.replace(look_at_machine(), read_bytes_per_s=read, flops_per_s=flops, engine_ops_per_s=ops)


def _gpus() -> tuple[str, ...]:
    """Return the GPUs by the names of NVIDIA's driver."""
    try:
        files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines()]
    except OSError:
        return ()
    return tuple(line.partition(":")[2].strip() for line in lines if line.startswith("Model"))
