"""What the measurements of this directory say about where they come from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tailrace.system.processors import processor

__all__ = ["this_machine"]


def this_machine() -> dict[str, object]:
    """Return the processor, the number of cores, and the commit of the measured code."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    return {"cpu": processor(), "cores": os.cpu_count(), "commit": commit}
