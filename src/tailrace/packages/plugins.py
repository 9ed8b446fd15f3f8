"""Plugins: objects that installed packages add to tailrace with entry points. The package tailrace has some, too.

A plugin that cannot be loaded or does not fit is left out, with a line in the log. The others still work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Generic, TypeVar

from tailrace.wording import in_one_line

__all__ = ["Plugins", "load_plugins", "plugin_names"]

logger = logging.getLogger("tailrace.plugins")

T = TypeVar("T")
_installed = cache(lambda: entry_points())  # of all groups, since looking for them reads a file of each package
_OURS = "tailrace"  # the package whose plugins no other package replaces


@dataclass(frozen=True, slots=True)
class Plugins(Generic[T]):
    """The loaded plugins, and the reasons for those that were left out; both by name. `ours` are the names of those
    that the package tailrace has."""

    found: Mapping[str, T]
    left_out: Mapping[str, str]
    ours: tuple[str, ...] = ()


def load_plugins(
    group: str,
    shape: type[T],
    *,
    taken: Container[str],
    refuses: Callable[[T, Mapping[str, T]], str],
    only: str | None = None,
) -> Plugins[T]:
    """Load the entry points of a group, or only those of one name: first those of the package tailrace, and then the
    others, sorted by name. Each must be an instance of `shape` whose attribute `name` is the name of the entry point.

    `taken` are names that no plugin may have. `refuses` gets a plugin and the plugins that were loaded before it; it
    returns why the plugin is left out, or "". Exceptions of plugins are not raised, except KeyboardInterrupt.
    """
    found: dict[str, T] = {}
    left_out: dict[str, str] = {}
    owners: dict[str, str] = {}  # the package of each plugin
    for point in sorted(_installed().select(group=group), key=_order):
        if only is not None and point.name != only:
            continue
        try:
            if point.name in taken or owners.get(point.name) == _OURS:
                raise _LeftOut("tailrace has one with this name")
            if point.name in found:
                raise _LeftOut("another package has one with this name")
            loaded = _load(point, shape)
            _check(loaded, point, refuses, found)
            found[point.name], owners[point.name] = loaded, _package(point)
        except _LeftOut as why:
            left_out.setdefault(point.name, str(why))
            logger.warning("%s: %s of the package %s is left out: %s.", group, point.name, _package(point), why)
    return Plugins(found, left_out, tuple(name for name, owner in owners.items() if owner == _OURS))


def plugin_names(group: str) -> set[str]:
    """Return the names of the entry points of a group. Whether they can be loaded is not known."""
    return set(_installed().select(group=group).names)


class _LeftOut(Exception):
    """Why a plugin is left out. The message has no full stop."""


def _load(point: EntryPoint, shape: type[T]) -> T:
    """Load the object of an entry point. Raises: _LeftOut."""
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:  # plugins may raise anything
        logger.debug("%s could not be loaded", point.value, exc_info=error)
        raise _LeftOut(f"{point.value} could not be loaded ({in_one_line(error)})") from None
    if not isinstance(loaded, shape):
        article = "an" if shape.__name__[0] in "AEIOU" else "a"
        raise _LeftOut(f"{point.value} is not {article} {shape.__name__}")
    if getattr(loaded, "name", None) != point.name:
        raise _LeftOut(f"{point.value} has another name than its entry point")
    return loaded


def _check(loaded: T, point: EntryPoint, refuses: Callable[[T, Mapping[str, T]], str], others: Mapping[str, T]) -> None:
    """Raises: _LeftOut."""
    try:
        reason = refuses(loaded, others)
    except Exception as error:  # attributes of the plugin may have any type
        logger.debug("%s could not be checked", point.value, exc_info=error)
        reason = f"{point.value} does not fit ({in_one_line(error)})"
    if reason:
        raise _LeftOut(reason)


def _order(point: EntryPoint) -> tuple[bool, str, str]:
    return _package(point) != _OURS, point.name, _package(point)


def _package(point: EntryPoint) -> str:
    return _name(point.dist) if point.dist is not None else "?"


@cache
def _name(package: Distribution) -> str:
    return package.name  # which parses all the metadata of the package, its README included
