"""Servers whose scripted model plays the model of an agent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from tests.api.process import Server

__all__ = ["Rules", "scripted"]

Rules: TypeAlias = list[dict[str, Any]]  # Any: JSON

_WINDOW = ("--context-tokens", "1000000", "--kv-tokens", "4000000")  # a token is a byte


@contextlib.contextmanager
def scripted(folder: Path, rules: Rules, *flags: str, options: str = "") -> Iterator[Server]:
    """Run a server whose model `coder` follows these rules. In them, FOLDER is the folder `work` in `folder`."""
    script = folder / "script.json"
    script.write_text(json.dumps({"rules": rules}).replace("FOLDER", str(folder / "work")))
    source = ",".join(filter(None, (f"coder=scripted:script={script}", options)))
    with contextlib.closing(Server(f"--model={source}", *_WINDOW, *flags)) as server:
        yield server.wait_ready()
