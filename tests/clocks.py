"""Programs with another clock than this machine has."""

from __future__ import annotations

import shutil
import subprocess

from tests.missing import skip_missing

__all__ = ["with_clock"]


def with_clock(ahead_s: float) -> tuple[str, ...]:
    """Return what to write before a command, so that its clocks are so far ahead. Skips the test if faketime is not
    installed."""
    if not ahead_s:
        return ()
    program = shutil.which("faketime")
    if program is None:
        skip_missing("faketime")
    # Only its library is used: the program itself would stay as a parent, and get the signals.
    asked = subprocess.run([program, "-f", "+0s", "printenv", "LD_PRELOAD"], capture_output=True, text=True, check=True)
    return ("env", f"LD_PRELOAD={asked.stdout.strip()}", f"FAKETIME={ahead_s:+.0f}s")
