"""Compares the bounds of a library in pyproject.toml with the releases that were checked."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

__all__ = ["check_versions", "parameters"]

_PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]


def check_versions(library: str, lowest: str, newest: str, *, tests: str) -> None:
    """`newest` is the newest release with which `tests` passed. A library that is not installed has only bounds."""
    required = [
        *_PROJECT["dependencies"],
        *(text for extra in _PROJECT["optional-dependencies"].values() for text in extra),
    ]
    bounds = {found.name: found.specifier for found in map(Requirement, required)}[library]
    assert {bound.version for bound in bounds if bound.operator == ">="} == {lowest}
    assert bounds.contains(newest)
    major, minor, *_ = (*Version(newest).release, 0)
    following = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}"  # releases of 0.x may change anything
    assert not bounds.contains(following), f"pyproject.toml needs an upper bound of {library}"
    try:
        installed = Version(version(library))
    except PackageNotFoundError:
        return
    assert installed.release[:2] <= Version(newest).release[:2], (
        f"{library} {installed} is newer than {newest}, with which its undocumented names were checked. Run `pytest "
        f"tests/compat {tests}`. If they pass, write {installed} here, and raise the bound in pyproject.toml if it "
        "excludes this release."
    )


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)
