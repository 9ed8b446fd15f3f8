"""Usage statistics are off in every process that imports tailrace. tests/cli/test_privacy.py checks the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_NAMES = ("DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED", "VLLM_NO_USAGE_STATS")


def _run(home: Path, script: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _NAMES}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment | {"HOME": str(home)} | settings, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_openvino_sends_nothing(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    script = "import tailrace, openvino, sys; print('openvino_telemetry.main' in sys.modules)"
    assert _run(tmp_path, script).split() == ["False"]
    assert list(tmp_path.iterdir()) == []


def test_libraries_are_switched_off_also_in_children(tmp_path: Path) -> None:
    child = f"import json, os; print(json.dumps([os.environ[name] for name in {_NAMES}]))"
    script = f"import tailrace, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert json.loads(_run(tmp_path, script)) == ["1", "1", "0", "1"]


def test_settings_of_the_user_are_kept(tmp_path: Path) -> None:
    script = "import os, tailrace; print(os.environ['VLLM_NO_USAGE_STATS'])"
    assert _run(tmp_path, script, VLLM_NO_USAGE_STATS="0").split() == ["0"]
