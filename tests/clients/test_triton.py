"""Triton's client, requests of Inferless' client, and readers of streams, which neither of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.clients.installed import run_python
from tests.http.wire import as_json
from tests.waiting import LONG_S

PROMPT = "Tell me of rivers."
SEED = 13
COUNT = 24
CHAT = Answer(chat_ids(PROMPT), COUNT, SEED)
SCRIPT = Path(__file__).with_name("scripts") / "tritonclient_outcomes.py"
REQUIREMENT = "tritonclient[http]==2.73.0"
WORKSPACE = "0123456789abcdef" * 2  # as Inferless names models

Json = Any  # Any: of JSON


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LONG_S, trust_env=False) as client:
        yield client


def tensors(name: str = "TEXT", prompt: str = PROMPT) -> Json:
    """Convert a dictionary to tensors as `inferless.call` does."""
    return {
        "inputs": [
            {"name": name, "shape": [1], "data": [prompt], "datatype": "BYTES"},
            {"name": "max_tokens", "shape": [1], "data": [COUNT], "datatype": "INT64"},
            {"name": "seed", "shape": [1], "data": [SEED], "datatype": "INT64"},
        ]
    }


def test_tritons_client(server: Server) -> None:
    ask: Json = {"model": "scripted", "outputs": ["text_output"]}
    sampling = [["max_tokens", "INT32", COUNT], ["seed", "INT64", SEED], ["temperature", "FP32", 0.5]]
    prompt = ["text_input", "BYTES", PROMPT]
    facts, whole, batched, usual, mixed, other, version, wrong, failed = run_python(
        REQUIREMENT,
        SCRIPT,
        address=f"127.0.0.1:{server.port}",
        questions=[
            {**ask, "inputs": [prompt, *sampling], "id": "seven"},
            {**ask, "inputs": [prompt, *sampling], "shape": [1, 1], "outputs": []},
            {**ask, "inputs": [prompt, *sampling], "binary": True, "outputs": None},  # as the client is without options
            {**ask, "inputs": [prompt, *sampling], "binary": True, "shape": [1, 1], "binary_output": True},
            {**ask, "inputs": [prompt], "model": "other"},
            {**ask, "inputs": [prompt], "version": "2"},
            {**ask, "inputs": [prompt, ["temperature", "FP32", -1]]},
            {**ask, "inputs": [prompt, ["stream", "BOOL", True]]},
        ],
    )
    assert [facts[name] for name in ("live", "ready", "model_ready", "other_ready")] == [True, True, True, False]
    assert facts["server"]["name"] == "tailrace"
    assert facts["model"]["name"] == facts["config"]["name"] == "scripted"
    assert "binary_tensor_data" in facts["server"]["extensions"]
    assert whole["texts"] == batched["texts"] == usual["texts"] == mixed["texts"] == [CHAT.text]
    assert whole["response"]["id"] == "seven"
    assert [one["shape"] for one in (whole, batched, usual, mixed)] == [[1], [1, 1], [1], [1, 1]]
    assert [one["is_binary"] for one in (whole, batched, usual, mixed)] == [False, True, True, True]
    refused = [(one["error"], one["status"]) for one in (other, version, wrong, failed)]
    assert refused == [("InferenceServerException", status) for status in ("404", "404", "400", "400")]


@pytest.mark.parametrize(
    ("name", "output"), [("TEXT", "OUT"), ("text_input", "text_output"), ("prompt", "generated_text")]
)
def test_what_inferless_sends(http: httpx.Client, name: str, output: str) -> None:
    path = f"/v2/models/scripted_{WORKSPACE}/versions/1/infer"
    answer = http.post(path, json=tensors(name), headers={"authorization": "Bearer 0123"})
    assert answer.status_code == 200
    assert answer.json() == {
        "model_name": "scripted",
        "model_version": "1",
        "outputs": [{"name": output, "datatype": "BYTES", "shape": [1], "data": [CHAT.text]}],
    }


@pytest.mark.parametrize(
    "body",
    [
        {"parameters": {"TEXT": PROMPT, "max_tokens": COUNT, "seed": SEED}},
        {"TEXT": PROMPT, "max_tokens": COUNT, "seed": SEED},
        {"TEXT": PROMPT, "parameters": {"max_tokens": COUNT, "seed": SEED}},
        tensors(),
    ],
    ids=["parameters", "bare", "both", "tensors"],
)
def test_every_byte(server: Server, body: Json) -> None:
    head = '{"model_name":"scripted","model_version":"1",'
    with server.wire() as wire:
        wire.send("POST", "/v2/models/scripted/generate_stream", body, {"accept": "text/event-stream"})
        assert wire.head() == 200
        assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
        texts = [_quoted(text) for text in CHAT.texts if text]
        assert wire.body() == "".join(f'data: {head}"OUT":{text}}}\n\n' for text in texts).encode()
    with server.wire() as wire:
        status, answer = wire.request("POST", "/v2/models/scripted/generate", body)
        assert (status, answer) == (200, f'{head}"OUT":{_quoted(CHAT.text)}}}'.encode())


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isascii() else "".join(f"\\u{unit:04x}" for unit in _units(c)) for c in text) + '"'


def _units(character: str) -> list[int]:
    halves = character.encode("utf-16-be")
    return [int.from_bytes(halves[at : at + 2], "big") for at in range(0, len(halves), 2)]


def test_a_reader_of_events(http: httpx.Client) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": COUNT, "seed": SEED, "stream": True}}
    with connect_sse(http, "POST", "/v2/models/scripted/generate_stream", json=body) as source:
        events = [event.json() for event in source.iter_sse()]
    assert "".join(event["text_output"] for event in events) == CHAT.text


@pytest.mark.parametrize("verb", ["infer", "generate", "generate_stream"])
@pytest.mark.parametrize(
    ("status", "model", "body"),
    [
        (404, "other", {"TEXT": PROMPT}),
        (404, "scripted/versions/2", {"TEXT": PROMPT}),
        (400, "scripted", {}),
        (400, "scripted", {"TEXT": PROMPT, "temperature": -1}),
        (400, "scripted", {"TEXT": PROMPT, "bad_words": "x"}),
        (400, "scripted", {"inputs": [{"name": "TEXT", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]}),
    ],
)
def test_refusals(http: httpx.Client, verb: str, status: int, model: str, body: Json) -> None:
    answer = http.post(f"/v2/models/{model}/{verb}", json=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert PROMPT not in answer.text
    assert http.get(f"/v2/models/{model}/{verb}").status_code == 405


def test_a_failure_in_the_middle_is_an_event(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--prompt-template", "{prompt}")  # which lets a prompt be the engine's control token
    body = {"TEXT": "<|fail|>", "max_tokens": 20}
    with server.wire() as wire:
        wire.send("POST", "/v2/models/scripted/generate_stream", body)
        assert wire.head() == 200
        *events, last = [as_json(event[6:]) for event in wire.events()]
    assert all("OUT" in event for event in events)
    assert 0 < len(events) <= 3
    assert "the script says so" in last["error"]
    for verb in ("generate", "infer"):
        answer = server.post(f"/v2/models/scripted/{verb}", body)
        assert (answer.status_code, list(answer.json())) == (500, ["error", "retryable"])


def test_who_leaves_stops_the_engine(paced: Server) -> None:
    with paced.wire() as wire:
        wire.send("POST", "/v2/models/scripted/generate_stream", {"TEXT": PROMPT, "max_tokens": 5_000})
        wire.head()
        stream_id = wire.headers["x-stream-id"]
        assert wire.event()
    assert paced.wait_state(stream_id, "cancelled")["usage"]["completion_tokens"] < 1_000


def test_bodies_of_other_types(http: httpx.Client) -> None:
    for kind in ("text/plain", "application/octet-stream"):
        answer = http.post("/v2/models/scripted/generate", content=b'{"TEXT":"Hi"}', headers={"content-type": kind})
        assert answer.status_code == 415
    foreign = {"origin": "http://evil.example"}  # a page may leave the type out, but not its origin
    assert http.post("/v2/models/scripted/generate", content=b'{"TEXT":"Hi"}', headers=foreign).status_code == 403
