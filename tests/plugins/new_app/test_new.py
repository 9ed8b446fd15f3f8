"""`tailrace new`: the files it writes, and what it refuses. tests/apps/test_examples.py runs the apps."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tailrace.cli import main

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _new(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new", *arguments])


@pytest.mark.parametrize("kind", ["textbot", "chatbot", "batchbot"])
def test_a_bot_is_the_example(kind: str) -> None:
    result = _new(kind, "my-bot")
    assert result.exit_code == 0, result.output
    assert [path.name for path in Path("my-bot").iterdir()] == ["app.py"]
    assert Path("my-bot/app.py").read_text() == (EXAMPLES / f"{kind}.py").read_text()
    assert "Run it:  tailrace run my-bot/app.py:app\n" in result.output


def test_an_inferless_app_is_the_example() -> None:
    result = _new("inferless", "words")
    assert {path.name for path in Path("words").iterdir()} == {"app.py", "input_schema.py"}
    for path in Path("words").iterdir():
        assert path.read_text() == (EXAMPLES / "inferless" / path.name).read_text()
    assert "Run it:  tailrace run ./words\n" in result.output
    assert '/v2/models/words/generate_stream -d \'{"prompt": ' in result.output


def test_files_for_ray_are_the_example() -> None:
    result = _new("ray", "cluster")
    assert {path.name for path in Path("cluster").iterdir()} == {"serve.yaml", "rayservice.yaml"}
    for path in Path("cluster").iterdir():
        assert path.read_text() == (EXAMPLES / "ray" / path.name).read_text()
    assert "Run it:  serve run cluster/serve.yaml\n" in result.output


def test_nothing_is_overwritten() -> None:
    assert _new("textbot", "bot").exit_code == 0
    Path("bot/app.py").write_text("mine")
    result = _new("chatbot", "bot")
    assert (result.exit_code, result.stderr) == (1, "tailrace: bot exists already. Nothing was changed.\n")
    assert Path("bot/app.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x", "-x", "1bot", "a b", "böt", "a" * 65])
def test_a_bad_name_is_refused(name: str, tmp_path: Path) -> None:
    result = _new("textbot", "--", name)
    assert result.exit_code == 2
    assert "should begin with a letter and contain only letters, digits, - and _." in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_is_refused() -> None:
    result = _new("talkbot", "bot")
    assert result.exit_code == 2
    assert "'talkbot' is not one of 'textbot', 'chatbot', 'batchbot', 'inferless', 'ray'" in result.stderr


def test_a_directory_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = _new("textbot", "bot")
    assert (result.exit_code, result.stderr) == (1, "tailrace: bot cannot be created: No such file or directory.\n")


def test_the_port_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_PORT", "19000")
    assert "http://127.0.0.1:19000/" in _new("textbot", "mybot").stdout
