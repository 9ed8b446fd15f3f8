"""Runs the same apps and the same server on Ray Serve, across several machines. The only module that knows Ray.

Ray's proxies, replicas and routing replace the front and its pools; user code and engine are the same. A stream exists
only in the replica that made it: a later request finds the stream only if Ray routes it to that replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.apps.target import load, options_of
from tailrace.http.listening import bind
from tailrace.requirements import install_command
from tailrace.serve.deployment import Application, nodes, replaced
from tailrace.serve.failures import failed
from tailrace.serve.ingress import asgi_of, has_ingress
from tailrace.serve.options import DeploymentOptions

if TYPE_CHECKING:
    from tailrace.apps.targets import Plan
    from tailrace.settings import Settings

__all__ = ["run_on_ray", "serve_on_ray"]

_DRAIN_S = 60.0  # longer than most answers
_MAX_CONNECTIONS = 1000  # per replica of the built-in server, whose own admission refuses what is too much


def run_on_ray(plan: Plan, settings: Settings) -> int:
    """Deploy the apps of a plan, and wait for a signal. Returns the exit status."""
    serve = _started(settings)
    if serve is None:
        return 1
    for spec in plan.apps:
        try:
            app, notes = load(spec.target)
            options = options_of(app, spec.target)
        except BaseException as error:
            told = failed(error, f"importing {spec.target.target}")
            where = f"{spec.where}: " if spec.where else ""
            sys.stderr.write(f"{told.traceback}tailrace: {where}{told.message}\n")
            return 1
        for note in notes:
            _say(f"tailrace: {note}")
        _say(f"Deploying {spec.target.app_name} on Ray …")
        try:
            serve.run(_on_ray(serve, app, options), name=spec.target.app_name, route_prefix=spec.route_prefix or "/")
        except Exception as error:  # Ray has printed the details
            _say(f"tailrace: Ray could not deploy {spec.target.app_name}: {type(error).__name__}: {error}")
            serve.shutdown()
            return 1
        _say(
            f"{spec.target.app_name} runs at http://{settings.host}:{settings.port}{spec.route_prefix or '/'} (on Ray)."
        )
    return _wait(serve)


def serve_on_ray(model: str, settings: Settings, *, num_replicas: int) -> int:
    """Deploy the built-in server, and wait for a signal. Returns the exit status."""
    serve = _started(settings)
    if serve is None:
        return 1
    threads = settings.threads or 1
    deployment = serve.deployment(
        name="tailrace",
        num_replicas=num_replicas,
        max_ongoing_requests=_MAX_CONNECTIONS,
        max_queued_requests=_MAX_CONNECTIONS,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=max(_DRAIN_S, settings.drain_s),
        ray_actor_options={"num_cpus": threads},
    )(serve.ingress(_builder(model, settings))())
    _say(f"Deploying {num_replicas} x {model} on Ray …")
    serve.run(deployment.bind(), name="tailrace", route_prefix="/")
    _say(f"Listening on http://{settings.host}:{settings.port} (on Ray, {num_replicas} replicas).")
    return _wait(serve)


def _started(settings: Settings) -> Any:  # Any: the module ray.serve
    try:
        import ray
        from ray import serve
    except ImportError:
        _say(f"tailrace: Ray is not installed. Try: {install_command(extra='ray')}")
        return None
    if _has_cluster():
        ray.init(address="auto", ignore_reinit_error=True, log_to_driver=True)
    else:
        try:  # Ray would share the port with another process that allows it, such as another Ray
            bind(settings).close()
        except OSError as error:
            _say(
                f"tailrace: cannot listen on {settings.host}:{settings.port} ({error.strerror}). Choose another --port."
            )
            return None
        ray.init(address="local", ignore_reinit_error=True, log_to_driver=True)
    serve.start(http_options={"host": settings.host, "port": settings.port})
    return serve


def _has_cluster() -> bool:
    import os

    return bool(os.environ.get("RAY_ADDRESS"))


def _wait(serve: Any) -> int:  # Any: the module ray.serve
    leaving = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: leaving.set())
    leaving.wait()
    _say("Stopping.")
    serve.shutdown()
    return 0


def _on_ray(
    serve: Any, app: Application, options: Mapping[str, tuple[DeploymentOptions, Mapping[str, Any]]]
) -> Any:  # Any: Ray's
    """Convert an app to Ray's application."""
    made: dict[int, Any] = {}
    for name, node in nodes(app).items():
        body = node.deployment.func_or_class
        if inspect.isclass(body) and has_ingress(body):
            body = serve.ingress()(_with_app(body))
        args, kwargs = replaced((node.args, node.kwargs), lambda child: made[id(child)])
        deployment = serve.deployment(**_ray_options(*options[name]))(body)
        made[id(node)] = deployment.bind(*args, **kwargs)
    return made[id(app)]


def _with_app(body: type[Any]) -> type[Any]:  # Any: the user's
    """Return a subclass of the user's class that gives Ray its ASGI app."""

    async def construct(self: Any, *args: Any, **kwargs: Any) -> None:  # Any: the user's
        begin: Any = body.__init__
        constructed = begin(self, *args, **kwargs)
        if inspect.isawaitable(constructed):
            await constructed
        if "tailrace.serve.model" in sys.modules:
            from tailrace.serve.model import models_loaded

            await models_loaded()

    async def build(self: Any) -> ASGIApp:  # Any: the user's
        return await asgi_of(self)

    return type(body.__name__, (body,), {"__init__": construct, "__serve_build_asgi_app__": build})


def _ray_options(options: DeploymentOptions, foreign: Mapping[str, Any]) -> dict[str, Any]:  # Any: Ray's
    given = {
        "name": options.name,
        "num_replicas": options.num_replicas,
        "max_ongoing_requests": options.max_ongoing_requests,
        "max_queued_requests": max(1, options.max_queued_requests),  # Ray rejects a queue of length 0
        "graceful_shutdown_timeout_s": options.graceful_shutdown_timeout_s,
        "health_check_period_s": options.health_check_period_s,
        "health_check_timeout_s": options.health_check_timeout_s,
        "user_config": options.user_config,
        "backpressure_config": {
            "status_code": options.backpressure_config.status_code,
            "retry_after_s": options.backpressure_config.retry_after_s,
        },
    }
    if "autoscaling_config" in foreign:
        del given["num_replicas"]  # Ray accepts only one of both
    return {**given, **foreign}


def _builder(model: str, settings: Settings) -> Callable[[], ASGIApp]:
    """Return a function that makes the built-in server in a replica. The app's lifespan starts its engine."""

    def build() -> ASGIApp:
        from tailrace.apps.on_ray import _Served

        return _Served(model, settings)

    return build


class _Served:
    """The built-in server as an ASGI app that starts and stops its own engine."""

    def __init__(self, model: str, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            assert self._app is not None
            await self._app(scope, receive, _without_request_id(send))
            return
        await receive()
        async with contextlib.AsyncExitStack() as running:
            try:
                self._app = await running.enter_async_context(self._service())
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @contextlib.asynccontextmanager
    async def _service(self) -> AsyncIterator[ASGIApp]:
        """Raises: ModelError."""
        from tailrace.access.audit import open_audit_log
        from tailrace.api.lifecycle import build_app
        from tailrace.generation.service import start_service
        from tailrace.generation.source import find_source
        from tailrace.models.places import prepared_path
        from tailrace.models.progress import NoProgress
        from tailrace.records.service import open_records

        source = await asyncio.to_thread(find_source, self._model, NoProgress(), self._settings.engine)
        with tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
            prepared = prepared_path()
            with open_audit_log(self._settings):
                async with (
                    open_records(self._settings) as records,
                    start_service(source, self._settings, data_path=Path(directory), cache_path=prepared) as service,
                ):
                    yield build_app(service.models, service.durable, self._settings, records)


def _without_request_id(send: Send) -> Send:
    """Drop our X-Request-Id, since Ray's proxy adds its own."""

    async def passed_on(message: Message) -> None:
        if "headers" in message:
            kept = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
            message = {**message, "headers": kept}
        await send(message)

    return passed_on


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
