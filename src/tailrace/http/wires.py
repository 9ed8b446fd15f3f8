"""The served wires, built in and of plugins, and which of them a request belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Scope

from tailrace.dialects import WIRES, WIRES_GROUP, Wire
from tailrace.dialects.wire import NO_PREFIX, Operation
from tailrace.errors import RequestError
from tailrace.packages.plugins import load_plugins

__all__ = ["ServedWires", "is_meant", "overlap"]

_Candidates = list[tuple[Wire, Operation | None]]  # wires that share a path; None: all operations of the wire

_PARAMETER = re.compile(r"\{[a-z_]+(:path)?\}")
_LITERAL = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*")


class ServedWires:
    """All wires of a server: first the built-in ones, then those of plugins, which are loaded when they are needed.

    A plugin's wire is left out, with a line in the log, if it conflicts with another wire or with one of `routes`,
    which the server has beside its wires, or if it cannot be described in the OpenAPI document. The routes of
    extensions may be below the prefix of a wire: their errors have its form.
    """

    def __init__(self, routes: Iterable[BaseRoute] = (), of_extensions: Iterable[BaseRoute] = ()) -> None:
        routes, of_extensions = tuple(routes), tuple(of_extensions)
        self._own_paths = [one.path for one in routes if isinstance(one, Route)]
        routes = (*routes, *of_extensions)
        self._routes = [one for one in routes if isinstance(one, Route)]
        self._sockets = {one.path for one in routes if isinstance(one, WebSocketRoute)}

    @cached_property
    def all(self) -> tuple[Wire, ...]:
        taken = {wire.name for wire in WIRES}
        return (*WIRES, *load_plugins(WIRES_GROUP, Wire, taken=taken, refuses=self._conflict_of).found.values())

    def of(self, scope: Scope) -> Wire:
        """Return the wire whose error format a request gets. The request need not have a route."""
        query, headers = QueryParams(scope["query_string"]), Headers(scope=scope)
        by_path, by_prefix = self._by_path
        with_prefix = [candidates for prefix, candidates in by_prefix if scope["path"].startswith(prefix)]
        for candidates in (by_path.get(scope["path"], []), *with_prefix):
            for wire, operation in candidates:
                if operation is None or is_meant(operation, query, headers):
                    return wire
        return WIRES[0]

    @cached_property
    def _by_path(self) -> tuple[dict[str, _Candidates], list[tuple[str, _Candidates]]]:
        """The wires by path, and by prefixes of paths, the longest prefix first."""
        by_path: dict[str, _Candidates] = {}
        by_prefix: dict[str, _Candidates] = {wire.prefix: [(wire, None)] for wire in self.all}
        for wire in self.all:
            for operation in wire.operations:
                head, brace, _ = operation.path.partition("{")
                (by_prefix if brace else by_path).setdefault(head, []).append((wire, operation))
        for candidates in (*by_path.values(), *by_prefix.values()):
            candidates.sort(key=lambda entry: entry[1] is None or not entry[1].is_conditional)
        return by_path, sorted(by_prefix.items(), key=lambda entry: -len(entry[0]))

    def _conflict_of(self, wire: Wire, others: Mapping[str, Wire]) -> str:
        """Return why a plugin's wire cannot be served, or "". Raises: what the wire raises."""
        served = (*WIRES, *others.values())
        routes = [route.path for route in self._routes]
        paths = [one.path for each in served for one in each.operations]
        taken = (*routes, *paths)
        for operation in wire.operations:
            path = operation.path
            if not path.startswith("/") or not _LITERAL.fullmatch(_PARAMETER.sub("", path)):
                return f"{path!r} is not a path"
            shared = {path} if self._is_told_apart(operation, served) else set()
            near = [other for other in taken if other == path or "{" in other or "{" in path]
            if other := next((other for other in near if other not in shared and overlap(path, other)), None):
                return f"its path {path} conflicts with {other}"
        sockets = self._sockets.union(*((*other.sockets, *other.lanes) for other in served))
        for path in (*wire.sockets, *wire.lanes):
            if not path.startswith("/") or not _LITERAL.fullmatch(path):
                return f"{path!r} is not a path"
            if path in sockets:
                return f"there is another WebSocket at {path}"
        # Errors on a path without names have the format of its own wire, whatever prefix it has.
        others_begin = (*self._own_paths, *(path for path in paths if "{" in path), *(other.prefix for other in served))
        if wire.prefix != NO_PREFIX and any(path.startswith(wire.prefix) for path in others_begin):
            return f"its prefix {wire.prefix!r} is also the prefix of other paths"
        return _misfit(wire)

    def _is_told_apart(self, operation: Operation, served: Iterable[Wire]) -> bool:
        """Return whether a condition tells the requests of an operation apart from all others with exactly its path."""
        path, method = operation.path, operation.method
        if any(route.path == path and method in (route.methods or ()) for route in self._routes):
            return False
        others = [one for wire in served for one in wire.operations if (one.path, one.method) == (path, method)]
        has_condition = operation.is_conditional or bool(others)  # without one, it gets what the others do not
        return has_condition and _condition(operation) not in map(_condition, others)


_misfits: dict[int, tuple[Wire, str]] = {}  # by the id of the wire, which this keeps


def _misfit(wire: Wire) -> str:
    """Return why a wire cannot be described or cannot answer with an error, or "". Raises: what the wire raises.

    Of what is found out at the start of a server, this takes longest. All applications of a process share it.
    """
    if id(wire) not in _misfits:
        msgspec.json.schema_components([one.body for one in wire.operations if one.body is not None])
        status, body = wire.encode_error(RequestError("…"))
        is_sound = 400 <= status < 600 and isinstance(msgspec.json.decode(body), dict)
        wrong = "" if is_sound else "encode_error does not return the status of an error and a JSON object"
        _misfits[id(wire)] = wire, wrong
    return _misfits[id(wire)][1]


def _condition(operation: Operation) -> tuple[str | None, str | None]:
    return operation.only_with, operation.only_with_header


def is_meant(operation: Operation, query: Mapping[str, str], headers: Mapping[str, str]) -> bool:
    """Return whether a request belongs to an operation, if several wires share its path. Names of headers are in lower
    case."""
    name, equals, value = (operation.only_with or "").partition("=")
    if name and not (query.get(name) == value if equals else name in query):
        return False
    return operation.only_with_header is None or operation.only_with_header in headers


@cache
def overlap(one: str, other: str) -> bool:
    """Return whether a request could match both paths."""
    for left, right in zip(one.split("/"), other.split("/"), strict=False):
        if ":path}" in left or ":path}" in right:
            return True
        if "{" not in left and "{" not in right and left != right:
            return False
    return one.count("/") == other.count("/")
