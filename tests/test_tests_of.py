"""scripts/tests_of.py finds the tests of a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from scripts.tests_of import find_tests, main

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("tailrace.text.stops", "tests/text/test_stops.py"),
        ("tailrace.streams.log", "tests/streams/test_index.py"),  # imports `Log` from the package
        ("tailrace_outer.admin.keys_command", "tests/admin/test_keys_command.py"),  # by its name alone
        ("tailrace_outer.apps.watch", "tests/apps"),  # replicas import it, and no test
        ("tailrace_plugins.llamacpp.llamacpp_model", "tests/plugins/llamacpp/test_llamacpp_engine.py"),
    ],
)
def test_the_tests_of_a_module(module: str, test: str) -> None:
    assert test in find_tests(module)


def test_every_module_has_tests() -> None:
    source = ROOT / "src"
    modules = [".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")]
    paths = {test for module in modules for test in find_tests(module.removesuffix(".__init__"))}
    assert all((ROOT / path).exists() for path in paths)


def test_the_command_takes_paths(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tests_of", "src/tailrace/text/stops.py", "tests/test_house.py"])
    monkeypatch.chdir(ROOT)
    main()  # in this process, which has read all files
    assert {"tests/test_house.py", "tests/text/test_stops.py"} <= set(capsys.readouterr().out.splitlines())
