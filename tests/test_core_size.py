"""The core stays small enough for one person to hold."""

from __future__ import annotations

from pathlib import Path

CORE = Path(__file__).parent.parent / "src" / "tailrace"
MOST_LINES = 40_000


def test_the_core_has_fewer_than_40_000_lines() -> None:
    num_lines = sum(len(path.read_text("utf-8").splitlines()) for path in CORE.rglob("*.py"))
    assert num_lines < MOST_LINES, (
        f"src/tailrace has {num_lines} lines. Look for what it does twice or does not need any more. Then look for a "
        "part that no stream on one machine needs: it can be a plugin (docs/decisions/own-plugins.md) or a folder of "
        "src/tailrace_outer (docs/decisions/outer-layer.md)."
    )
