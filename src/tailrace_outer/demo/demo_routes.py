"""The routes of the demo's page, beside the wires of every server.

Two routes kill a process: the engine's worker, or this server. They need a token that only this server's own page can
read. They refuse connections from other machines, requests through a proxy, and pages of other origins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections import OrderedDict
from pathlib import Path

import msgspec
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from tailrace import __version__
from tailrace.access.principal import caller_of, owner_of
from tailrace.api.pages import PageFiles, answer_without_libraries, has_libraries
from tailrace.api.request_headers import is_cross_origin
from tailrace.api.routes import route
from tailrace.api.stream_facts import facts_of
from tailrace.assembly.served import Served
from tailrace.assembly.service import Service
from tailrace.dialects import BareTextView, Generate, GenerateCall, ParsedRequest, View
from tailrace.dialects.bodies import read_json, require_json
from tailrace.dialects.shapes import read_fields
from tailrace.errors import EngineLost, Forbidden, UnknownStream
from tailrace.generation import Observer, Times
from tailrace.http.asgi_answers import STREAM_HEADERS, JsonAnswer
from tailrace.http.body_budget import BodyBudget
from tailrace.http.stream_actions import StreamActions
from tailrace.http.wires import ServedWires
from tailrace.settings import Settings
from tailrace.transport.addresses import is_loopback
from tailrace.types import Record
from tailrace_outer.demo.unkept_stream import PlainAnswer, PlainBody

__all__ = ["TOKEN_HEADER", "DemoRoutes"]

TOKEN_HEADER = "x-tailrace-demo"  # noqa: S105 - the name of a header
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")  # what proxies add
_MAX_TIMES = 256
_PATHS = {"native": "/v1/streams", "openai": "/v1/chat/completions", "tgi": "/generate_stream"}


class _StreamTimes(Observer):
    """Keeps the times of the newest streams of this process, by stream id."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, Times] = OrderedDict()

    def on_admitted(self, record: Record, times: Times) -> None:
        self._times[record.stream_id] = times
        if len(self._times) > _MAX_TIMES:
            self._times.popitem(last=False)

    def spent(self, stream_id: str) -> dict[str, float | None]:
        """Raises: UnknownStream."""
        times = self._times.get(stream_id)
        if times is None or times.admitted_s is None:
            raise UnknownStream("This process has not started such a stream.")
        prefill_s = None if times.first_s is None else times.first_s - times.admitted_s
        return {"queue_s": times.admitted_s - times.arrived_s, "prefill_s": prefill_s}


class DemoRoutes:
    """The page and its files, the state of the demo, and its actions. The parent writes the progress of the download to
    `fetch_file`."""

    def __init__(self, service: Service, settings: Settings, fetch_file: Path) -> None:
        self._service = service
        self._settings = settings
        self._streams = StreamActions(service.store, settings)
        self._fetch_file = fetch_file
        self._token = secrets.token_urlsafe(24)
        self._bodies = BodyBudget(settings)
        self._times = _StreamTimes()
        service.models.observers.add(self._times)
        self._page = PageFiles("tailrace_outer.demo")
        self._wires = ServedWires()

    def table(self) -> list[BaseRoute]:
        return [
            route("GET", "/demo", self.show_page),
            route("GET", "/demo/page/{name}", self.show_file),
            route("GET", "/demo/state", self.show_state),
            route("GET", "/demo/streams/{stream_id}/times", self.show_times),
            route("GET", "/demo/streams/{stream_id}/as/{wire}", self.show_stream),
            route("POST", "/demo/plain", self.stream_plainly),
            route("POST", "/demo/kill/engine", self.kill_engine),
            route("POST", "/demo/kill/server", self.kill_server),
        ]

    async def show_page(self, request: Request) -> ASGIApp:
        return self._page.answer(request, "index.html") if has_libraries() else answer_without_libraries()

    async def show_file(self, request: Request) -> ASGIApp:
        return self._page.answer(request, request.path_params["name"])

    async def show_state(self, request: Request) -> ASGIApp:
        """The processes, the models, and the token for the kill routes."""
        state = {
            "version": __version__,
            "token": self._token,
            "server": {"pid": os.getpid(), "life": self._service.store.state.epoch},
            "max_sequences": self._settings.max_sequences,
            "models": [_model_state(served) for served in self._service.models],
            "fetch": self._fetch(),
        }
        return JsonAnswer(msgspec.json.encode(state))

    async def show_times(self, request: Request) -> ASGIApp:
        """The time of a stream in the queue and in prefill, in seconds."""
        return JsonAnswer(msgspec.json.encode(self._times.spent(request.path_params["stream_id"])))

    async def show_stream(self, request: Request) -> ASGIApp:
        """A stream on one of four wires, from its first event. Raises: as `LogStore.read`."""
        view = self._view_of(request.path_params["wire"])
        log = await self._streams.find(owner_of(request.scope), request.path_params["stream_id"])
        return self._streams.follow(log, view.open(facts_of(self._service.models.of(log), log)), view)

    async def stream_plainly(self, request: Request) -> ASGIApp:
        require_json(request.headers)
        with self._bodies.reader(request.scope) as reader:
            body = read_json(await reader.read(request.headers, request.receive))
            fields, _ = read_fields(body, PlainBody, strict=True)
        headers = {**STREAM_HEADERS, "content-type": "text/event-stream; charset=utf-8"}
        return PlainAnswer(self._find(fields.model), fields, headers)

    async def kill_engine(self, request: Request) -> ASGIApp:
        """Send SIGKILL to the worker of `?model=`. Raises: EngineLost if there is no worker now."""
        self._check_may_kill(request)
        pid = self._find(request.query_params.get("model")).supervisor.pid
        if pid is None:
            raise EngineLost("This engine is not running.")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return JsonAnswer(msgspec.json.encode({"killed": pid}))

    async def kill_server(self, request: Request) -> ASGIApp:
        """Send SIGKILL to this process after the response."""
        self._check_may_kill(request)
        pid = os.getpid()

        async def kill() -> None:
            asyncio.get_running_loop().call_soon(os.kill, pid, signal.SIGKILL)

        return JsonAnswer(msgspec.json.encode({"killed": pid}), background=BackgroundTask(kill))

    def _check_may_kill(self, request: Request) -> None:
        """Raises: Forbidden. The edge has already checked Host and Origin."""
        given = request.headers.get(TOKEN_HEADER, "").encode()
        if not secrets.compare_digest(given, self._token.encode()):
            raise Forbidden("The token of this demo is missing or wrong.", param=TOKEN_HEADER)
        if not is_loopback(caller_of(request.scope)) or any(name in request.headers for name in _FORWARDED):
            raise Forbidden("Only a client on this machine can do this, without a proxy.")
        if is_cross_origin(request):
            raise Forbidden("Pages of other origins cannot do this.", param="sec-fetch-site")

    def _view_of(self, wire: str) -> View:
        """Return the view with which a wire answers its own example. Raises: HTTPException for another wire."""
        if wire == "plain":
            return BareTextView()
        for one in (operation for served in self._wires.all for operation in served.operations):
            if one.path == _PATHS.get(wire) and isinstance(one.act, Generate):
                call = one.act.parse(ParsedRequest(self._service.models.first.names[0], dict(one.example or {})))
                assert isinstance(call, GenerateCall)  # an example asks for an answer
                return call.view
        raise HTTPException(404)

    def _find(self, name: str | None) -> Served:
        """Raises: UnknownModel."""
        named = self._service.models.find(name)
        if named is None:
            raise self._service.models.unknown()
        return named.served

    def _fetch(self) -> object:
        """The progress of the download; None without one."""
        try:
            return msgspec.json.decode(self._fetch_file.read_bytes())
        except (OSError, msgspec.DecodeError):
            return None


def _model_state(served: Served) -> dict[str, object]:
    capabilities = served.supervisor.capabilities
    if served.is_loaded:
        state = "ready" if served.supervisor.is_ready else "restarting"
    elif served.loading is not None:
        state = "loading"
    else:
        state = "failed" if served.refusal else "unloaded"
    return {
        "name": served.model,
        "engine": capabilities.engine if capabilities is not None else served.supervisor.spec.engine,
        "is_simulated": served.supervisor.spec.engine == "scripted",
        "state": state,
        "pid": served.supervisor.pid,
    }
