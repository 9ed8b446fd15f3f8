"""Child processes end when their parent is killed."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from tests.processes import wait_ended

from tailrace.system.child import how_it_ended

_SCRIPT = """
import subprocess, sys, time
from tailrace.system.child import end_family_with_me
end_family_with_me()
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""


def test_children_end_with_their_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        child = psutil.Process(int(head.stdout.readline()))
        family = psutil.Process(head.pid).children()
        assert child in family
        assert len(family) == 2
        head.kill()
        wait_ended(family)


@pytest.mark.parametrize(
    ("status", "described"), [(3, "exit status 3"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")]
)
def test_how_a_process_ended(status: int, described: str) -> None:
    assert how_it_ended(status) == described
