"""What the measurements of this directory say about where they come from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tailrace.system.processors import processor

__all__ = ["this_machine"]

_OF_THE_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT_S = 30.0


def this_machine() -> dict[str, object]:
    """Return the processor, the number of cores, the GPUs if there are any, and the commit of the measured code."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    gpus = _gpus()
    return {"cpu": processor(), "cores": os.cpu_count(), **({"gpus": gpus} if gpus else {}), "commit": commit}


def _gpus() -> list[str]:
    """Return the names of NVIDIA's GPUs. Nothing is started on them, as torch would."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout
        except (OSError, subprocess.SubprocessError):
            shown = ""
        if names := [line.strip() for line in shown.splitlines() if line.strip()]:
            return names
    files = sorted(_OF_THE_DRIVER.glob("*/information"))
    found = (re.search(r"^Model:\s*(.+?)\s*$", file.read_text("utf-8"), re.MULTILINE) for file in files)
    return [one[1] for one in found if one]
