"""Runs tests with the lowest releases of the dependencies that pyproject.toml allows, and with the newest, on each
Python of this machine.

They are the tests that the guards of undocumented names ask for, in `tests/compat` and `test_NAME_names.py`, and those
of what else depends on libraries. Of `api`, `apps` and `transport` they are short files that use those names: the rest
of these folders is left out to save time. Of `plugins/openvino` it is the guard. The engines transformers and vllm, and
Ray, are left out: these environments do not have their packages.

Each environment takes 600 MB, below `.versions`; the next run brings it up to date.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
UV = str(Path(sysconfig.get_path("scripts"), "uv"))
LOWEST = "3.11"  # the lowest releases have no wheels for later ones
PYTHONS = (LOWEST, "3.12", "3.13", "3.14")
TESTS = [
    "api/test_native.py",
    "api/test_near_paths.py",
    "api/test_sockets.py",
    "apps/test_anyio_names.py",
    "apps/test_closing.py",
    "apps/test_leaving.py",
    "assembly",
    "compat",
    "dialects",
    "generation",
    "http",
    "plugins/anthropic",
    "plugins/durable_streams",
    "plugins/ollama",
    "plugins/openvino/test_openvino_names.py",
    "plugins/tgi",
    "plugins/triton",
    "records",
    "redis",
    "responses",
    "schemas",
    "serve",
    "streams",
    "text",
    "transport/test_connections.py",
    "transport/test_http_edge.py",
    "transport/test_websocket_frames.py",
    "transport/test_websocket_shell.py",
]


# pyenv's commands fail for versions that are not chosen, so its versions come first.
_PYENV = sorted(str(path) for path in Path.home().glob(".pyenv/versions/*/bin"))
ENVIRONMENT = os.environ | {"PATH": os.pathsep.join((*_PYENV, os.environ["PATH"])), "PYTHONPATH": ""}


def has_python(version: str) -> bool:
    command = [UV, "python", "find", "--quiet", "--no-python-downloads", "--system", version]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False).returncode == 0


def passes(resolution: str, python: str, tests: list[str]) -> bool:
    """Make an environment, and run tests in it."""
    directory = ROOT / ".versions" / f"{resolution}-{python}"
    interpreter = str(directory / "bin" / "python")
    print(f"\n{resolution} releases, Python {python}", flush=True)
    if not directory.exists():
        subprocess.run([UV, "venv", "--quiet", "--python", python, str(directory)], env=ENVIRONMENT, check=True)
    packages = ["--editable", f"{ROOT}[postgresql,redis]", "--group", f"{ROOT / 'pyproject.toml'}:test"]
    install = [UV, "pip", "install", "--quiet", "--upgrade", "--python", interpreter, "--resolution", resolution]
    subprocess.run([*install, *packages], check=True)
    pytest = [interpreter, "-m", "pytest", "-q", "-m", "not deep", "-n", "1", "--reruns", "1", *tests]
    return subprocess.run(pytest, cwd=ROOT, env=ENVIRONMENT, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", choices=("lowest-direct", "highest"), action="append")
    parser.add_argument("--python", choices=PYTHONS, action="append")
    parser.add_argument("tests", nargs="*", default=[f"tests/{path}" for path in TESTS])
    given = parser.parse_args()
    pairs = [("lowest-direct", LOWEST), *(("highest", python) for python in PYTHONS)]
    failed = []
    for resolution, python in pairs:
        if resolution not in (given.resolution or [resolution]) or python not in (given.python or [python]):
            continue
        if not has_python(python):
            print(f"\nThere is no Python {python} here.")
        elif not passes(resolution, python, given.tests):
            failed.append(f"{resolution} releases, Python {python}")
    sys.exit("\nFailed: " + "; ".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
