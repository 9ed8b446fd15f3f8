"""Setting the version. A deep test runs `make release`, which builds and installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from scripts.release import CHANGELOG, SOURCE, check, raised
from tests.missing import skip_missing

from tailrace import __version__

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
BEFORE = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n"


def test_the_version_is_raised() -> None:
    source, changelog = raised('x\n__version__ = "0.1.9"\ny\n', BEFORE, "0.1.10", "2026-01-02")
    assert source == 'x\n__version__ = "0.1.10"\ny\n'
    assert changelog == "# Changelog\n\n## Unreleased\n\n## 0.1.10, 2026-01-02\n\n### Added\n\n- A thing.\n"


@pytest.mark.parametrize(
    ("version", "changelog", "reason"),
    [
        ("0.1", BEFORE, "three numbers"),
        ("v0.2.0", BEFORE, "three numbers"),
        ("0.2.0\n", BEFORE, "three numbers"),
        ("0.1.9", BEFORE, "not above 0.1.9"),
        ("0.0.10", BEFORE, "not above 0.1.9"),
        ("0.2.0", "# Changelog\n", "nothing under Unreleased"),
        ("0.2.0", "# Changelog\n\n## Unreleased\n\n## 0.1.9, 2026-01-01\n\n- A thing.\n", "nothing under Unreleased"),
    ],
)
def test_versions_that_cannot_be_released(version: str, changelog: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raised('__version__ = "0.1.9"\n', changelog, version, "2026-01-02")


def test_the_version_in_the_files_can_be_raised() -> None:
    source, changelog = raised(SOURCE.read_text(), CHANGELOG.read_text(), "9999.0.0", "2026-01-02")
    assert '__version__ = "9999.0.0"' in source
    assert "## 9999.0.0, 2026-01-02\n\n### Added\n" in changelog


def test_the_workflow_pins_every_action_and_only_signing_jobs_may_sign() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    for name, job in jobs.items():
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used, name
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used), used
        signs = any(action.startswith(("actions/attest@", "pypa/")) for action in used)
        assert (job["permissions"].get("id-token") == "write") == signs, name


def test_the_workflow_passes_its_linters() -> None:
    bin_ = Path(sys.executable).parent
    for tool, arguments in (
        ("check-jsonschema", ("--builtin-schema", "vendor.github-workflows")),
        ("zizmor", ("--offline", "--persona", "pedantic", "--no-progress")),
    ):
        if (command := shutil.which(tool, path=f"{bin_}{os.pathsep}{os.environ['PATH']}")) is None:
            skip_missing(tool)
        ran = subprocess.run([command, *arguments, str(WORKFLOW)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_workflow_refuses_a_tag_that_is_not_the_version() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["build"]["steps"]
    (command,) = (step["run"] for step in steps if step.get("name") == "The tag is the version")
    for tag, status in ((f"v{__version__}", 0), ("v9999.0.0", 1), ("", 1)):
        ran = subprocess.run(
            ["bash", "-ec", command], cwd=ROOT, env=os.environ | {"TAG": tag}, stdout=subprocess.DEVNULL, check=False
        )
        assert ran.returncode == status, tag


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_a_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    assert "dynamic" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    token, num_bytes = check(wheel, __version__, "scripted")
    assert token
    assert num_bytes > 10**8
