"""Ollama's client with only the server's address."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator

import httpx
import pytest
from ollama import AsyncClient, Client, ResponseError
from tests.api.oracle import LOGPROB, Answer, chat_ids
from tests.api.process import Server
from tests.http.wire import as_json
from tests.waiting import LONG_S

PROMPT = "Tell me of rivers."
SEED = 13
COUNT = 24
RAW = Answer(PROMPT, COUNT, SEED)
CHAT = Answer(chat_ids(PROMPT), COUNT, SEED)
MESSAGES = [{"role": "user", "content": PROMPT}]
OPTIONS = {"num_predict": COUNT, "seed": SEED}


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=LONG_S) as client:
        yield client


@pytest.fixture
def streams() -> list[str]:
    """Return the ids of the streams that `watching` has seen."""
    return []


@pytest.fixture
def watching(paced: Server, streams: list[str]) -> Iterator[Client]:
    hooks = {"response": [lambda response: streams.append(response.headers["x-stream-id"])]}
    with Client(paced.url, timeout=LONG_S, event_hooks=hooks) as client:
        yield client


def test_a_chat_streams(client: Client) -> None:
    *parts, last = client.chat("scripted", MESSAGES, stream=True, options=OPTIONS)
    assert [part.message.content for part in parts] == [text for text in CHAT.texts if text]
    assert {(part.model, part.message.role, part.done) for part in parts} == {("scripted", "assistant", False)}
    assert (last.done, last.done_reason, last.message.content) == (True, "length", "")
    assert (last.prompt_eval_count, last.eval_count) == (len(CHAT.prompt_ids), COUNT)
    assert last.total_duration is not None
    assert last.eval_duration is not None
    assert last.prompt_eval_duration is not None
    assert last.load_duration == 0
    assert 0 < last.eval_duration + last.prompt_eval_duration <= last.total_duration + 3  # each of them is rounded


def test_a_chat_without_streaming(client: Client) -> None:
    answer = client.chat("scripted:latest", MESSAGES, options=OPTIONS)
    assert answer.message.content == answer["message"]["content"] == CHAT.text
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", COUNT)


def test_a_raw_prompt_streams(client: Client) -> None:
    *parts, last = client.generate("scripted", PROMPT, raw=True, stream=True, options=OPTIONS)
    assert [part.response for part in parts] == [text for text in RAW.texts if text]
    assert (last.done, last.done_reason, last.response, last.eval_count) == (True, "length", "", COUNT)


def test_a_prompt_is_a_chats_turn(client: Client) -> None:
    assert client.generate("scripted", PROMPT, options=OPTIONS).response == CHAT.text


def test_every_byte_of_a_stream(server: Server) -> None:
    with server.wire() as wire:
        wire.send("POST", "/api/chat", {"model": "scripted", "messages": MESSAGES, "options": OPTIONS})
        assert wire.head() == 200
        assert wire.headers["content-type"] == "application/x-ndjson"
        body = wire.body()
        created_at = as_json(body.splitlines()[0])["created_at"]
        head = {"model": "scripted", "created_at": created_at}

        def line(text: str, **more: object) -> bytes:
            fields = {**head, "message": {"role": "assistant", "content": text}, "done": False, **more}
            return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

        counts = {"prompt_eval_count": len(CHAT.prompt_ids), "eval_count": COUNT}
        expected = [line(text) for text in CHAT.texts if text]
        *lines, last = body.splitlines(keepends=True)
        assert lines == expected
        durations = {name: value for name, value in as_json(last).items() if name.endswith("_duration")}
        assert len(durations) == 4
        assert last == line("", done=True, done_reason="length", **counts, **durations)


def test_stop(client: Client) -> None:
    stop = CHAT.text[20:25]
    answer = client.chat("scripted", MESSAGES, options={**OPTIONS, "stop": [stop]})
    assert answer.message.content == CHAT.text[: CHAT.text.index(stop)]
    assert answer.done_reason == "stop"


def test_logprobs(client: Client) -> None:
    answer = client.generate("scripted", PROMPT, raw=True, options=OPTIONS, logprobs=True)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == COUNT
    assert {entry.logprob for entry in answer.logprobs} == {LOGPROB}
    assert answer.logprobs[0].token == RAW.texts[0]


def test_a_request_without_a_prompt_loads_the_model(client: Client) -> None:
    for answer in (client.generate("scripted"), client.chat("scripted")):
        assert (answer.done, answer.done_reason) == (True, "load")
    (part,) = client.chat("scripted", stream=True)
    assert part.done_reason == "load"


def test_models(client: Client) -> None:
    (model,) = client.list().models
    assert model.model == "scripted:latest"
    shown = client.show(model.model)
    assert shown.capabilities == ["completion", "vision", "insert"]
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 65_534
    (running,) = client.ps().models
    assert (running.name, running.context_length) == ("scripted:latest", 65_534)


def test_the_first_requests_of_the_command_line(server: Server) -> None:
    assert httpx.head(server.url, trust_env=False).status_code == 200
    assert httpx.head(server.url + "/api/version", trust_env=False).status_code == 200
    assert httpx.get(server.url + "/api/version", trust_env=False).json()["version"]


@pytest.mark.parametrize(
    ("status", "ask"),
    [
        (404, lambda client: client.chat("gemma4", MESSAGES)),
        (404, lambda client: client.show("gemma4")),
        (400, lambda client: client.embed("scripted", PROMPT)),
        (400, lambda client: client.chat("scripted", MESSAGES, options={"temperature": 9})),
        (400, lambda client: client.chat("scripted", MESSAGES, format="json")),
        (400, lambda client: list(client.chat("scripted", [{**MESSAGES[0], "content": "x" * 70_000}], stream=True))),
        (400, lambda client: client.chat("scripted", [{"role": "robot", "content": "Hi"}])),
        (400, lambda client: client.chat("scripted", [{**MESSAGES[0], "images": [b"an image"]}])),
        (400, lambda client: client.generate("scripted", PROMPT, template="{{ .Prompt }}")),
        (400, lambda client: client.generate("scripted", PROMPT, context=[1, 2, 3])),
        (400, lambda client: client.create("mine", from_="scripted")),
        (400, lambda client: client.copy("scripted", "mine")),
        (400, lambda client: client.delete("scripted")),
        (400, lambda client: client.push("scripted")),
        (404, lambda client: client.pull("gemma4")),
    ],
)
def test_refusals_are_raised(client: Client, status: int, ask: Callable[[Client], object]) -> None:
    with pytest.raises(ResponseError) as refused:
        ask(client)
    assert refused.value.status_code == status
    assert refused.value.error
    assert "{" not in refused.value.error  # the client has found the message


def test_a_model_that_is_there_can_be_pulled(client: Client) -> None:
    assert client.pull("scripted").status == "success"
    assert [each.status for each in client.pull("scripted:latest", stream=True)][-1] == "success"


def test_a_model_is_asked_to_be_unloaded(client: Client) -> None:
    answer = client.generate("scripted", keep_alive=0)
    assert (answer.done, answer.done_reason, answer.response) == (True, "unload", "")


def test_the_error_in_a_stream_is_raised(client: Client) -> None:
    stream = client.generate("scripted", "<|fail|>", raw=True, stream=True, options={"num_predict": 20})
    assert next(stream).response
    with pytest.raises(ResponseError, match="the script says so"):
        list(stream)
    with pytest.raises(ResponseError, match="the script says so") as failed:
        client.generate("scripted", "<|fail|>", raw=True, options={"num_predict": 20})
    assert failed.value.status_code == 500


def test_a_stream_cancelled_by_another_client_is_an_error(watching: Client, paced: Server, streams: list[str]) -> None:
    stream = watching.chat("scripted", MESSAGES, stream=True, options={"num_predict": 5_000})
    next(stream)
    paced.post(f"/v1/streams/{streams[0]}/cancel", None)
    with pytest.raises(ResponseError, match="cancelled"):
        list(stream)


def test_a_disconnect_stops_the_engine(watching: Client, paced: Server, streams: list[str]) -> None:
    stream = watching.chat("scripted", MESSAGES, stream=True, options={"num_predict": 5_000})
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()
    assert paced.wait_state(streams[0], "cancelled")["usage"]["completion_tokens"] < 1_000


@pytest.mark.deep
def test_overload(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100", "--max-concurrent-requests", "1")
    server.create({"prompt": "Long.", "max_tokens": 5_000})
    with Client(server.url, timeout=LONG_S) as client, pytest.raises(ResponseError) as full:
        client.chat("scripted", MESSAGES)
    assert full.value.status_code == 503


@pytest.mark.deep
def test_heartbeats_are_ignored(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=10", "--heartbeat-s", "0.01")
    options = {"num_predict": 6, "seed": SEED}
    with Client(server.url, timeout=LONG_S) as client:
        chat = list(client.chat("scripted", MESSAGES, stream=True, options=options))
        raw = list(client.generate("scripted", PROMPT, raw=True, stream=True, options=options))
    assert any(not part.message.content and not part.done for part in chat)
    assert "".join(part.message.content or "" for part in chat) == Answer(CHAT.prompt_ids, 6, SEED).text
    assert any(not part.response and not part.done for part in raw)
    assert "".join(part.response or "" for part in raw) == Answer(PROMPT, 6, SEED).text


async def test_the_asynchronous_client(server: Server) -> None:
    async with AsyncClient(server.url, timeout=LONG_S) as client:
        assert (await client.chat("scripted", MESSAGES, options=OPTIONS)).message.content == CHAT.text
        parts = [part async for part in await client.chat("scripted", MESSAGES, stream=True, options=OPTIONS)]
        assert "".join(part.message.content or "" for part in parts) == CHAT.text
        failing = await client.generate("scripted", "<|fail|>", raw=True, stream=True, options={"num_predict": 20})
        with pytest.raises(ResponseError):
            [part async for part in failing]


def test_the_client_finds_the_server_by_its_variable(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{server.port}")
    with Client() as client:
        assert client.chat("scripted", MESSAGES, options=OPTIONS).message.content == CHAT.text
