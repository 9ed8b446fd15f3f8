"""The deployment of the built-in server, with options that fit streams."""

from __future__ import annotations

from typing import Any

from ray import serve

from tailrace.assembly.source import find_named
from tailrace.errors import ModelError
from tailrace.models.progress import NoProgress
from tailrace_outer.apps.on_ray.cluster import deploy, joins_cluster, on_cluster, say, wait_for_signal
from tailrace_outer.apps.on_ray.ray_replica import RayReplica
from tailrace_outer.apps.on_ray.spec import RayError, ServerSpec, check_redis

__all__ = ["NAME", "serve_models", "server_application"]

NAME = "tailrace"  # of the application and its deployment
_MAX_CONNECTIONS = 1000  # per replica; its own admission refuses requests that are too many
_SHUTDOWN_S = 10.0  # of a replica after its last request
_STATS_S = 1.0  # how often the router learns which replicas have a queue


def serve_models(spec: ServerSpec) -> None:
    """Deploy the built-in server, and wait for a signal. Raises: RayError."""
    check_redis(spec.settings)
    try:
        if not joins_cluster():  # where the models are on other machines
            _check_models(spec)
    except ModelError as error:
        raise RayError(error.message) from None
    least, most = spec.replicas
    number = (
        f"{least} replica" if most == 1 else f"{least} replicas" if least == most else f"{least} to {most} replicas"
    )
    with on_cluster(spec.settings) as names:
        say(f"Deploying {spec.models_text} on Ray …")
        deploy(server_application(spec), names, NAME, "/")
        say(f"Listening on http://{spec.settings.host}:{spec.settings.port} (on Ray, {number}).")
        wait_for_signal()


def _check_models(spec: ServerSpec) -> None:
    """Find or fetch the models. Raises: ModelError."""
    find_named(spec.named, NoProgress(), spec.settings, first=spec.first, own=spec.own)


def server_application(spec: ServerSpec) -> Any:  # Any: Ray's application
    options: dict[str, Any] = {  # Any: Ray's
        "name": NAME,
        "max_ongoing_requests": _MAX_CONNECTIONS,
        "max_queued_requests": _MAX_CONNECTIONS,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": spec.settings.drain_s + _SHUTDOWN_S,
        "max_constructor_retry_count": 3,
        "ray_actor_options": {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus},
        "request_router_config": {
            "request_router_class": "tailrace_outer.apps.on_ray.routing.SessionRouter",
            "request_routing_stats_period_s": _STATS_S,
        },
    }
    least, most = spec.replicas
    if least == most:
        options["num_replicas"] = least
    else:
        options["autoscaling_config"] = {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": spec.target_requests,
            "policy": {"policy_function": "tailrace_outer.apps.on_ray.scaling:by_requests"},
            **spec.autoscaling,
        }
    return serve.deployment(**options)(serve.ingress()(RayReplica)).bind(spec)
