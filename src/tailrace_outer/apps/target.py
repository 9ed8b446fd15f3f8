"""Imports the app that a user has named, in the process that will run it."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import msgspec

from tailrace_outer.serve.boot import AppTarget, Described, FolderKind, Part
from tailrace_outer.serve.deployment import Application, Deployment, nodes
from tailrace_outer.serve.failures import TargetError
from tailrace_outer.serve.folders import FolderApp
from tailrace_outer.serve.ingress import ingress, is_asgi
from tailrace_outer.serve.options import REMARKS, DeploymentOptions, read_options

__all__ = ["describe", "load", "options_of"]


def load(target: AppTarget) -> tuple[Application, tuple[str, ...]]:
    """Import the app. Returns it, and notes for the user.

    Raises: TargetError, or what the user's code raises.
    """
    directory = str(Path(target.directory).resolve())
    os.chdir(directory)
    sys.path.insert(0, directory)
    os.environ.update(target.environment)
    if target.target.endswith(".pickle"):
        return pickle.loads(Path(target.target).read_bytes()), ()  # noqa: S301  # written by `serve.run`
    if target.kind is not None:
        app, notes = _of_folder(target, target.kind)
        return app, tuple(notes)
    module_name, _, attribute = target.target.partition(":")
    module = importlib.import_module(module_name)
    found: Any = module  # Any: whatever the user put there
    for name in attribute.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise TargetError(f"{module_name} has nothing named {attribute}.{_suggestion(module)}")
    return _app_of(found, target), ()


def describe(app: Application, target: AppTarget, notes: tuple[str, ...]) -> Described:
    """Describe the app for the front. Raises: TargetError for an invalid option."""
    parts = {name: Part(options) for name, (options, _) in options_of(app, target).items()}
    return Described(parts, (*notes, *dict.fromkeys(REMARKS)))


def options_of(app: Application, target: AppTarget) -> dict[str, tuple[DeploymentOptions, dict[str, Any]]]:
    """Return the options of each deployment with overrides applied, and the options that only Ray uses.

    Raises: TargetError.
    """
    found = nodes(app)
    for name, node in found.items():
        _check_arguments(name, node)
    overrides = {str(given.get("name")): given for given in target.overrides}
    for name in overrides.keys() - found.keys():
        raise TargetError(f"The app has no deployment {name}; it has {', '.join(found)}.")
    read = {}
    for name, node in found.items():
        given = {key: value for key, value in overrides.get(name, {}).items() if key != "name"}
        try:
            options, foreign = read_options(given, msgspec.structs.replace(node.deployment.settings, name=name))
        except (TypeError, ValueError) as error:
            raise TargetError(f"{name}: {error}") from None
        if options.user_config is not None and not hasattr(node.deployment.func_or_class, "reconfigure"):
            raise TargetError(f"{name} has a user_config but no method reconfigure to take it.")
        read[name] = (options, node.deployment.foreign | foreign)
    return read


def _app_of(found: Any, target: AppTarget) -> Application:  # Any: whatever the user put there
    if isinstance(found, Application):
        _expect_no_arguments(f"{target.target} is bound already", target)
        return found
    if isinstance(found, Deployment):
        _expect_no_arguments(f"{target.target} is a deployment", target)
        return found.bind()
    if is_asgi(found):
        _expect_no_arguments(f"{target.target} is an ASGI app", target)
        wrapper = ingress(found)()
        return Deployment(wrapper, DeploymentOptions(name=getattr(found, "title", None) or "app")).bind()
    if inspect.isfunction(found):
        built = _build(found, target.arguments)
        return _app_of(built, msgspec.structs.replace(target, arguments={}))
    raise TargetError(
        f"{target.target} is not an app, but of type {type(found).__name__}. It should be the result of .bind(…), an "
        "ASGI app such as FastAPI(), or a function that returns one of these."
    )


def _expect_no_arguments(what: str, target: AppTarget) -> None:
    """Reject arguments that nothing would read. Raises: TargetError."""
    if target.arguments:
        names = ", ".join(target.arguments)
        raise TargetError(f"{what}, so nothing takes {names}. Arguments go to a function that builds an app.")


def _check_arguments(name: str, node: Application) -> None:
    """Raises: TargetError if the constructor does not accept the bound arguments."""
    body = node.deployment.func_or_class
    if not inspect.isclass(body) or body.__new__ is not object.__new__:
        return
    try:
        signature = inspect.signature(body)
    except ValueError:  # a class written in C has no signature
        return
    try:
        signature.bind(*node.args, **node.kwargs)
    except TypeError as error:
        wanted = ", ".join(str(parameter) for parameter in signature.parameters.values())
        raise TargetError(f"{name}: {error}. Its constructor takes ({wanted}): pass these to .bind(…).") from None


def _build(builder: Callable[..., Any], arguments: dict[str, Any]) -> Any:  # Any: the user's
    """Call a builder and return its result. A builder takes no argument, or the KEY=VALUE arguments as a dict or as the
    model of its annotation."""
    parameters = list(inspect.signature(builder, eval_str=True).parameters.values())
    if len(parameters) > 1 and any(parameter.default is parameter.empty for parameter in parameters[1:]):
        raise TargetError(f"{builder.__name__} should take one argument: the dict of the KEY=VALUE arguments.")
    if not parameters:
        if arguments:
            raise TargetError(f"{builder.__name__} takes no arguments.")
        return builder()
    model = parameters[0].annotation
    validate = getattr(model, "model_validate", None)
    return builder(validate(arguments) if validate is not None else arguments)


def _of_folder(target: AppTarget, kind: FolderKind) -> FolderApp:
    """Raises: TargetError, or what the user's code raises."""
    _expect_no_arguments(f"{Path(target.target).name} is {kind.text}", target)
    module, _, function = kind.load.partition(":")
    top = module.partition(".")[0]
    if target.python and top not in sys.modules:
        # Of this copy of the package, whether or not the app's environment has one of its own: as for tailrace.
        spec = spec_from_file_location(top, f"{kind.package}/__init__.py", submodule_search_locations=[kind.package])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[top] = package = module_from_spec(spec)
        spec.loader.exec_module(package)
    load_folder: Callable[..., FolderApp] = getattr(importlib.import_module(module), function)
    return load_folder(Path(target.target).resolve(), concurrency=target.concurrency, queue_s=target.queue_s)


def _suggestion(module: Any) -> str:
    """Suggest an app of the module for the error message."""
    held = list(vars(module).items())
    apps = [name for name, value in held if isinstance(value, Application)]
    apps += [name for name, value in held if isinstance(value, Deployment)]
    apps += [name for name, value in held if is_asgi(value) and hasattr(value, "router")]
    apps += [name for name, value in held if inspect.isfunction(value) and value.__module__ == module.__name__]
    return f" Did you mean {module.__name__}:{apps[0]}?" if apps else ""
