"""A client sends requests that kill engines, one after the other. No other client is blamed."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.faults.house import House
from tests.waiting import LONG_S
from websockets.sync.client import connect

_COUNT = 30
_PACED = "scripted:tokens_per_s=200"


@contextmanager
def attacked(server: Server, num_attackers: int, control: str = "<|crash|>") -> Iterator[list[tuple[int, str]]]:
    """Attackers send killers, one after the other, each with a different text. Yields their answers."""
    is_over = threading.Event()
    numbers = itertools.count()
    answers: list[tuple[int, str]] = []

    def attack() -> None:
        with httpx.Client(base_url=server.url, timeout=LONG_S, trust_env=False) as client:
            while not is_over.is_set():
                body = {"prompt": f"{next(numbers)} {control}", "max_tokens": 50}
                answer = client.post("/v1/completions", json=body)
                answers.append((answer.status_code, answer.json()["error"]["code"]))
                if answer.status_code == 429:
                    is_over.wait(float(answer.headers["retry-after"]))

    with ThreadPoolExecutor(num_attackers) as pool:
        attacks = [pool.submit(attack) for _ in range(num_attackers)]
        try:
            yield answers
        finally:
            is_over.set()
        for one in attacks:
            one.result()


def chat(server: Server, text: str) -> str:
    """Ask, and return what is wrong with the answer, or nothing."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": _COUNT, "seed": 7, "model": "scripted"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False)
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    content = answer.json()["choices"][0]["message"]["content"]
    return "" if content == Answer(chat_ids(text), _COUNT, 7).text else f"answered {content}"


def _wait_killed(server: Server, count: int) -> None:
    deadline_s = time.monotonic() + LONG_S
    while server.log.count("Starting another engine.") < count:
        assert time.monotonic() < deadline_s, server.log
        time.sleep(0.01)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num_clients", "num_chats", "num_texts"),
    [
        pytest.param(3, 6, 1, id="one-chat"),
        pytest.param(16, 16, 16, id="distinct"),
        pytest.param(3, 45, 1, id="one-chat-long"),
        pytest.param(64, 64, 64, id="distinct-long"),
        pytest.param(10, 130, 130, id="many-long"),
    ],
)
@pytest.mark.timeout(400)
def test_harmless_chats_are_not_blamed(tmp_path: Path, num_clients: int, num_chats: int, num_texts: int) -> None:
    with House(tmp_path, _PACED) as house:
        server = house.server
        with attacked(server, 2) as answers, ThreadPoolExecutor(num_clients) as pool:
            _wait_killed(server, 1)
            texts = [f"Chat {number % num_texts}." for number in range(num_chats)]
            wrong = list(filter(None, pool.map(lambda text: chat(server, text), texts)))
        assert not wrong
        assert answers
        assert {code for _, code in answers} <= {"poison_request", "overloaded"}


@pytest.mark.deep
@pytest.mark.timeout(400)
@pytest.mark.parametrize("control", ["<|stall|>", "<|garbage|>"])
def test_running_streams_survive_other_ways_to_kill_an_engine(tmp_path: Path, control: str) -> None:
    with House(tmp_path, _PACED, "--stall-s", "0.5") as house:
        streams = [house.begin(Answer(f"Long {seed}.", 200, seed)).seen(1) for seed in range(4)]
        with attacked(house.server, 2, control) as answers:
            for stream in streams:
                stream.wait()
        assert {code for _, code in answers} <= {"poison_request", "overloaded"}


def test_a_ban_is_for_the_address_that_sent_the_request(tmp_path: Path) -> None:
    with House(tmp_path, _PACED) as house:
        body = {"prompt": "Now <|crash|>", "max_tokens": 50}
        other = httpx.Client(
            base_url=house.server.url, transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=LONG_S
        )

        def ask(**headers: str) -> httpx.Response:
            return house.server.post("/v1/completions", body, **headers)

        assert ask().json()["error"]["code"] == "poison_request"
        _wait_killed(house.server, 2)
        for headers in ({}, {"x_forwarded_for": "192.0.2.1", "forwarded": "for=192.0.2.1", "x_real_ip": "192.0.2.1"}):
            assert ask(**headers).json()["error"]["code"] == "poison_request"
        with connect(house.server.url.replace("http", "ws") + "/v1/ws") as socket:
            socket.send(json.dumps({"type": "create", "id": "a", **body}))
            assert "poison_request" in str(socket.recv())
        assert house.server.log.count("Starting another engine.") == 2  # all of these were refused before they ran
        with other:
            assert other.post("/v1/completions", json=body).json()["error"]["code"] == "poison_request"
        _wait_killed(house.server, 4)  # this one ran
