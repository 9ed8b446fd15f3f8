"""The pages of the wires: every printed command and program runs, with another port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.waiting import LONG_S

from tailrace.http.wires import ServedWires

WIRES = ServedWires().all
ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "wires"
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _blocks() -> list[tuple[str, str, str]]:
    return [
        (page.name, kind, text)
        for page in [*sorted(PAGES.glob("*.md")), ROOT / "docs" / "conversations.md"]
        for kind, text in _BLOCK.findall(page.read_text())
    ]


def _commands(text: str) -> list[str]:
    """Return the commands after a `$`, with continuation lines, except those that start a server."""
    return re.findall(r"^\$ (?!tailrace )((?:.*\\\n)*.*)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "kind", "text"), _blocks(), ids=[f"{page}-{place}" for place, (page, _, _) in enumerate(_blocks())]
)
def test_every_printed_command_runs(server: Server, page: str, kind: str, text: str) -> None:
    text = re.sub(r"(localhost|127\.0\.0\.1):8000", f"127.0.0.1:{server.port}", text)
    programs = [[sys.executable, "-c", text]] if kind == "python" else [["bash", "-c", one] for one in _commands(text)]
    for program in programs:
        done = subprocess.run(program, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert not re.search(r'"error": ?["{]', done.stdout)


def test_every_wire_has_a_page() -> None:
    pages = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    for wire in WIRES:
        for operation in wire.operations:
            path = re.sub(r"\{[^}]*\}", "{}", operation.path)
            assert path in re.sub(r"\{[^}]*\}", "{}", pages), (
                f"{wire.name}: {operation.path} is on no page of docs/wires"
            )
