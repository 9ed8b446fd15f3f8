"""Users' apps on Ray."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import serve
from starlette.types import ASGIApp

from tailrace_outer.apps.on_ray.cluster import deploy, on_cluster, say, wait_for_signal
from tailrace_outer.apps.on_ray.resumable import ResumableApp
from tailrace_outer.apps.on_ray.spec import RayError, check_redis
from tailrace_outer.apps.on_ray.stream_thread import StreamThread
from tailrace_outer.apps.on_ray.streams_application import STREAMS_NAME, streams_application
from tailrace_outer.apps.stream_routes import STREAMS_PATH
from tailrace_outer.apps.target import load, options_of
from tailrace_outer.serve.calling import call
from tailrace_outer.serve.deployment import Application, nodes, replaced
from tailrace_outer.serve.failures import failed
from tailrace_outer.serve.ingress import asgi_of, has_ingress
from tailrace_outer.serve.options import DeploymentOptions

if TYPE_CHECKING:
    from tailrace.settings import Settings
    from tailrace_outer.apps.host import AppSpec
    from tailrace_outer.apps.targets import Plan

__all__ = ["run_apps"]


def run_apps(plan: Plan, settings: Settings) -> None:
    """Deploy the apps of a plan, and wait for a signal. Raises: RayError."""
    if settings.shares_streams:
        if any(spec.route_prefix == STREAMS_PATH for spec in plan.apps):
            raise RayError(f"with a Redis in --journal, the path {STREAMS_PATH} belongs to the streams of the apps.")
        check_redis(settings, of_apps=True)
    with on_cluster(settings) as names:
        if settings.shares_streams:
            deploy(streams_application(settings), names, STREAMS_NAME, STREAMS_PATH)
        for spec in plan.apps:
            application = _application(spec, settings)
            say(f"Deploying {spec.target.app_name} on Ray …")
            deploy(application, names, spec.target.app_name, spec.route_prefix or "/")
            url = f"http://{settings.host}:{settings.port}{spec.route_prefix or '/'}"
            say(f"{spec.target.app_name} runs at {url} (on Ray).")
        wait_for_signal()


def _application(spec: AppSpec, settings: Settings) -> Any:  # Any: Ray's
    """Raises: RayError if the app cannot be imported."""
    try:
        app, notes = load(spec.target)
        options = options_of(app, spec.target)
    except BaseException as error:
        failure = failed(error, f"importing {spec.target.target}")
        sys.stderr.write(failure.traceback)
        raise RayError(f"{f'{spec.where}: ' if spec.where else ''}{failure.message}") from None
    for note in notes:
        say(f"tailrace: {note}")
    return _ray_application(app, options, spec.target.app_name, settings)


def _ray_application(
    app: Application,
    options: Mapping[str, tuple[DeploymentOptions, Mapping[str, Any]]],  # Any: Ray's
    app_name: str,
    settings: Settings,
) -> Any:  # Any: Ray's
    """Convert an app to Ray's application."""
    made: dict[int, Any] = {}
    for name, node in nodes(app).items():
        body = node.deployment.func_or_class
        if node is app and settings.shares_streams:
            drain_s = options[name][0].graceful_shutdown_timeout_s
            body = serve.ingress()(_class_with_streams(body, app_name, settings, drain_s=drain_s))
        elif inspect.isclass(body) and has_ingress(body):
            body = serve.ingress()(_class_with_asgi(body))
        args, kwargs = replaced((node.args, node.kwargs), lambda child: made[id(child)])
        deployment = serve.deployment(**_ray_options(*options[name]))(body)
        made[id(node)] = deployment.bind(*args, **kwargs)
    return made[id(app)]


def _class_with_asgi(body: type[Any]) -> type[Any]:  # Any: the user's
    """Return a subclass of the user's class that gives Ray its ASGI app."""

    async def construct(self: Any, *args: Any, **kwargs: Any) -> None:  # Any: the user's
        await _construct(body, self, *args, **kwargs)

    async def build(self: Any) -> ASGIApp:  # Any: the user's
        return await asgi_of(self)

    return type(body.__name__, (body,), {"__init__": construct, "__serve_build_asgi_app__": build})


async def _construct(body: type[Any], instance: object, *args: Any, **kwargs: Any) -> None:  # Any: the user's
    begin: Any = body.__init__  # may be asynchronous
    constructed = begin(instance, *args, **kwargs)
    if inspect.isawaitable(constructed):
        await constructed
    if "tailrace_outer.serve.model" in sys.modules:  # user code has asked for a model
        from tailrace_outer.serve.model import models_loaded

        await models_loaded()


def _class_with_streams(
    body: Any, app_name: str, settings: Settings, *, drain_s: float
) -> type[Any]:  # Any: the user's
    """Return a class that wraps the ingress of the app. It builds the app's ASGI application with streams in a log
    store. It passes all other attributes on to the user's class or function."""

    async def construct(self: Any, *args: Any, **kwargs: Any) -> None:  # Any: the user's
        self.body = body
        if inspect.isclass(body):
            self.body = body.__new__(body)
            await _construct(body, self.body, *args, **kwargs)

    def get_attribute(self: Any, name: str) -> Any:  # Any: the user's
        if name == "body":  # not constructed yet
            raise AttributeError(name)
        return getattr(self.body, name)

    async def build(self: Any) -> ASGIApp:  # Any: the user's
        thread = StreamThread(settings)
        await thread.start()
        resumable = self.resumable = ResumableApp(await asgi_of(self.body), app_name, thread, drain_s=drain_s)
        return resumable

    async def check_health(self: Any) -> None:  # Any: the user's
        """Raises: RuntimeError if the log store is closed; what the user's check raises."""
        self.resumable.thread.check()
        check = getattr(self.body, "check_health", None)
        if check is not None:
            await call(check, (), {})

    async def close(self: Any) -> None:  # Any: the user's
        if "resumable" in vars(self):
            await self.resumable.close()
        leave = getattr(self.body, "__del__", None)
        if leave is not None:
            left = leave()
            if inspect.isawaitable(left):
                await left

    members = {
        "__init__": construct, "__getattr__": get_attribute, "__serve_build_asgi_app__": build,
        "check_health": check_health, "__del__": close,
    }  # fmt: skip
    return type(body.__name__, (), members)


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
