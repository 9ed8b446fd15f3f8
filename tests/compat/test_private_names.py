"""Only `compat` uses private names of libraries, and the `*_names.py` of the packages around the core."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.check_versions import TESTS
from tests.defined import defined

SOURCE = Path(__file__).parents[2] / "src" / "tailrace"
_OURS = ("tailrace", "tailrace_outer", "tailrace_plugins")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Documented all the same, by Python and SQLAlchemy.
_DOCUMENTED = {
    "_asdict", "_current_frames", "_exit", "_field_defaults", "_fields", "_get_running_loop", "_getframe", "_mapping",
    "_replace",
}  # fmt: skip
_WITHOUT_DOCUMENTS = "uvicorn.protocols"  # modules, whose names have no underscore


def _private_names(tree: ast.AST, inherited: set[str]) -> Iterator[str]:
    """Return the private names that a module uses and does not define. `inherited` are those that it may use of
    `self`."""
    own = defined(tree) | _DOCUMENTED
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module.partition(".")[0] not in _OURS:
                for alias in aliases:
                    parts = [*module.split("."), alias.name]
                    if module.startswith(_WITHOUT_DOCUMENTS) or any(map(_PRIVATE.fullmatch, parts)):
                        yield f"{module}.{alias.name}"
            case ast.Attribute(attr=name) if _PRIVATE.fullmatch(name) and name not in own:
                if name not in inherited or ast.unparse(node.value) != "self":
                    yield ast.unparse(node)
            case ast.Call(func=ast.Name("getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]):
                if _PRIVATE.fullmatch(name) and name not in own:
                    yield name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from ray import _raylet", ["ray._raylet"]),
        ("from uvicorn.protocols.utils import is_ssl", ["uvicorn.protocols.utils.is_ssl"]),
        ("task._waiter, sys._getframe(1)", ["task._waiter"]),
        ("self._of_base, other._of_base", ["other._of_base"]),
        ("getattr(task, '_waiter', None)", ["_waiter"]),
        ("from tailrace.streams import _index\nself._own = 1\nother._own", []),
    ],
)
def test_private_names_are_found(source: str, found: list[str]) -> None:
    assert list(_private_names(ast.parse(source), {"_of_base"})) == found


def test_only_compat_uses_private_names_of_libraries() -> None:
    paths = [path for package in _OURS for path in (SOURCE.parent / package).rglob("*.py")]
    trees = {path.relative_to(SOURCE.parent): ast.parse(path.read_text("utf-8")) for path in paths}
    inherited = set().union(*map(defined, trees.values()))
    found = {str(path): names for path, tree in trees.items() if (names := [*_private_names(tree, inherited)])}
    assert {path for path in found if path.startswith("tailrace/compat/")} == {"tailrace/compat/uvicorn.py"}
    rooms = {path for path in found if path.startswith("tailrace/compat/") or path.endswith("_names.py")}
    assert not {path: names for path, names in found.items() if path not in rooms}


def test_every_module_has_its_versions_checked() -> None:
    modules = {path.stem for path in (SOURCE / "compat").glob("*.py")} - {"__init__"}
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")} - {"private_names"}
    assert tests == modules
    around = {(path.parent.name, path.name) for path in SOURCE.parent.rglob("*_names.py")}
    checked = {(path.parent.name, path.name) for path in Path(__file__).parents[1].rglob("test_*_names.py")}
    assert {("apps", "anyio_names.py"), ("vllm", "vllm_names.py")} <= around
    assert {(folder, f"test_{name}") for folder, name in around} == checked - {("compat", "test_private_names.py")}


def test_the_environments_of_other_versions_run_what_guards_name() -> None:
    """Of engines whose packages they do not have, and of Ray, they run nothing."""
    guards = "".join(path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    named = {folder for tests in re.findall(r'check_versions\(.*tests="(.*)"\)', guards) for folder in tests.split()}
    left_out = {"tests/apps/on_ray", "tests/plugins/transformers", "tests/plugins/vllm"}
    assert left_out < named
    assert {folder for folder in named if not any(f"tests/{place}".startswith(folder) for place in TESTS)} == left_out
    assert all((Path(__file__).parents[1] / place).exists() for place in TESTS)
