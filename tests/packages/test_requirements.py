"""Commands that install missing packages."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.waiting import LONG_S

from tailrace.packages.requirements import install_command, requirements

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def _parts(requirement: str) -> tuple[str, ...]:
    """Return the parts in a fixed order, because build tools sort the bounds of a version."""
    return tuple(sorted(requirement.partition(";")[0].strip().replace("<", ",<").replace(">", ",>").split(",")))


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_requirements_are_those_of_the_project(extra: str) -> None:
    declared = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found = [[part for part in _parts(line) if part] for line in requirements(extra=extra)]
    assert sorted(found) == sorted([part for part in _parts(line) if part] for line in declared)


def test_an_extra_is_installed_by_its_requirements() -> None:
    command = shlex.split(install_command(extra="transformers"))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    declared = PROJECT["optional-dependencies"]["transformers"]
    assert [_parts(line) for line in command[4:]] == [_parts(line) for line in declared]


def test_where_tailrace_is_not_installed_the_extra_is_named() -> None:
    """The modules are on the path, but the package's metadata are missing."""
    source = Path(__file__).parents[2] / "src"
    code = "from tailrace.packages.requirements import install_command; print(install_command(extra='ray'))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(source)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG_S)
    assert shlex.split(done.stdout)[1:] == ["-m", "pip", "install", "tailrace[ray]"]


def test_without_an_extra_the_packages_are_installed_again() -> None:
    command = shlex.split(install_command(packages=("openvino",)))
    assert command[4] == "--force-reinstall"
    assert [line.partition("<")[0] for line in command[5:]] == ["openvino"]
