"""Reads what `tailrace run` has to run, without importing it."""

from __future__ import annotations

import ast
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tailrace.models.catalogue import is_known
from tailrace.packages.plugins import load_plugins
from tailrace.settings import checked_settings
from tailrace.wording import did_you_mean
from tailrace_outer.apps.host import AppSpec
from tailrace_outer.apps.interpreters import InterpreterError, find_interpreter
from tailrace_outer.serve.boot import AppTarget, FolderKind
from tailrace_outer.serve.folders import AppFolder

__all__ = ["Plan", "PlanError", "plan_of"]

_FOLDERS_GROUP = "tailrace.app_folders"  # of entry points
_IMPORT = re.compile(r"[^\W\d][\w-]*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_APP_KEYS = {"name", "route_prefix", "import_path", "args", "deployments", "runtime_env"}
_IGNORED_APP_KEYS = {"logging_config", "autoscaling_policy", "external_scaler_enabled"}
_TOP_KEYS = {"applications", "http_options"}
_IGNORED_TOP_KEYS = {
    "proxy_location", "grpc_options", "controller_options", "logging_config", "tracing_config", "target_capacity",
}  # fmt: skip
_HTTP_OPTIONS = {"host": "host", "port": "port", "keep_alive_timeout_s": "keep_alive_s"}


class PlanError(Exception):
    """The target cannot be run. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The apps to run, the settings of a YAML file, and notes for its author."""

    apps: tuple[AppSpec, ...]
    source: str  # what the plan was read from; unique to the plan
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: of the setting's type
    notes: tuple[str, ...] = ()


def plan_of(
    target: str,
    arguments: Sequence[str],
    *,
    directory: str,
    route_prefix: str,
    name: str,
    concurrency: int,
    log_level: str,
    resumable: bool = False,
    queue_s: float | None = None,
    python: str = "",
    on_ray: bool = False,
) -> Plan:
    """Read a target and the options of the command line. Raises: PlanError."""
    if concurrency != 1 and not Path(target).is_dir():
        raise PlanError("--concurrency is for folders. Other apps set max_ongoing_requests in their code.")
    plan = _plan_of(target, arguments, directory=directory, route_prefix=route_prefix, name=name)
    common = {"concurrency": concurrency, "log_level": log_level, "queue_s": queue_s}

    def completed(spec: AppSpec) -> AppSpec:
        if on_ray and spec.target.python:
            raise PlanError(f"{spec.where}: runtime_env.py_executable is not supported with --on ray.")
        interpreter = _interpreter(spec.target.python or python, spec.where)
        target = msgspec.structs.replace(spec.target, **common, python=interpreter)
        return replace(spec, target=target, is_resumable=resumable)

    apps = tuple(completed(spec) for spec in plan.apps)
    return replace(plan, apps=apps)


def _interpreter(python: str, where: str) -> str:
    if not python:
        return ""
    try:
        return find_interpreter(python)
    except InterpreterError as error:
        raise PlanError(f"{where}: {error}" if where else str(error)) from None


def _plan_of(target: str, arguments: Sequence[str], *, directory: str, route_prefix: str, name: str) -> Plan:
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        if arguments:
            raise PlanError("A YAML file takes no arguments on the command line: write them under `args`.")
        return _plan_of_file(path, directory)
    given = dict(_pair(argument) for argument in arguments)
    if directory != "." and (path.is_dir() or target.partition(":")[0].endswith(".py")):
        raise PlanError("--app-dir is for the name of a module: a file and a folder have directories of their own.")
    if path.is_dir():
        found = AppTarget(str(path.resolve()), name, str(path.resolve()), given, kind=_kind_of(path))
    else:
        module, directory = _module(target, directory)
        found = AppTarget(module, name, directory, given)
    source = found.target if path.is_dir() else f"{found.directory}/{found.target}"
    return Plan((AppSpec(found, _prefix(route_prefix, "--route-prefix")),), source)


def _kind_of(folder: Path) -> FolderKind:
    """Raises: PlanError if a folder is of no kind."""
    kinds = load_plugins(_FOLDERS_GROUP, AppFolder, taken=(), refuses=_misfit).found.values()
    kind = next((kind for kind in kinds if (folder / kind.file).is_file()), None)
    if kind is None:
        files = " and ".join(kind.file for kind in kinds) or "an app"
        raise PlanError(f"{folder} is a folder without {files}. Name a module and its attribute: textbot:app.")
    return FolderKind(kind.text, kind.load, _package_of(kind), kind.wire_prefix)


def _misfit(kind: AppFolder, others: Mapping[str, AppFolder]) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", kind.load):
        return f"{kind.load!r} is not module:function"
    if not _package_of(kind):
        return f"there is no package {_top(kind)}"
    return next((f"{other} has the file {one.file}, too" for other, one in others.items() if one.file == kind.file), "")


def _top(kind: AppFolder) -> str:
    return re.split("[.:]", kind.load)[0]


def _package_of(kind: AppFolder) -> str:
    """Return the directory of the package that loads a folder, or ""."""
    spec = find_spec(_top(kind))
    directories = spec.submodule_search_locations if spec is not None else None
    return str(Path(next(iter(directories))).resolve()) if directories else ""


def _pair(argument: str) -> tuple[str, str]:
    key, equals, value = argument.partition("=")
    if not key or not equals:
        raise PlanError(f"{argument} is not of the form KEY=VALUE.")
    return key, value


def _module(target: str, directory: str) -> tuple[str, str]:
    """Return `module:attribute` and its directory, for a module's name or its file."""
    file, colon, attribute = target.rpartition(":")
    if not colon:
        file, attribute = target, "app"
    if file.endswith(".py"):
        path = Path(file)
        if not path.is_file():
            raise PlanError(f"There is no file {file}.")
        target, directory = f"{path.stem}:{attribute}", str(path.parent)
    elif is_known(target) and not Path(directory, f"{file}.py").exists():
        raise PlanError(
            f"{target} is a model: `tailrace chat {target}` talks to it, `tailrace serve {target}` serves it."
        )
    elif not colon and re.fullmatch(r"[\w.]+", target):
        raise PlanError(f"Name the attribute of {target} too: {target}:{_likely_app(Path(directory, f'{target}.py'))}.")
    if not _IMPORT.fullmatch(target):
        raise PlanError(f"{target} is not a module with an attribute (textbot:app), a folder or a YAML file.")
    if not Path(directory).is_dir():
        raise PlanError(f"There is no directory {directory}.")
    return target, str(Path(directory).resolve())


def _likely_app(file: Path) -> str:
    """Return the name that is probably the module's app: `app`, or the only function. Does not import the module."""
    try:
        body = ast.parse(file.read_text("utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return "app"
    assigned = {ast.unparse(one.targets[0]) for one in body if isinstance(one, ast.Assign)}
    functions = [one.name for one in body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return functions[0] if "app" not in assigned and len(functions) == 1 else "app"


def _prefix(given: object, where: str) -> str:
    if not isinstance(given, str) or not given.startswith("/") or "{" in given:
        raise PlanError(f"{where} should be a path that begins with / and has no {{}}, not {reprlib.repr(given)}.")
    return given.rstrip("/")


def _plan_of_file(path: Path, directory: str) -> Plan:
    """Read a file in Ray Serve's format. Raises: PlanError, which names the file and the field."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        why = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise PlanError(f"{path} is not YAML{where}{f': {why}' if why else ''}.") from None
    if not isinstance(content, dict):
        raise PlanError(f"{path} should be a mapping with `applications`.")
    if "import_path" in content:
        content = {"applications": [content]}
    notes = [
        f"{path}: {key} is ignored: it has no effect on one machine."
        for key in sorted(_IGNORED_TOP_KEYS & content.keys())
    ]
    _reject_unknown(content, _TOP_KEYS | _IGNORED_TOP_KEYS, str(path))
    listed = content.get("applications")
    if not isinstance(listed, list) or not listed:
        raise PlanError(f"{path}: `applications` should be a list with an app in it.")
    settings: dict[str, Any] = {}  # Any: of the setting's type
    for key, value in _mapping(content.get("http_options") or {}, f"{path}: http_options").items():
        if key not in _HTTP_OPTIONS:
            notes.append(f"{path}: http_options.{key} is ignored: tailrace does not use it.")
            continue
        try:
            settings |= checked_settings({_HTTP_OPTIONS[key]: value})
        except ValueError as error:
            raise PlanError(f"{path}: http_options.{key} {error}") from None
    apps = [_app(entry, f"{path}: applications[{n}]", directory, n, notes) for n, entry in enumerate(listed)]
    for what, seen in (
        ("name", [app.target.app_name for app in apps]),
        ("route_prefix", [app.route_prefix or "/" for app in apps]),
    ):
        for value in seen:
            if seen.count(value) > 1:
                raise PlanError(f"{path}: two apps have the {what} {value}.")
    return Plan(tuple(apps), str(path.resolve()), settings, tuple(notes))


def _app(entry: object, where: str, directory: str, number: int, notes: list[str]) -> AppSpec:
    given = _mapping(entry, where)
    _reject_unknown(given, _APP_KEYS | _IGNORED_APP_KEYS, where)
    notes += [
        f"{where}.{key} is ignored: it has no effect on one machine."
        for key in sorted(_IGNORED_APP_KEYS & given.keys())
    ]
    import_path = given.get("import_path")
    if not isinstance(import_path, str) or not _IMPORT.fullmatch(import_path):
        raise PlanError(f"{where}.import_path should be a module and its attribute: textbot:app.")
    environment, python = {}, ""
    for key, value in _mapping(given.get("runtime_env") or {}, f"{where}.runtime_env").items():
        if key == "env_vars":
            environment = {name: str(text) for name, text in _mapping(value, f"{where}.runtime_env.env_vars").items()}
        elif key == "py_executable" and isinstance(value, str):
            python = value
        elif key == "working_dir" and isinstance(value, str) and "://" not in value:
            if not Path(value).is_dir():
                raise PlanError(f"{where}.runtime_env.working_dir: there is no directory {value}.")
            directory = value
        else:
            notes.append(f"{where}.runtime_env.{key} is ignored; install what the app needs yourself.")
    deployments = given.get("deployments") or []
    if not isinstance(deployments, list):
        raise PlanError(f"{where}.deployments should be a list.")
    overrides = []
    for index, one in enumerate(deployments):
        override = _mapping(one, f"{where}.deployments[{index}]")
        if not isinstance(override.get("name"), str):
            raise PlanError(f"{where}.deployments[{index}].name should be the name of a deployment.")
        overrides.append(override)
    name = given.get("name", "default" if number == 0 else f"app{number + 1}")
    if not isinstance(name, str) or not name:
        raise PlanError(f"{where}.name should be text.")
    target = AppTarget(
        import_path,
        name,
        str(Path(directory).resolve()),
        _mapping(given.get("args") or {}, f"{where}.args"),
        tuple(overrides),
        environment,
        python=python,
    )
    return AppSpec(target, _prefix(given.get("route_prefix", "/"), f"{where}.route_prefix"), f"{where} ({name})")


def _mapping(value: object, where: str) -> dict[str, Any]:  # Any: any YAML
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise PlanError(f"{where} should be a mapping.")
    return value


def _reject_unknown(given: Mapping[str, object], known: set[str], where: str) -> None:
    for key in given.keys() - known:
        raise PlanError(f"{where} has no field {key}.{did_you_mean(key, known)}")
