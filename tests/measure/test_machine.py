"""`bench/machine.py`: what is written about the machine beside each measurement."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

_SMI = """#!/bin/sh
test "$1 $2" = "--query-gpu=name --format=csv,noheader" || exit 1
printf 'NVIDIA H200\\nNVIDIA L4\\n'
"""


def test_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = importlib.import_module("bench.machine")
    program = tmp_path / "nvidia-smi"
    program.write_text(_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine.this_machine()["gpus"] == ["NVIDIA H200", "NVIDIA L4"]


def test_gpus_are_named_by_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program is missing, or does not work."""
    machine = importlib.import_module("bench.machine")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_OF_THE_DRIVER", tmp_path)
    assert "gpus" not in machine.this_machine()
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t 44\n")
    found = machine.this_machine()
    assert (found["gpus"], found["cores"]) == (["NVIDIA H200"], os.cpu_count())
