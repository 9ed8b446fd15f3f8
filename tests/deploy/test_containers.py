"""The Dockerfile and compose.yaml: checked by linters and schemas. No container engine runs here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.settings import Settings, settings_table

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent


def _compose() -> dict[str, Any]:  # Any: of YAML
    parsed: dict[str, Any] = yaml.safe_load((_ROOT / "compose.yaml").read_text())
    return parsed


def test_hadolint_finds_nothing() -> None:
    found = subprocess.run([_BIN / "hadolint", _ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_compose_has_the_form_of_the_specification() -> None:
    command = [f"{_BIN}/check-jsonschema", "--builtin-schema", "vendor.compose-spec", f"{_ROOT}/compose.yaml"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_server_knows_every_variable() -> None:
    known = {row.variable for row in settings_table()} | {"TAILRACE_HOME"}
    given = set(re.findall(r"\b(TAILRACE_[A-Z_]+)=", (_ROOT / "Dockerfile").read_text()))
    given |= set(_compose()["services"]["tailrace"]["environment"])
    assert "TAILRACE_HOST" in given
    assert given <= known


def test_draining_has_time() -> None:
    server = _compose()["services"]["tailrace"]
    drain_s = float(server["environment"]["TAILRACE_DRAIN_S"])
    assert float(server["stop_grace_period"].removesuffix("s")) >= drain_s + 10
    Settings(drain_s=drain_s, metrics_as=server["environment"]["TAILRACE_METRICS_AS"])


def test_every_file_that_is_mounted_or_copied_exists() -> None:
    for service in _compose()["services"].values():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (_ROOT / volume.partition(":")[0]).is_file(), volume
    kept = {line[1:] for line in (_ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--)(.*)", (_ROOT / "Dockerfile").read_text(), re.MULTILINE):
        *names, _ = line.split()
        assert set(names) <= kept
        assert all((_ROOT / name).exists() for name in names)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="chroots need root")
def test_the_commands_of_the_dockerfile_make_a_server(tmp_path: Path) -> None:
    """Of at most 450 MB, with everything that its libraries need."""
    program = shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("debootstrap is not installed")
    base = tmp_path / "base"
    made = subprocess.run([program, "--variant=minbase", "bookworm", base], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"debootstrap cannot get Debian's packages: {(made.stdout + made.stderr).splitlines()[-1]}")
    command = [sys.executable, "-m", "scripts.try_dockerfile", str(tmp_path / "try"), "--base", str(base)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended with 0" in done.stdout
