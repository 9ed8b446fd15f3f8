"""What dies on Ray while streams run: a replica, the controller, a machine. The streams go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.apps.on_ray.cluster import REPLICA, kill_tree, processes, ray_house, two_machines
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]


def test_a_replica_is_killed(tmp_path: Path) -> None:
    with ray_house(tmp_path) as house:
        house.begin("Kill.", 300)
        killed = house.replicas()[0]
        killed.kill()
        # Any replica answers for any stream.
        stopped, *_ = house.begin("Stop.", 5000, count=1)
        stopped.ends = ("cancelled",)
        assert house.server.post(f"{stopped.path}/cancel", {}).status_code == 200
        house.check()
        assert any(b'"continuity":"replayed"' in stream.end for stream in house.streams)
        assert sum(follower.num_connections for stream in house.streams for follower in stream.followers) > 10
        deleted = house.streams[0]
        assert house.server.http.delete(deleted.path).status_code == 204
        assert {house.server.http.get(deleted.path).status_code for _ in range(10)} == {410}
        until(lambda: len(house.replicas()) == 2 and killed not in house.replicas())


def test_the_controller_is_killed(tmp_path: Path) -> None:
    with ray_house(tmp_path) as house:
        streams = house.begin("Control.", 300)
        (controller,) = processes("ray::ServeController", house.server.process.pid)
        controller.kill()
        house.check()
        assert all(follower.num_connections == 1 for stream in streams for follower in stream.followers)
        until(lambda: processes("ray::ServeController", house.server.process.pid) not in ([], [controller]))
        house.begin("Afterwards.", 20)


def test_a_machine_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two raylets on this machine, each with a replica and a proxy. All processes of one are killed."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with two_machines() as (address, head, other):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with ray_house(tmp_path, above=(head, other)) as house:
            assert len(processes(REPLICA, other)) == 1
            house.begin("Lose.", 300, count=12)
            kill_tree(other)
            house.check()
            assert any(b'"continuity":"replayed"' in stream.end for stream in house.streams)
            house.begin("Afterwards.", 20)
