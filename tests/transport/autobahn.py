"""The Autobahn test suite, the conformance tests for WebSockets. It needs Python 2.7, and is downloaded once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from tests.missing import skip_missing

__all__ = ["Outcome", "Suite"]

_VERSION = "25.10.1"
_RUN = "import sys; from autobahntestsuite.wstest import run; sys.exit(run())"


@dataclass(frozen=True)
class Outcome:
    """The result of a case, and of its closing handshake, in the suite's words."""

    case: str
    behavior: str
    closing: str


class Suite:
    """The installed suite. Skips the test if it cannot be installed."""

    def __init__(self) -> None:
        self._python = _python()
        self._path = Path(platformdirs.user_cache_dir("tailrace-tests")) / f"autobahn-{_VERSION}"
        if not (self._path / "complete").exists():
            self._install()

    def _install(self) -> None:
        install = [self._python, "-m", "pip", "install", "--quiet", "--target", str(self._path)]
        done = subprocess.run(
            [*install, f"autobahntestsuite=={_VERSION}"], capture_output=True, text=True, check=False
        )  # fmt: skip
        if done.returncode:
            skip_missing("autobahntestsuite", done.stderr.strip()[-300:])
        (self._path / "zope" / "__init__.py").touch()  # a namespace package, which --target leaves without one
        (self._path / "complete").touch()

    def run(self, url: str, cases: list[str], folder: Path) -> list[Outcome]:
        """Run the client in these cases, against an echo server."""
        spec = folder / "spec.json"
        servers = [{"agent": "tailrace", "url": url}]
        spec.write_text(
            json.dumps({"outdir": str(folder), "servers": servers, "cases": cases, "exclude-cases": []})
        )  # fmt: skip
        subprocess.run(
            [self._python, "-c", _RUN, "-m", "fuzzingclient", "-s", str(spec)],
            env={**os.environ, "PYTHONPATH": str(self._path)}, cwd=folder, capture_output=True, check=True,
        )  # fmt: skip
        found = json.loads((folder / "index.json").read_text())["tailrace"]
        return [Outcome(case, one["behavior"], one["behaviorClose"]) for case, one in found.items()]


def _python() -> str:
    candidates = [shutil.which("python2.7"), *sorted(Path.home().glob(".pyenv/versions/2.7*/bin/python2.7"))]

    def runs(candidate: str) -> bool:
        """Return whether a program starts. pyenv puts programs on the PATH that exist only for some versions."""
        return subprocess.run([candidate, "-c", "import sys"], capture_output=True, check=False).returncode == 0

    found = next(filter(runs, map(str, filter(None, candidates))), None)
    return found or skip_missing("Python 2.7", "the Autobahn test suite needs it")
