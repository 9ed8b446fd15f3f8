"""What is told of an exception in a user's code: where it was, and nothing of ours around it."""

from __future__ import annotations

import importlib
import os
import re
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tailrace.errors import TailraceError
from tailrace.requirements import pip_install
from tailrace.serve.boot import Failed
from tailrace.serve.exceptions import BackPressureError, DeploymentUnavailableError

__all__ = ["FAILED", "Refusal", "TargetError", "failed", "know_packages", "refusal_of"]

FAILED = "The app failed; its log says how."  # what clients are told of an exception that means nothing to them

# What packages are called whose modules have another name, the most usual first.
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
_BESIDE = {"transformers": ("torch",)}  # without which a package is there and does not work
_RAY = (
    'ray is not installed. Change "from ray import serve" to "from tailrace import serve". An app that uses more of '
    "Ray is run with --on ray."
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BETWEEN = (str(Path(__file__).parent.parent), "<frozen importlib", str(Path(importlib.__file__).parent))


_listed: list[str] = []  # the packages that the app's own configuration asks for, with versions


def know_packages(listed: Sequence[str]) -> None:
    """Which packages the app's configuration asks for, so that a missing module is named as it does."""
    _listed[:] = listed


class TargetError(Exception):
    """What was named is no app. The message says what to do."""


class Refusal(NamedTuple):
    """What a client is told of an exception in a user's code."""

    status: int
    message: str
    retry_after_s: float | None
    code: str  # which clients compare
    param: str | None = None


def refusal_of(error: BaseException) -> Refusal:
    """The words of what a deployment or a model refuses; no words of the user's own code."""
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    if isinstance(error, TailraceError):
        return Refusal(error.status, str(error), retry_after_s, error.code, error.param)
    if isinstance(error, BackPressureError):
        return Refusal(error.status, str(error), retry_after_s, "overloaded")
    if isinstance(error, DeploymentUnavailableError):
        return Refusal(503, str(error), retry_after_s, "app_unavailable")
    return Refusal(500, FAILED, retry_after_s, "app_failed")


def failed(error: BaseException, what: str, *, answering: object = None) -> Failed:
    """What is told of an error in the user's code, without frames of ours. `answering` is the user's function that was
    at work: where no line of theirs raised, as with an answer that cannot be written, it is what is pointed to."""
    if isinstance(error, TargetError):
        return Failed(str(error))
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        wanted = what.removeprefix("importing ").partition(":")[0] if what.startswith("importing ") else ""
        if f"{wanted}.".startswith(f"{error.name}."):  # it, or a package that it would be in
            return Failed(f"There is no module {error.name} in {os.getcwd()}. --app-dir says where to look.")
        if package == "ray":
            return Failed(f"{what}: {_RAY}", _traceback(error, answering))
        beside = [name for name in _BESIDE.get(package, ()) if find_spec(name) is None]
        install = pip_install(*(_requirement(name) for name in (package, *beside)))
        line = f"{what}: the package {package} is missing. Try: {install}"
        return Failed(line, _traceback(error, answering))
    kind, words = type(error).__name__, str(error).strip().partition("\n")[0]
    return Failed(f"{what} raised {kind}: {words}" if words else f"{what} raised {kind}.", _traceback(error, answering))


def _requirement(module: str) -> str:
    """What to install for a module: as the app's configuration has it, with its version, if it does."""
    names = _PACKAGES.get(module, (module,))
    wanted = {_normal(name) for name in (*names, module, f"python-{module}", f"py{module}")}
    for listed in _listed:
        name = _NAME.match(listed)
        if name is not None and _normal(name[0]) in wanted:
            return listed
    return names[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _traceback(error: BaseException, answering: object) -> str:
    """From the first line of the user's own on, where there is one in the app's directory."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_BETWEEN)]
    theirs = next((n for n, frame in enumerate(frames) if _is_theirs(frame.filename)), None)
    code = getattr(answering, "__code__", None)
    if theirs is None and code is not None:
        frames = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name), *frames[-1:]]
    if frames:
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[theirs or 0 :])]
        return "".join([*lines, *traceback.format_exception_only(error)])
    in_place = isinstance(error, SyntaxError) or "\n" in str(error)  # what tells more than the one line of `failed`
    return "".join(traceback.format_exception_only(error)) if in_place else ""


def _is_theirs(filename: str) -> bool:
    return filename.startswith(os.getcwd() + os.sep) and "site-packages" not in filename
