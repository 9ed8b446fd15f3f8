"""docs/deployments.md: the tests save each file of the page, run each command, and compare the output with the page.

Ports, ids and batch sizes differ from run to run. The scripted engine replaces the built-in model, and its words are
not compared. Code that needs torch or Ray is only compiled.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.process import TAILRACE, environment
from tests.apps.process import AppServer
from tests.waiting import LONG_S

import tailrace.serve
from tailrace_outer.serve.options import IGNORED, DeploymentOptions

ROOT = Path(__file__).parent.parent
START = (ROOT / "docs" / "start.md").read_text("utf-8")
PAGE = (ROOT / "docs" / "deployments.md").read_text("utf-8")
_FILE = re.compile(r"`(\w+\.(?:py|yaml))`:\n\n```(?:python|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILES: dict[str, str] = dict(_FILE.findall(PAGE))
_ID = re.compile(r"[\w-]{22}(?=[-\"\n']|$)")
_AT_ONCE = re.compile(r"(?<=/)\d(?= )|(?<=one of )\d")
_FREE_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+(?=/\n)")
_SECONDS = re.compile(r"[\d.]+ s(?=\.)")
_FAILS = ("wrong:app",)


def _sections() -> dict[str, list[str]]:
    """Return the console blocks below each heading."""
    sections = {}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        blocks = re.findall(r"^```console\n(.*?)^```", section, re.S | re.M)
        if blocks:
            sections[section.partition("\n")[0]] = blocks
    return sections


class Reader:
    """A reader of the page, who types its commands in a separate directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._server: AppServer | None = None
        self._ids: dict[str, str] = {}  # ids on the page: ids of this run
        self._is_compared = True

    def type(self, command: str, shown: str) -> None:
        words = shlex.split(command)
        if words[:2] == ["tailrace", "run"]:
            self._run(words[2:], shown)
        else:
            self._ask(command, shown)

    def close(self) -> None:
        if self._server is not None:
            failing = any(target in self._server.process.args for target in _FAILS)  # type: ignore[operator]  # a list
            with contextlib.suppress(AssertionError) if failing else contextlib.nullcontext():
                self._server.close()
            self._server = None

    @property
    def server(self) -> AppServer:
        assert self._server is not None
        return self._server

    def _run(self, words: list[str], shown: str) -> None:
        self.close()
        self._save(0)
        self._server = AppServer(*words, directory=self.directory)
        self._server.wait_ready()
        self._is_compared = "story:app" not in words
        if shown:
            self._server.wait_line("^Started in ")
            output = self._server.log.replace(f"127.0.0.1:{self._server.port}", "127.0.0.1:8000")
            assert _SECONDS.sub("n s", output) == _SECONDS.sub("n s", shown)

    def _ask(self, command: str, shown: str) -> None:
        port = self._server.port if self._server is not None else 0
        self._save(port)
        for ours, theirs in self._ids.items():
            command = command.replace(ours, theirs)
        command = command.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        path = f"{Path(TAILRACE).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", f"{command} 2>&1" if command.startswith("python ") else command], cwd=self.directory,
            env=environment() | {"PATH": path, "PYTHONUNBUFFERED": "1"},
            capture_output=True, text=True, timeout=LONG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if self._is_compared or shown:  # the page shows a model's refusals, but not its answers
            self._compare(_FREE_PORT.sub("39131", done.stdout), shown)
        else:
            assert done.stdout
            assert "rror" not in done.stdout

    def _compare(self, output: str, shown: str) -> None:
        """Compare output with the page. `^C` means that the reader leaves; `…` matches any text within a line."""
        shown, is_left, _ = _AT_ONCE.sub("n", shown).partition("^C\n")
        expected, seen = shown.splitlines(), _AT_ONCE.sub("n", output).splitlines()
        if is_left:
            seen = seen[: len(expected)]
        for ours, theirs in zip(_ID.findall("\n".join(expected)), _ID.findall("\n".join(seen)), strict=False):
            self._ids[ours] = theirs
        for ours, theirs in self._ids.items():
            expected = [line.replace(ours, theirs) for line in expected]
        assert len(seen) == len(expected), output
        for is_, should in zip(seen, expected, strict=True):
            pattern = re.escape(should).replace(",…,", ",.*,")
            assert re.fullmatch(pattern, is_), f"{is_!r} should be {should!r}"

    def _save(self, port: int) -> None:
        for name, text in FILES.items():
            text = text.replace('Story.bind("smollm2")', 'Story.bind("scripted")')
            (self.directory / name).write_text(text.replace("127.0.0.1:8000", f"127.0.0.1:{port}"), "utf-8")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with contextlib.closing(Reader(tmp_path)) as one:
        yield one


_LONG = {
    "Other apps",
    "Several deployments",
    "In scripts and tests",
    "Coming from Inferless",
    "Any answer can be resumed",
}


@pytest.mark.parametrize(
    "heading",
    [
        pytest.param(heading, marks=pytest.mark.deep) if heading in _LONG else heading
        for heading in _sections()
        if heading != "On Ray"
    ],
)
def test_every_printed_command_runs(reader: Reader, heading: str) -> None:
    for block in _sections()[heading]:
        for part in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            reader.type(command, shown)


def test_the_page_shows_the_real_errors(reader: Reader) -> None:
    (shown,) = re.findall(r"^```text\n(GET / raised.*?)^```", PAGE, re.S | re.M)
    reader.type("tailrace run wrong:app", "")
    for how in ("raise", "die"):
        subprocess.run(
            ["curl", "-sN", f"{reader.server.url}/?how={how}"], capture_output=True, check=True, timeout=LONG_S
        )
    for line in shown.splitlines():
        reader.server.wait_line(re.escape(line).replace("/home/ada/", ".*/"))


def test_the_app_of_the_first_five_minutes_runs(reader: Reader) -> None:
    (text,) = re.findall(r"^```python\n(import tailrace\n.*?)^```", START, re.DOTALL | re.MULTILINE)
    (reader.directory / "teller.py").write_text(text.replace("smollm2", "scripted"), "utf-8")
    shown = "Starting teller:app …\ndefault runs at http://127.0.0.1:8000/ (Storyteller).\n"
    reader.type("tailrace run teller:app", f"{shown}Started in 1.0 s. Ctrl-C stops it.\n")
    assert "event: done" in reader.server.http.post("/", params={"about": "rivers"}).text


def test_all_files_compile() -> None:
    assert len(FILES) > 10
    for name, text in FILES.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_every_option_and_every_name_is_on_the_page() -> None:
    for name in (*DeploymentOptions.__struct_fields__, *IGNORED):
        assert f"`{name}`" in PAGE, name
    explained = {"Application", "BackpressureConfig", "Deployment", "DeploymentHandle", "DeploymentResponse"}
    explained |= {"DeploymentResponseGenerator", "Member"}  # their results
    for name in set(tailrace.serve.__all__) - explained:
        assert re.search(rf"\b{name}\b", PAGE), name
