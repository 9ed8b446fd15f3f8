"""The number of replicas changes under load, and a new version replaces them. No stream is cut."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any  # YAML

import pytest
import yaml
from tests.apps.on_ray.cluster import (
    LEASE_S,
    PACED,
    START_S,
    RayHouse,
    RayServer,
    ServeRun,
    free_port,
    ray_house,
    two_machines,
)
from tests.testing.redis_server import own_redis
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray" / "serve.yaml"


def _config(url: str) -> dict[str, Any]:
    """The file of `tailrace new ray`, with a scripted engine, a small machine and little patience."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    config["http_options"]["port"] = free_port()
    (app,) = config["applications"]
    app["args"] |= {"model": PACED, "replicas": "1-3", "target_requests": 4}
    app["args"]["autoscaling"] = {"upscale_delay_s": 1, "downscale_delay_s": 2, "look_back_period_s": 2}
    app["args"]["settings"] = {"journal": url, "lease_s": LEASE_S, "drain_s": 1}
    app["deployments"] = [{"name": "tailrace", "ray_actor_options": {"num_cpus": 0.1}}]
    return config


def test_up_and_down_under_a_ramp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
    with own_redis(tmp_path) as (url, _):
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump(_config(url)))
        with contextlib.closing(ServeRun(file)) as server:
            house = RayHouse(server.wait_ready(timeout_s=START_S))
            assert len(house.replicas()) == 1
            house.begin("Long.", 2500, count=2, num_readers=1)
            ramp = house.begin("Ramp.", 5000, count=9, num_readers=1)
            house.wait_replicas(3)
            house.begin("Spread.", 1500, count=3, num_readers=1)
            for stream in ramp:
                stream.ends = ("cancelled",)
                assert house.server.post(f"{stream.path}/cancel", {}).status_code == 200
            until(lambda: len(house.replicas()) < 3)
            house.check()
            house.wait_replicas(1)
            house.begin("Afterwards.", 20, count=1)
            house.check()
            house.is_open = False


def test_a_new_version_replaces_replicas_with_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `tailrace serve --on ray` with other settings. Streams shorter than --drain-s do not notice it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with two_machines() as (address, *above):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with ray_house(tmp_path, "--drain-s", "60", above=above) as house:
            before = house.replicas()
            short = house.begin("Short.", 400)
            flags = ("--replicas", "2", "--journal", house.journal, "--lease-s", str(LEASE_S), "--drain-s", "60")
            newer = RayServer(PACED, *flags, "--max-sequences", "32", port=house.server.port)
            with contextlib.closing(newer):
                newer.wait_ready(timeout_s=START_S)
                until(lambda: len(house.replicas()) == 2 and not {*house.replicas()} & {*before})
                house.check()
                assert {follower.num_connections for stream in short for follower in stream.followers} == {1}
                house.begin("Afterwards.", 20)
                house.check()
