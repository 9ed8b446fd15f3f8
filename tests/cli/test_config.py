"""`tailrace config` and `tailrace completion`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.api.process import TAILRACE, environment

from tailrace.cli import main
from tailrace.settings import settings_table


def test_every_setting_and_where_it_comes_from() -> None:
    variables = {"TAILRACE_PORT": "99", "TAILRACE_QUEUE_S": "5"}
    result = CliRunner().invoke(main, ["config", "--json", "--queue-s", "7", "--strict"], env=variables)
    rows = {row["name"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}
    assert list(rows) == [row.name.rstrip("_") for row in settings_table()]
    assert (rows["port"], rows["queue_s"], rows["strict"]) == ((99, "environment"), (7.0, "flag"), (True, "flag"))
    assert rows["host"] == ("127.0.0.1", "default")


def test_only_changed_settings() -> None:
    result = CliRunner().invoke(main, ["config", "--changed", "--port", "99"], env={"TAILRACE_STRICT": "true"})
    assert result.stdout.splitlines() == ["port    99  (flag)", "strict  true  (environment)"]


def test_no_password_is_shown() -> None:
    url = "postgresql+psycopg://me:hunter2@host/x?sslpassword=hunter2&application_name=a"
    shown = CliRunner().invoke(main, ["config"], env={"TAILRACE_DATABASE": url, "TAILRACE_KEY": "hunter2"}).output
    assert "postgresql+psycopg://me:***@host/x?sslpassword=***&application_name=a" in shown
    assert "hunter2" not in shown


def test_unknown_variables_are_named() -> None:
    """Not those that Kubernetes sets for a Service called tailrace, and none of another command's."""
    kubernetes = {"TAILRACE_SERVICE_HOST": "10.0.0.1", "TAILRACE_WEB_PORT_80_TCP": "tcp://10.0.0.1:80"}
    others = {"TAILRACE_URL": "http://127.0.0.1:1", "TAILRACE_MODEL": "scripted", "TAILRACE_HOME": "/nowhere"}
    misspelt = {"TAILRACE_QUEU_S": "1", "TAILRACE_STRICTLY_NOTHING_ALIKE": "hunter2"}
    removed = {"TAILRACE_GRAMMAR_MEMORY_BYTES": "1"}
    result = CliRunner().invoke(main, ["config", "--json"], env=kubernetes | others | misspelt | removed)
    ending = "is not a setting, and has no effect."
    assert result.stderr.splitlines() == [
        f"tailrace: The environment variable TAILRACE_GRAMMAR_MEMORY_BYTES {ending} It was removed: compiled grammars "
        "take little memory now.",
        f"tailrace: The environment variable TAILRACE_QUEU_S {ending} Did you mean TAILRACE_QUEUE_S?",
        f"tailrace: The environment variable TAILRACE_STRICTLY_NOTHING_ALIKE {ending}",
    ]


def test_an_invalid_setting() -> None:
    result = CliRunner().invoke(main, ["config", "--tls-key", "x"])
    assert result.exit_code == 2
    assert "need --tls-cert" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str) -> None:
    assert "_TAILRACE_COMPLETE" in CliRunner().invoke(main, ["completion", shell]).stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
def test_bash_completes() -> None:
    script = """
    eval "$(tailrace completion bash)"
    complete_words() {
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _tailrace_completion tailrace
        echo "${COMPREPLY[@]}"
    }
    complete_words tailrace se
    complete_words tailrace serve --journal-k
    complete_words tailrace completion f
    """
    path = f"{Path(TAILRACE).parent}:/usr/bin:/bin"
    ran = subprocess.run(
        ["bash", "-c", script],
        env=environment() | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ran.stdout.splitlines() == ["serve", "--journal-key-file", "fish"], ran.stderr
