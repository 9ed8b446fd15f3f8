"""Loads a folder with an `app.py`: reads its files, constructs its class and checks it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from tailrace_plugins.inferless import shim
from tailrace_plugins.inferless.configuration import read_configuration
from tailrace_plugins.inferless.inferless_errors import AppError
from tailrace_plugins.inferless.schema import Schema, read_fields, read_schema

__all__ = ["InferlessSettings", "Loaded", "load", "positional"]

_CLASS = "InferlessPythonModel"
_SETTINGS = ("IS_STREAMING_OUTPUT", "BATCH_SIZE", "BATCH_WINDOW", "IS_BATCHED_INPUT")
_WINDOW_MS = 500.0


@dataclass(frozen=True, slots=True)
class InferlessSettings:
    is_streaming: bool = False
    batch_size: int | None = None
    batch_window_s: float = _WINDOW_MS / 1000


@dataclass(frozen=True, slots=True)
class Loaded:
    name: str
    instance: Any  # Any: the app's
    inputs: Schema
    outputs: Schema  # empty unless the app has a pydantic response class
    request_class: type[BaseModel] | None
    settings: InferlessSettings
    notes: list[str]


def load(folder: Path, name: str | None = None) -> Loaded:
    """Load an app. Raises: AppError, and the exceptions of the app's own code."""
    file = folder / "app.py"
    if not file.is_file():
        raise AppError(f"{folder.name}: there is no app.py in this folder.")
    named, environment, notes = read_configuration(folder)
    for key, value in environment.items():
        os.environ.setdefault(key, value)
    used: list[str] = []
    shim.install(used.append)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # an app may import modules of its folder
    declared = _declared(folder)
    with _Exported() as exported:
        module = _execute("app", file)
    request_class, response_class = (_decorated(module, file, role) for role in ("request", "response"))
    if declared is not None and "INPUT_SCHEMA" in declared:
        inputs, request_class = read_schema(declared["INPUT_SCHEMA"]), None
    elif request_class is not None:
        inputs = read_fields(request_class)
    else:
        meant = f" To run its ASGI app: tailrace run {folder.name}/app.py:app" if hasattr(module, "app") else ""
        raise AppError(
            "app.py: there is neither an input_schema.py with an INPUT_SCHEMA nor a class with "
            f"@inferless.request.{meant}"
        )
    named_in_app = {
        "IS_STREAMING_OUTPUT": getattr(module, "IS_STREAMING_OUTPUT", None)
    }  # the only one that the vendor documents there
    given = _given(("input_schema.py", declared or {}), ("app.py", named_in_app), ("app.py", exported.values))
    settings = _settings(given, notes)
    instance = _instance(module, settings)
    notes += dict.fromkeys(used)
    outputs = read_fields(response_class) if response_class is not None else Schema()
    return Loaded(name or named or folder.resolve().name, instance, inputs, outputs, request_class, settings, notes)


def positional(function: Callable[..., Any]) -> int:  # Any: the app's
    """Return how many positional arguments a bound method takes; sys.maxsize for `*args`."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return sys.maxsize
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _execute(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and pydantic look modules up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _declared(folder: Path) -> Mapping[str, object] | None:
    file = folder / "input_schema.py"
    return vars(_execute("input_schema", file)) if file.is_file() else None


def _decorated(module: ModuleType, file: Path, role: str) -> type[BaseModel] | None:
    """Return the class with `@inferless.request` (or response). Reads the source: the decorators leave no common
    mark."""
    tree = ast.parse(file.read_bytes())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {f"{one.asname or one.name}.{role}" for one in node.names if one.name == "inferless"}
        elif isinstance(node, ast.ImportFrom) and node.module == "inferless":
            names |= {one.asname or one.name for one in node.names if one.name == role}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        decorators = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
        if names & {ast.unparse(one) for one in decorators}:
            found = getattr(module, node.name, None)
            if not isinstance(found, type) or not issubclass(found, BaseModel):
                raise AppError(f"app.py: {node.name} has @inferless.{role}, but is not a pydantic BaseModel.")
            return found
    return None


class _Exported:
    """Settings that an app's `@inferless.config` puts into the environment while it is imported."""

    def __enter__(self) -> _Exported:
        self._before = {name: os.environ.pop(name) for name in _SETTINGS if name in os.environ}
        self.values: dict[str, object] = {}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in _SETTINGS:
            if name in os.environ:
                self.values[name] = _literal(os.environ[name])
        os.environ.update({name: value for name, value in self._before.items() if name not in os.environ})


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _given(*sources: tuple[str, Mapping[str, object]]) -> dict[str, tuple[str, object]]:
    """Return each setting with its file. The first file that has a setting wins."""
    given: dict[str, tuple[str, object]] = {}
    for file, values in sources:
        for name in _SETTINGS:
            if values.get(name) is not None:
                given.setdefault(name, (file, values[name]))
    return given


def _settings(given: Mapping[str, tuple[str, object]], notes: list[str]) -> InferlessSettings:
    for name, (file, value) in given.items():
        if name.startswith("IS_") and not isinstance(value, bool):
            raise AppError(f"{file}: {name} must be True or False.")
        if name.startswith("BATCH_") and not _is_amount(value, whole=name == "BATCH_SIZE"):
            raise AppError(f"{file}: {name} must be {'an integer' if name == 'BATCH_SIZE' else 'a number'} above 0.")
    values: dict[str, Any] = {name: value for name, (_, value) in given.items()}  # Any: checked above
    is_streaming = values.get("IS_STREAMING_OUTPUT", False)
    size = values.get("BATCH_SIZE") or None
    if is_streaming and size:
        notes.append(
            f"{given['BATCH_SIZE'][0]}: BATCH_SIZE has no effect on a streaming app: its requests are not batched."
        )
        size = None
    if values.get("IS_BATCHED_INPUT"):
        notes.append(
            f"{given['IS_BATCHED_INPUT'][0]}: IS_BATCHED_INPUT has no effect: "
            "inputs are accepted with and without a leading 1 in their shape."
        )
    return InferlessSettings(is_streaming, size, values.get("BATCH_WINDOW", _WINDOW_MS) / 1000)


def _is_amount(value: object, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return 0 < value < 1e9 or (whole and value == 0)  # a size of 0 turns batching off


def _instance(module: ModuleType, settings: InferlessSettings) -> Any:  # Any: the app's
    found = getattr(module, _CLASS, None)
    if not isinstance(found, type):
        raise AppError(f"app.py: there is no class {_CLASS}.")
    infer = getattr(found, "infer", None)
    if not callable(infer):
        raise AppError(f"app.py: {_CLASS} has no method infer.")
    if inspect.isgeneratorfunction(infer) or inspect.isasyncgenfunction(infer):
        raise AppError(
            "app.py: infer is a generator. It should call stream_output_handler.send_streamed_output instead of yield."
        )
    instance = found()
    parameters = inspect.signature(instance.infer).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    num_required = sum(one.default is one.empty and one.kind in kinds for one in parameters)
    if not positional(instance.infer) or num_required > 2:
        raise AppError("app.py: infer should take inputs, and also stream_output_handler if it streams.")
    if num_required == 2 and not settings.is_streaming:
        raise AppError(
            "input_schema.py: infer takes a stream_output_handler, but IS_STREAMING_OUTPUT is not set to True."
        )
    return instance
