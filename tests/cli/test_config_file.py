"""Settings from a file: named like flags, below flags and variables, and refused by name where they are wrong."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.api.process import Server

from tailrace.cli import main
from tailrace.settings import settings_table


def ran(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(main, words, env=variables)


def shown(file: Path, *flags: str, **variables: str) -> dict[str, Any]:  # Any: values of settings
    """Return value and source of each setting."""
    result = ran("config", "--json", "--config", str(file), *flags, **variables)
    assert result.exit_code == 0, result.output
    return {row["name"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tailrace.toml"
    path.write_text('port = 8123\nmax-sequences = 8\nqueue_s = 5\nstrict = true\nadapter = ["a=./a", "b=./b"]\n')
    return path


def test_names_are_those_of_the_flags(file: Path) -> None:
    found = shown(file)
    assert found["port"] == (8123, "file")
    assert found["max_sequences"] == (8, "file")
    assert found["queue_s"] == (5.0, "file")
    assert found["strict"] == (True, "file")
    assert found["adapter"] == ("a=./a,b=./b", "file")
    assert found["host"] == ("127.0.0.1", "default")


def test_flags_and_variables_go_before_the_file(file: Path) -> None:
    assert shown(file, "--port", "1")["port"] == (1, "flag")
    assert shown(file, TAILRACE_PORT="2")["port"] == (2, "environment")


def test_the_variable_names_the_file(file: Path) -> None:
    result = ran("config", "--json", "--changed", TAILRACE_CONFIG=str(file))
    assert result.exit_code == 0
    assert "is not a setting" not in result.stderr
    assert len(json.loads(result.stdout)) == 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "prot is not a setting. Did you mean port?"),
        ("grammar-memory-bytes = 1", "grammar-memory-bytes is not a setting. It was removed: compiled grammars"),
        ("port = [1]", "port should be a text, a number, true or false."),
        ("port = 70000", "70000 is not from 0 to 65535"),
        ("port = 'x'", "'x' is not a valid integer"),
        ("engine = 'opnvino'", "opnvino"),
        ("model = 3", "model should be a text."),
        ("models = 3", "models should be tables"),
        ("[models.a]\nthreads = 2", "models.a needs a source"),
        ("[models.a]\nsource = 'smollm2'\nthraeds = 2", "models.a.thraeds is not a setting. Did you mean threads?"),
        ("[models.a]\nsource = 'smollm2'\nport = 2", "models.a.port cannot be set for a single model."),
        ("[models.a]\nsource = 'scripted'\nmax-sequences = 'many'", "a.max_sequences: 'many' is not a valid integer"),
        ("[models.a]\nsource = 'scripted'\nmax-sequences = -1", "a.max_sequences: -1 is not from 1 to"),
        ("port = ", "Invalid value (at "),
        ("port = 1\nport = 2", "Cannot overwrite a value"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text(text)
    for command in ("config", "serve"):
        result = ran(command, "--config", str(file))
        assert (result.exit_code, result.stdout) == (2, "")
        assert reason in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[models.a]\nsource = 'scripted'\ndraft-tokens = 3", "a: --draft-tokens needs --draft."),
        ("[models.'a b']\nsource = 'scripted'", "'a b' cannot be a model's name"),
    ],
)
def test_what_is_wrong_with_a_model_is_found_by_the_check(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text(f"port = 0\n{text}")
    for words, status in ((("config", "--check"), 2), (("serve",), 1)):
        result = ran(*words, "--config", str(file))
        assert (result.exit_code, result.stdout) == (status, "")
        assert reason in result.stderr


def test_settings_of_single_models_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text("model = 'scripted'\n[models.a]\nsource = 'scripted'\nfor = 'one'\nmax-sequences = 3\n")
    found = shown(file, "--changed")
    assert found == {"a.for": ("one", "file"), "a.max_sequences": (3, "file")}
    found = shown(file, "--changed", "--set", "b.threads=2")  # may be the name of the first model
    assert found == {"b.threads": (2, "flag")}
    assert "there is no model c" in ran("config", "--model", "a=x", "--set", "c.threads=2").stderr


def test_a_flag_that_was_removed() -> None:
    for words in (("config",), ("serve", "scripted")):
        result = ran(*words, "--grammar-memory-bytes", "1")
        assert result.exit_code == 2
        assert "No such option '--grammar-memory-bytes'" in result.stderr
        assert "It was removed: compiled grammars take little memory now." in result.stderr
        assert "Did you mean" not in result.stderr


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read"), (b"\xff", "utf-8")])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "tailrace.toml"
    if content is not None:
        file.write_bytes(content)
    result = ran("config", "--config", str(file))
    assert result.exit_code == 2
    assert reason in result.stderr


def test_the_example_has_every_setting_and_is_accepted(tmp_path: Path) -> None:
    example = ran("config", "--example").stdout
    file = tmp_path / "tailrace.toml"
    file.write_text(example)
    assert {source for _, source in shown(file).values()} == {"default"}
    file.write_text(re.sub(r"(?m)^#(?=[a-z\[])", "", example))
    undecided = {row.key for row in settings_table() if row.default is None}
    found = shown(file)
    assert {source for name, (_, source) in found.items() if name not in undecided} == {"file"}
    for row in settings_table():
        if row.key not in undecided:
            assert found[row.key][0] == row.default


def test_a_server_with_two_models(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text(
        'default-max-tokens = 20\n[models.short]\nsource = "scripted"\ndefault-max-tokens = 4\nspare-engine = false\n'
        '[models.long]\nsource = "scripted"\n'
    )
    with contextlib.closing(Server(f"--config={file}")) as server:
        server.wait_ready()
        chats = [
            server.post("/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "Hi"}]})
            for name in ("short", "long", "default")
        ]
        assert [chat.json()["usage"]["completion_tokens"] for chat in chats] == [4, 20, 4]


def test_commands_find_what_the_server_of_the_file_keeps(tmp_path: Path) -> None:
    """Otherwise the first key lies in a database that the server does not read, and the server stays open."""
    directory, audit, file = tmp_path / "llm", tmp_path / "audit.jsonl", tmp_path / "tailrace.toml"
    file.write_text(f'model = "scripted"\nport = 8123\ndata-dir = "{directory}"\naudit-log = "{audit}"\n')
    assert ran("keys", "create", "alice", "--config", str(file)).exit_code == 0
    assert (directory / "records.sqlite").exists()
    assert json.loads(audit.read_text())["event"] == "key.create"
    assert "alice" in ran("keys", "list", TAILRACE_CONFIG=str(file)).stdout
    assert ran("keys", "list", "--data-dir", str(tmp_path / "other"), TAILRACE_CONFIG=str(file)).stderr == (
        "There are no keys.\n"
    )
    assert ran("usage", "--config", str(file)).stderr.startswith("There were no requests since ")
    assert ran("backup", str(tmp_path / "b.tar.gz"), "--config", str(file)).exit_code == 0
    directory.rename(tmp_path / "before")
    assert ran("restore", str(tmp_path / "b.tar.gz"), "--config", str(file)).exit_code == 0
    assert (directory / "records.sqlite").exists()


def test_a_wrong_file_stops_a_command_on_keys(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text("databse = 'sqlite:///x'")
    result = ran("keys", "create", "alice", "--config", str(file))
    assert result.exit_code == 2
    assert "databse is not a setting. Did you mean database?" in result.stderr
