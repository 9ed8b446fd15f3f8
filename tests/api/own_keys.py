"""Keys for tests."""

from __future__ import annotations

import json
import subprocess

from tests.api.process import TAILRACE, environment

__all__ = ["key_of"]


def key_of(database: str, owner: str, *scopes: str) -> str:
    """Create a key in a database before its server starts."""
    given = [flag for scope in scopes for flag in ("--scope", scope)]
    command = [TAILRACE, "keys", "create", owner, "--json", "--database", database, *given]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return str(json.loads(made.stdout)["token"])
