"""Reads `inferless.yaml` and `inferless-runtime-config.yaml`. Most of their settings apply only at the vendor."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from tailrace.serve.folders import pip_install, set_requirements
from tailrace_plugins.inferless.inferless_errors import AppError

__all__ = ["read_configuration"]

_DEPLOYMENT = "inferless.yaml"
_RUNTIME = "inferless-runtime-config.yaml"
_CONFLICTS = {
    "python_packages": " (where that conflicts with tailrace: into an environment of their own, given as --python)",
    "system_packages": "",
}
# Used elsewhere, or only about where the code comes from: not worth a note.
_SILENT = (
    *("version", "name", "import_source", "source_framework_type", "model_url", "provider", "branch", "autobuild"),
    *("io_schema", "hf_model_name", "model_type", "task_type", "configuration", "optional", "env", "secrets"),
)


def read_configuration(folder: Path) -> tuple[str | None, dict[str, str], list[str]]:
    """Return the app's name, its environment variables, and a note for each setting that has no effect here.

    Raises: AppError if a file is not valid.
    """
    deployment, runtime = _read(folder / _DEPLOYMENT), _read(folder / _RUNTIME)
    name = deployment.get("name")
    if name is not None and (not isinstance(name, str | int) or not str(name) or "/" in str(name)):
        raise AppError(f"{_DEPLOYMENT}: name must be a word.")
    environment = {
        str(key): str(value) for key, value in _mapping(deployment, "env", _DEPLOYMENT).items() if value is not None
    }
    notes = [*_notes_on_deployment(deployment), *_notes_on_runtime(runtime)]
    return (None if name is None else str(name)), environment, notes


def _notes_on_deployment(deployment: Mapping[str, object]) -> list[str]:
    notes = []
    unused = _given(_mapping(deployment, "configuration", _DEPLOYMENT))
    unused += _given({key: value for key, value in deployment.items() if key not in _SILENT})
    if unused:
        notes.append(
            f"{_DEPLOYMENT}: {', '.join(unused)} ha{'s' if len(unused) == 1 else 've'} no effect: "
            "the app runs on this machine as it is."
        )
    files = _given(_mapping(deployment, "optional", _DEPLOYMENT))
    if files:
        notes.append(f"{_DEPLOYMENT}: {', '.join(files)} ha{'s' if len(files) == 1 else 've'} no effect.")
    secrets = deployment.get("secrets")
    if secrets:
        names = secrets if isinstance(secrets, list | dict) else [secrets]
        notes.append(
            f"{_DEPLOYMENT}: secrets are not fetched: set those that the app needs in the environment "
            f"({', '.join(str(one) for one in names)})."
        )
    return notes


def _notes_on_runtime(runtime: Mapping[str, object]) -> list[str]:
    build = _mapping(runtime, "build", _RUNTIME)
    notes = []
    for key in ("python_packages", "system_packages"):
        packages = _words(build, key)
        if key == "python_packages":
            set_requirements(packages)
        if packages:
            apt = shlex.join(["apt-get", "install", *packages])
            command = pip_install(*packages) if key == "python_packages" else apt
            notes.append(f"{_RUNTIME}: {key} are left to you: {command}{_CONFLICTS[key]}")
    for key in ("run", "run_commands"):
        lines = _words(build, key)
        if lines:
            notes.append(f"{_RUNTIME}: {key} is left to you: {' && '.join(lines)}")
    known = ("python_packages", "system_packages", "run", "run_commands")
    unused = _given({key: value for key, value in build.items() if key not in known})
    unused += _given({key: value for key, value in runtime.items() if key != "build"})
    if unused:
        notes.append(
            f"{_RUNTIME}: {', '.join(unused)} ha{'s' if len(unused) == 1 else 've'} no effect: "
            "no image is built; the app uses the packages of this machine."
        )
    return notes


def _read(file: Path) -> Mapping[str, object]:
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise AppError(f"{file.name}: not valid YAML{where}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise AppError(f"{file.name}: the file must be a mapping of settings.")
    return content


def _mapping(settings: Mapping[str, object], key: str, file: str) -> Mapping[str, object]:
    value = settings.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AppError(f"{file}: {key} must be a mapping of settings.")
    return value


def _words(build: Mapping[str, object], key: str) -> list[str]:
    value = build.get(key)
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise AppError(f"{_RUNTIME}: build.{key} must be a list.")
    return [str(one) for one in value]


def _given(settings: Mapping[str, object]) -> list[str]:
    """Return the names of the settings that have a value."""
    return [str(key) for key, value in settings.items() if value not in (None, "", [], {})]
