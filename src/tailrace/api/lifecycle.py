"""Starts a server from its settings, with or without sockets, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp

from tailrace.access.audit import AuditLog, open_audit_log
from tailrace.access.requests_in_progress import CANCEL_DELAY_S
from tailrace.api.about_routes import AboutRoutes
from tailrace.api.openapi import document
from tailrace.api.reload import Reread
from tailrace.api.routes import Routes
from tailrace.api.server_metrics import Metrics
from tailrace.api.sockets import Sockets
from tailrace.api.stream_audit import StreamAudit
from tailrace.api.stream_starts import StreamStarts
from tailrace.assembly.models import Models
from tailrace.assembly.service import Service, start_service
from tailrace.assembly.source import Source
from tailrace.dialects import native
from tailrace.errors import SHUTTING_DOWN, Draining, ModelError
from tailrace.generation.stalls import StallWatch
from tailrace.http.access_log import AccessLog
from tailrace.http.edge import CrossOrigin, Edge
from tailrace.http.near_paths import NearPaths
from tailrace.http.wires import ServedWires
from tailrace.records.records_service import Records, open_records
from tailrace.server import Opened, Server, open_extensions
from tailrace.settings import Settings
from tailrace.system import eventloop
from tailrace.transport.listening import BACKLOG, Signals, Uvicorn

__all__ = ["PUBLIC", "RunningServer", "build_app", "build_routes", "open_server", "serve"]

_DRAIN_RETRY_S = 5.0
_HANDED_OVER = "The server is shutting down. The next one continues this stream."

# Readable without a key: health, the page's files, for which browsers send no key, and what links show, which have a
# secret of their own.
PUBLIC = (
    "/", "/admin", "/share", "/v1/shared", "/livez", "/readyz", "/health", "/ping",
    "/v1/health", "/v2/health/live", "/v2/health/ready", "/page/",
)  # fmt: skip

# For browsers: no answer is cached, embedded by other sites, or given another media type.
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def build_routes(
    models: Models,
    server: Server,
    extensions: Sequence[Opened] = (),
    records: Records | None = None,
    own_routes: Sequence[BaseRoute] = (),
    metrics: Metrics | None = None,
) -> tuple[list[BaseRoute], ServedWires]:
    """Return all routes, and the wires among them. `own_routes` come first."""
    settings = server.settings
    metrics = metrics or _metrics_of(models, settings)
    conversations = records.conversations if records is not None else None
    about = AboutRoutes(models, metrics, lambda: document(wires, server.settings.root_path, extensions))
    own: list[BaseRoute] = [*about.table()]
    server.forget_with(*(extension.forget for extension in extensions))
    starts = StreamStarts(models, server, conversations)
    lane_takes = {path: take for extension in extensions for path, take in extension.lane_takes.items()}
    sockets = Sockets(models, server, starts, lane_takes)
    own += sockets.table()
    of_extensions = [route for extension in extensions for route in extension.routes]
    wires = ServedWires((*own_routes, *own), of_extensions)
    takes = {key: take for extension in extensions for key, take in extension.takes.items()}
    routes = Routes(wires, models, server, starts, takes)
    return [*own_routes, *routes.table(), *sockets.of_wires(wires), *own, *of_extensions], wires


def build_app(
    models: Models,
    server: Server,
    extensions: Sequence[Opened] = (),
    records: Records | None = None,
    own_routes: Sequence[BaseRoute] = (),
    audit: AuditLog | None = None,
    metrics: Metrics | None = None,
) -> ASGIApp:
    """Return the ASGI application. Without records there are no keys and no conversations, and all requests are
    anonymous. With an audit log, the generators' new streams are written to it from now on. `metrics` have observed the
    models from their start; without them it makes some."""
    settings = server.settings
    metrics = metrics or _metrics_of(models, settings)
    for extension in extensions:
        extension.on_metrics(metrics)
    routes, wires = build_routes(models, server, extensions, records, own_routes, metrics)
    router = Router(routes, redirect_slashes=False)
    if audit is not None:
        models.observers.add(StreamAudit(audit))
    if records is not None:
        records.keyring.on_revoked(partial(_end_streams, models))
    edge = Edge(
        router,
        settings,
        records.authentication if records is not None else None,
        records.quotas if records is not None else None,
        audit=audit,
        wires=wires,
        public=(*PUBLIC, "/metrics") if settings.public_metrics else PUBLIC,
        headers=_HEADERS,
        on_refused=metrics.on_turned_away,
    )
    server.answer_with(edge, wires)
    shown = CrossOrigin(edge, settings, [name for one in extensions for name in one.exposed_headers])
    logged = AccessLog(shown, settings, wires)
    for part in (models, edge, shown, logged):
        server.on_reload(part.use)
    return NearPaths(logged, wires, routes)


def _end_streams(models: Models, key_id: str) -> None:
    """End the streams of a revoked key, and later those that its requests have begun before they were cancelled."""
    models.end_streams_of(key_id)
    asyncio.get_running_loop().call_later(2 * CANCEL_DELAY_S, models.end_streams_of, key_id)


def _metrics_of(models: Models, settings: Settings) -> Metrics:
    return Metrics(models.generators, models.observers, shows_keys=not settings.public_metrics)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server below its sockets: the application, and what it uses."""

    app: ASGIApp
    server: Server
    service: Service
    records: Records
    extensions: Sequence[Opened]

    def announce_drain(self) -> None:
        """Let `/readyz` answer 503; requests are still accepted."""
        for generator in self.service.models.generators:
            generator.gate.will_drain = True

    async def drain(self, drain_s: float, force_requested: asyncio.Event | None = None) -> None:
        """Let running streams finish. Then hand over those with linger time in a durable store, and interrupt the
        rest."""
        generators = list(self.service.models.generators)
        for generator in generators:
            generator.gate.drain(_DRAIN_RETRY_S)

        async def idle() -> None:
            for generator in generators:
                await generator.wait_idle()

        async with asyncio.TaskGroup() as group:
            waits: list[asyncio.Task[object]] = [group.create_task(idle())]
            if force_requested is not None:
                waits.append(group.create_task(force_requested.wait()))
            await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        for run in self.service.models.live:
            if self.service.store.state.is_durable and run.log.record.linger_s:
                run.hand_over(Draining(_HANDED_OVER, retry_after_s=_DRAIN_RETRY_S))
            else:
                run.interrupt()
        for vectors in [run for generator in generators for run in generator.vector_runs]:
            vectors.fail(Draining(SHUTTING_DOWN, retry_after_s=_DRAIN_RETRY_S))
        await asyncio.sleep(0)  # the store commits the ends
        await self.records.conversations.finish()
        for extension in self.extensions:
            extension.drain()


@contextlib.asynccontextmanager
async def open_server(
    source: Source,
    settings: Settings,
    *,
    data_path: Path,
    cache_path: str = "",
    more: Sequence[Source] = (),
    own_routes: Callable[[Service], Sequence[BaseRoute]] = lambda service: (),
) -> AsyncIterator[RunningServer]:
    """Start a server without sockets. `own_routes` adds routes.

    Raises: ModelError if the engine cannot load the model.
    """
    metrics: list[Metrics] = []  # made before streams of an earlier process continue

    def on_loaded(models: Models) -> None:
        metrics.append(_metrics_of(models, settings))
        records.conversations.observe(models.observers, models.first.generator.store)

    with open_audit_log(settings) as audit:
        async with (
            open_records(settings) as records,
            start_service(
                source,
                settings,
                data_path=data_path,
                cache_path=cache_path,
                more=more,
                on_loaded=on_loaded,
            ) as service,
            records.recording(
                service.models.observers,
                lambda: [run.record for run in service.models.live],
                service.store,
                data_path,
            ),
        ):
            models = service.models
            server = Server(settings, service.store, records, models)
            async with open_extensions(server) as extensions, asyncio.TaskGroup() as group:
                app = build_app(models, server, extensions, records, own_routes(service), audit, *metrics)
                stalls = StallWatch(models.generators, *metrics)
                watching = group.create_task(stalls.run())
                yield RunningServer(app, server, service, records, extensions)
                watching.cancel()


async def serve(
    source: Source,
    settings: Settings,
    sock: socket.socket,
    *,
    data_path: Path,
    cache_path: str = "",
    more: Sequence[Source] = (),
    on_ready: Callable[[RunningServer], None] = lambda running: None,
    on_drain: Callable[[int, float], None] = lambda num_streams, within_s: None,
    own_routes: Callable[[Service], Sequence[BaseRoute]] = lambda service: (),
    reread: Reread | None = None,
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT, then drain. A second signal stops the server at once; while the
    engine loads, the first does. SIGHUP reads the settings again.

    Raises: ModelError if the engine cannot load the model.
    """
    signals = Signals()
    ready = asyncio.Event()

    async def serve_until_stopped() -> None:
        async with open_server(
            source, settings, data_path=data_path, cache_path=cache_path, more=more, own_routes=own_routes
        ) as running:
            ready.set()
            # Objects created so far stay: exclude them from later collections, which pause streams. There is next to no
            # garbage among them, and looking for it takes as long as a twentieth of the start.
            gc.freeze()
            try:
                sock.listen(BACKLOG)
            except OSError as error:  # another process listens there now
                raise ModelError(f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}.") from None
            single_headers = [name for one in running.extensions for name in one.single_headers]
            server = Uvicorn(running.app, settings, native.encode_error, single_headers)
            running.server.on_reload(server.use)
            async with asyncio.TaskGroup() as serving:
                serving.create_task(server.serve(sockets=[sock]))
                on_ready(running)
                reloading = None
                if reread is not None:
                    reloading = serving.create_task(reread.run(running.server, running.service))
                await signals.stop_requested.wait()
                if reloading is not None:
                    reloading.cancel()
                now = running.server.settings
                on_drain(running.service.num_live, now.shutdown_delay_s + now.drain_s)
                running.announce_drain()
                await signals.wait_forced(now.shutdown_delay_s)
                await running.drain(now.drain_s, signals.force_requested)
                server.force_exit = signals.force_requested.is_set()
                server.should_exit = True

    async with contextlib.AsyncExitStack() as stack:
        if reread is not None:
            stack.enter_context(eventloop.on_hangup(reread.requested.set))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        task = group.create_task(serve_until_stopped())
        await signals.stop_requested.wait()
        if not ready.is_set():
            task.cancel()
