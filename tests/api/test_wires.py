"""The wires of plain text, text-generation-inference and OpenAI, byte for byte, over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.api.oracle import LOGPROB, Answer, chat_ids
from tests.api.process import Server
from tests.http.wire import Wire, as_json, sse_data

from tailrace_outer.scripted.texts import TEXTS

PROMPT = "Tell me of rivers."
COUNT = 21  # ends within a character
SEED = 5
COMPLETION = Answer(PROMPT, COUNT, SEED)
CHAT = Answer(chat_ids(PROMPT), COUNT, SEED)

OPENAI = {"max_tokens": COUNT, "seed": SEED, "model": "scripted"}
CHAT_BODY = {**OPENAI, "messages": [{"role": "user", "content": PROMPT}]}
TEXT_BODY = {**OPENAI, "prompt": PROMPT}
TGI_BODY = {"inputs": PROMPT, "parameters": {"max_new_tokens": COUNT, "seed": SEED, "details": True}}


@dataclass(frozen=True)
class Facade:
    """A wire whose streams are cancelled on disconnect. With `body` it generates `count` tokens."""

    name: str
    path: str
    body: Callable[[int], dict[str, Any] | None]  # Any: of JSON

    def send(self, wire: Wire, count: int, headers: dict[str, str] | None = None) -> None:
        wire.send("POST", self.path.format(count=count), self.body(count), headers)


def _chat(stream: bool) -> Callable[[int], dict[str, Any]]:
    return lambda count: {**CHAT_BODY, "max_tokens": count, "stream": stream}


def _text(stream: bool) -> Callable[[int], dict[str, Any]]:
    return lambda count: {**TEXT_BODY, "max_tokens": count, "stream": stream}


def _tgi(stream: bool | None) -> Callable[[int], dict[str, Any]]:
    extra = {} if stream is None else {"stream": stream}
    return lambda count: {"inputs": PROMPT, "parameters": {"max_new_tokens": count}, **extra}


STREAMING = [
    Facade("plain", "/?prompt=Hello&max_tokens={count}", lambda count: None),
    Facade("chat", "/v1/chat/completions", _chat(True)),
    Facade("text", "/v1/completions", _text(True)),
    Facade("tgi", "/", _tgi(True)),
    Facade("tgi-generate-stream", "/generate_stream", _tgi(None)),
]
WHOLE = [
    Facade("chat-whole", "/v1/chat/completions", _chat(False)),
    Facade("text-whole", "/v1/completions", _text(False)),
    Facade("tgi-whole", "/", _tgi(False)),
    Facade("tgi-generate", "/generate", _tgi(None)),
]
every = pytest.mark.parametrize("facade", [*STREAMING, *WHOLE], ids=lambda facade: facade.name)
streaming = pytest.mark.parametrize("facade", STREAMING, ids=lambda facade: facade.name)
whole = pytest.mark.parametrize("facade", WHOLE, ids=lambda facade: facade.name)


def _stream(server: Server, path: str, body: object) -> tuple[bytes, dict[str, str]]:
    with server.wire() as wire:
        status, content = wire.request("POST", path, body)
        assert status == 200, content
        assert wire.headers["transfer-encoding"] == "chunked"
        assert wire.headers["cache-control"] == "no-cache, no-transform"
        assert wire.headers["x-accel-buffering"] == "no"
        return content, wire.headers


def _log_text(server: Server, stream_id: str) -> str:
    """The text of a stream, as tailrace's own wire tells it."""
    body = server.http.get(f"/v1/streams/{stream_id}/events").content
    return "".join(as_json(line).get("text", "") for line in sse_data(body))


# Plain


def test_plain_is_the_text_and_nothing_else(server: Server) -> None:
    body, headers = _stream(server, "/?prompt=Tell%20me%20of%20rivers.&max_tokens=24", None)
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert body.decode() == _log_text(server, headers["x-stream-id"])
    assert len(body.decode()) > 24


def test_plain_writes_each_token_as_it_comes(serve: Callable[..., Server]) -> None:
    # So slow that tokens stay apart on a busy machine, too.
    with serve("scripted:tokens_per_s=5").wire() as wire:
        wire.send("POST", "/?prompt=rivers&max_tokens=8")
        assert wire.head() == 200
        pieces = []
        while piece := wire.chunk():
            pieces.append(piece)
    assert len(pieces) == 5  # four words and a character of four bytes
    assert all(piece.startswith(b" ") for piece in pieces[:4])
    assert len(pieces[4].decode()) == 1


@pytest.mark.parametrize("path", ["/query-stream", "/query-stream/"])
def test_the_articles_endpoint_reads_the_query_from_url_form_and_json(server: Server, path: str) -> None:
    """In the address, in a form and in JSON."""
    fields = {"query": PROMPT, "max_tokens": "9"}
    for answer in (
        server.http.get(path, params=fields),
        server.http.post(path, params=fields),
        server.http.post(path, data=fields),
        server.http.post(path, json={**fields, "max_tokens": 9}),
        server.http.post(path, params={"max_tokens": "9"}, json={"query": PROMPT}),
    ):
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert len(server.state(answer.headers["x-stream-id"])["text"]) == len(answer.text) > 0
        assert server.state(answer.headers["x-stream-id"])["usage"]["completion_tokens"] <= 9


def test_invalid_bodies_of_the_articles_endpoint(server: Server) -> None:
    path = "/query-stream/"
    for answer, status, param in (
        (server.http.post(path, params={"query": "a"}, data={"query": "b"}), 400, None),
        (server.http.post(path, json={"query": ["a"]}), 400, "query"),
        (server.http.post(path, json={"prompt": "a"}), 400, "query"),
        (server.http.post(path, json={"query": "a", "max_tokens": "x"}), 400, "max_tokens"),
        (server.http.post(path, files={"query": b"a"}), 415, "content-type"),
        (server.http.post(path, content=b"a", headers={"content-type": "text/plain"}), 415, "content-type"),
        (server.http.post(path, data={"query": "a"}, headers={"origin": "https://elsewhere.example"}), 403, "origin"),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    ignored = server.http.post(path, json={"query": PROMPT, "max_tokens": 1, "temperature": 1, "frobnicate": "x"})
    assert ignored.headers["x-tailrace-ignored"] == "temperature, frobnicate"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_tgi_refuses_a_parameter_under_its_own_name(server: Server, path: str) -> None:
    answer = server.post(path, {"inputs": PROMPT, "parameters": {"top_n_tokens": 3}})
    assert answer.status_code == 422
    assert answer.json()["error"] == "Input validation error: This engine does not support top_n_tokens."


def test_openai_refuses_a_parameter_under_its_own_name(server: Server) -> None:
    """`logprobs` of a text completion is a number; that of a chat is not."""
    answer = server.post("/v1/completions", {**TEXT_BODY, "logprobs": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    answer = server.post("/v1/chat/completions", {**CHAT_BODY, "logprobs": True, "top_logprobs": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


def test_get_on_the_root_explains_the_request(server: Server) -> None:
    answer = server.http.get("/")
    assert answer.status_code == 200
    assert "POST /?prompt=" in answer.text


# text-generation-inference


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
def test_tgi_streams_one_event_a_token(server: Server, path: str) -> None:
    body, headers = _stream(server, path, {**TGI_BODY, "stream": True})
    assert headers["content-type"] == "text/event-stream", "which one client compares with"
    details = {
        "finish_reason": "length",
        "generated_tokens": COUNT,
        "seed": None,
        "input_length": len(COMPLETION.prompt_ids),
    }
    prompt_text = PROMPT if path == "/" else ""  # the root shows the prompt where nobody says otherwise
    assert body == COMPLETION.tgi(prompt_text=prompt_text, details=details)


def test_tgi_streams_without_details(server: Server) -> None:
    parameters = {"max_new_tokens": COUNT, "seed": SEED, "return_full_text": False}
    body, _ = _stream(server, "/generate_stream", {"inputs": PROMPT, "parameters": parameters})
    assert body == COMPLETION.tgi()


@pytest.mark.parametrize("path", ["/", "/generate"])
def test_tgi_answers_without_streaming(server: Server, path: str) -> None:
    answer = server.post(path, TGI_BODY)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    if path == "/":
        assert len(found) == 1
        found = found[0]
    tokens = [
        {"id": token_id, "text": text, "logprob": LOGPROB, "special": False}
        for token_id, text in zip(COMPLETION.token_ids, COMPLETION.texts, strict=True)
    ]
    assert found == {
        "generated_text": (PROMPT if path == "/" else "") + COMPLETION.text,
        "details": {
            "finish_reason": "length",
            "generated_tokens": COUNT,
            "seed": None,
            "prefill": [],
            "tokens": tokens,
        },
    }


def test_tgi_shows_its_end_token_and_the_seed_of_a_sample(serve: Callable[..., Server]) -> None:
    server = serve("scripted:eos_after=5")
    parameters = {"max_new_tokens": 50, "seed": SEED, "details": True, "do_sample": True}
    body, _ = _stream(server, "/generate_stream", {"inputs": PROMPT, "parameters": parameters})
    *_, last = (as_json(line) for line in sse_data(body))
    assert last["token"] == {"id": 256, "text": "<|end|>", "logprob": LOGPROB, "special": True}
    text = Answer(PROMPT, 4, SEED).text
    assert last["generated_text"] == text
    assert last["details"]["finish_reason"] == "eos_token"
    assert last["details"]["seed"] == SEED


def test_tgi_leaves_the_stop_string_in_the_text(server: Server) -> None:
    stop = COMPLETION.text[10:14]
    parameters = {"max_new_tokens": COUNT, "seed": SEED, "details": True, "stop": [stop], "return_full_text": False}
    answer = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()
    assert answer["generated_text"] == COMPLETION.text[: COMPLETION.text.index(stop) + len(stop)]
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_tgi_truncates_the_prompt(server: Server) -> None:
    parameters = {"max_new_tokens": COUNT, "seed": SEED, "truncate": 4, "return_full_text": False}
    answer = server.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()
    assert answer["generated_text"] == Answer(PROMPT[-4:], COUNT, SEED).text


def test_tgi_info_and_health(server: Server) -> None:
    found = server.http.get("/info").json()
    assert found["model_id"] == "scripted"
    assert found["max_concurrent_requests"] == 128
    assert found["max_total_tokens"] > found["max_input_tokens"] > 1000
    health = server.http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


# OpenAI


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_openai_chunks(server: Server, kind: str, include_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    path, ask = ("/v1/chat/completions", CHAT_BODY) if kind == "chat" else ("/v1/completions", TEXT_BODY)
    body, headers = _stream(server, path, {**ask, "stream": True, **options})
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    created_s = as_json(sse_data(body)[0])["created"]
    stream_id = headers["x-stream-id"]
    if kind == "chat":
        assert body == CHAT.openai_chat(f"chatcmpl-{stream_id}", created_s, include_usage=include_usage)
    else:
        assert body == COMPLETION.openai_text(f"cmpl-{stream_id}", created_s, include_usage=include_usage)


def test_openai_without_streaming(server: Server) -> None:
    chat = server.post("/v1/chat/completions", CHAT_BODY)
    found = chat.json()
    assert found["id"] == f"chatcmpl-{chat.headers['x-stream-id']}"
    assert found["object"] == "chat.completion"
    assert found["model"] == "scripted"
    assert found["usage"] == CHAT.usage
    message = {"role": "assistant", "content": CHAT.text, "refusal": None}
    assert found["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    text = server.post("/v1/completions", TEXT_BODY).json()
    assert text["object"] == "text_completion"
    assert text["choices"] == [{"text": COMPLETION.text, "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert text["usage"] == COMPLETION.usage


def test_openai_logprobs_give_every_token_its_bytes(server: Server) -> None:
    body, _ = _stream(server, "/v1/chat/completions", {**CHAT_BODY, "stream": True, "logprobs": True})
    chunks = [as_json(line) for line in sse_data(body)[:-1]]
    entries = [
        entry
        for chunk in chunks
        if (given := chunk["choices"][0]["logprobs"]) is not None
        for entry in given["content"]
    ]
    assert [bytes(entry["bytes"]) for entry in entries] == CHAT.pieces
    assert {entry["logprob"] for entry in entries} == {LOGPROB}
    found = server.post("/v1/chat/completions", {**CHAT_BODY, "logprobs": True}).json()
    assert found["choices"][0]["logprobs"]["content"] == entries
    text = server.post("/v1/completions", {**TEXT_BODY, "logprobs": 0}).json()["choices"][0]
    assert len(text["logprobs"]["tokens"]) == len(text["logprobs"]["token_logprobs"]) == COUNT
    offsets = text["logprobs"]["text_offset"]
    pairs = zip(offsets, [*offsets[1:], len(text["text"])], strict=True)
    assert [text["text"][start:stop] for start, stop in pairs] == COMPLETION.texts


def test_openai_choices_are_interleaved_and_complete(server: Server) -> None:
    body, _ = _stream(server, "/v1/chat/completions", {**CHAT_BODY, "stream": True, "n": 3})
    texts, finishes = ["", "", ""], ["", "", ""]
    for line in sse_data(body)[:-1]:
        (choice,) = as_json(line)["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        finishes[choice["index"]] += choice["finish_reason"] or ""
    assert texts == [Answer(CHAT.prompt_ids, COUNT, SEED + index).text for index in range(3)]
    assert finishes == ["length"] * 3
    found = server.post("/v1/chat/completions", {**CHAT_BODY, "n": 3}).json()
    assert [choice["message"]["content"] for choice in found["choices"]] == texts
    assert found["usage"]["completion_tokens"] == 3 * COUNT


def test_openai_models(server: Server) -> None:
    found = server.http.get("/v1/models").json()
    assert found["object"] == "list"
    (model,) = found["data"]
    assert model["id"] == "scripted"
    assert model["object"] == "model"
    assert server.http.get("/v1/models/scripted").json() == model


def test_codex_gets_a_list_that_it_can_read(server: Server) -> None:
    answer = server.http.get("/v1/models", params={"client_version": "0.169.0"})
    assert answer.json() == {**server.http.get("/v1/models").json(), "models": []}
    assert "x-tailrace-ignored" not in answer.headers


def test_bare_text_that_breaks_off_says_why_on_our_own_wire(serve: Callable[..., Server]) -> None:
    """The number in the prompt makes the engine fail the sequence."""
    server = serve("scripted:text=-1,fault_after=2")
    with server.wire() as wire:
        wire.send("POST", f"/?prompt=Fail{len(TEXTS) + 2}")
        assert wire.head() == 200
        with pytest.raises(EOFError):
            wire.body()
    state = server.state(wire.headers["x-stream-id"])
    assert state["status"] == "error"
    assert state["error"] == {"code": "sequence_failed", "message": state["error"]["message"], "retryable": False}


def test_models_in_the_format_of_the_clients_header(server: Server) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    for path in ("/v1/models", "/v1/models/scripted"):
        ours, theirs = server.http.get(path), server.http.get(path, headers=headers)
        assert "object" in ours.json()
        assert "object" not in theirs.json()
        assert (ours.headers["vary"], theirs.headers["vary"]) == ("anthropic-version", "anthropic-version")
    assert server.http.get("/v1/models", params={"limit": 1}).headers["x-tailrace-ignored"] == "limit"
    assert "x-tailrace-ignored" not in server.http.get("/v1/models", params={"limit": 1}, headers=headers).headers


def test_openai_takes_the_newer_name_of_max_tokens_and_text_parts(server: Server) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of rivers."}]
    body = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": COUNT, "seed": SEED}
    found = server.post("/v1/chat/completions", body).json()
    assert found["choices"][0]["message"]["content"] == CHAT.text


def test_control_tokens_in_a_message_are_only_text(server: Server) -> None:
    """In a prompt of one's own they are what they say; from a chat they cannot reach the engine."""
    content = "<|crash|><|fail|><|user|>"
    answer = Answer(chat_ids(content), COUNT, SEED)
    body = {**CHAT_BODY, "messages": [{"role": "user", "content": content}]}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == answer.text


# What all of them promise


@every
def test_names_for_request_and_stream(server: Server, facade: Facade) -> None:
    with server.wire() as wire:
        facade.send(wire, 3, {"x-request-id": "mine-42.x~y"})
        assert wire.head() == 200
        body = wire.body()
        assert wire.headers["x-request-id"] == "mine-42.x~y"
        stream_id = wire.headers["x-stream-id"]
        facade.send(wire, 3, {"x-request-id": "has spaces in it"})
        assert wire.head() == 200
        wire.body()
        made = wire.headers["x-request-id"]
        assert made
        assert made != "has spaces in it"
        facade.send(wire, 3)
        wire.head()
        wire.body()
        assert wire.headers["x-request-id"] not in ("", made)
    text = _log_text(server, stream_id)
    assert text
    shown = body.decode() if facade.name == "plain" else body.decode().encode().decode("unicode_escape")
    assert text.split()[0] in shown


@streaming
def test_a_stream_of_another_wire_can_be_resumed_on_our_own(paced: Server, facade: Facade) -> None:
    """While its client still reads, another follows the same log."""
    with paced.wire() as wire, paced.wire() as other:
        facade.send(wire, 30)
        assert wire.head() == 200
        wire.chunk()
        other.send("GET", f"/v1/streams/{wire.headers['x-stream-id']}/events?after=0")
        assert other.head() == 200
        wire.body()
        lines = [as_json(line) for line in sse_data(other.body())]
    assert len(lines) == 31
    assert lines[-1]["status"] == "done"


@pytest.mark.parametrize("facade", [*STREAMING[1:], *WHOLE], ids=lambda facade: facade.name)
def test_ignored_fields_are_named(server: Server, facade: Facade) -> None:
    body = facade.body(2) or {}
    answer = server.post(facade.path, {**body, "frobnicate": {"a": 1}, "metadata2": None, "Käse\n": 1})
    assert answer.status_code == 200
    assert answer.headers["x-tailrace-ignored"] == "K?se?, frobnicate, metadata2"
    assert "x-tailrace-ignored" not in server.post(facade.path, body).headers


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/streams/{}/events", "/v1/streams/{}"])
def test_unknown_fields_of_a_query_are_named(server: Server, path: str) -> None:
    path = path.format(server.create({"prompt": PROMPT, "max_tokens": 1}))
    answer = server.http.get(path, params={"affter": "4", "Käse\n": ""})
    assert answer.status_code == 200
    assert answer.headers["x-tailrace-ignored"] == "affter, K?se?"
    assert "x-tailrace-ignored" not in server.http.get(path).headers


def test_unknown_parameters_of_tgi_are_named(server: Server) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1, "frobnicate": 1}}
    assert server.post("/generate", body).headers["x-tailrace-ignored"] == "parameters.frobnicate"


@whole
def test_whole_answers_have_a_content_length(server: Server, facade: Facade) -> None:
    with server.wire() as wire:
        facade.send(wire, 4)
        assert wire.head() == 200
        assert int(wire.headers["content-length"]) == len(wire.body())


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    """A server that runs one sequence at a time."""
    with contextlib.closing(Server("scripted:tokens_per_s=50", "--max-sequences", "1")) as running:
        yield running.wait_ready()


def _queued(server: Server) -> str:
    """A stream that waits for its turn, which takes another try if it came before the one it is to wait for."""
    for _ in range(50):
        state = server.post("/v1/streams", {"prompt": "Next.", "max_tokens": 2, "seed": 1}).json()
        if state["status"] == "queued":
            return str(state["id"])
    raise AssertionError("nothing occupies the engine")


@every
def test_a_disconnect_frees_the_slot(single: Server, facade: Facade) -> None:
    """The answer would take 200 s. The next request can start only if its slot is free."""
    with single.wire() as leaver, single.wire() as next_one:
        facade.send(leaver, 10_000)
        if facade in STREAMING:
            assert leaver.head() == 200
            leaver.chunk()
        waiting = _queued(single)
        next_one.send("GET", f"/v1/streams/{waiting}/events")
        assert next_one.head() == 200
        leaver.close()
        assert next_one.body() == b"".join(Answer("Next.", 2, 1).native(waiting))
    if facade in STREAMING:
        state = single.state(leaver.headers["x-stream-id"])
        assert state["status"] == "cancelled"
        assert state["usage"]["completion_tokens"] < 50
