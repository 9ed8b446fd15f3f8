"""The simulation finds defects that are planted in the product."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.defects import DEFECTS, HIDDEN, Defect

_ROOT = Path(__file__).parents[2]
_QUICKLY_FOUND = 5  # seeds


_EVERY = [*DEFECTS, *HIDDEN]


@pytest.mark.parametrize("defect", _EVERY, ids=lambda defect: defect.name)
def test_its_place_is_there(defect: Defect) -> None:
    """Whoever changes these lines changes the defect, too."""
    path = _ROOT / "src" / f"{defect.module.replace('.', '/')}.py"
    assert path.read_text("utf-8").count(defect.old) == 1


@pytest.mark.parametrize(
    "defect",
    [pytest.param(one, id=one.name, marks=() if one.seeds <= _QUICKLY_FOUND else pytest.mark.deep) for one in DEFECTS],
)
def test_it_is_found(defect: Defect) -> None:
    command = [sys.executable, "-m", "tests.simulation.defects", defect.name]
    found = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stdout + found.stderr
