"""`tailrace new`: the files it writes, and what it refuses. tests/apps/test_examples.py runs the apps."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.api.process import TAILRACE, environment
from tests.missing import skip_missing

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


def test_a_service_runs_this_command() -> None:
    made = subprocess.run(
        [TAILRACE, "new", "service", "llm"], env=environment(), capture_output=True, text=True, check=True
    )
    assert {path.name for path in Path("llm").iterdir()} == {"llm.service", "llm.plist", "tailrace.toml"}
    assert "see the first lines of llm/llm.service (Linux)" in made.stdout
    for path in Path("llm").iterdir():
        assert not re.search(r"\b(NAME|COMMAND|HOMES)\b", path.read_text()), path
    unit = Path("llm/llm.service").read_text()
    assert f'\nExecStart="{TAILRACE}" serve --config /etc/tailrace/tailrace.toml\n' in unit
    agent = plistlib.loads(Path("llm/llm.plist").read_bytes())
    assert agent["Label"] == "llm"
    assert f"exec {TAILRACE} serve" in agent["ProgramArguments"][2]
    assert tomllib.loads(Path("llm/tailrace.toml").read_text())["host"] == "127.0.0.1"
    checked = CliRunner().invoke(main, ["config", "--config", "llm/tailrace.toml", "--check"])
    assert (checked.exit_code, checked.output) == (0, "")


def test_systemd_takes_the_unit_and_finds_few_rights() -> None:
    if shutil.which("systemd-analyze") is None:
        skip_missing("systemd-analyze")
    subprocess.run([TAILRACE, "new", "service", "llm"], env=environment(), stdout=subprocess.DEVNULL, check=True)
    for arguments in (["verify"], ["security", "--offline=true", "--threshold=20", "--no-pager"]):
        ran = subprocess.run(
            ["systemd-analyze", *arguments, "./llm/llm.service"], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Unknown" not in ran.stderr


def _command(folder: Path) -> str:
    """Make a program that prints its arguments, and return its path."""
    folder.mkdir()
    program = folder / "tailrace"
    program.write_text('#!/bin/sh\necho "$*"\n')
    program.chmod(0o755)
    return str(program)


def test_a_service_of_a_command_with_special_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [_command(tmp_path / "my apps & 100% <its>")])
    assert _new("service", "llm").exit_code == 0
    unit = Path("llm/llm.service").read_text()
    start = f'ExecStart="{tmp_path}/my apps & 100%% <its>/tailrace" serve --config /etc/tailrace/tailrace.toml'
    assert f"\n{start}\n" in unit
    create = re.search(r"TAILRACE_HOME=\S+ (.* keys create alice)", unit)
    assert create is not None
    assert subprocess.check_output(["/bin/sh", "-c", create[1]], text=True) == "keys create alice\n"
    agent = plistlib.loads(Path("llm/llm.plist").read_bytes())
    (tmp_path / "Library" / "Logs").mkdir(parents=True)
    ran = subprocess.check_output(agent["ProgramArguments"], env={"HOME": str(tmp_path)}, text=True)
    assert ran == f"serve --config {tmp_path}/.config/tailrace.toml\n"
    if shutil.which("systemd-analyze") is None:
        skip_missing("systemd-analyze")
    verified = subprocess.run(
        ["systemd-analyze", "verify", "./llm/llm.service"], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize("folder", ["it's", 'a "b"', "a\\b", "a\nb"])
def test_a_command_that_systemd_cannot_run(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [_command(tmp_path / folder)])
    result = _new("service", "llm")
    assert result.exit_code == 1
    assert "contains a quote, a backslash or a control character. Install it elsewhere." in result.stderr
    assert not Path("llm").exists()


def test_a_command_that_the_services_user_cannot_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _command(tmp_path / "closed")
    (tmp_path / "closed").chmod(0o700)
    monkeypatch.setattr("sys.argv", [command])
    monkeypatch.setattr("sys.executable", "/bin/sh")
    monkeypatch.setattr("sys.platform", "linux")
    result = _new("service", "llm")
    assert result.exit_code == 0
    closed = re.search("other users may not enter (.*), where this tailrace or its Python is", result.stderr)
    assert closed is not None
    assert Path(closed[1]) in Path(command).parents
    monkeypatch.setattr("sys.argv", ["/bin/sh"])
    assert _new("service", "other").stderr == ""


def test_homes_are_readable_where_the_python_is_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/sh"])
    for executable, homes in (("/usr/bin/python3-none", "yes"), ("/home/none/python3-none", "read-only")):
        monkeypatch.setattr("sys.executable", executable)
        monkeypatch.setattr("sys.platform", "darwin")  # it looks at no directories
        assert _new("service", homes).exit_code == 0
        assert f"\nProtectHome={homes}\n" in Path(homes, f"{homes}.service").read_text()


@pytest.mark.parametrize(("name", "is_taken"), [("a" * 31, True), ("a" * 32, False), ("a-b", True), ("a--b", False)])
def test_the_name_of_a_service(name: str, is_taken: bool) -> None:
    result = _new("service", name)
    assert result.exit_code == (0 if is_taken else 2)
    if is_taken:
        assert plistlib.loads(Path(name, f"{name}.plist").read_bytes())["Label"] == name
    else:
        assert "at most 31 characters, and no -- in it" in result.stderr


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
