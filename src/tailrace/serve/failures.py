"""What is told of an exception in a user's code: where it was, and nothing of ours around it."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path

from tailrace.serve.boot import Failed

__all__ = ["TargetError", "failed", "know_interpreter", "know_packages"]

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
_RAY = (
    'ray is not installed. Change "from ray import serve" to "from tailrace import serve"; for an app that uses more '
    "of Ray: pip install 'ray[serve]', and run it with --on ray."
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BETWEEN = (str(Path(__file__).parent.parent), "<frozen importlib", str(Path(importlib.__file__).parent))


_listed: list[str] = []  # the packages that the app's own configuration asks for, with versions
_pip = ["pip"]  # the command that installs where the app runs


def know_packages(listed: Sequence[str]) -> None:
    """Which packages the app's configuration asks for, so that a missing module is named as it does."""
    _listed[:] = listed


def know_interpreter(python: str) -> None:
    """Which interpreter runs the app, where it is not tailrace's."""
    _pip[:] = [python, "-m", "pip"] if python else ["pip"]


class TargetError(Exception):
    """What was named is no app. The message says what to do."""


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
        install = shlex.join([*_pip, "install", _requirement(package)])
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
