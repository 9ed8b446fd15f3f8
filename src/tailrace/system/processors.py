"""The processor's name and features, and how many of them this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

__all__ = ["processor", "processor_flags", "usable_processors"]


def usable_processors(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of processors, at least 1: those of the machine, or fewer if a mask (`taskset`, a cpuset) or a
    container's quota (`docker run --cpus 2`, a limit in Kubernetes) allows fewer. A quota of 2.5 counts as 2.

    `groups` is where the control groups of version 2 are mounted, `membership` says in which of them this process is.
    """
    masked = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(int(min(masked, _quota(groups, membership))), 1)


def _quota(groups: Path, membership: Path) -> float:
    """Return the processors that the group and those around it allow; infinity without a limit."""
    least = float("inf")
    with contextlib.suppress(OSError):
        lines = membership.read_text().splitlines()
        path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
        group = groups / path.lstrip("/")
        while group.is_relative_to(groups):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (group / "cpu.max").read_text().split()
                if quota != "max":
                    least = min(least, int(quota) / int(period))
            group = group.parent
    return least


def processor() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """Return the features by Linux's names, such as "avx2"; none on other systems."""
    return frozenset(_cpuinfo("flags", "Features").split())


def _cpuinfo(*names: str) -> str:
    """Return the first value with one of these names in Linux's description of the processor, or ""."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
    return ""
