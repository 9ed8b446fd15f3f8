"""Users' apps on Ray."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import serve
from starlette.types import ASGIApp

from tailrace.apps.on_ray.cluster import deploy, on_cluster, say, wait_for_signal
from tailrace.apps.on_ray.spec import RayError
from tailrace.apps.target import load, options_of
from tailrace.serve.deployment import Application, nodes, replaced
from tailrace.serve.failures import failed
from tailrace.serve.ingress import asgi_of, has_ingress
from tailrace.serve.options import DeploymentOptions

if TYPE_CHECKING:
    from tailrace.apps.host import AppSpec
    from tailrace.apps.targets import Plan
    from tailrace.settings import Settings

__all__ = ["run_apps"]


def run_apps(plan: Plan, settings: Settings) -> None:
    """Deploy the apps of a plan, and wait for a signal. Raises: RayError."""
    with on_cluster(settings) as names:
        for spec in plan.apps:
            application = _application(spec)
            say(f"Deploying {spec.target.app_name} on Ray …")
            deploy(application, names, spec.target.app_name, spec.route_prefix or "/")
            url = f"http://{settings.host}:{settings.port}{spec.route_prefix or '/'}"
            say(f"{spec.target.app_name} runs at {url} (on Ray).")
        wait_for_signal()


def _application(spec: AppSpec) -> Any:  # Any: Ray's
    """Raises: RayError if the app cannot be imported."""
    try:
        app, notes = load(spec.target)
        options = options_of(app, spec.target)
    except BaseException as error:
        told = failed(error, f"importing {spec.target.target}")
        sys.stderr.write(told.traceback)
        raise RayError(f"{f'{spec.where}: ' if spec.where else ''}{told.message}") from None
    for note in notes:
        say(f"tailrace: {note}")
    return _on_ray(app, options)


def _on_ray(app: Application, options: Mapping[str, tuple[DeploymentOptions, Mapping[str, Any]]]) -> Any:  # Any: Ray's
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
