"""Other Python interpreters for apps whose packages cannot be installed together with tailrace's.

Such an environment does not need tailrace. The app's process loads this copy of tailrace, and nothing else from
this environment, so that the packages of the two environments never mix.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import tailrace

__all__ = ["NEEDED", "InterpreterError", "command_of", "find_interpreter"]

NEEDED = ("anyio", "cloudpickle", "msgspec", "prometheus-client", "pyyaml", "starlette")
_MODULES = {"prometheus-client": "prometheus_client", "pyyaml": "yaml"}  # where they differ from the package's name
_MIN_VERSION = (3, 11)
_CHECK_S = 60.0

# Runs a module of this copy of tailrace, whether or not that environment has one of its own.
_RUN = """
import importlib.util, runpy, sys
base, module = sys.argv[1:3]
for name in ("tailrace", "tailrace_outer"):
    folder = f"{base}/{name}"
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
sys.argv[:3] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_CHECK = """
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(*sys.version_info[:2], *missing)
"""


class InterpreterError(Exception):
    """The interpreter cannot run apps. The message says what to do."""


def find_interpreter(given: str) -> str:
    """Return the executable, given its path, its name on the PATH, or the directory of its environment.

    Raises: InterpreterError if there is none, or if its environment lacks a package that every app's process needs.
    """
    path = Path(given)
    if path.is_dir():
        path = path / "bin" / "python"
    elif path.name == given and not path.exists():
        path = Path(shutil.which(given) or given)
    if any(blank in given for blank in " \t\n") and not path.exists():
        raise InterpreterError(
            f"{given!r} is not the path of a Python interpreter. A command with arguments is not supported."
        )
    path = (
        path.absolute()
    )  # not resolved: an environment's interpreter is a link, and finds its packages next to the link
    checked = _run([str(path), "-c", _CHECK, *(_MODULES.get(name, name) for name in NEEDED)])
    major, minor, *missing = checked.split()
    if (int(major), int(minor)) < _MIN_VERSION:
        least = ".".join(map(str, _MIN_VERSION))
        raise InterpreterError(f"{path} is Python {major}.{minor}; apps need {least} or later.")
    if missing:
        packages = [name for name in NEEDED if _MODULES.get(name, name) in missing]
        install = f"{path} -m pip install {' '.join(packages)}"
        raise InterpreterError(f"{path} lacks packages that every app needs. Install them there: {install}")
    _run(
        [*command_of(str(path), "tailrace_outer.apps.replica")]
    )  # without arguments, the module only tests its imports
    return str(path)


def command_of(python: str, module: str) -> list[str]:
    """Return the command that runs a module of tailrace under an interpreter; "" is the interpreter of this process."""
    if not python:
        return [
            sys.executable,
            "-u",
            "-m",
            module,
        ]  # -u: unbuffered, so that no output is lost when the process is killed
    return [python, "-u", "-c", _RUN, str(Path(tailrace.__file__).parent.parent), module]


def _run(command: list[str]) -> str:
    """Run a command and return its output. Raises: InterpreterError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_S, check=False)
    except OSError as error:
        raise InterpreterError(f"{command[0]} cannot be run: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        raise InterpreterError(f"{command[0]} did not answer within {_CHECK_S:g} s.") from None
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise InterpreterError(f"{command[0]} cannot run apps: {last}")
    return done.stdout
