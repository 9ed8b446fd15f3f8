"""Prints the test files of modules, by default of those that differ from the branch main:

    pytest $(python -m scripts.tests_of src/tailrace/streams/log.py)

They are the file that is named like the module, and those that import it. If none imports it, they are the test files
that import a module that imports it, and so on. Imports in strings count, since tests write apps and plugins. A module
that runs only in processes has the folder of its package.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# And the folders in `tests` of those whose tests are not beside the core's.
_ROOTS = {"tailrace": [], "tailrace_kit": ["kit"], "tailrace_outer": [], "tailrace_plugins": ["plugins"]}
# Parsing all files takes ten times as long.
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (?:\(([^)]*)\)|(.+))|import ([\w.]+))", re.MULTILINE)


@cache
def _modules() -> dict[str, Path]:
    """Return the files of tailrace and of its tests by the names of their modules."""
    found = {}
    for base, folder in (*((ROOT / "src", name) for name in _ROOTS), (ROOT, "tests")):
        for path in sorted((base / folder).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _imports(module: str) -> dict[str, str]:
    """Return what a file imports of tailrace and of its tests, anywhere: the module of each name."""
    found = {}
    for source, block, line, plain in _IMPORT.findall(_modules()[module].read_text("utf-8")):
        if source in _modules():
            for name in re.findall(r"(\w+|\*)(?: as \w+)?", re.sub("#.*", "", block or line)):
                inner = f"{source}.{name}"
                found[name] = inner if inner in _modules() else source
        elif plain in _modules():
            found[plain] = plain
    return found


def _used(module: str) -> Iterator[str]:
    """Yield the modules that a module imports; for a name that a package imports from its module, this one."""
    for name, source in _imports(module).items():
        is_package = _modules()[source].name == "__init__.py"
        yield _imports(source).get(name, source) if is_package else source


@cache
def _users() -> dict[str, set[str]]:
    users = defaultdict(set)
    for module in _modules():
        for used in _used(module):
            users[used].add(module)
    return users


def find_tests(module: str) -> list[str]:
    """Return the test files of a module, such as `tailrace.streams.log`, as paths from the project's folder."""
    root, *package = module.split(".")[:-1] or [module]
    package, name = [*_ROOTS[root], *package], module.rpartition(".")[2]
    found = {".".join(("tests", *package, f"test_{name}"))} & _modules().keys()
    seen = nearest = {module}
    while nearest:
        nearest = {user for used in nearest for user in _users().get(used, ())} - seen
        seen = seen | nearest
        found |= {user for user in nearest if _modules()[user].name.startswith("test_")}
        if found:
            return sorted(str(_modules()[test].relative_to(ROOT)) for test in found)
    folders = [Path("tests", *package[:depth]) for depth in range(len(package), -1, -1)]
    return [str(next(folder for folder in (Path("tests", *package, name), *folders) if (ROOT / folder).is_dir()))]


def _changed() -> list[str]:
    command = ["git", "diff", "--name-only", "--diff-filter=d", "main", "--", "src", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split() if path.endswith(".py")]


def main() -> None:
    named = {path: module for module, path in _modules().items()}
    found: set[str] = set()
    for given in sys.argv[1:] or _changed():
        path = Path(given).resolve()
        found.update([given] if path.name.startswith("test_") else find_tests(named[path]))
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
