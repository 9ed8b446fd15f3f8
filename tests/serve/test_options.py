from __future__ import annotations

from typing import Any

import pytest

from tailrace import serve
from tailrace_outer.serve.options import REMARKS, DeploymentOptions, read_options

_BASE = DeploymentOptions(name="Bot")

_FOREIGN = [
    "autoscaling_config", "deployment_actors", "gang_scheduling_config", "logging_config",
    "max_constructor_retry_count", "max_replicas_per_node", "max_surge_percent", "placement_group_bundles",
    "placement_group_strategy", "ray_actor_options", "request_router_config", "rolling_update_percentage",
    "graceful_shutdown_wait_loop_s",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_remarks() -> None:
    REMARKS.clear()


@pytest.mark.parametrize("name", _FOREIGN)
def test_options_that_only_ray_uses_are_logged_and_kept(name: str) -> None:
    options, foreign = read_options({name: {"a": 1}}, _BASE)
    assert options == _BASE
    assert foreign == {name: {"a": 1}}
    (remark,) = REMARKS
    assert remark.startswith(f"Bot: {name} is ignored: ")


def test_absent_options_are_not_logged() -> None:
    options, foreign = read_options(dict.fromkeys([*_FOREIGN, "num_replicas", "max_ongoing_requests"]), _BASE)
    assert (options, foreign, REMARKS) == (_BASE, {}, [])


def test_options_in_rays_form_are_read() -> None:
    options, _ = read_options({"num_replicas": "auto", "max_queued_requests": -1, "user_config": {"a": [1]}}, _BASE)
    assert (options.num_replicas, options.max_queued_requests, options.user_config) == (1, 1000, {"a": [1]})
    assert len(REMARKS) == 2
    assert all(remark.startswith("Bot: ") for remark in REMARKS)


@pytest.mark.parametrize(
    ("given", "kind", "reason"),
    [
        ({"replicas": 2}, TypeError, "Deployments have no option replicas. Did you mean num_replicas?"),
        ({"max_ongoing_request": 2}, TypeError, "max_ongoing_request. Did you mean max_ongoing_requests?"),
        ({"frobnicate": 2}, TypeError, "Deployments have no option frobnicate."),
        ({"version": "1"}, ValueError, "The option version is not supported"),
        ({"num_replicas": 0}, ValueError, "num_replicas should be at least 1."),
        ({"num_replicas": 257}, ValueError, "num_replicas should be at most 256."),
        ({"num_replicas": "two"}, TypeError, "num_replicas should be a whole number."),
        ({"num_replicas": True}, TypeError, "num_replicas should be a whole number."),
        ({"num_replicas": 1.5}, TypeError, "num_replicas should be a whole number."),
        ({"max_ongoing_requests": 0}, ValueError, "max_ongoing_requests should be at least 1."),
        ({"max_ongoing_requests": 10**10}, ValueError, "max_ongoing_requests should be at most 1000000000."),
        ({"max_queued_requests": -2}, ValueError, "max_queued_requests should be at least 0."),
        ({"graceful_shutdown_timeout_s": -1}, ValueError, "graceful_shutdown_timeout_s should be at least 0."),
        ({"graceful_shutdown_timeout_s": float("inf")}, ValueError, "graceful_shutdown_timeout_s should be at most"),
        ({"graceful_shutdown_timeout_s": float("nan")}, ValueError, "graceful_shutdown_timeout_s should be at least"),
        ({"health_check_period_s": 0}, ValueError, "health_check_period_s should be at least 0.01."),
        ({"health_check_timeout_s": "1"}, TypeError, "health_check_timeout_s should be a number."),
        ({"name": ""}, ValueError, "The name of a deployment should be text without #."),
        ({"name": "a#b"}, ValueError, "The name of a deployment should be text without #."),
        ({"user_config": object()}, TypeError, "user_config should be JSON."),
        ({"backpressure_config": {"status_code": 500}}, ValueError, "429 or 503"),
        ({"backpressure_config": {"retry_after_s": -1}}, ValueError, "retry_after_s of backpressure_config"),
        ({"backpressure_config": {"retry": 1}}, ValueError, "unknown field `retry`"),
        ({"backpressure_config": "503"}, ValueError, "Expected `object`, got `str`"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind) as refused:
        read_options(given, _BASE)
    assert reason in str(refused.value)


def test_the_config_of_backpressure_in_all_forms() -> None:
    class Theirs:
        status_code = 503
        retry_after_s = 2.5

    wanted = serve.BackpressureConfig(503, 2.5)
    for given in (wanted, {"status_code": 503, "retry_after_s": 2.5}, Theirs()):
        assert read_options({"backpressure_config": given}, _BASE)[0].backpressure_config == wanted
    with pytest.raises(ValueError, match="429 or 503"):
        serve.BackpressureConfig(500)
