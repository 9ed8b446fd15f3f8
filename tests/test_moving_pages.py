"""docs/from-ollama.md, from-llama-server.md, from-vllm.md and from-ray-serve.md: what they say is tried."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.api.process import Server
from tests.apps.process import AppServer

import tailrace.serve
from tailrace.cli import main
from tailrace.cli.other_servers import COMMANDS, FLAGS
from tailrace.settings import settings_table
from tailrace_outer.serve.options import IGNORED, DeploymentOptions

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ("from-ollama", "from-llama-server", "from-vllm", "from-ray-serve")
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in NAMES}
_MORE_FLAGS = {"--model", "--set", "--on", "--available", "--reload"}


def _rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    section = re.split(r"^## ", page.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(lines) > 3, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def _routes() -> list[tuple[str, str, str]]:
    return [
        (name, route.strip("`"), says)
        for name, page in PAGES.items()
        if "\n## Routes\n" in page
        for route, says in _rows(page, "Routes")
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server("scripted", "--journal", "memory")) as server:
        yield server.wait_ready()


@pytest.mark.parametrize(("name", "route", "says"), _routes())
def test_a_route_is_there_or_not(name: str, route: str, says: str, server: Server) -> None:
    method, path = route.split()
    body = {} if method == "GET" else {"json": {"model": "scripted"}}
    answer = server.http.request(method, path, **body)  # type: ignore[arg-type]  # httpx's union
    is_missing = answer.status_code in (404, 405) or "when the server starts" in answer.text
    assert is_missing == says.startswith("no"), (answer.status_code, answer.text)


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_that_is_named_exists(name: str) -> None:
    known = {"--" + row.name.rstrip("_").replace("_", "-") for row in settings_table()} | _MORE_FLAGS
    found = set()
    for heading in ("Flags", "Commands", "Variables", "Modelfiles"):
        if f"\n## {heading}\n" in PAGES[name]:
            for theirs, ours in _rows(PAGES[name], heading):
                is_theirs = "no counterpart" in ours
                flags = set(re.findall(r"`[^`]*?(--[a-z-]+)[^`]*`", ours))
                found |= set() if is_theirs else flags
                assert theirs
    assert found or name == "from-ray-serve"
    assert found <= known, found - known


def test_hints_in_errors_say_what_the_pages_say() -> None:
    headings = (("from-ollama", "Commands"), ("from-llama-server", "Flags"), ("from-vllm", "Flags"))
    rows = [row for name, heading in headings for row in _rows(PAGES[name], heading)]
    for theirs, ours in (COMMANDS | FLAGS).items():
        flag = re.compile(rf"`(ollama )?{re.escape(theirs)}( MODEL)?`")
        assert any(flag.search(left) and f"`{ours}`" in right for left, right in rows), (theirs, ours)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_its_options(name: str) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGES[name], re.DOTALL | re.MULTILINE)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ tailrace ")]
    commands += re.findall(r"\| `(tailrace [a-z]+[^`]*)`", PAGES[name])
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        result = CliRunner().invoke(main, [*words, "--help"])
        assert result.exit_code == 0, (command, result.output)


@pytest.mark.parametrize("name", ["from-llama-server", "from-vllm"])
def test_no_flag_has_two_rows(name: str) -> None:
    flags = [flag for theirs, _ in _rows(PAGES[name], "Flags") for flag in re.findall(r"`([^`]+)`", theirs)]
    assert len(flags) == len(set(flags))
    assert len(flags) > 40


def test_the_names_of_ray_serve() -> None:
    for name, says in _rows(PAGES["from-ray-serve"], "Names of ray.serve"):
        assert hasattr(tailrace.serve, name.strip("`")) == says.startswith("yes"), name


def test_the_options_of_a_deployment() -> None:
    rows = {name.strip("`"): says for name, says in _rows(PAGES["from-ray-serve"], "Options of a deployment")}
    assert {name for name, says in rows.items() if says == "ignored"} == set(IGNORED)
    fields = DeploymentOptions.__struct_fields__
    assert {name for name, says in rows.items() if says == "yes"} == set(fields)


def test_the_app_of_the_page_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGES["from-ray-serve"], re.DOTALL | re.MULTILINE)
    (tmp_path / "story.py").write_text(code)
    with contextlib.closing(AppServer("story:app", directory=tmp_path)) as server:
        server.wait_ready()
        assert server.http.get("/").text == "Once there was a river."
