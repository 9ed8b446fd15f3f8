"""The first and the last thing a request meets.

First: is it addressed to us, from a page that may? Last: what nobody else has answered becomes a
refusal, in the shape of the path's dialect.

A server on loopback is reachable from every page in the user's browser, by its address or by a name that an attacker
points at it. So the Host must be one of ours, and an Origin, where a browser sends one, too.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.dialects import Wire, native
from tailrace.errors import Forbidden, RequestError, TailraceError
from tailrace.server.answers import error_answer, wire_of
from tailrace.server.settings import Settings

__all__ = ["Edge"]

logger = logging.getLogger("tailrace.server")

_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^][/@?#:\\\s]+)(?::[0-9]{0,5})?")
_BEGINNINGS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}", re.ASCII)


class Edge:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._any_host, self._hosts = _names(settings.allowed_hosts)
        self._any_origin, self._origins = _names(settings.allowed_origins)
        self._hosts |= {"localhost", settings.host.lower(), socket.gethostname().lower()}
        self._is_loopback = _is_loopback(settings.host)

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
            if message["type"] in _BEGINNINGS:
                has_begun = True
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        scope["app"] = self  # makes the router raise what it cannot route
        scope["tailrace_request_id"] = request_id
        try:
            self._check(headers)
            await self._app(scope, receive, send_with_id)
        except ConnectionError:
            return  # the client has left
        except Exception as error:
            if has_begun:
                logger.exception("request %s failed after its headers", request_id)
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1011, "reason": "The server failed."})
                return  # without its end, the answer is cut off visibly
            if scope["type"] == "websocket":
                # Answers before the upgrade are HTTP: Starlette's know how, where the server lets them.
                if "websocket.http.response" not in scope.get("extensions", {}):
                    await send({"type": "websocket.close", "code": 1008})
                    return
                answer = self._refusal(error, native.WIRE, request_id)
            else:
                answer = self._refusal(error, wire_of(scope), request_id)
            await answer(scope, receive, send_with_id)

    def _refusal(self, error: Exception, wire: Wire, request_id: str) -> Response:
        if isinstance(error, HTTPException):
            missing = error.status_code == 404
            text = "There is nothing at this path; /openapi.json says what there is."
            refusal = RequestError(text if missing else "This method is not allowed here.")
            refusal.status, refusal.code = error.status_code, "not_found" if missing else "method_not_allowed"
            answer = error_answer(wire, refusal)
            answer.headers.update(error.headers or {})
            return answer
        if isinstance(error, TailraceError):
            return error_answer(wire, error)
        logger.error("request %s failed", request_id, exc_info=error)
        return error_answer(wire, TailraceError("The server failed; its log says how."))

    def _check(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise Forbidden(
                "This server is not known under that name. Start it with --allowed-hosts to add one.", param="host"
            )
        origin = headers.get("origin")
        if origin is None or self._any_origin or origin.lower() in self._origins:
            return
        if origin.lower().partition("://")[2] != hosts[0].lower():
            raise Forbidden(
                "Pages of that origin may not call this server. Start it with --allowed-origins to let them.",
                param="origin",
            )

    def _is_ours(self, host: str) -> bool:
        """Names must be known, against rebinding; addresses cannot be rebound."""
        if not _HOST.fullmatch(host):
            return False
        if self._any_host:
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


def _names(listed: str) -> tuple[bool, set[str]]:
    names = {name.strip().lower() for name in listed.split(",") if name.strip()}
    return "*" in names, names


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
