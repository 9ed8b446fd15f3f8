"""Builds wheel and sdist, installs each in several ways, and asks a server that runs there for its first token.

    .venv/bin/python -m scripts.release [VERSION]

With VERSION, the version and the changelog are raised first, and stay so whatever comes of the rest: commit them, or
`git checkout` them. The distributions are in `dist`. Exit status 1 if one does not work.

The wheel is installed with pip, pipx and uvx, on each Python of this machine, with an empty home directory each time;
the source distribution with pip.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from scripts import page_libraries
from scripts.check_versions import ENVIRONMENT, PYTHONS, UV, has_python
from tests.api.process import Server

__all__ = ["check", "raised"]

Way = Literal["pip", "pipx", "uvx"]

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

    def __init__(self, command: tuple[str, ...], directory: Path, source: str) -> None:
        self.command = command
        super().__init__(source, "--journal", "memory", directory=directory)


def check(distribution: Path, version: str, source: str, way: Way = "pip", python: str = "") -> tuple[str, int]:
    """Install a distribution with an empty home directory. Returns the first token that a server of it says, and the
    size of the installation in bytes.

    Raises: AssertionError for another version or a server that does not start, CalledProcessError, HTTPError.
    """
    with tempfile.TemporaryDirectory(prefix="tailrace-release-") as folder, _empty_home(Path(folder)) as home:
        command = _installed(
            distribution.resolve(), home, way, python or f"{sys.version_info[0]}.{sys.version_info[1]}"
        )
        said = _run(home, *command, "--version")
        assert said.split()[-1] == version, f"{distribution.name} says: {said}"
        num_bytes = _size(home)
        with contextlib.closing(_Installed(command, home, source)) as server:
            server.wait_ready(timeout_s=300)
            answer = server.post("/v1/completions", {"prompt": "A river is", "max_tokens": 1, "temperature": 0})
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"]), num_bytes


def _installed(distribution: Path, home: Path, way: Way, python: str) -> tuple[str, ...]:
    """Install a distribution, and return the command that runs it."""
    interpreter = _run(home, UV, "python", "find", "--no-python-downloads", "--system", python).strip()
    if way == "uvx":
        return UV, "tool", "run", "--quiet", "--python", interpreter, "--from", str(distribution), "tailrace"
    if way == "pipx":
        _run(home, sys.executable, "-m", "pipx", "install", "--quiet", "--python", interpreter, str(distribution))
        return (str(home / "pipx" / "bin" / "tailrace"),)
    _run(home, interpreter, "-m", "venv", str(home / "venv"))
    _run(home, str(home / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", str(distribution))
    return (str(home / "venv" / "bin" / "tailrace"),)


@contextlib.contextmanager
def _empty_home(home: Path) -> Iterator[Path]:
    """Make `home` the home directory of this process and its children, and of pipx and uv."""
    own = {
        "HOME": str(home),
        "PATH": ENVIRONMENT["PATH"],
        "PIP_NO_CACHE_DIR": "1",  # it would count
        "PIPX_BIN_DIR": str(home / "pipx" / "bin"),
        "PIPX_HOME": str(home / "pipx"),
        "UV_CACHE_DIR": str(home / "uv"),
    }
    before = dict(os.environ)
    for name in [name for name in os.environ if re.match("XDG_|TAILRACE_|PYTHONPATH|HF_", name)]:
        del os.environ[name]
    os.environ.update(own)
    try:
        yield home
    finally:
        os.environ.clear()
        os.environ.update(before)


def _size(home: Path) -> int:
    """Return the size of all files of the installation. Files that are linked twice count once."""
    files = {
        (found.st_dev, found.st_ino): found.st_size
        for path in home.rglob("*")
        if path.is_file() and not path.is_symlink() and (found := path.stat())
    }
    return sum(files.values())


def _run(directory: Path, *command: str) -> str:
    return subprocess.run(command, check=True, cwd=directory, stdout=subprocess.PIPE, text=True).stdout


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
    wheel, source = f"tailrace-{version}-py3-none-any.whl", f"tailrace-{version}.tar.gz"
    ways: tuple[Way, ...] = ("pip", "pipx", "uvx")
    tries = [(wheel, way, python) for python in filter(has_python, PYTHONS) for way in ways]
    for distribution, way, python in (*tries, (source, ways[0], "")):
        print(f"{distribution} with {way} {python}: installing it …", flush=True)
        token, num_bytes = check(DISTRIBUTIONS / distribution, version, "smollm2", way, python)
        print(f"{distribution} with {way} {python}: {num_bytes / 1e6:.0f} MB, its first token is {token!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
