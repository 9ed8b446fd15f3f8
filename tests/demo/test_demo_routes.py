"""The routes of the demo, and the refusals of the kill routes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
from tests.api.process import Server
from tests.demo.process import TOKEN, Demo, said_by_the_simulated
from tests.missing import skip_missing

PROMPT = "Why do rivers bend?"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "seed": 7}  # Any: of JSON
TEXT = said_by_the_simulated(PROMPT, 60)
KILLS = ("/demo/kill/engine", "/demo/kill/server")


def _plain_texts(demo: Demo, on_first: Callable[[], object]) -> tuple[str, bool]:
    """Return the text of a plain stream, and whether it broke. Calls `on_first` at the first token."""
    parts: list[str] = []
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 7}
    try:
        with httpx.stream("POST", f"{demo.url}/demo/plain", json=body, trust_env=False, timeout=60) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return "".join(parts), False
                if line.startswith("data: "):
                    parts.append(json.loads(line[6:])["text"])
                    if len(parts) == 1:
                        on_first()
    except httpx.TransportError:
        return "".join(parts), True
    raise AssertionError("it ended without its end")


def test_it_says_that_the_engine_is_simulated(demo: Demo) -> None:
    state = demo.demo_state()
    assert [(model["name"], model["is_simulated"]) for model in state["models"]] == [("scripted", True)]
    assert state["fetch"] is None


def test_a_plain_stream_has_the_same_text_as_a_kept_one(demo: Demo) -> None:
    stream_id = demo.create(BODY)
    assert _plain_texts(demo, lambda: None) == (TEXT, False)
    assert demo.wait_state(stream_id, "done")["text"] == TEXT


def test_the_engine_is_killed(demo: Demo) -> None:
    """The plain stream breaks; tailrace's stream continues on another engine."""
    stream_id, before = demo.create(BODY), demo.model()["pid"]
    text, is_broken = _plain_texts(demo, lambda: demo.kill("engine?model=scripted").raise_for_status())
    assert is_broken
    assert TEXT.startswith(text)
    assert len(text) < len(TEXT)
    end = demo.wait_state(stream_id, "done")
    assert (end["text"], end["continuity"]) == (TEXT, "replayed")
    assert demo.model()["pid"] not in (None, before)


@pytest.mark.deep
def test_the_server_is_killed() -> None:
    """The new server continues the stream. The plain stream is lost."""
    demo = Demo("--offline").wait_ready()
    try:
        stream_id, before = demo.create(BODY), demo.demo_state()["server"]
        text, is_broken = _plain_texts(demo, lambda: demo.kill("server").raise_for_status())
        assert is_broken
        assert len(text) < len(TEXT)
        after = demo.wait_life(before["life"] + 1)["server"]
        assert after["pid"] != before["pid"]
        assert not psutil.pid_exists(before["pid"])
        with httpx.Client(base_url=demo.url, trust_env=False, timeout=60) as client:
            events = client.get(f"/v1/streams/{stream_id}/events").text  # to the end
            assert events.count("event: done") == 1
            assert client.get(f"/v1/streams/{stream_id}").json()["text"] == TEXT
        demo.wait_line(r"The server was killed \(SIGKILL\)")
        demo.wait_line(r"1 stream goes on")
    finally:
        demo.close()


def test_times_of_a_stream(demo: Demo) -> None:
    stream_id = demo.create(BODY)
    demo.wait_state(stream_id, "done")
    times = demo.http.get(f"/demo/streams/{stream_id}/times").json()
    assert set(times) == {"queue_s", "prefill_s"}
    assert all(seconds >= 0 for seconds in times.values())
    assert demo.http.get("/demo/streams/none/times").status_code == 404


def test_one_stream_on_four_wires(demo: Demo) -> None:
    stream_id = demo.create(BODY)
    demo.wait_state(stream_id, "done")

    def shown(wire: str) -> list[Any]:  # Any: of JSON
        answer = demo.http.get(f"/demo/streams/{stream_id}/as/{wire}")
        assert answer.status_code == 200
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines] or [answer.text]

    assert "".join(event.get("text", "") for event in shown("native")) == TEXT
    chunks = [choice["delta"].get("content") or "" for chunk in shown("openai") for choice in chunk["choices"]]
    assert "".join(chunks) == TEXT
    assert "".join(event["token"]["text"] for event in shown("tgi")) == TEXT
    assert shown("plain") == [TEXT]
    assert demo.http.get(f"/demo/streams/{stream_id}/as/none").status_code == 404
    assert demo.http.get("/demo/streams/none/as/plain").status_code == 404


@pytest.mark.parametrize("path", KILLS)
@pytest.mark.parametrize(
    ("headers", "has_token"),
    [
        ({}, False),
        ({TOKEN: "wrong"}, False),
        ({TOKEN: "\u00e4"}, False),
        ({"origin": "https://elsewhere.example"}, True),
        ({"origin": "null"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
        ({"referer": "https://elsewhere.example/"}, True),
        ({"host": "elsewhere.example"}, True),
        ({"x-forwarded-for": "10.0.0.7"}, True),
        ({"forwarded": "for=10.0.0.7"}, True),
        ({"via": "1.1 proxy"}, True),
    ],
)
def test_requests_that_may_not_kill(demo: Demo, path: str, headers: dict[str, str], has_token: bool) -> None:
    before = demo.demo_state()
    sent = {name.encode(): value.encode() for name, value in headers.items()}
    if has_token:
        sent[TOKEN.encode()] = before["token"].encode()
    answer = httpx.post(f"{demo.url}{path}", headers=sent, trust_env=False)
    assert answer.status_code == 403
    assert before["token"] not in answer.text
    after = demo.demo_state()
    assert (after["server"], after["models"]) == (before["server"], before["models"])


@pytest.mark.parametrize("path", KILLS)
def test_a_get_kills_nothing(demo: Demo, path: str) -> None:
    assert demo.http.get(path, headers={TOKEN: demo.demo_state()["token"]}).status_code == 405


def test_other_pages_cannot_read_the_token(demo: Demo) -> None:
    answer = demo.http.get("/demo/state", headers={"origin": "https://elsewhere.example"})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in demo.http.get("/demo/state").headers


def test_no_engine_of_that_name(demo: Demo) -> None:
    assert demo.kill("engine?model=none").status_code == 404


def test_it_listens_only_on_loopback(demo: Demo) -> None:
    own = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    if not own:
        skip_missing("another address than loopback", "this machine has none")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own[0], demo.port), timeout=10)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/demo"), ("GET", "/demo/state"), ("POST", "/demo/plain"), *(("POST", p) for p in KILLS)],
)
def test_other_servers_have_no_demo(server: Server, method: str, path: str) -> None:
    assert server.http.request(method, path, json={}).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, None),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x" * 2001}, 400, "prompt"),
        ({"prompt": 1}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 513}, 400, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "seed": -1}, 400, "seed"),
        ({"prompt": "x", "n": 2}, 400, "n"),
        ({"prompt": "x", "model": "none"}, 404, "model"),
    ],
)
def test_invalid_bodies_of_plain_streams(demo: Demo, body: dict[str, Any], status: int, param: str | None) -> None:
    answer = demo.post("/demo/plain", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_plain_stream_needs_json(demo: Demo) -> None:
    assert demo.http.post("/demo/plain", content=b"prompt=x").status_code == 415
    assert demo.post("/demo/plain", []).status_code == 400


def test_the_number_of_plain_streams_is_limited(demo: Demo) -> None:
    body = {"prompt": PROMPT, "max_tokens": 512}
    with (
        httpx.Client(base_url=demo.url, trust_env=False, timeout=60) as client,
        client.stream("POST", "/demo/plain", json=body) as one,
        client.stream("POST", "/demo/plain", json=body) as two,
    ):
        assert (one.status_code, two.status_code) == (200, 200)
        refused = demo.post("/demo/plain", body)
        assert refused.status_code == 429
        assert "retry-after" in refused.headers


@pytest.mark.parametrize("path", ["/demo/page/none.js", "/demo/page/..%2Froutes.py", "/demo/page/", "/demo/none"])
def test_other_paths_are_404(demo: Demo, path: str) -> None:
    assert demo.http.get(path).status_code == 404
