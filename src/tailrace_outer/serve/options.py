"""The options of a deployment, and the options of Ray Serve that have no effect on one machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.wording import did_you_mean

__all__ = ["IGNORED", "REMARKS", "BackpressureConfig", "DeploymentOptions", "read_options"]

# Notes about ignored options. Every process of an app collects them; the user sees them once.
REMARKS: list[str] = []

# Options of Ray Serve that have no effect here, with the reason.
IGNORED = {
    "autoscaling_config": "the number of processes is num_replicas",
    "deployment_actors": "there are no actors",
    "gang_scheduling_config": "there is one machine",
    "logging_config": "logs go to stderr",
    "max_constructor_retry_count": "failed processes are restarted without limit",
    "max_replicas_per_node": "there is one machine",
    "max_surge_percent": "a changed app is restarted",
    "placement_group_bundles": "there is one machine",
    "placement_group_strategy": "there is one machine",
    "ray_actor_options": "a process may use the whole machine",
    "request_router_config": "each request goes to the process with the fewest requests",
    "rolling_update_percentage": "a changed app is restarted",
    "graceful_shutdown_wait_loop_s": "nothing is polled",
}


class BackpressureConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a request when the queue is full."""

    status_code: int = 429
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        if self.status_code not in (429, 503):
            raise ValueError("status_code of backpressure_config is 429 or 503.")
        if not 0 <= self.retry_after_s < math.inf:
            raise ValueError("retry_after_s of backpressure_config is 0 or more.")


class DeploymentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Units end the names: `_s` seconds."""

    name: str
    num_replicas: int = 1  # processes
    max_ongoing_requests: int = 100  # in one process
    max_queued_requests: int = 1000  # waiting for any of the processes
    graceful_shutdown_timeout_s: float = 20.0
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 30.0
    user_config: Any = None  # the argument of `reconfigure`: any JSON
    backpressure_config: BackpressureConfig = BackpressureConfig()


_NAMES = frozenset(field.name for field in msgspec.structs.fields(DeploymentOptions))
_LEAST = {
    "num_replicas": 1,
    "max_ongoing_requests": 1,
    "max_queued_requests": 0,
    "graceful_shutdown_timeout_s": 0,
    "health_check_period_s": 0.01,
    "health_check_timeout_s": 0.01,
}
_MOST = {"num_replicas": 256}


def read_options(given: Mapping[str, Any], base: DeploymentOptions) -> tuple[DeploymentOptions, dict[str, Any]]:
    """Apply options to `base`. Returns the result, and the options that only Ray uses, each noted in REMARKS.

    Raises: TypeError for an unknown option or one of the wrong type, ValueError for one out of range.
    """
    values = {name: value for name, value in given.items() if value is not None or name == "user_config"}
    if "version" in values:
        raise ValueError("The option version is not supported: a changed app is restarted.")
    unknown = sorted(values.keys() - _NAMES - IGNORED.keys())
    if unknown:
        meant = did_you_mean(unknown[0], _NAMES | IGNORED.keys())
        raise TypeError(f"Deployments have no option {unknown[0]}.{meant}")
    foreign: dict[str, Any] = {}
    for name in sorted(values.keys() & IGNORED.keys()):
        REMARKS.append(f"{base.name}: {name} is ignored: {IGNORED[name]}.")
        foreign[name] = values.pop(name)
    if values.get("num_replicas") == "auto":
        REMARKS.append(f'{base.name}: num_replicas="auto" is ignored: num_replicas is 1. Set a number to change it.')
        foreign["num_replicas"], values["num_replicas"] = "auto", 1
    if values.get("max_queued_requests") == -1:
        REMARKS.append(f"{base.name}: max_queued_requests=-1 would mean an unlimited queue: the limit is 1000.")
        foreign["max_queued_requests"], values["max_queued_requests"] = -1, 1000
    _check(values)
    return msgspec.structs.replace(base, **values), foreign


def _check(values: dict[str, Any]) -> None:
    if "name" in values and (not isinstance(values["name"], str) or "#" in values["name"] or not values["name"]):
        raise ValueError("The name of a deployment should be text without #.")
    for name, least in _LEAST.items():
        if name not in values:
            continue
        value = values[name]
        kinds = (int,) if name.startswith(("num_", "max_")) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name} should be a whole number." if kinds == (int,) else f"{name} should be a number.")
        most = _MOST.get(name, 10**9)
        if not least <= value <= most:
            raise ValueError(
                f"{name} should be at most {most}." if value > most else f"{name} should be at least {least}."
            )
    if "backpressure_config" in values:
        try:
            values["backpressure_config"] = msgspec.convert(
                values["backpressure_config"], BackpressureConfig, from_attributes=True
            )
        except msgspec.ValidationError as error:
            raise ValueError(f"backpressure_config: {str(error).rstrip('.')}.") from None
    if values.get("user_config") is not None:
        try:
            msgspec.json.encode(values["user_config"])
        except (TypeError, ValueError):
            raise TypeError("user_config should be JSON.") from None
