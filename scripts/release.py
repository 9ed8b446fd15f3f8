"""Builds wheel and sdist, installs each into a new environment, and asks a server that runs there for its first token.

    .venv/bin/python -m scripts.release [VERSION]

With VERSION, the version and the changelog are raised first, and stay so whatever comes of the rest: commit them, or
`git checkout` them. The distributions are in `dist`. Exit status 1 if one does not work.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from scripts import page_libraries
from tests.api.process import Server

__all__ = ["check", "raised"]

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tailrace" / "__init__.py"
CHANGELOG = ROOT / "CHANGELOG.md"
DISTRIBUTIONS = ROOT / "dist"
_VERSION = re.compile(r'^__version__ = "([0-9]+)\.([0-9]+)\.([0-9]+)"$', re.MULTILINE)
_NEW = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", re.ASCII)
_UNRELEASED = "## Unreleased\n"


def raised(source: str, changelog: str, version: str, day: str) -> tuple[str, str]:
    """Source and changelog with a new version, under which stands what was unreleased.

    Raises: ValueError for what is no version, is not above the last one, or has no changes.
    """
    new, old = _NEW.fullmatch(version), _VERSION.search(source)
    if new is None or old is None:
        raise ValueError("A version is three numbers with dots between them, such as 0.2.0.")
    if tuple(map(int, new.groups())) <= tuple(map(int, old.groups())):
        raise ValueError(f"{version} is not above {'.'.join(old.groups())}.")
    before, heading, after = changelog.partition(_UNRELEASED)
    if not heading or not re.match(r"\s*(### |- )", after):
        raise ValueError("The changelog has nothing under Unreleased.")
    return (
        _VERSION.sub(f'__version__ = "{version}"', source),
        f"{before}{_UNRELEASED}\n## {version}, {day}\n{after}",
    )


class _Installed(Server):
    """The server of another environment, started where no source of tailrace is."""

    def __init__(self, environment: Path, source: str, *flags: str) -> None:
        self.command = (str(environment / "bin" / "tailrace"),)
        super().__init__(source, *flags, directory=environment)


def check(distribution: Path, version: str, source: str) -> str:
    """Install a distribution where nothing else is, and return the first token that a server of it says.

    Raises: AssertionError for another version or a server that does not start, CalledProcessError, HTTPError.
    """
    with tempfile.TemporaryDirectory(prefix="tailrace-release-") as folder:
        environment = Path(folder)
        venv.create(environment, with_pip=True)
        _run(environment, str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", str(distribution))
        said = _run(environment, str(environment / "bin" / "tailrace"), "--version")
        assert said.split()[-1] == version, f"{distribution.name} says: {said}"
        with contextlib.closing(_Installed(environment, source, "--journal", "memory")) as server:
            server.wait_ready(timeout_s=300)
            answer = server.post("/v1/completions", {"prompt": "A river is", "max_tokens": 1, "temperature": 0})
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"])


def _run(directory: Path, *command: str) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, check=True, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: list[str]) -> None:
    if arguments:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        try:
            texts = raised(SOURCE.read_text(), CHANGELOG.read_text(), arguments[0], today)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        for path, text in zip((SOURCE, CHANGELOG), texts, strict=True):
            path.write_text(text)
    found = _VERSION.search(SOURCE.read_text())
    assert found is not None
    version = ".".join(found.groups())
    try:
        page_libraries.make()  # the build would only warn
    except page_libraries.MissingLibraries as error:
        raise SystemExit(str(error)) from None
    for old in DISTRIBUTIONS.glob(f"tailrace-{version}[.-]*"):
        old.unlink()
    _run(ROOT, sys.executable, "-m", "build", "--outdir", str(DISTRIBUTIONS), str(ROOT))
    for distribution in (f"tailrace-{version}-py3-none-any.whl", f"tailrace-{version}.tar.gz"):
        print(f"{distribution}: installing it into a new environment …", flush=True)
        print(f"{distribution}: its first token is {check(DISTRIBUTIONS / distribution, version, 'smollm2')!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
