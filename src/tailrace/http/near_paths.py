"""Paths that are nearly right: what clients make of a base URL that is not quite the one they expect.

A base URL with or without `/v1`, or with a slash at its end, gives `/v1/v1/models`, `/chat/completions`,
`/v1//models` or `/v1/models/`. If exactly that was meant by no route, but a wire has the path without the mistake, the
request gets that path, before anything checks or logs it. Only wires get such requests. Elsewhere, as at `/v1/admin`, a
second path for the same thing could pass a proxy that forbids the first one; the error there names the path.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Iterator
from urllib.parse import quote

from starlette.routing import BaseRoute, Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.http.wires import ServedWires
from tailrace.wording import closest

__all__ = ["NearPaths", "nearest_path"]

_VERSION = "/v1"
_MAX_CHARACTERS = 200  # of a path for which another one is suggested; comparing takes time
_SAFE = "/:@!$&'()*+,;=-._~"


class NearPaths:
    """ASGI middleware around the whole application, which has these routes.

    It returns the application's coroutine, and has none of its own, which would stay while a stream is read.
    """

    def __init__(self, app: ASGIApp, wires: ServedWires, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        found = [route for route in routes if isinstance(route, Route)]
        self._literals = {route.path for route in found if "{" not in route.path}
        self._patterns = [route.path_regex for route in found if "{" in route.path]
        of_wires = {operation.path for wire in wires.all for operation in wire.operations}
        self._wire_literals = {path for path in of_wires if "{" not in path}
        self._wire_patterns = [compile_path(path)[0] for path in of_wires if "{" in path]
        self._sockets = {path for wire in wires.all for path in (*wire.sockets, *wire.lanes)}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["path"] not in self._literals:
            scope = _with_path(scope, self._meant(scope["path"]))
        elif scope["type"] == "websocket" and scope["path"] not in self._sockets:
            meant = (path for path in _candidates(scope["path"]) if path in self._sockets)
            scope = _with_path(scope, next(meant, scope["path"]))
        return self._app(scope, receive, send)

    def _meant(self, path: str) -> str:
        """Return the path of the wire that a request means, or its own path."""
        candidates = list(_candidates(path))
        for candidate in candidates:
            if candidate in self._wire_literals:
                return candidate
        if any(pattern.match(path) for pattern in self._patterns):
            return path
        for candidate in candidates:
            if any(pattern.match(candidate) for pattern in self._wire_patterns):
                return candidate
        return path


def _with_path(scope: Scope, path: str) -> Scope:
    return scope if path == scope["path"] else {**scope, "path": path, "raw_path": quote(path, safe=_SAFE).encode()}


def nearest_path(path: str, routes: Iterable[BaseRoute]) -> str:
    """Return the path of the route that is most similar to a path without a route; "" if none is similar."""
    if len(path) > _MAX_CHARACTERS:
        return ""
    known = {route.path: route.path_regex for route in routes if isinstance(route, Route)}
    for candidate in _candidates(path):
        if candidate in known:
            return candidate
        for pattern, regex in known.items():
            if "{" in pattern and ":path}" not in pattern and regex.match(candidate):
                return pattern
    below = path.rstrip("/") + "/"
    return "" if any(pattern.startswith(below) for pattern in known) else closest(path, [*known])


def _candidates(path: str) -> Iterator[str]:
    """Yield the paths that may be meant, the most likely one first."""
    plain = re.sub("//+", "/", path).removesuffix("/")
    if not plain:
        return  # the page has addresses relative to its own
    if plain != path:
        yield plain
    yield plain.removeprefix(_VERSION) if plain.startswith(f"{_VERSION}/") else _VERSION + plain
