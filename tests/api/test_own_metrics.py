"""tailrace's own metrics, of real servers: what is counted, and when."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.keyed import serving_with_keys
from tests.api.process import Server
from tests.api.test_server_metrics import Samples, samples, scrape, wait_for

from tailrace.settings import Settings

CHAT = {"messages": [{"role": "user", "content": "Tell me of rivers."}], "max_tokens": 12, "seed": 1}


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:tokens_per_s=50")) as running:
        yield running.wait_ready()


def grown(before: Samples, after: Samples, *names: str) -> Samples:
    """Return how much these have grown, those that have."""
    names = tuple(f"tailrace_{name}" for name in names)
    return {
        name.removeprefix("tailrace_"): value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith(names) and value != before.get(name, 0)
    }


def test_tokens_by_phase_and_why_answers_end(server: Server) -> None:
    before = scrape(server)
    for _ in range(2):
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
    after = scrape(server)
    tokens = grown(before, after, "tokens_total")
    assert tokens["tokens_total{phase=decode}"] == 24
    prompt = tokens["tokens_total{phase=prefill}"] + tokens.get("tokens_total{phase=cached}", 0)
    assert prompt == after["tailrace_prompt_tokens_sum"] - before["tailrace_prompt_tokens_sum"]
    assert grown(before, after, "answers", "streams_ended") == {
        "answers_total{finish_reason=length}": 2,
        "streams_ended_total{reason=,status=done}": 2,
    }
    stages = ("queue", "prefill", "time_to_first_token", "inter_token", "decode", "request", "inference", "validation")
    assert grown(before, after, *(f"{stage}_seconds_count" for stage in stages)) == {
        f"{stage}_seconds_count": 2 for stage in stages
    }


def test_tokens_of_a_running_stream_are_counted_while_it_runs(slow: Server) -> None:
    before = scrape(slow)["tailrace_tokens_total{phase=decode}"]
    stream = slow.create({"prompt": "Long.", "max_tokens": 3000})
    wait_for(slow, lambda found: found["tailrace_tokens_total{phase=decode}"] >= before + 3)
    assert slow.state(stream)["status"] == "running"
    slow.post(f"/v1/streams/{stream}/cancel", {})
    usage = slow.wait_state(stream, "cancelled")["usage"]
    assert scrape(slow)["tailrace_tokens_total{phase=decode}"] == before + usage["completion_tokens"]


def test_tokens_that_nobody_reads(slow: Server) -> None:
    before = scrape(slow)
    read = slow.create({"prompt": "Read.", "max_tokens": 5})
    assert slow.http.get(f"/v1/streams/{read}/events").status_code == 200
    assert grown(before, scrape(slow), "unread") == {}
    unread = slow.create({"prompt": "Not read.", "max_tokens": 5})
    slow.wait_state(unread, "done")
    assert grown(before, scrape(slow), "unread") == {"unread_tokens_total": 5}


def test_readers_and_those_that_come_back(slow: Server) -> None:
    before = scrape(slow)
    stream = slow.create({"prompt": "Long.", "max_tokens": 3000})
    wait_for(slow, lambda found: grown(before, found, "tokens_total{phase=decode}") != {})
    with slow.wire() as first, slow.wire() as second:
        for wire, after in ((first, ""), (second, "?after=1")):
            wire.send("GET", f"/v1/streams/{stream}/events{after}")
            assert wire.head() == 200
        wait_for(slow, lambda found: grown(before, found, "readers") == {"readers": 2})
    wait_for(slow, lambda found: grown(before, found, "readers") == {})
    assert grown(before, scrape(slow), "follows") == {
        "follows_total{position=start}": 1,
        "follows_total{position=later}": 1,
    }
    slow.post(f"/v1/streams/{stream}/cancel", {})


def test_refusals_and_ignored_fields_by_reason(server: Server) -> None:
    before = scrape(server)
    assert server.post("/v1/chat/completions", {**CHAT, "temperature": -1}).status_code == 400
    assert server.post("/v1/chat/completions", {**CHAT, "messages": "x" * 200_000}).status_code == 400
    assert server.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    ignored = server.post("/v1/chat/completions", {**CHAT, "audio": {"voice": "x"}, "whatever": 1, "more": 2})
    assert set(ignored.headers["x-tailrace-ignored"].split(", ")) == {"audio", "whatever", "more"}
    assert grown(before, scrape(server), "refusals", "ignored") == {
        "refusals_total{reason=invalid_request}": 2,
        "refusals_total{reason=forbidden}": 1,
        "ignored_fields_total{field=audio,wire=openai}": 1,
        "ignored_fields_total{field=other,wire=openai}": 1,
    }


def test_replays_and_what_they_cost(slow: Server) -> None:
    before = scrape(slow)
    stream = slow.create({"prompt": "Long.", "max_tokens": 3000})
    wait_for(slow, lambda found: grown(before, found, "tokens_total{phase=decode}") != {})
    slow.worker().kill()
    found = wait_for(slow, lambda found: grown(before, found, "replay_silence_seconds_count") != {})
    replayed = grown(before, found, "replay", "engine_restarts")
    assert replayed["replays_total"] == replayed["replay_silence_seconds_count"] == replayed["engine_restarts"] == 1
    assert replayed["replayed_tokens_total{phase=prefill}"] == 5
    assert replayed["replayed_tokens_total{phase=decode}"] >= 1
    slow.post(f"/v1/streams/{stream}/cancel", {})


def test_streams_of_a_dead_server(tmp_path: Path) -> None:
    """Its tokens are not counted again."""
    flags = ("--data-dir", str(tmp_path))
    with contextlib.closing(Server("scripted:tokens_per_s=50", *flags)) as server:
        stream = server.wait_ready().create({"prompt": "Long.", "max_tokens": 3000})
        wait_for(server, lambda found: found["tailrace_tokens_total{phase=decode}"] > 30)
        server.send_signal(signal.SIGKILL)
        server.wait()
    with contextlib.closing(Server("scripted:tokens_per_s=50", *flags)) as server:
        server.wait_ready()
        found = wait_for(server, lambda found: found["tailrace_replay_silence_seconds_count"] == 1)
        assert found["tailrace_streams_taken_over_total"] == 1
        assert found["tailrace_replayed_tokens_total{phase=decode}"] >= 30
        server.post(f"/v1/streams/{stream}/cancel", {})
        usage = server.wait_state(stream, "cancelled")["usage"]
        made = scrape(server)["tailrace_tokens_total{phase=decode}"]
        assert made + found["tailrace_replayed_tokens_total{phase=decode}"] == usage["completion_tokens"]


def test_a_stopped_engine_is_a_stall(slow: Server) -> None:
    before = scrape(slow)
    stream = slow.create({"prompt": "Long.", "max_tokens": 3000})
    wait_for(slow, lambda found: grown(before, found, "tokens_total{phase=decode}") != {})
    slow.worker().send_signal(signal.SIGSTOP)
    wait_for(slow, lambda found: grown(before, found, "stalled_seconds_total{cause=engine}") != {})
    slow.worker().send_signal(signal.SIGCONT)
    assert grown(before, scrape(slow), "stalls_total{cause=engine}") == {"stalls_total{cause=engine}": 1}
    slow.post(f"/v1/streams/{stream}/cancel", {})


async def test_a_key_has_its_own_counts_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.api.server_metrics.MAX_KEYS", 1)
    async with serving_with_keys(tmp_path) as house:
        first, second = house.key(scopes=("generate", "read", "metrics")), house.key("you")
        for token in (first, second, first):
            async with house.client(token) as client:
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        async with house.client(first) as client, house.client(second) as other:
            for sender in (client, other):
                assert (await sender.post("/v1/chat/completions", json={**CHAT, "temperature": -1})).status_code == 400
            unread = (await client.post("/v1/streams", json={"prompt": "Not read.", "max_tokens": 5})).json()
            while (await client.get(f"/v1/streams/{unread['id']}")).json()["status"] != "done":
                await asyncio.sleep(0.01)  # whoever waits for its end as a reader gets its tokens
        async with house.client("tr_wrong") as nobody:
            assert (await nobody.post("/v1/chat/completions", json=CHAT)).status_code == 401
        async with house.client(first) as client:
            found = samples((await client.get("/metrics")).text)
        key = first.split("_")[1]
        assert found[f"tailrace_key_requests_total{{key={key}}}"] == 4
        assert found["tailrace_key_requests_total{key=other}"] == 2
        assert found[f"tailrace_key_tokens_total{{key={key},phase=decode}}"] == 29
        for name in (key, "other"):
            assert found[f"tailrace_key_refusals_total{{key={name},reason=invalid_request}}"] == 1
        assert found[f"tailrace_key_unread_tokens_total{{key={key}}}"] == 5
        assert found["tailrace_key_unread_tokens_total{key=other}"] == 0
        assert found["tailrace_refusals_total{reason=invalid_api_key}"] == 1
        assert second.split("_")[1] not in str(found)

        house.app = house.build_app(Settings(public_metrics=True))
        async with house.client() as anybody, house.client(first) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert "tailrace_key_" not in re.sub("#.*", "", (await anybody.get("/metrics")).text)
