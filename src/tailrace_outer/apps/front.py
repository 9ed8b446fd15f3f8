"""Receives the clients' requests. Finds the app of each request, and a process of that app."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable
from contextlib import nullcontext

import msgspec
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.access.audit import note_refusal
from tailrace.access.principal import arrival_of, principal_of
from tailrace.dialects import native
from tailrace.errors import AppUnavailable, NotFound, QueueFull, RequestError, TailraceError
from tailrace.http.asgi_answers import JsonAnswer, error_answer
from tailrace.records.records_service import Records
from tailrace.settings import Settings
from tailrace_outer.apps.app_metrics import AppMetrics
from tailrace_outer.apps.app_streams import AppStreams
from tailrace_outer.apps.pool import HostedApp, Pool
from tailrace_outer.apps.relay import Relay
from tailrace_outer.apps.stream_routes import event_id_of, resumed, stream_answer
from tailrace_outer.serve.exceptions import BackPressureError, DeploymentUnavailableError
from tailrace_outer.serve.handles import CallHead
from tailrace_outer.serve.link import Channel, ChannelClosed, LinkLost

__all__ = ["Front"]

logger = logging.getLogger("tailrace.apps")

_ADMIN = "/-/"
_WIRE = "app"  # of all requests to apps, in scopes and records
PUBLIC = ("/-/healthz", "/-/livez", "/-/readyz")  # need no key
_START_RETRY_S = 1.0


class Front:
    """The ASGI application of `tailrace run`."""

    def __init__(self, settings: Settings, streams: AppStreams, records: Records) -> None:
        self.apps: list[HostedApp] = []  # also apps that start: their constructors call each other
        self.is_open = False  # to HTTP requests
        self._settings = settings
        self._streams = streams
        self._records = records
        self._will_drain = False
        self._metrics = AppMetrics(lambda: self.apps, streams.num_ended)

    def set_apps(self, apps: Iterable[HostedApp]) -> None:
        """Replace the apps that calls and requests go to."""
        self.apps = sorted(apps, key=lambda app: -len(app.route_prefix))

    def announce_drain(self) -> None:
        """Let `/-/readyz` answer 503; requests are accepted until the pools drain."""
        self._will_drain = True

    @property
    def is_ready(self) -> bool:
        pools = [pool for app in self.apps for pool in app.pools.values()]
        return self.is_open and not self._will_drain and all(pool.is_ready for pool in pools)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: TailraceError before the first byte, for paths whose wire formats its own errors."""
        path: str = scope["path"]
        is_http = scope["type"] == "http"
        try:
            answer = await self._own_answer(scope, path) if is_http else None
        except TailraceError as error:
            note_refusal(error, scope)
            answer = error_answer(native.WIRE, error)
        if answer is not None:
            await answer(scope, receive, send)
            return
        try:
            await self._relay(scope, path, receive, send)
        except TailraceError as error:
            app = self._app_at(path)
            if not is_http or (app is not None and app.wire_prefix and path.startswith(app.wire_prefix)):
                raise
            note_refusal(error, scope)
            # other paths belong to the app, even if a built-in wire has the same path
            await error_answer(native.WIRE, error)(scope, receive, send)

    async def _relay(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        principal_of(scope).require("generate")  # the front does not know which of an app's routes only read
        principal_of(scope).require_within("wire", _WIRE)
        if not self.is_open:
            raise AppUnavailable("The app is being started.", retry_after_s=_START_RETRY_S)
        app = self._app_at(path)
        if app is None:
            raise NotFound("There is no app at this path. GET /-/routes lists the paths of all apps.")
        log = self._records.request_log
        counted = nullcontext() if log is None else log.counted(arrival_of(scope, wire=_WIRE, model=app.name))
        with self._metrics.measure(app.name) as outcome, counted:
            scope = {**scope, "root_path": scope.get("root_path", "") + app.route_prefix}
            if scope["type"] == "websocket" and path == app.route_prefix:
                # HTTP clients follow the app's redirect to the slash; most WebSocket clients do not
                scope |= {"path": path + "/", "raw_path": scope.get("raw_path", path.encode()) + b"/"}
            relay = Relay(
                app.ingress, app.name, self._settings, self._streams, is_resumable=app.is_resumable
            )  # fmt: skip
            await relay(scope, receive, outcome.watched(send))

    async def _own_answer(self, scope: Scope, path: str) -> ASGIApp | None:
        """Return the answer to requests that the front serves itself: streams, and the server's state. Else None."""
        if path.startswith(_ADMIN):
            what = path.removeprefix(_ADMIN)
            if what == "metrics":
                principal_of(scope).require("metrics")
            return self._server_state(what)
        answer = await stream_answer(self._streams, scope, path)
        app = self._app_at(path)
        if answer is None and app is not None and event_id_of(scope):
            return await resumed(self._streams, scope, app.name)  # a request with an event's id only resumes
        return answer

    def _app_at(self, path: str) -> HostedApp | None:
        return next((app for app in self.apps if _is_below(path, app.route_prefix)), None)

    def _server_state(self, what: str) -> ASGIApp:
        match what:
            case "livez":
                return JsonAnswer(b'{"live":true}')
            case "healthz":
                return PlainTextResponse("success") if self.is_ready else PlainTextResponse("not ready", 503)
            case "readyz":
                shown = {"ready": self.is_ready, "apps": {app.name: _state(app) for app in self.apps}}
                headers = None if self.is_ready else {"retry-after": "1"}
                return JsonAnswer(msgspec.json.encode(shown), 200 if self.is_ready else 503, headers)
            case "routes":
                return JsonAnswer(msgspec.json.encode({app.route_prefix or "/": app.name for app in self.apps}))
            case "metrics":
                return self._metrics
        return PlainTextResponse("The paths under /-/ are livez, readyz, healthz, routes and metrics.\n", 404)

    # Calls from one deployment to another

    def on_channel(self, channel: Channel, kind: str, head: bytes) -> None:
        """Serve a call from a process. When the process closes the channel, the call ends, or leaves the queue."""
        channel.serve(self._call(channel, head))

    async def _call(self, caller: Channel, head: bytes) -> None:
        try:
            pool = self._pool_of(msgspec.msgpack.decode(head, type=CallHead))
            lease = await pool.lease()
        except TailraceError as error:
            caller.close(pickle.dumps(_for_callers(error)))
            return
        except msgspec.DecodeError:
            caller.close()
            return
        callee = lease.replica.link.open("call", head)
        try:
            await callee.send(await caller.receive())  # the arguments
            while True:
                await caller.send(await callee.receive())
        except ChannelClosed as end:
            failure = end.failure
            if isinstance(end, LinkLost):
                failure = pickle.dumps(DeploymentUnavailableError("The process of the called deployment died."))
            caller.close(failure)
        finally:
            callee.close()
            callee.when_over(lease.release)

    def _pool_of(self, head: CallHead) -> Pool:
        for app in self.apps:
            if app.name == head.app and head.deployment in app.pools:
                return app.pools[head.deployment]
        raise RequestError(f"There is no deployment {head.deployment} in {head.app}.")


def _for_callers(error: TailraceError) -> Exception:
    if isinstance(error, QueueFull):
        return BackPressureError(error.message, status=error.status, retry_after_s=error.retry_after_s or 1.0)
    return DeploymentUnavailableError(error.message)


def _is_below(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(prefix + "/")


def _state(app: HostedApp) -> dict[str, object]:
    return {
        name: {"processes": len(pool.replicas), "of": pool.options.num_replicas, "restarts": pool.num_restarts}
        for name, pool in app.pools.items()
    }
