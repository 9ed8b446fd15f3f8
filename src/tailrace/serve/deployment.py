"""What an app is made of: deployments, and how they are bound to one another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

from tailrace.serve.options import DeploymentOptions, read_options

__all__ = ["Application", "Deployment", "bound", "deployment", "nodes", "replaced"]

Body = type[Any] | Callable[..., Any]  # Any: a class or a function of the user's


class Deployment:
    """A class or a function that is to be served, and how. Made by `deployment`; `bind` makes an app of it."""

    def __init__(
        self, body: Body, options: DeploymentOptions, foreign: Mapping[str, Any] | None = None
    ) -> None:  # Any: of Ray's types
        self.func_or_class = body
        self.foreign = dict(foreign or {})  # options that mean something on Ray alone
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
        """A copy with these options in place of those it has. Raises: TypeError, ValueError as `deployment`."""
        read, foreign = read_options(options, self._options)
        return Deployment(func_or_class or self.func_or_class, read, self.foreign | foreign)

    def bind(self, *args: Any, **kwargs: Any) -> Application:  # Any: the constructor's
        """An app: this deployment, to be constructed with these. An app among them becomes a handle to it."""
        return Application(self, args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"Deployments are not constructed directly: {self.name}.bind(…) makes an app.")

    def __repr__(self) -> str:
        return f"Deployment(name={self.name!r})"


class Application:
    """A deployment with the arguments of its constructor. What the arguments hold of other apps comes with it."""

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
    """Make a deployment of a class or a function. The options are those of Ray Serve, as far as one machine has a
    meaning for them; the others are named in a warning.

    Raises: TypeError for what is neither a class nor a function, for an option that nobody knows or of another type;
    ValueError for one out of range.
    """

    def decorate(body: Body) -> Deployment:
        if isinstance(body, Deployment):
            raise TypeError(f"{body.name} is a deployment already.")
        if not (inspect.isclass(body) or inspect.isfunction(body)):
            raise TypeError("A deployment is made of a class or a function.")
        return Deployment(body, *read_options(options, DeploymentOptions(name=body.__name__)))

    return decorate if _body is None else decorate(_body)


def nodes(app: Application) -> dict[str, Application]:
    """All that an app consists of, by name; the one that the web reaches comes last. The order, and the names of those
    that would share one, are the same in every process."""
    found: dict[str, Application] = {}
    seen: set[int] = set()

    def visit(node: Application) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        for child in _inside([*node.args, *node.kwargs.values()]):
            visit(child)
        name, number = node.deployment.name, 0
        while name in found:
            number += 1
            name = f"{node.deployment.name}_{number}"
        found[name] = node

    visit(app)
    return found


def bound(app: Application, handle: Callable[[str], Any]) -> Callable[[Application], tuple[tuple[Any, ...], Any]]:
    """How a node's arguments are got with `handle(name)` in the place of every app among them."""
    names = {id(node): name for name, node in nodes(app).items()}

    def arguments(node: Application) -> tuple[tuple[Any, ...], Any]:  # Any: the user's
        return replaced((node.args, node.kwargs), lambda child: handle(names[id(child)]))  # type: ignore[no-any-return]

    return arguments


def replaced(value: Any, by: Callable[[Application], Any]) -> Any:  # Any: the user's
    """A copy of lists, tuples and dicts with every app in them replaced."""
    if isinstance(value, Application):
        return by(value)
    if type(value) in (list, tuple):
        return type(value)(replaced(item, by) for item in value)
    if type(value) is dict:
        return {key: replaced(item, by) for key, item in value.items()}
    return value


def _inside(value: Any) -> Iterator[Application]:  # Any: the user's
    if isinstance(value, Application):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _inside(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _inside(item)
