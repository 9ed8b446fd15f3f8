"""Errors of `tailrace run` for apps that cannot run: one clear line, without tailrace's own code."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.api.forks import run_text
from tests.api.process import TAILRACE, environment
from tests.apps.process import AppServer, Forgiving, write
from tests.waiting import LONG_S

from tailrace.cli import main

_DEPLOYMENT = """
from tailrace import serve

@serve.deployment
class Bot:
    def __init__(self, word="hello"):
        self.word = word

    def __call__(self, request):
        return self.word

app = Bot.bind()


@serve.deployment
class Wrong:
    def __init__(self):
        1 / 0

wrong = Wrong.bind()
"""

_INSTALL = f"Try: {sys.executable} -m pip install"

# what is run, what its last line says, and what stands in the user's traceback
_FAILURES = {
    "no attribute": ("bot:ap", "bot has nothing named ap. Did you mean bot:app?", ""),
    "no attribute but a function": ("built:nope", "built has nothing named nope. Did you mean built:build?", ""),
    "a bot's folder": ("folder", "To run its ASGI app: tailrace run folder/app.py:app", ""),
    "another machine's address": ("bot:app --insecure --host 192.0.2.1", "Choose another --host.", ""),
    "an import": ("needs:app", f"{_INSTALL} soundfile_of_nobody", "import soundfile_of_nobody.reader"),
    "a constructor": ("constructor:app", "constructing Bot raised ValueError: there are no weights", "any of these"),
    "a hang": ("sleeps:app --load-s 1.5", "importing sleeps:app took longer than 1.5 s.", ""),
}

_MODULES = {
    "bot": _DEPLOYMENT,
    "built": "def build(): ...",
    "folder/app": _DEPLOYMENT,
    "needs": "import soundfile_of_nobody.reader",
    "sleeps": "import time\ntime.sleep(60)",
    "constructor": """
        from tailrace import serve

        @serve.deployment
        class Bot:
            def __init__(self):
                raise ValueError("there are no weights\\nin any of these places")

        app = Bot.bind()
        """,
}


@pytest.mark.parametrize("what", _FAILURES)
def test_a_failing_start_is_an_error_of_one_line(what: str, tmp_path: Path) -> None:
    target, line, shown = _FAILURES[what]
    (tmp_path / "folder").mkdir()
    for name, source in _MODULES.items():
        write(tmp_path, f"{name}.py", source)
    ran = run_text([TAILRACE, "run", *target.split(), "--port", "0"], environment(), directory=tmp_path)
    assert ran.returncode == 1
    last = ran.stderr.rstrip().splitlines()[-1]
    assert last.startswith("tailrace: ")
    assert line in last
    assert shown in ran.stderr
    assert ("Traceback" in ran.stderr) == bool(shown), ran.stderr
    assert "site-packages" not in ran.stderr
    assert "/tailrace/" not in ran.stderr, "frames of ours"


def test_an_app_that_never_ran_leaves_no_journal(tmp_path: Path) -> None:
    write(tmp_path, "bot.py", _DEPLOYMENT)
    variables = environment() | {"TAILRACE_HOME": str(tmp_path / "home")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [TAILRACE, "run", "nope2:app", "--port", port]
    done = run_text(command, variables, directory=tmp_path)
    assert "There is no module nope2" in done.stderr
    assert list((tmp_path / "home").rglob("journal*")) == []


def _refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("bot", "Name the attribute of bot too: bot:app."),
        ("built", "Name the attribute of built too: built:build."),
        ("qwen3:4b", "qwen3:4b is a model: `tailrace chat qwen3:4b` talks to it"),
        ("smollm2", "smollm2 is a model: `tailrace chat smollm2` talks to it"),
        ("bot:app --concurrency 3", "--concurrency is for folders."),
        ("bot:", "is not a module with an attribute"),
        (":app", "is not a module with an attribute"),
        ("bot:app()", "is not a module with an attribute"),
        ("./nowhere", "is not a module with an attribute"),
        ("nowhere.py:app", "There is no file nowhere.py."),
        ("nowhere.yaml", "nowhere.yaml cannot be read: No such file or directory."),
        ("bot:app word", "word is not of the form KEY=VALUE."),
        ("bot:app =x", "=x is not of the form KEY=VALUE."),
        ("bot:app --app-dir nowhere", "There is no directory nowhere."),
        ("bot.py --app-dir nowhere", "--app-dir is for the name of a module"),
        ("bot:app --route-prefix api", "--route-prefix should be a path that begins with / and has no {}, not 'api'."),
        ("bot:app --route-prefix /{x}", "--route-prefix should be a path that begins with /"),
        ("bot:app --frobnicate", "No such option"),
        ("bot:app --port 70000", "70000 is not from 0 to 65535."),
        ("bot:app --port x", "'x' is not a valid integer"),
        ("bot:app --queue-s -1", "-1.0 is not 0 or more."),
        ("bot:app --concurrency 0", "0 is not in the range x>=1."),
        ("bot:app --log-level loud", "'loud' is not one of"),
        ("bot:app --allowed-origins banana", "origins such as"),
        ("bot:app --journal tape", "--journal takes disk, memory, or a URL"),
        ("", "is a folder without app.py"),
    ],
)
def test_invalid_command_lines(target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "built.py", "def build(): ...")
    assert reason in _refused(*(target.split() or ["."]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("applications: [\n  }", "apps.yaml is not YAML, line 2, column 3: expected the node content, but found '}'."),
        ("\x00", "apps.yaml is not YAML: special characters are not allowed."),
        ("just text", "should be a mapping with `applications`"),
        ("applications: []", "`applications` should be a list with an app in it."),
        ("applications: {a: 1}", "`applications` should be a list"),
        ("applications:\n- 5", "applications[0] should be a mapping."),
        ("aplications: []", "has no field aplications. Did you mean applications?"),
        ("import_path: a:b\nroute: /x", "applications[0] has no field route."),
        ("route_prefix: /x\napplications: []", "has no field route_prefix."),
        ("import_path: 5", "import_path should be a module and its attribute"),
        ("import_path: textbot", "import_path should be a module and its attribute"),
        ("import_path: a:b\nroute_prefix: x", "applications[0].route_prefix should be a path that begins with /"),
        ("import_path: a:b\nroute_prefix: 5", "begins with / and has no {}, not 5."),
        ("import_path: a:b\nname: 5", "applications[0].name should be text."),
        ("import_path: a:b\nargs: [1]", "applications[0].args should be a mapping."),
        ("import_path: a:b\nargs: {1: 2}", "applications[0].args should be a mapping."),
        ("import_path: a:b\ndeployments: {x: 1}", "deployments should be a list."),
        ("import_path: a:b\ndeployments: [x]", "deployments[0] should be a mapping."),
        (
            "import_path: a:b\ndeployments: [{num_replicas: 2}]",
            "deployments[0].name should be the name of a deployment.",
        ),
        ("import_path: a:b\nruntime_env: x", "runtime_env should be a mapping."),
        ("import_path: a:b\nruntime_env: {env_vars: [x]}", "runtime_env.env_vars should be a mapping."),
        ("import_path: a:b\nruntime_env: {working_dir: nowhere}", "there is no directory nowhere."),
        ("applications: [{import_path: a:b}]\nhttp_options: 5", "http_options should be a mapping."),
        ("applications: [{import_path: a:b}]\nhttp_options: {port: x}", "http_options.port should be a whole number."),
        ("applications: [{import_path: a:b}]\nhttp_options: {port: 99999}", "port should be from 0 to 65535."),
        ("applications: [{import_path: a:b}]\nhttp_options: {host: 5}", "http_options.host should be text."),
        (
            "applications: [{import_path: a:b, route_prefix: /x, name: one}, {import_path: a:c, route_prefix: /x/}]",
            "two apps have the route_prefix /x.",
        ),
        (
            "applications: [{import_path: a:b, name: one}, {import_path: a:c, name: one, route_prefix: /c}]",
            "two apps have the name one.",
        ),
    ],
)
def test_errors_of_a_config_file_name_the_field(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "apps.yaml"
    path.write_text(text)
    told = _refused(str(path))
    assert reason in told
    assert "apps.yaml" in told


@pytest.mark.deep
def test_an_error_of_a_config_file_names_the_app(tmp_path: Path) -> None:
    write(tmp_path, "bot.py", _DEPLOYMENT)
    for entry, line in (
        (
            "{name: b, route_prefix: /b, import_path: nosuch:app}",
            f"There is no module nosuch in {tmp_path}. Set its directory",
        ),
        ("{name: b, route_prefix: /b, import_path: bot:app, args: {words: 3}}", "bot:app is bound already, so nothing"),
        ("{name: b, route_prefix: /b, import_path: bot:wrong}", "constructing Wrong raised ZeroDivisionError"),
    ):
        (tmp_path / "apps.yaml").write_text(f"applications:\n- {{name: a, import_path: bot:app}}\n- {entry}\n")
        ran = subprocess.run(
            [TAILRACE, "run", "apps.yaml", "--port", "0"], cwd=tmp_path, env=environment(),
            capture_output=True, text=True, timeout=LONG_S, check=False,
        )  # fmt: skip
        assert ran.returncode == 1
        assert f"tailrace: apps.yaml: applications[1] (b): {line}" in ran.stderr


def test_a_config_file_has_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "apps.yaml"
    path.write_text("import_path: a:b")
    assert "under `args`" in _refused(str(path), "word=x")


def test_a_folder_needs_an_app(tmp_path: Path) -> None:
    assert "is a folder without app.py" in _refused(str(tmp_path))


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    write(tmp_path, "bot.py", _DEPLOYMENT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(
            main, ["run", "bot:app", "-d", str(tmp_path), "--port", str(taken.getsockname()[1])]
        )
    assert result.exit_code == 1
    assert "Choose another --port." in result.stderr


def test_the_access_log_of_an_app(tmp_path: Path) -> None:
    write(tmp_path, "bot.py", _DEPLOYMENT)
    with contextlib.closing(AppServer("bot:app", "--access-log", directory=tmp_path)) as server:
        server.wait_ready()
        server.http.get("/some/path?prompt=secret", headers={"x-request-id": "one"})
        line = server.wait_line("request=one ").string
    assert re.fullmatch(
        r"tailrace: \S+Z 127\.0\.0\.1:\d+ GET /some/path 200 first_ms=\S+ total_ms=\S+ request=one end=done\n", line
    )
    assert "secret" not in server.log


_ENDS = """
from fastapi import FastAPI
from tailrace import serve

app = FastAPI()


@app.get("/set")
async def a_set():
    async def items():
        yield "a"
        yield {1, 2}

    return serve.stream(items())


@app.get("/long")
async def too_long():
    async def items():
        while True:
            yield "x" * 2**23

    return serve.stream(items())
"""


@pytest.mark.deep
def test_the_access_log_says_how_a_stream_ended(tmp_path: Path) -> None:
    write(tmp_path, "ends.py", _ENDS)
    with contextlib.closing(Forgiving("ends:app", "--access-log", "--journal", "memory", directory=tmp_path)) as server:
        server.wait_ready()
        answer = server.http.get("/set", headers={"x-request-id": "one"})
        assert '"code":"app_output"' in answer.text
        assert "stream=" in server.wait_line("request=one end=error:app_output").string
        server.wait_line("GET /set: a_set.<locals>.items yielded a set that cannot be JSON")
        server.http.get("/long", headers={"x-request-id": "two"}, timeout=LONG_S)
        server.wait_line("default: a stream was ended: The stream is longer than 64 MiB")
        server.wait_line("request=two end=error:stream_too_long")


def test_a_path_cannot_add_lines_to_the_log(tmp_path: Path) -> None:
    source = """
        from tailrace import serve

        @serve.deployment
        class AnyPath:
            async def __call__(self, request):
                if "fails" in request.url.path:
                    raise ValueError("no")
                return serve.stream([object()])

        app = AnyPath.bind()
    """
    write(tmp_path, "paths.py", source)
    with contextlib.closing(Forgiving("paths:app", "--journal", "memory", directory=tmp_path)) as server:
        server.wait_ready()
        server.http.get("/%0aFORGED%1b[2J")
        server.wait_line("^GET /%0AFORGED%1B%5B2J: list yielded a object that cannot be JSON")
        server.http.get("/fails%0aFORGED")
        server.wait_line("^GET /fails%0AFORGED raised ValueError: no")
