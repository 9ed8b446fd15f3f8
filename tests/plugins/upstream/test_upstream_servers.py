"""tailrace in front of real server processes, which are cut off, killed and restarted."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from tests.api.process import Server
from tests.engines.fake_upstream import (
    SSE,
    FakeUpstream,
    UpstreamRequest,
    answer_of,
    chat_chunk,
    done,
    head,
    text_chunk,
)
from tests.http.wire import sse_data
from tests.missing import skip_missing
from tests.waiting import LONG_S

from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.resolve import resolve
from tailrace.testing import Chaos, Flow, Line
from tailrace_plugins.upstream.upstream_models import find_upstream, upstream_key

__all__ = ["llama_server"]

Serve = Callable[..., Server]

_CHAT = {
    "messages": [{"role": "user", "content": "Tell me of dogs 🐕."}],
    "max_tokens": 30,
    "seed": 5,
    "temperature": 0,
}
_TEXT = {"prompt": "The river", "max_tokens": 30, "seed": 5, "temperature": 0}
_CUTS: list[tuple[int, Literal["fin", "reset"]]] = [(0, "reset"), (2500, "fin"), (3300, "reset"), (1000, "reset")]
_MODELS = {"data": [{"id": "m", "owned_by": "somebody"}]}


def _chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream of OpenAI's wire."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def _end(server: Server, stream_id: str) -> dict[str, Any]:
    return server.wait_state(stream_id, "done", "error")


# What passes through


@pytest.fixture(scope="module")
def fronts(paced: Server) -> Iterator[dict[str, Server]]:
    """Two servers in front of the same upstream: one uses OpenAI's wire, the other TGI's."""
    with contextlib.ExitStack() as running:
        found = {kind: Server(f"{kind}:{paced.url}") for kind in ("openai", "tgi")}
        for front in found.values():
            running.callback(front.close)
        yield {kind: front.wait_ready() for kind, front in found.items()}


@pytest.mark.parametrize("kind", ["openai", "tgi"])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", _CHAT), ("/v1/completions", _TEXT)])
def test_answers_equal_those_of_the_upstream_server(
    fronts: dict[str, Server], paced: Server, kind: str, path: str, body: dict[str, Any]
) -> None:
    front = fronts[kind]
    behind, before = paced.post(path, body).json(), front.post(path, body).json()
    assert before["choices"] == behind["choices"]
    assert before["usage"] == behind["usage"]
    streamed = _chunks(front.post(path, body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert streamed[-1]["usage"] == behind["usage"]


def test_a_stream_can_be_read_later(fronts: dict[str, Server], paced: Server) -> None:
    front = fronts["openai"]
    text = paced.post("/v1/completions", _TEXT).json()["choices"][0]["text"]
    stream_id = front.create({"prompt": _TEXT["prompt"], "max_tokens": 30, "seed": 5, "temperature": 0})
    assert _end(front, stream_id)["status"] == "done"
    events = front.http.get(f"/v1/streams/{stream_id}/events").text
    assert "".join(json.loads(line[6:]).get("text", "") for line in events.splitlines() if line[:6] == "data: ") == text


def test_several_answers_and_a_stop_string(fronts: dict[str, Server], paced: Server) -> None:
    several = _TEXT | {"n": 2}
    behind, before = (server.post("/v1/completions", several).json() for server in (paced, fronts["openai"]))
    assert before["choices"] == behind["choices"]
    assert before["usage"] == behind["usage"]
    stop = behind["choices"][0]["text"].split()[3]
    behind, before = (
        server.post("/v1/completions", _TEXT | {"stop": stop}).json() for server in (paced, fronts["tgi"])
    )
    assert before["choices"] == behind["choices"]
    assert before["choices"][0]["finish_reason"] == "stop"


def test_unsupported_requests_are_refused(fronts: dict[str, Server]) -> None:
    for body, param in ((_TEXT | {"logprobs": 1}, "logprobs"), (_TEXT | {"prompt": [7000, 8000]}, "prompt")):
        refusal = fronts["openai"].post("/v1/completions", body)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, param)


def test_refusals_of_the_upstream_server_are_passed_on(fronts: dict[str, Server]) -> None:
    refusal = fronts["openai"].post("/v1/completions", _TEXT | {"guided_regex": "a+"})
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "request_refused")
    assert (
        "answers with status 400 and says: This engine does not support grammar." in refusal.json()["error"]["message"]
    )
    assert refusal.json()["error"]["type"] == "invalid_request_error"


# What is survived


def test_clients_do_not_notice_cuts(serve: Serve, paced: Server) -> None:
    whole = paced.post("/v1/chat/completions", _CHAT).json()
    cuts = [Line(to_client=Flow(end_after_bytes=count, end=end)) for count, end in _CUTS]
    with Chaos(paced.port, [Line(), *cuts]) as chaos:
        front = serve(f"openai:{chaos.url}")
        body = _CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = _chunks(front.post("/v1/chat/completions", body))
        assert chaos.num_connections == 2 + len(cuts)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_the_upstream_server_is_killed_and_replaced(serve: Serve) -> None:
    first = serve("scripted:tokens_per_s=100")
    with Chaos(first.port) as chaos:
        front = serve(f"openai:{chaos.url}")
        worker = front.worker().pid
        stream_id = front.create(_TEXT | {"max_tokens": 150, "n": 2})
        with front.http.stream("GET", f"/v1/streams/{stream_id}/events") as reading:
            lines = reading.iter_lines()
            while '"text"' not in next(lines):
                pass
            first.process.kill()
            first.wait()
            second = serve("scripted:tokens_per_s=1000")
            chaos.server_port = second.port
            whole = "\n".join(lines)
        assert '"status":"done"' in whole
        state = front.state(stream_id)
        assert state["status"] == "done"
        assert '"replayed"' in whole
        assert front.worker().pid == worker, "nothing of this server's had to be replaced"
        expected = second.post("/v1/completions", _TEXT | {"max_tokens": 150, "n": 2}).json()
        assert (
            front.post("/v1/completions", _TEXT | {"max_tokens": 150, "n": 2}).json()["choices"] == expected["choices"]
        )


@pytest.mark.deep
def test_the_worker_dies_as_well(serve: Serve, paced: Server) -> None:
    front = serve(f"openai:{paced.url}")
    stream_id = front.create(_TEXT | {"max_tokens": 100})
    with front.http.stream("GET", f"/v1/streams/{stream_id}/events") as reading:
        lines = reading.iter_lines()
        while '"text"' not in next(lines):
            pass
        front.worker().kill()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert events[-1]["continuity"] == "replayed", events[-1]
    assert events[-1]["usage"]["completion_tokens"] == 100


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeUpstream]:
    with FakeUpstream(b"", models=_MODELS) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def front(fake: FakeUpstream) -> Iterator[Server]:
    """A server in front of a fake server, whose answers the test sets."""
    with contextlib.closing(Server(f"openai:{fake.url}")) as running:
        yield running.wait_ready()


def _cut_after(*chunks: bytes) -> bytes:
    return SSE + b"".join(chunks)


def test_the_same_text_in_other_chunks_is_the_same_text(fake: FakeUpstream, front: Server) -> None:
    cut = _cut_after(text_chunk("The ol"), text_chunk("d ri"))
    fake.say(cut, answer_of("Th", "e old river", " runs", usage=(2, 6)))
    answer = front.post("/v1/completions", _TEXT).json()
    assert answer["choices"][0]["text"] == "The old river runs"
    assert answer["usage"]["completion_tokens"] == 6


def test_another_text_continues_after_the_delivered_text(fake: FakeUpstream, front: Server) -> None:
    cut = _cut_after(text_chunk("one "), text_chunk("two "))
    fake.say(cut, answer_of("uno ", "due "), answer_of("three", usage=(9, 1)))
    stream_id = front.create(_TEXT)
    state = _end(front, stream_id)
    assert (state["status"], state["text"]) == ("done", "one two three")
    assert state["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert '"continued"' in front.http.get(f"/v1/streams/{stream_id}/events").text
    assert [asked.body["prompt"] for asked in fake.asked] == ["The river", "The river", "The riverone two "]
    assert fake.asked[2].body["max_tokens"] == 28


def test_an_exact_request_gets_an_error_instead_of_another_text(fake: FakeUpstream, front: Server) -> None:
    fake.say(_cut_after(text_chunk("one ")), answer_of("uno "))
    state = _end(front, front.create(_TEXT | {"continuity": "exact"}))
    assert (state["status"], state["text"], state["error"]["code"]) == ("error", "one ", "diverged")


_CUT_CHAT = _cut_after(chat_chunk({"content": "one "}), chat_chunk({"content": "two "}))
_OTHER_CHAT = _cut_after(chat_chunk({"content": "uno"}), chat_chunk({}, "stop"), done())


@pytest.mark.deep
def test_long_reasoning_is_not_a_hang(serve: Serve) -> None:
    def think(asked: UpstreamRequest) -> bytes:
        asked.sock.sendall(SSE)
        for _ in range(30):
            asked.sock.sendall(chat_chunk({"reasoning_content": "hm"}))
            time.sleep(0.1)
        return chat_chunk({"content": "so"}) + chat_chunk({}, "stop") + done()

    with FakeUpstream(think, models=_MODELS) as upstream:
        server = serve(f"openai:{upstream.url}", "--stall-s", "1.5")
        message = server.post("/v1/chat/completions", _CHAT).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm" * 30, "so")
        assert len(upstream.asked) == 1
        assert "no progress" not in server.log


@pytest.mark.deep
def test_reasoning_of_another_tailrace_is_passed_on(serve: Serve) -> None:
    behind = serve("scripted:thinks=24")
    for flags in ((), ("--reasoning", "text")):  # of the server in front
        front = serve(f"openai:{behind.url}/v1", *flags)
        asked = _CHAT | {"max_tokens": 60}
        theirs = behind.post("/v1/chat/completions", asked).json()["choices"][0]["message"]
        ours = front.post("/v1/chat/completions", asked).json()["choices"][0]["message"]
        if flags:
            assert ours["content"] == f"<think>\n{theirs['reasoning_content']}\n</think>\n\n{theirs['content']}"
        else:
            assert ours == theirs


def test_a_chat_that_cannot_be_continued_fails(fake: FakeUpstream, front: Server) -> None:
    fake.say(_CUT_CHAT, _OTHER_CHAT)
    failure = front.post("/v1/chat/completions", _CHAT)
    assert failure.status_code == 500
    assert "cannot continue an interrupted answer" in failure.json()["error"]["message"]


def test_a_chat_is_continued_if_the_server_can(serve: Serve) -> None:
    last = _cut_after(chat_chunk({"content": "three"}), chat_chunk({}, "stop"), done())
    with FakeUpstream(_CUT_CHAT, _OTHER_CHAT, last, models={"data": [{"id": "m", "owned_by": "vllm"}]}) as upstream:
        answer = serve(f"openai:{upstream.url}").post("/v1/chat/completions", _CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "one two three"
        assert upstream.asked[2].body["continue_final_message"] is True


def test_retries_of_a_server_that_always_breaks_off_end(fake: FakeUpstream, front: Server) -> None:
    fake.say(_cut_after(text_chunk("one ")))
    failure = front.post("/v1/completions", _TEXT)
    assert (failure.status_code, failure.json()["error"]["code"]) == (503, "engine_unavailable")
    assert len(fake.asked) == 4


def test_a_full_server_is_503(fake: FakeUpstream, front: Server) -> None:
    full = head("429 Too Many Requests", "application/json", "retry-after: 3600") + b'{"error": "slow down."}'
    fake.say(full, answer_of("fine"))
    failure = front.post("/v1/completions", _TEXT)
    assert (failure.status_code, failure.json()["error"]["code"]) == (503, "engine_unavailable")
    assert failure.json()["error"]["message"].endswith("answers with status 429 and says: slow down.")
    assert front.post("/v1/completions", _TEXT).json()["choices"][0]["text"] == "fine"


def test_a_disconnect_closes_the_upstream_request(fake: FakeUpstream, front: Server) -> None:
    left = threading.Event()

    def hold(asked: UpstreamRequest) -> bytes:
        asked.sock.sendall(SSE + text_chunk("a"))
        if asked.is_left():
            left.set()
        return b""

    fake.say(hold)
    with front.http.stream("POST", "/v1/completions", json=_TEXT | {"stream": True}) as reading:
        next(reading.iter_lines())
    assert left.wait(LONG_S)


_TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]}


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_generated_after_the_only_call(fake: FakeUpstream, front: Server, stream: bool) -> None:
    left = threading.Event()
    text = 'So: <tool_call>\n{"name": "look", "arguments": {"at": "dogs"}}\n</tool_call> And then'

    def hold(asked: UpstreamRequest) -> bytes:
        asked.sock.sendall(SSE + b"".join(chat_chunk({"content": piece}) for piece in text))
        if asked.is_left():
            left.set()
        return b""

    fake.say(hold)
    body = _CHAT | _TOOLS | {"max_tokens": 4_000, "parallel_tool_calls": False, "stream": stream}
    answer = front.post("/v1/chat/completions", body)
    choices = [chunk["choices"][0] for chunk in (_chunks(answer) if stream else [answer.json()])]
    calls = [call for choice in choices for call in choice["delta" if stream else "message"].get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"at": "dogs"}'
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "then" not in answer.text
    assert left.wait(LONG_S)


# How it starts


def _refusal(source: str) -> str:
    with pytest.raises(ModelError) as refusal:
        find_upstream(source)
    return refusal.value.message


@pytest.mark.parametrize(
    ("models", "name", "reason"),
    [
        ({"data": []}, "", "lists no models."),
        ({"data": 3}, "", "lists no models."),
        ([], "", "does not answer with JSON"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "", "has a, b. Name one"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "#c", "no model c; it has a, b."),
    ],
)
def test_unavailable_models(models: object, name: str, reason: str) -> None:
    with FakeUpstream(b"", models=models) as upstream:
        assert reason in _refusal(f"openai:{upstream.url}{name}")


def test_addresses_that_are_none() -> None:
    assert "Write openai:http://host:port/v1" in _refusal("openai:localhost:8000")
    assert "Write openai:http://host:port/v1" in _refusal("openai:http://a..b/v1")
    assert "Write tgi:http://host:port," in _refusal("tgi:")
    assert "TAILRACE_UPSTREAM_KEY" in _refusal("openai:http://sk-1@there/v1")
    assert "127.0.0.1:1 cannot be reached" in _refusal("openai:http://127.0.0.1:1")


def test_a_model_has_the_name_of_its_server() -> None:
    models = {"data": [{"id": "a"}, {"id": "org/b", "owned_by": "vllm", "max_model_len": 4096}]}
    with FakeUpstream(b"", models=models) as upstream:
        found = find_upstream(f"openai:{upstream.url}/v1/#org/b")
    assert (found.card.name, found.card.context_tokens, found.card.format) == ("org/b", 4096, "upstream")
    assert found.address == f"vllm:{upstream.url}/v1#org/b"


def test_each_server_gets_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILRACE_UPSTREAM_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    assert upstream_key("https://api.openai.com/v1") == "sk-openai"
    assert upstream_key("https://api.openai.com.elsewhere/v1") == ""
    monkeypatch.setenv("TAILRACE_UPSTREAM_KEY", "sk-mine\n")
    assert upstream_key("https://api.openai.com/v1") == upstream_key("http://elsewhere/v1") == "sk-mine"


# A server of somebody else's

_LLAMA = """
import sys, threading, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.port = sys.argv[1], 1024, 2, 0
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1  # others compute here, too
server = xllamacpp.Server(p)
print(server.listening_address, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def llama() -> Iterator[str]:
    """Start llama.cpp's own server; yields its address."""
    try:
        card = resolve("smollm2", NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)
    with llama_server(card.path) as url:
        yield url


@contextlib.contextmanager
def llama_server(model: Path) -> Iterator[str]:
    pytest.importorskip("xllamacpp")
    process = subprocess.Popen(
        [sys.executable, "-c", _LLAMA, str(model)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.kill()
            process.wait()


@pytest.mark.deep  # it computes for half a minute
def test_llama_cpp(serve: Serve, llama: str) -> None:
    cut = Line(to_client=Flow(end_after_bytes=1100, end="reset"))
    with Chaos(int(llama.rpartition(":")[2]), [Line(), Line(), cut]) as chaos:  # the model, infill, the answer
        front = serve(f"openai:{chaos.url}")
        front.wait_line("llamacpp")
        body = {
            "messages": [{"role": "user", "content": "Count to ten."}],
            "max_tokens": 10,
            "temperature": 0,
            "seed": 1,
        }
        answer = front.post("/v1/chat/completions", body).json()
        assert chaos.num_connections >= 4, answer
        long = {"prompt": "The river bends. " * 100, "max_tokens": 1, "stream": True, "return_progress": True}
        chunks = [json.loads(data) for data in sse_data(front.post("/v1/completions", long).content)[:-1]]
        reports = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert reports, chunks
        assert 300 < reports[-1]["total"] < 512  # in tokens of the model, which the front does not know
        assert reports[-1]["processed"] <= reports[-1]["total"]
    whole = httpx.post(
        f"{llama}/v1/chat/completions", json=body | {"top_k": 0, "min_p": 0, "top_p": 1}, timeout=LONG_S
    ).json()
    assert answer["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
