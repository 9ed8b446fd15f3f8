"""System features that the fault tests need. Without them the tests are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoints import smollm2_calling, smollm2_thinking
from tests.missing import skip_missing
from tests.seeing import seeing_dir
from tests.waiting import LONG_S

__all__ = ["seeing_dir", "smollm2_calling", "smollm2_thinking"]

_SOURCE = Path(__file__).parent / "shim.c"


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`shim("FAULT_CLOCK")` preloads `shim.c` into later servers, and returns the file that controls it."""
    if shutil.which("gcc") is None:
        skip_missing("gcc", "it makes the library that plays the system's part")

    def preload(variable: str) -> Path:
        library, steering = tmp_path / "shim.so", tmp_path / variable
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=LONG_S)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv(variable, str(steering))
        return steering

    return preload
