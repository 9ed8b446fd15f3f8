"""What dies on Ray while streams run: a replica, the controller, a machine. The streams go on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from tests.apps.on_ray.cluster import REPLICA, kill_tree, processes, ray_house, two_machines
from tests.faults.house import Follower
from tests.faults.laws import status_of
from tests.http.wire import as_json, sse_data
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]


def test_a_replica_is_killed(tmp_path: Path) -> None:
    with ray_house(tmp_path) as house:
        house.begin("Kill.", 300, count=12)  # with four, all may be on the other replica
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


def test_a_replica_with_a_real_model_is_killed(tmp_path: Path) -> None:
    """The answer is the undisturbed one, greedy and with a seed."""
    with ray_house(tmp_path, "--threads", "1", model="smollm2") as house:
        for temperature in (0.0, 0.9):
            body = {"prompt": "A river is", "max_tokens": 300, "temperature": temperature, "seed": 7}
            answers = []
            for is_killed in (False, True):
                stream_id = house.server.create(body | {"ignore_eos": True})
                follower = Follower(house, stream_id)
                if is_killed:
                    follower.wait_events(10)
                    before_s = {replica: _processor_s(replica) for replica in house.replicas()}
                    follower.wait_events(100)
                    max(before_s, key=lambda replica: _processor_s(replica) - before_s[replica]).kill()
                follower.wait(timeout_s=240)
                assert status_of(follower.events[-1]) == "done"
                assert (b'"continuity":"replayed"' in follower.events[-1]) == is_killed
                answers.append(_token_ids(follower))
            assert answers[0] == answers[1]
            until(lambda: len(house.replicas()) == 2 and all(replica.children() for replica in house.replicas()))


def _processor_s(replica: psutil.Process) -> float:
    """The processor time of its engine."""
    return sum(sum(engine.cpu_times()[:2]) for engine in replica.children(recursive=True))


def _token_ids(follower: Follower) -> list[int]:
    return [token_id for event in follower.events for token_id in as_json(sse_data(event)[0]).get("token_ids", [])]


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
