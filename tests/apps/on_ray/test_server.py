"""The built-in server on two replicas of a local Ray: the same answers on every wire, and refusal of overload."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any  # JSON
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from tests.api.process import Server
from tests.apps.on_ray.cluster import PACED, RayServer, ray_house
from tests.testing.redis_server import own_redis
from tests.waiting import LONG_S

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

PROMPT = "Once upon a time"


def test_the_server_on_two_replicas(tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 11}
    wires = ("/v1/completions", "/generate", "/v1/chat/completions", "/api/generate")
    bodies = (
        body,
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "seed": 11}},
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "seed": 11},
        {"model": "scripted", "prompt": PROMPT, "stream": False, "options": {"num_predict": 20, "seed": 11}},
    )
    with contextlib.closing(Server(PACED)) as here:
        here.wait_ready()
        expected = [_said(here.post(wire, asked).json()) for wire, asked in zip(wires, bodies, strict=True)]
    with ray_house(tmp_path, "--max-concurrent-requests", "2") as house:
        server = house.server
        assert [_said(server.post(wire, asked).json()) for wire, asked in zip(wires, bodies, strict=True)] == expected
        assert len(server.http.get("/healthz").headers.get_list("x-request-id")) == 1
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[0]
        assert len(chunks) > 5
        statuses: list[int] = []
        retries: list[str] = []

        def ask(client: httpx.Client) -> None:
            with client:
                got = client.post("/v1/completions", json=body | {"max_tokens": 600})
            statuses.append(got.status_code)
            retries.extend([got.headers["retry-after"]] if got.status_code != 200 else [])

        clients = [httpx.Client(base_url=server.url, timeout=LONG_S, trust_env=False) for _ in range(12)]
        askers = [threading.Thread(target=ask, args=[client]) for client in clients]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert set(statuses) == {200, 429}
        assert 2 < statuses.count(200) <= 4, "more than one replica's worth, and no more than two's"
        assert len(retries) == statuses.count(429)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert sum("tailrace.engines.worker" in " ".join(child.cmdline()) for child in children) == 2


def test_a_cluster_that_cannot_be_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at RAY_ADDRESS, or a server that is not Ray. The command ends with one line."""
    with own_redis(tmp_path) as (url, _), socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for address, reason in (
            (f"127.0.0.1:{unused.getsockname()[1]}", "Connection refused"),
            (f"127.0.0.1:{urlsplit(url).port}", "no Ray has answered within 60 s"),
            ("nonsense", "Invalid address format: nonsense"),
        ):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with contextlib.closing(RayServer(PACED, "--journal", url)) as server:
                server.wait_line(f"tailrace: The cluster at RAY_ADDRESS cannot be joined: {reason}", timeout_s=180)
                assert server.wait() == 1


def _said(answer: dict[str, object]) -> object:
    """The text of an answer, whatever the wire."""
    for name in ("generated_text", "response"):
        if name in answer:
            return answer[name]
    choices: Any = answer["choices"]
    return choices[0].get("text") or choices[0]["message"]["content"]
