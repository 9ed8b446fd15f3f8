"""The outermost middleware: checks each request first, and turns unhandled errors into responses last.

It checks Host, Origin and key. An error response has the form of the path's dialect.

Every page in the user's browser can reach a server on loopback, by its address, or by a domain name that an attacker
points at it (DNS rebinding). So the Host must be a name of this server, and an Origin, which browsers send, must be
this server or allowed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.access.audit import AUDIT, AuditLog, note_refusal
from tailrace.access.authentication import Authentication
from tailrace.access.keyring import Keyring
from tailrace.access.principal import AUTHENTICATE, PRINCIPAL, Principal, principal_of
from tailrace.access.quotas import LIMIT_HEADERS, Quotas
from tailrace.access.requests_in_progress import RequestsInProgress
from tailrace.access.sessions import Sessions, is_own_origin
from tailrace.dialects import Wire, native
from tailrace.errors import Forbidden, MethodNotAllowed, NotFound, TailraceError, Unauthenticated
from tailrace.http.asgi_answers import error_answer
from tailrace.http.near_paths import nearest_path
from tailrace.http.wires import ServedWires
from tailrace.settings import Settings
from tailrace.transport.addresses import listens_on_loopback

__all__ = ["CrossOrigin", "Edge"]

logger = logging.getLogger("tailrace.server")

_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^][/@?#:\\\s]+)(?::[0-9]{0,5})?")
_START_MESSAGES = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}", re.ASCII)


class Edge:
    """ASGI middleware around the whole application.

    If there are keys, every request needs one. `public` are the exceptions: paths that need no key for GET and
    HEAD; a path that ends with `/` includes all paths below it. `headers`, with names in lower case, are defaults for
    each HTTP response. `on_refused` is called for each request that may not pass.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        authentication: Authentication | None = None,
        quotas: Quotas | None = None,
        *,
        audit: AuditLog | None = None,
        wires: ServedWires | None = None,
        public: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        on_refused: Callable[[TailraceError], None] = lambda error: None,
    ) -> None:
        self._app = app
        self._headers = Headers(headers).raw
        self._on_refused = on_refused
        self._authentication = authentication or Authentication(Keyring(), Sessions())
        self._quotas = quotas or Quotas()
        self._audit = audit or AuditLog()
        self._wires = wires or ServedWires()
        self._public = frozenset(path for path in public if not path.endswith("/") or path == "/")
        self._public_below = tuple(path for path in public if path.endswith("/") and path != "/")
        self._requests = RequestsInProgress()
        self._authentication.keyring.on_revoked(self._requests.cancel_soon)
        self.use(settings)
        self._is_loopback = listens_on_loopback(settings.host)

    def use(self, settings: Settings) -> None:
        """Use other settings from now on."""
        self._allows_any_host, self._hosts = _names(settings.allowed_hosts)
        self._allows_any_origin, self._origins = _names(settings.allowed_origins)
        self._hosts |= {"localhost", settings.host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_urlsafe(12)
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] in _START_MESSAGES:
                has_begun = True
                message["headers"].extend(self._quotas.headers(principal_of(scope)))
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
                if message["type"] != "websocket.accept":
                    present = {name for name, _ in message["headers"]}
                    message["headers"] += [header for header in self._headers if header[0] not in present]
            await send(message)

        scope["app"] = self  # makes the router raise its errors instead of answering them
        scope["tailrace_request_id"] = request_id
        scope[AUDIT] = self._audit
        try:
            principal = scope[PRINCIPAL] = self._admit(scope, headers)
            with self._requests.register(principal.key_id):
                await self._app(scope, receive, send_with_id)
        except ConnectionError:
            return  # the client has disconnected
        except asyncio.CancelledError:
            if not self._requests.was_cancelled():
                raise
            if scope["type"] == "websocket" and has_begun:
                await send({"type": "websocket.close", "code": 1008, "reason": "The key was revoked."})
            elif not has_begun:
                await self._refuse(Unauthenticated("The key was revoked."), scope, receive, send_with_id)
        except Exception as error:
            if has_begun:
                logger.exception("request %s failed after its headers", request_id)
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1011, "reason": "The server failed."})
                return  # without its last chunk, the client sees that the answer is incomplete
            await self._refuse(error, scope, receive, send_with_id)

    def _admit(self, scope: Scope, headers: Headers) -> Principal:
        """Raises: Unauthenticated, Forbidden."""
        try:
            self._check(headers)
            return self._principal(scope, headers)
        except TailraceError as error:
            self._on_refused(error)
            raise

    def _principal(self, scope: Scope, headers: Headers) -> Principal:
        """Authenticate the request. Raises: Unauthenticated, Forbidden."""
        if PRINCIPAL in scope:  # an outer application has authenticated it
            return principal_of(scope)
        path = scope["path"]  # never a URL that is built from headers
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and self._is_public(path):
            return Principal()
        principal = self._authentication.authenticate(scope, headers)
        if scope["type"] == "websocket":  # it may stay open for long
            scope[AUTHENTICATE] = partial(self._authentication.authenticate_again, scope, headers, principal)
        if principal.stream_id is not None and scope["type"] == "http":
            ids = [part.removeprefix("resp_") for part in path.split("/")]
            principal.require_stream(principal.stream_id if principal.stream_id in ids else "")
        return principal

    def _is_public(self, path: str) -> bool:
        return path in self._public or path.startswith(self._public_below)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        note_refusal(error, scope)
        request_id = scope["tailrace_request_id"]
        routes = self._app.routes if isinstance(self._app, Router) else []
        if isinstance(error, HTTPException):
            error = _not_routed(error, routes, scope)
        if scope["type"] == "websocket":
            # Before the upgrade an error is an HTTP response, if the ASGI server supports that.
            if "websocket.http.response" not in scope.get("extensions", {}):
                await send({"type": "websocket.close", "code": 1008})
                return
            answer = self._refusal(error, native.WIRE, request_id)
        else:
            answer = self._refusal(error, self._wires.of(scope), request_id)
            if isinstance(error, MethodNotAllowed):
                answer.headers.update(_allowed_methods(routes, scope))
        if isinstance(error, Unauthenticated):
            answer.headers["www-authenticate"] = "Bearer"
        await answer(scope, receive, send)

    def _refusal(self, error: Exception, wire: Wire, request_id: str) -> Response:
        if isinstance(error, TailraceError):
            return error_answer(wire, error)
        logger.error("request %s failed", request_id, exc_info=error)
        return error_answer(wire, TailraceError("Internal server error. See the server's log."))

    def _check(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own_host(hosts[0]):
            raise Forbidden(
                "The Host header is not a name of this server. Add the name with --allowed-hosts.", param="host"
            )
        origin = headers.get("origin")
        if origin is None or self._allows_any_origin or origin.lower() in self._origins:
            return
        if not is_own_origin(origin, hosts[0]):
            raise Forbidden(
                "Pages of this Origin may not call this server. Allow the origin with --allowed-origins.",
                param="origin",
            )

    def _is_own_host(self, host: str) -> bool:
        """Return whether a Host is this server. Names must be known, against DNS rebinding; addresses cannot be
        rebound."""
        if not _HOST.fullmatch(host):
            return False
        if self._allows_any_host:
            return True
        try:
            name = (urlsplit("//" + host).hostname or "").lower()
        except ValueError:
            return False
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_loopback


class CrossOrigin:
    """ASGI middleware around the edge. Adds CORS for the allowed origins: answers preflight requests, and lets pages
    read responses, including errors, with the tailrace headers and further `exposed_headers`."""

    def __init__(self, app: ASGIApp, settings: Settings, exposed_headers: Iterable[str] = ()) -> None:
        self._app = app
        self._exposed_headers = (
            "location",
            "retry-after",
            "x-request-id",
            "x-stream-id",
            "x-tailrace-ignored",
            *LIMIT_HEADERS,
            *exposed_headers,
        )
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Use other settings from now on."""
        origins = _listed(settings.allowed_origins)
        with_cors = CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "PUT", "POST", "DELETE"],
            allow_headers=["*"],  # clients of the various APIs send headers of their own
            allow_private_network=True,  # browsers ask before a page of a public site calls a private address
            expose_headers=self._exposed_headers,
        )
        self._answer = with_cors if origins else self._app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _names(names: str) -> tuple[bool, set[str]]:
    found = set(_listed(names.lower()))
    return "*" in found, found


_AUDIO = ("/v1/audio/", "/audio/")  # OpenAI's routes, which front ends with one address for all ask for


def _not_routed(error: HTTPException, routes: Iterable[BaseRoute], scope: Scope) -> TailraceError:
    """Return the error for a request that no route takes."""
    if error.status_code != 404:
        return MethodNotAllowed("This method is not allowed here.")
    if scope["path"].startswith(_AUDIO):
        return NotFound("This server reads and makes no audio. Use another address for speech.")
    near = nearest_path(scope["path"], routes)
    hint = f" Did you mean {near}?" if near else ""
    return NotFound(f"There is nothing at this path.{hint} /openapi.json lists all paths.")


def _allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> dict[str, str]:
    """Return the header with the methods of a path. Starlette names only those of the first of its routes."""
    at_path = [route for route in routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    methods = sorted({method for route in at_path for method in route.methods or ()})
    return {"allow": ", ".join(methods)} if methods else {}
