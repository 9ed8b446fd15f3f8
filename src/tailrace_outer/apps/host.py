"""Starts the apps and the front, and drains and stops them at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

from starlette.types import ASGIApp

from tailrace.access.audit import open_audit_log
from tailrace.dialects import native
from tailrace.errors import ModelError
from tailrace.generation import Observers
from tailrace.http.access_log import AccessLog
from tailrace.http.edge import CrossOrigin, Edge
from tailrace.records.records_service import open_records
from tailrace.settings import Settings
from tailrace.system import eventloop
from tailrace.transport.listening import BACKLOG, Signals, Uvicorn
from tailrace_outer.apps.app_streams import AppStreams, open_app_streams
from tailrace_outer.apps.front import PUBLIC, Front
from tailrace_outer.apps.pool import HostedApp, Pool
from tailrace_outer.apps.process import BootError, ReplicaProcess
from tailrace_outer.serve.boot import AppTarget, Described, Failed

__all__ = ["AppSpec", "host"]

logger = logging.getLogger("tailrace.apps")


@dataclass(frozen=True, slots=True)
class AppSpec:
    """An app to run, and its route prefix."""

    target: AppTarget
    route_prefix: str  # "" for the root
    where: str = ""  # the app's position in a YAML file, for error messages
    is_resumable: bool = False  # whether its streamed answers are recorded


async def host(
    get_apps: Callable[[], Sequence[AppSpec]],
    settings: Settings,
    sock: socket,
    *,
    data_path: Path,
    on_ready: Callable[[Front, tuple[str, ...]], None],
    on_drain: Callable[[int], None] = lambda num_requests: None,
    on_boot_error: Callable[[BootError], None] = lambda error: None,
    changes: Callable[[], AsyncIterator[object]] | None = None,
) -> None:
    """Run apps on a bound socket until SIGTERM or SIGINT, then drain. A second signal stops at once.

    `get_apps` is called in a thread each time before the apps are started. It may raise BootError. With `changes`, each
    item of it restarts the apps. If they do not start then, `on_boot_error` is called, and the next change is awaited.

    Raises: BootError if an app does not start, ModelError if the journal cannot be opened.
    """
    signals = Signals()
    async with AsyncExitStack() as stack:
        audit = stack.enter_context(open_audit_log(settings))
        records = await stack.enter_async_context(open_records(settings))
        streams = await stack.enter_async_context(open_app_streams(settings, data_path, audit))
        observers = Observers()  # of nothing: apps have streams of their own
        records.conversations.observe(observers, streams.store)
        await stack.enter_async_context(records.recording(observers, lambda: (), streams.store, data_path))
        front = Front(settings, streams, records)
        edge = Edge(front, settings, records.authentication, records.quotas, audit=audit, public=PUBLIC)
        app = AccessLog(CrossOrigin(edge, settings), settings)
        change = asyncio.Event()  # of a file, also while the apps start
        is_watched = changes is not None

        async def run_once(listening: _Listening) -> bool:
            """Run the apps until the end or a change. Returns whether they have to restart. Raises: BootError."""
            try:
                apps = await asyncio.to_thread(get_apps)  # may read files and try interpreters
                async with _started(apps, settings, front, signals.force_requested) as notes:
                    listening.begin()
                    on_ready(front, notes)
                    if await _wait_for_change(signals.stop_requested, change):
                        await streams.interrupt_all()
                        return True
                    await _drain(front, streams, settings, signals, on_drain)
                    listening.end(hurried=signals.force_requested.is_set())
                    return False
            except BaseExceptionGroup as errors:
                raise eventloop.first_error(errors) from None

        async def run() -> None:
            async with _Listening(app, settings, sock) as listening:
                has_to_run = True
                while has_to_run:
                    try:
                        has_to_run = await run_once(listening)
                    except BootError as error:
                        if not is_watched:
                            raise
                        on_boot_error(error)
                        has_to_run = await _wait_for_change(signals.stop_requested, change)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(run())
            leaving = group.create_task(signals.stop_requested.wait())
            watching = [group.create_task(_watch(changes, change))] if changes is not None else []
            await asyncio.wait([running, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not front.is_open:  # nothing runs yet
                running.cancel()
            for other in (leaving, *watching):
                other.cancel()


class _Listening:
    """The web server. Listens as soon as the apps are ready."""

    def __init__(self, app: ASGIApp, settings: Settings, sock: socket) -> None:
        self._settings = settings
        self._sock = sock
        self._server = Uvicorn(app, settings, native.encode_error)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Listening:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.end(hurried=exc_info[0] is not None)
        if self._task is not None:
            await self._task

    def begin(self) -> None:
        """Start to listen. Raises: ModelError if another process has taken the port."""
        if self._task is not None:
            return
        try:
            self._sock.listen(BACKLOG)
        except OSError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise ModelError(f"Cannot listen on {where}: {error.strerror}.") from None
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._sock]))

    def end(self, *, hurried: bool) -> None:
        self._server.force_exit = self._server.force_exit or hurried
        self._server.should_exit = True


@asynccontextmanager
async def _started(
    apps: Sequence[AppSpec], settings: Settings, front: Front, force_stop: asyncio.Event
) -> AsyncIterator[tuple[str, ...]]:
    """Start all processes of all apps, and register the apps with the front. Raises: BootError."""
    notes: list[str] = []
    async with AsyncExitStack() as running:
        hosted: list[HostedApp] = []
        for spec in apps:
            with _adding_position(spec.where):
                first = await ReplicaProcess.start(
                    front.on_channel, log_level=spec.target.log_level, python=spec.target.python
                )
                try:
                    described = await first.describe(spec.target, within_s=settings.load_s)
                    notes += described.notes
                    hosted.append(_app(spec, described, settings, front, force_stop))
                    front.set_apps(hosted)  # constructors may call deployments that were constructed before
                    last = next(reversed(described.parts))
                    for name, pool in hosted[-1].pools.items():
                        # the process that has imported the app becomes the ingress, which is the last deployment
                        await running.enter_async_context(pool.running(first if name == last else None))
                except BaseException:
                    await first.kill()
                    raise
        front.is_open = True
        try:
            yield tuple(dict.fromkeys(notes))
        finally:
            front.is_open = False


def _app(spec: AppSpec, described: Described, settings: Settings, front: Front, force_stop: asyncio.Event) -> HostedApp:
    """Return the app with a pool for each deployment. No pool has a process yet."""
    pools = {
        name: Pool(
            spec.target,
            part,
            root_path=spec.route_prefix,
            load_s=settings.load_s,
            queue_s=settings.queue_s,
            on_channel=front.on_channel,
            force_stop=force_stop,
        )
        for name, part in described.parts.items()
    }
    kind = spec.target.kind
    wire_prefix = kind.wire_prefix if kind is not None else ""
    return HostedApp(spec.target.app_name, spec.route_prefix, pools, spec.is_resumable, wire_prefix)


@contextmanager
def _adding_position(where: str) -> Iterator[None]:
    """Put the app's position in the YAML file into a failure's message. Raises: BootError."""
    try:
        yield
    except (BootError, BaseExceptionGroup) as error:
        first = eventloop.first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not where or not isinstance(first, BootError):
            raise
        raise BootError(Failed(f"{where}: {first.message}", first.traceback)) from None


async def _watch(changes: Callable[[], AsyncIterator[object]], change: asyncio.Event) -> None:
    async for _ in changes():
        change.set()


async def _wait_for_change(leaving: asyncio.Event, change: asyncio.Event) -> bool:
    """Wait for a signal or a change. Returns True for a change."""
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(leaving.wait()), group.create_task(change.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    change.clear()
    return not leaving.is_set()


async def _drain(
    front: Front, streams: AppStreams, settings: Settings, signals: Signals, on_drain: Callable[[int], None]
) -> None:
    front.announce_drain()
    pools = [pool for app in front.apps for pool in app.pools.values()]
    on_drain(sum(app.ingress.num_ongoing for app in front.apps))
    await signals.wait_forced(settings.shutdown_delay_s)
    drain_s = max([settings.drain_s, *(pool.options.graceful_shutdown_timeout_s for pool in pools)])
    async with asyncio.TaskGroup() as group:
        drained = [group.create_task(app.ingress.wait_drained()) for app in front.apps]
        hurried = group.create_task(signals.force_requested.wait())
        done = asyncio.gather(*drained)
        either: list[asyncio.Future[Any]] = [done, hurried]  # Any: their results differ
        await asyncio.wait(either, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in (*drained, hurried):
            wait.cancel()
        await asyncio.gather(done, return_exceptions=True)
    await streams.interrupt_all()
