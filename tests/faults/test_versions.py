"""A rolling update: servers of an earlier commit and of this one over one Redis, in the same form of streams."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.api.process import TAILRACE, Server
from tests.faults.team import Team
from tests.missing import skip_missing
from tests.testing.redis_server import own_redis
from tests.waiting import LONG_S

_ROOT = Path(__file__).parents[2]
# An early one, the last one before leases had a length and servers listed their models, and the version before.
_COMMITS = ("463fc64", "2e35d82", "5a6d94d")


class VersionedServer(Server):
    """A server of the code in `source_path`."""

    def __init__(self, source: str, *flags: str, source_path: Path | None) -> None:
        self.command = self.command_of(source_path)
        super().__init__(source, *flags)

    @staticmethod
    def command_of(source_path: Path | None) -> tuple[str, ...]:
        """Return how to run this version, or the code in a directory."""
        if source_path is None:
            return (TAILRACE,)
        return ("env", f"PYTHONPATH={source_path}", sys.executable, "-m", "tailrace")


def code_of(commit: str, directory: Path) -> Path:
    """Write the code of a commit into a directory, and return what to add to Python's path. Skips the test if there is
    no history."""
    done = subprocess.run(
        ["git", "archive", commit, "src", "pyproject.toml"], cwd=_ROOT, capture_output=True, timeout=LONG_S
    )
    if done.returncode:
        skip_missing("git history", done.stderr.decode())
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(directory, filter="data")
    _describe(tomllib.loads((directory / "pyproject.toml").read_text())["project"], directory / "src")
    return directory / "src"


def _describe(project: dict[str, Any], source_path: Path) -> None:  # Any: as in the file
    """Write what an installation would say of this code. Otherwise it would have the plugins of this version."""
    folder = source_path / "tailrace-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tailrace\nVersion: 0\n")
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("commit", os.environ.get("TAILRACE_TEST_OLD_COMMITS", " ".join(_COMMITS)).split())
def test_servers_of_two_versions(tmp_path: Path, commit: str) -> None:
    """Streams and idempotency keys go from the old version to the new one, back, and to the new one again."""
    old = code_of(commit, tmp_path / "old")
    with own_redis(tmp_path / "redis") as (url, _):
        servers = Team(tmp_path, url, VersionedServer, seed=1)
        try:
            earlier, later = servers.add(source_path=old), servers.add(source_path=None)
            for version, victim in (("Old", earlier), ("New", later), ("Old again", None)):
                victim = victim or servers.servers[0]
                streams = servers.begin_some(version, 3, 300, on=victim)
                body, key = {"prompt": version, "max_tokens": 300}, {"Idempotency-Key": version.replace(" ", "-")}
                keyed = victim.create(body, **key)
                servers.kill(victim)
                for stream in streams:
                    stream.wait()
                    assert b'"continuity":"replayed"' in stream.end
                assert {server.post("/v1/streams", body, **key).json()["id"] for server in servers.servers} == {keyed}
                servers.add(source_path=old if victim is later else None)
            assert all(server.http.get("/readyz").status_code == 200 for server in servers.servers)
            servers.check()
        finally:
            servers.close()
