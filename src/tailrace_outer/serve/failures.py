"""Describes exceptions of user code: a message, and a traceback without tailrace's frames."""

from __future__ import annotations

import importlib
import os
import re
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import tailrace
from tailrace.errors import TailraceError
from tailrace.packages.requirements import pip_install
from tailrace_outer.serve.boot import Failed
from tailrace_outer.serve.exceptions import BackPressureError, DeploymentUnavailableError

__all__ = ["FAILED", "Refusal", "TargetError", "failed", "refusal_of", "set_requirements"]

FAILED = "The app failed; the app's log has details."  # all that clients learn about an exception of user code

# Packages whose modules have another name, the most common first.
_PACKAGES = {
    "PIL": ("pillow", "pillow-simd"),
    "bs4": ("beautifulsoup4",),
    "cv2": (
        *("opencv-python", "opencv-python-headless"),
        *("opencv-contrib-python", "opencv-contrib-python-headless"),
    ),
    "dotenv": ("python-dotenv",),
    "faiss": ("faiss-cpu", "faiss-gpu"),
    "fitz": ("pymupdf",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "sentence_transformers": ("sentence-transformers",),
    "sklearn": ("scikit-learn",),
    "skimage": ("scikit-image",),
    "yaml": ("pyyaml",),
}
_ALSO_NEEDED = {"transformers": ("torch",)}  # packages that do not work without another one
_RAY = (
    'ray is not installed. Change "from ray import serve" to "from tailrace import serve". Run an app that '
    "uses more of Ray with --on ray."
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The folder of tailrace is also the beginning of those of `tailrace_outer` and `tailrace_plugins`, beside it.
_TAILRACE_OR_IMPORT = (str(Path(tailrace.__file__).parent), "<frozen importlib", str(Path(importlib.__file__).parent))


_listed: list[str] = []  # the requirements in the app's configuration, with versions


def set_requirements(listed: Sequence[str]) -> None:
    """Set the requirements of the app's configuration, to name a missing package with its version."""
    _listed[:] = listed


class TargetError(Exception):
    """The target is not an app. The message says what to do."""


class Refusal(NamedTuple):
    """The error that a client gets for an exception in user code."""

    status: int
    message: str
    retry_after_s: float | None
    code: str  # stable: clients compare it
    param: str | None = None


def refusal_of(error: BaseException) -> Refusal:
    """Return the client's error. It has the message of tailrace's own errors, but no text of user code."""
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    if isinstance(error, TailraceError):
        return Refusal(error.status, str(error), retry_after_s, error.code, error.param)
    if isinstance(error, BackPressureError):
        return Refusal(error.status, str(error), retry_after_s, "overloaded")
    if isinstance(error, DeploymentUnavailableError):
        return Refusal(503, str(error), retry_after_s, "app_unavailable")
    return Refusal(500, FAILED, retry_after_s, "app_failed")


def failed(error: BaseException, what: str, *, running: object = None) -> Failed:
    """Describe an exception of user code, without tailrace's frames. `running` is the user's function that ran: the
    traceback points to it if no line of user code raised, as for an answer that cannot be encoded."""
    if isinstance(error, TargetError):
        return Failed(str(error))
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        candidates = what.removeprefix("importing ").partition(":")[0] if what.startswith("importing ") else ""
        if f"{candidates}.".startswith(f"{error.name}."):  # the module itself, or a parent package
            return Failed(f"There is no module {error.name} in {os.getcwd()}. Set its directory with --app-dir.")
        if package == "ray":
            return Failed(f"{what}: {_RAY}", _traceback(error, running))
        also_needed = [name for name in _ALSO_NEEDED.get(package, ()) if find_spec(name) is None]
        install = pip_install(*(_requirement(name) for name in (package, *also_needed)))
        line = f"{what}: the package {package} is missing. Try: {install}"
        return Failed(line, _traceback(error, running))
    kind, words = type(error).__name__, str(error).strip().partition("\n")[0]
    return Failed(f"{what} raised {kind}: {words}" if words else f"{what} raised {kind}.", _traceback(error, running))


def _requirement(module: str) -> str:
    """Return the package to install for a module, with the version of the app's configuration if it has one."""
    names = _PACKAGES.get(module, (module,))
    candidates = {_normal(name) for name in (*names, module, f"python-{module}", f"py{module}")}
    for listed in _listed:
        name = _NAME.match(listed)
        if name is not None and _normal(name[0]) in candidates:
            return listed
    return names[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _traceback(error: BaseException, running: object) -> str:
    """Return the traceback from the first frame in the app's directory on, if there is one."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TAILRACE_OR_IMPORT)
    ]
    first_user = next((n for n, frame in enumerate(frames) if _is_user_code(frame.filename)), None)
    code = getattr(running, "__code__", None)
    if first_user is None and code is not None:
        frames = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name), *frames[-1:]]
    if frames:
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[first_user or 0 :])]
        return "".join([*lines, *traceback.format_exception_only(error)])
    in_place = isinstance(error, SyntaxError) or "\n" in str(error)  # more than the one line of `failed`
    return "".join(traceback.format_exception_only(error)) if in_place else ""


def _is_user_code(filename: str) -> bool:
    return filename.startswith(os.getcwd() + os.sep) and "site-packages" not in filename
