"""Rules for tests: no private names of tailrace, no sleeps as synchronisation, no long files; and names of modules."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from tests.defined import defined

ROOT = Path(__file__).parent.parent
TESTS = sorted(
    path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "bots"
)  # those are apps of others
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_OURS = ("tailrace", "tailrace_kit", "tailrace_outer")
_PUBLIC = {"_asdict", "_exit", "_fields", "_replace"}  # of the standard library
_OF_RAY = {
    "_get_batch_wait_timeout_s", "_get_curr_iteration_start_times", "_get_handling_task_stack",
    "_get_max_batch_size", "_is_batching_task_alive",
}  # fmt: skip  # what Ray Serve's users call all the same
_PATCHES = ("delattr", "getattr", "hasattr", "patch", "patch.object", "setattr")

# They look inside. None may be added; whoever changes one of these makes it ask what is public.
_LOOK_INSIDE = {
    "apps/test_leaving.py",
    "plugins/durable_streams/test_shared_faults.py",
    "plugins/llamacpp/test_llamacpp_engine.py",
    "models/test_fetch.py",
    "plugins/inferless/test_app.py",
    "plugins/inferless/test_app_class.py",
    "plugins/inferless/test_streams.py",
    "streams/test_database.py",
    "redis/test_finished.py",
    "streams/test_index.py",
    "streams/test_old_journals.py",
    "redis/test_openings.py",
    "testing/test_conformance.py",
    "testing/test_log_stores.py",
    "text/test_tool_calls.py",
}


# Checks the private names of libraries that our classes override or use.
_OF_LIBRARIES = {f"compat/test_{library}.py" for library in ("private_names", "uvicorn")}


def _is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None and name not in _PUBLIC | _OF_RAY


def private_names(source: str) -> Iterator[str]:
    """Return the private names of other modules that a source uses, also in programs in its strings."""
    tree = ast.parse(source)
    own = defined(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module.partition(".")[0] in _OURS:
                for alias in aliases:
                    if any(map(_is_private, (*module.split("."), alias.name))):
                        yield f"{module}.{alias.name}"
            case ast.Attribute(attr=name) if _is_private(name) and name not in own:
                yield ast.unparse(node)
            case ast.Call(func=function, args=arguments):
                texts = (argument.value for argument in arguments if isinstance(argument, ast.Constant))
                parts = (part for text in texts if isinstance(text, str) for part in text.split("."))
                if (names := [part for part in parts if _is_private(part)]) and ast.unparse(function).endswith(
                    _PATCHES
                ):
                    yield from names
            case ast.Constant(value=str(text)) if "\n" in text and "tailrace" in text:
                try:
                    yield from private_names(dedent(text))
                except SyntaxError:
                    continue  # it is no program


_IMPORTED = re.compile(r"from tailrace[\w.]* import (?:\([^)]*\)|[^\n]*)")
_USED = re.compile(r"""[.'"](_[A-Za-z]\w*)""")


def _may_use(source: str, names: set[str]) -> bool:
    """Return whether `private_names` may find one of these names. Parsing takes fifty times as long as this does."""
    used = {*_USED.findall(source), *re.findall(r"\b_[A-Za-z]\w*", "".join(_IMPORTED.findall(source)))}
    return not used.isdisjoint(names)


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT / "tests"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from tailrace.streams import _index", ["tailrace.streams._index"]),
        ("from tailrace.streams._index import Index", ["tailrace.streams._index.Index"]),
        ("store._streams", ["store._streams"]),
        ("patch.setattr(module, '_LIMIT', 3)", ["_LIMIT"]),
        ("patch.setattr('tailrace.module._LIMIT', 3)", ["_LIMIT"]),
        ("APP = '''\nimport tailrace\ntailrace._nothing\n'''", ["tailrace._nothing"]),
        ("class Own:\n    def _of_mine(self):\n        return self._of_mine", []),
        ("event._asdict(), batch._get_max_batch_size()", []),
    ],
)
def test_private_names_are_found(source: str, found: list[str]) -> None:
    assert list(private_names(source)) == found
    assert all(_may_use(source, set(name.split("."))) for name in found)


def test_tests_know_no_private_names() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    ours = {*re.findall(r"\b_[A-Za-z]\w*", sources), *(path.stem for path in (ROOT / "src").rglob("_*.py"))}
    found = {}
    for path in TESTS:
        if _named(path) in _LOOK_INSIDE | _OF_LIBRARIES or not _may_use(path.read_text("utf-8"), ours - _PUBLIC):
            continue
        names = {name for name in private_names(path.read_text("utf-8")) if not ours.isdisjoint(name.split("."))}
        if names:
            found[_named(path)] = sorted(names)
    assert not found


def test_tests_do_not_sleep_0() -> None:
    """Tests use `tests/waiting.py` to wait for a condition."""
    turns = {"asyncio.sleep(0)", "asyncio.sleep(0.0)", "time.sleep(0)", "sleep(0)"}
    found = set()
    for path in TESTS:
        if "sleep(0" not in (source := path.read_text("utf-8")):  # parsing takes long
            continue
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        if any(ast.unparse(call) in turns for call in calls):
            found.add(_named(path))
    assert found == {"waiting.py"}


_BY_CHANCE = re.compile(r"new_\w*id|token_\w+|uuid\d|urandom|random\w*|time|monotonic|getpid")


def _named_by_chance(source: str) -> set[str]:
    """Return calls in parameters of tests whose value is different in every process."""
    if "parametrize" not in source or not re.search(rf"\b({_BY_CHANCE.pattern})\s*\(", source):  # parsing takes long
        return set()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    inner = [
        ast.unparse(node.func)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "parametrize"
        for node in ast.walk(call)
        if isinstance(node, ast.Call)
    ]
    return {name for name in inner if _BY_CHANCE.fullmatch(name.rpartition(".")[2])}


def test_parameters_of_tests_are_not_random() -> None:
    """Each test process collects the tests, and all have to find the same names."""
    assert _named_by_chance("@pytest.mark.parametrize('a', [1, os.urandom(2)])\ndef test(a): ...") == {"os.urandom"}
    found = {_named(path): names for path in TESTS if (names := _named_by_chance(path.read_text("utf-8")))}
    assert not found


def test_no_file_is_long() -> None:
    assert not [_named(path) for path in TESTS if path.read_text("utf-8").count("\n") > 600]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a git checkout")
def test_ignored_files_are_not_committed() -> None:
    """The page's libraries are other people's code, which the build fetches."""
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""


_HANDED_ON = "tailrace/serve"  # its modules hand on those of tailrace_outer/serve, as apps import them
_ROLES = {"__init__", "__main__", "command", "extension", "opening"}  # what a plugin calls its parts


def test_a_module_is_found_by_its_name() -> None:
    names = Counter(
        path.stem for path in (ROOT / "src").rglob("*.py") if path.relative_to(ROOT / "src").parent != Path(_HANDED_ON)
    )
    assert {name for name, count in names.items() if count > 1} <= _ROLES
