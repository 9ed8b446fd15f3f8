from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from tests.api.forks import run_text
from tests.api.own_keys import key_of
from tests.api.process import TAILRACE, Server, environment
from tests.missing import missing_reason
from tests.waiting import LONG_S

import tailrace
from tailrace import __version__
from tailrace.cli import main
from tailrace.settings import settings_table


def test_the_verbs() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for verb in ("bench", "pull", "serve"):
        assert f"  {verb} " in result.output
    assert CliRunner().invoke(main, ["--version"]).output.strip().endswith(__version__)
    assert CliRunner().invoke(main, ["serv"]).exit_code == 2


def test_help_names_every_setting_with_its_default() -> None:
    result = CliRunner().invoke(main, ["serve", "--help"], terminal_width=200)
    assert result.exit_code == 0
    words = result.output.split()
    for row in settings_table():
        assert row.flag in words or any(word.startswith(f"{row.flag}/") for word in words), row.name
        assert row.text.split()[0] in words
    assert "TAILRACE_MAX_STEP_TOKENS" in result.output


def test_help_is_quick_because_it_imports_little() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from tailrace.cli import main\n"
        "assert CliRunner().invoke(main, ['serve', '--help']).exit_code == 0\n"
        "print(sorted({'uvicorn', 'starlette', 'tokenizers', 'openvino', 'numpy', 'rich'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LONG_S)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("flags", [["--port", "x"], ["--port"], ["--frobnicate"], ["a", "b"], ["--queue-s", "soon"]])
def test_a_mistyped_command_line_is_exit_2(flags: list[str]) -> None:
    result = CliRunner().invoke(main, ["serve", *flags])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("tailrace: ")
    assert "Error: " not in result.stderr


def test_a_wrong_value_of_the_environment_names_the_variable() -> None:
    for variable, value in (("TAILRACE_PORT", "abc"), ("TAILRACE_EXACT", "maybe")):
        result = CliRunner().invoke(main, ["serve", "scripted"], env={variable: value})
        assert result.exit_code == 2
        assert f"(environment variable {variable})" in result.stderr
    assert "is not a valid boolean. Write true or false." in result.stderr


def test_a_mistyped_command_gets_a_suggestion() -> None:
    assert "No such command 'runn'. Did you mean run?" in CliRunner().invoke(main, ["runn", "x"]).stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("serve x --ctx-size 4096", "--ctx-size'. It is `--context-tokens` here."),
        ("serve x --tensor-parallel-size=2", "It is `--gpus` here."),
        ("serve x --max-model-len 4096", "It is `--context-tokens` here."),
        ("serve x --n-gpu-layers 99", "It is `--device` here."),
        ("serve x --gpu-memory-utilization 0.9", "It is `--gpu-memory` here."),
        ("show x", "No such command 'show'. Ollama's `show` is `tailrace doctor MODEL` here."),
        ("create x", "Ollama's `create` is `--model NAME=SOURCE` of `tailrace serve` here."),
        ("stop x", "Ollama's `stop` is `--idle-unload-s` of `tailrace serve` here."),
    ],
)
def test_words_of_other_servers_get_a_hint(words: str, hint: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    assert hint in result.stderr
    assert "Did you mean" not in result.stderr


def test_settings_from_the_environment() -> None:
    result = CliRunner().invoke(main, ["serve", "scripted"], env={"TAILRACE_PORT": "x"})
    assert result.exit_code == 2
    assert "'x' is not a valid integer" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--port 65536",
        "--port -1",
        "--max-sequences 0",
        "--kv-tokens -1",
        "--kv-tokens 9223372036854775808",
        "--max-connections 99999999999999999999",
        "--drain-s nan",
        "--queue-s inf",
        "--body-s 0",
    ],
)
def test_a_setting_out_of_bounds_is_refused_with_the_bounds(flags: str) -> None:
    result = CliRunner().invoke(main, ["serve", "scripted", *flags.split()])
    assert result.exit_code == 2
    assert re.search(r"is not (from \S+ to \S+|\S+ or more)\.\n", result.stderr)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--prompt-template", "hello"], "must contain {prompt}"),
        (["--allowed-origins", "banana"], "origins such as"),
        (["--allowed-hosts", "http://x"], "names without scheme"),
        (["--allowed-hosts", "x, y:8000"], "names without scheme"),
        (["--allowed-hosts", "192.168.1.5:8000"], "names without scheme"),
        (["--allowed-hosts", "cafe:80"], "names without scheme"),
        (["--allowed-hosts", "*.example"], "names without scheme"),
        (["--allowed-origins", "https://*.example"], "origins such as"),
        (["--allowed-origins", "http://a.test, http://b.test/path"], "origins such as"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_reason(flags: list[str], reason: str) -> None:
    result = CliRunner().invoke(main, ["serve", "scripted", *flags])
    assert result.exit_code == 2
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("threads=2", "model.setting=value"),
        ("a.threads", "model.setting=value"),
        (".threads=2", "model.setting=value"),
        ("a.thread=2", "Did you mean threads?"),
        ("a.port=2", "port cannot be set for a single model"),
        ("a.kv_tokens=9", "from 256 to"),
        ("b.kv_tokens=9", "there is no model b; the models are a."),
        ("a.threads=two", "not a valid integer"),
        ("a.engine=gpt", "'openvino'"),
        ("a.exact=perhaps", "not a valid boolean"),
    ],
)
def test_a_setting_of_one_model_is_checked_like_that_of_all(text: str, reason: str) -> None:
    result = CliRunner().invoke(main, ["serve", "--model", "a=scripted", "--set", text])
    assert result.exit_code == 2
    assert reason in result.stderr


def test_more_context_than_the_models_window_is_refused() -> None:
    command = [
        TAILRACE,
        "serve",
        "scripted",
        "--port",
        "0",
        "--context-tokens",
        "65537",
    ]  # it handles signals: not here
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ran.returncode == 1
    assert "--context-tokens must be at most 65536" in ran.stderr


def test_every_default_is_within_its_bounds() -> None:
    for row in settings_table():
        if row.kind in (int, float):
            assert row.least <= row.default <= row.limit, row.name


def test_the_start_message_names_the_page_and_the_base_url_for_openai_clients(server: Server) -> None:
    assert f"Listening on {server.url}\n" in server.log
    page = server.wait_line(r"Page to chat on: +(\S+)\n")
    base = server.wait_line(r"OpenAI base URL: +(\S+)\n")
    assert "<!doctype html>" in httpx.get(page[1], headers={"accept": "text/html"}, trust_env=False).text.lower()
    assert httpx.get(f"{base[1]}/models", trust_env=False).json()["data"][0]["id"] == "scripted"


def test_the_start_message_sends_a_key_where_there_are_keys(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/records.sqlite"
    key = key_of(database, "alice")
    with contextlib.closing(Server("scripted", "--database", database).wait_ready()) as running:
        command = running.wait_line(r"Try it: +(curl .+)\n")[1]
        shown = command.replace("tr_…", key).replace("-N", "-sN")
        ran = subprocess.run(["/bin/sh", "-c", shown], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert "invalid_api_key" not in ran.stdout
    assert ran.stdout


def test_without_the_libraries_of_the_page_all_apis_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from another registry than Python's packages, which may be out of reach."""
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    shutil.copytree(Path(tailrace.__file__).parent, tmp_path / "tailrace", ignore=ignored)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    running = Server("scripted").wait_ready()
    try:
        line = running.wait_line(r"No page to chat on\. (.+)\n")
        answer = httpx.get(running.url, headers={"accept": "text/html"}, trust_env=False)
        assert answer.status_code == 503
        assert answer.headers["content-type"].startswith("text/html")
        assert line[1] in answer.text
        assert "make serve" in line[1]
        assert running.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status_code == 200
    finally:
        running.close()


_AS_NOBODY = (  # an id without an entry in passwd, which may read Python's files all the same
    "setpriv", "--reuid", "123456", "--regid", "123456", "--clear-groups", "--inh-caps", "+dac_read_search",
    "--ambient-caps", "+dac_read_search",
)  # fmt: skip


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason=missing_reason("root with setpriv", "another user")
)
@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (["serve", "scripted", "--port", "0"], "TAILRACE_HOME"),
        *(
            pytest.param(words.split(), "TAILRACE_HOME", marks=pytest.mark.deep)
            for words in ("ls", "doctor --quick", "keys list")
        ),
        (["pull", "smollm2"], "TAILRACE_HOME"),
        (["pull", "hf:org/name"], "HF_HOME"),
        (["serve", "scripted", "--port", "0", "--data-dir", "~/tailrace"], "TAILRACE_HOME"),
    ],
)
def test_a_user_without_a_home_directory(words: list[str], variable: str, tmp_path: Path) -> None:
    """As in some containers and units of systemd."""
    kept = {name: value for name, value in environment().items() if name in ("PATH", "PYTHONPATH")}
    ran = subprocess.run(
        [*_AS_NOBODY, TAILRACE, *words], env=kept, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert "no home directory" in ran.stderr.splitlines()[-1]
    assert variable in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("verb", ["serve", "run", "pull", "doctor", "bench", "certify", "new"])
def test_errors_of_every_verb_have_one_prefix(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["--frobnicate"], ["./gone.gguf"], ["a", "b", "c"]):
        command = [TAILRACE, verb, *arguments]
        ran = run_text(command, environment())
        assert ran.returncode in (1, 2)
        assert ran.stderr.splitlines()[-1].startswith("tailrace: "), ran.stderr
        assert "Error:" not in ran.stderr


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "Commands:" in result.stderr
