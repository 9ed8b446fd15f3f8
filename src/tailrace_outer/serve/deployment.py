"""The parts of an app: deployments, and how they are bound to each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

from tailrace_outer.serve.options import DeploymentOptions, read_options

__all__ = ["Application", "Deployment", "bound", "deployment", "nodes", "replaced"]

Body = type[Any] | Callable[..., Any]  # Any: a class or a function of the user's


class Deployment:
    """A class or a function to serve, with its options. Made by `deployment`; `bind` makes an app of it."""

    def __init__(
        self, body: Body, options: DeploymentOptions, foreign: Mapping[str, Any] | None = None
    ) -> None:  # Any: of Ray's types
        self.func_or_class = body
        self.foreign = dict(foreign or {})  # options that only Ray uses
        self._options = options
        self.__doc__ = body.__doc__

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def settings(self) -> DeploymentOptions:
        return self._options

    @property
    def num_replicas(self) -> int:
        return self._options.num_replicas

    @property
    def max_ongoing_requests(self) -> int:
        return self._options.max_ongoing_requests

    @property
    def max_queued_requests(self) -> int:
        return self._options.max_queued_requests

    @property
    def user_config(self) -> Any:  # Any: as given
        return self._options.user_config

    def options(
        self, func_or_class: Body | None = None, **options: Any
    ) -> Deployment:  # Any: checked by `read_options`
        """Return a copy with these options changed. Raises: TypeError, ValueError as `deployment`."""
        read, foreign = read_options(options, self._options)
        return Deployment(func_or_class or self.func_or_class, read, self.foreign | foreign)

    def bind(self, *args: Any, **kwargs: Any) -> Application:  # Any: the constructor's
        """Make an app: this deployment, constructed with these arguments. Apps among them are replaced with handles."""
        return Application(self, args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"Deployments are not constructed directly: {self.name}.bind(…) makes an app.")

    def __repr__(self) -> str:
        return f"Deployment(name={self.name!r})"


class Application:
    """A deployment with the arguments of its constructor, including the other apps among these arguments."""

    def __init__(
        self, deployment: Deployment, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:  # Any: the user's
        self.deployment = deployment
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"Application({self.deployment.name!r})"


@overload
def deployment(_body: Body) -> Deployment: ...
@overload
def deployment(_body: None = None, **options: Any) -> Callable[[Body], Deployment]: ...
def deployment(
    _body: Body | None = None, **options: Any
) -> Deployment | Callable[[Body], Deployment]:  # Any: checked by `read_options`
    """Make a deployment of a class or a function. The options are those of Ray Serve. Options that have no effect on
    one machine are named in a warning.

    Raises: TypeError if `_body` is not a class or a function, or for an unknown option or one of the wrong type;
    ValueError for an option out of range.
    """

    def decorate(body: Body) -> Deployment:
        if isinstance(body, Deployment):
            raise TypeError(f"{body.name} is a deployment already.")
        if not (inspect.isclass(body) or inspect.isfunction(body)):
            raise TypeError("serve.deployment decorates a class or a function.")
        return Deployment(body, *read_options(options, DeploymentOptions(name=body.__name__)))

    return decorate if _body is None else decorate(_body)


def nodes(app: Application) -> dict[str, Application]:
    """Return all deployments of an app by name; the ingress comes last. Equal names get numbers. Order and names are
    the same in every process."""
    found: dict[str, Application] = {}
    seen: set[int] = set()

    def visit(node: Application) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        for child in _apps_in([*node.args, *node.kwargs.values()]):
            visit(child)
        name, number = node.deployment.name, 0
        while name in found:
            number += 1
            name = f"{node.deployment.name}_{number}"
        found[name] = node

    visit(app)
    return found


def bound(app: Application, handle: Callable[[str], Any]) -> Callable[[Application], tuple[tuple[Any, ...], Any]]:
    """Return a function that gives a node's arguments, with each app among them replaced by `handle(name)`."""
    names = {id(node): name for name, node in nodes(app).items()}

    def arguments(node: Application) -> tuple[tuple[Any, ...], Any]:  # Any: the user's
        return replaced((node.args, node.kwargs), lambda child: handle(names[id(child)]))  # type: ignore[no-any-return]

    return arguments


def replaced(value: Any, by: Callable[[Application], Any]) -> Any:  # Any: the user's
    """Return a copy of nested lists, tuples and dicts in which every app is replaced."""
    if isinstance(value, Application):
        return by(value)
    if type(value) in (list, tuple):
        return type(value)(replaced(item, by) for item in value)
    if type(value) is dict:
        return {key: replaced(item, by) for key, item in value.items()}
    return value


def _apps_in(value: Any) -> Iterator[Application]:  # Any: the user's
    if isinstance(value, Application):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _apps_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _apps_in(item)
