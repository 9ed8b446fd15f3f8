"""An upstream server as the engine: the requests it gets, and how its answers and its invalid bytes are read."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest
from tests.engines.fake_upstream import (
    SSE,
    Answer,
    FakeUpstream,
    UpstreamRequest,
    answer_of,
    chat_chunk,
    done,
    head,
    text_chunk,
)
from tests.waiting import LONG_S

from tailrace.engines import EngineSpec
from tailrace.engines.interface import Delta, Prefill, Sequence
from tailrace.errors import ModelError, SequenceFailed
from tailrace.testing import Law, laws
from tailrace.types import IMAGE_MARK, Attachment, Grammar, Image, Message, Sampling, TextSegment
from tailrace_outer.testing.sampling_laws import sampling_laws
from tailrace_plugins.upstream.upstream_engine import UpstreamEngine
from tailrace_plugins.upstream.upstream_models import Address, UpstreamKind
from tailrace_plugins.upstream.upstream_requests import PARAMETERS, make_request
from tailrace_plugins.upstream.upstream_text import CHAT_ID, END_ID, ChatBody, MessageEncoder, pack, unpack

_PATIENCE = {"retry_s": 1.0, "first_s": LONG_S, "idle_s": LONG_S}


@contextmanager
def engine_at(
    port: int, *, kind: UpstreamKind = "openai", key: str = "", context_tokens: int = 1000, **patience: float
) -> Iterator[UpstreamEngine]:
    url = f"http://127.0.0.1:{port}" + ("" if kind == "tgi" else "/v1")
    spec = EngineSpec(
        "upstream",
        path=str(Address(kind, url, "m")),
        context_tokens=context_tokens,
        max_sequences=16,
        secret=key,
        options=_PATIENCE | patience,
    )
    with closing(UpstreamEngine(spec)) as engine:
        yield engine


# Any: fields of Sampling
def asking(sequence_id: int = 1, prompt: str = "hello", **sampling: Any) -> Sequence:
    chosen = {"seed": 7, "max_tokens": 20} | sampling
    return Sequence(sequence_id, (TextSegment(prompt, len(pack(prompt.encode()))),), Sampling(**chosen))


def run(engine: UpstreamEngine, *sequences: Sequence) -> dict[int, list[Delta]]:
    """Return all deltas of sequences that start together."""
    for sequence in sequences:
        engine.submit(sequence)
    heard: dict[int, list[Delta]] = {sequence.sequence_id: [] for sequence in sequences}
    deadline_s = time.monotonic() + LONG_S
    while any(not deltas or deltas[-1].finish_reason is None for deltas in heard.values()):
        assert time.monotonic() < deadline_s, heard
        for delta in engine.step():
            heard[delta.sequence_id].append(delta)
    return heard


def text_of(deltas: list[Delta]) -> str:
    ids = [token_id for delta in deltas for token_id in delta.token_ids if token_id != END_ID]
    return unpack(ids).decode()


# The laws


def _letters(asked: UpstreamRequest) -> bytes:
    """Return this many tokens of six bytes, which depend on prompt and seed."""
    key = zlib.crc32(f"{asked.body['prompt']!r} {asked.body['seed']}".encode())
    words = [f" {(key + 7919 * index) % 99_991:05}" for index in range(asked.body["max_tokens"])]
    *chunks, last = (text_chunk(word) for word in words)
    asked.sock.sendall(SSE)
    for chunk in chunks:
        asked.sock.sendall(chunk)
        time.sleep(0.003)
    return last.replace(b"null", b'"length"') + done((3, len(words)))


# The server that stands behind it here draws from nothing: what a sampling parameter does is not to be seen.
@pytest.mark.parametrize("law", [law for law in laws if law not in sampling_laws], ids=str)
def test_engine_keeps(law: Law) -> None:
    with FakeUpstream(_letters) as upstream, engine_at(upstream.port, context_tokens=128) as engine:
        if not law.applies_to(engine.capabilities):
            pytest.skip("not among its capabilities")
        law(lambda: engine, num_sequences=200)


# What is asked


def _body(kind: UpstreamKind, **sampling: Any) -> tuple[str, dict[str, object]]:
    asked = make_request(Address(kind, "http://there/v1", "m"), asking(prompt="Öl", **sampling))
    return asked.url, json.loads(asked.body)


def test_only_fields_of_openai_are_sent() -> None:
    url, body = _body("openai", temperature=0.5, presence_penalty=1.0, seed=2**64 - 1, stop=("x",), n=3)
    assert url == "http://there/v1/completions"
    assert body == {
        "model": "m",
        "prompt": "Öl",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 20,
        "seed": 2**31 - 1,
        "presence_penalty": 1.0,
    }


def test_neutral_values_are_sent_if_the_server_has_other_defaults() -> None:
    assert (
        _body("vllm", ignore_eos=True)[1].items() >= {"top_k": 0, "repetition_penalty": 1.0, "ignore_eos": True}.items()
    )
    assert _body("llamacpp")[1].items() >= {"top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}.items()


def test_tgi_gets_its_own_fields() -> None:
    url, body = _body("tgi", temperature=0.0, top_k=5, top_p=1.0)
    assert url == "http://there/v1/generate_stream"
    assert body == {
        "inputs": "Öl",
        "parameters": {"details": True, "do_sample": False, "max_new_tokens": 20, "seed": 7, "top_k": 5},
    }


def _chat(kind: UpstreamKind, beginning: str = "", **sampling: Any) -> dict[str, object]:
    messages = (Message("user", "Hi"), *((Message("assistant", beginning),) if beginning else ()))
    tools = ({"type": "function", "function": {"name": "look"}},)
    ids = MessageEncoder(continues=True).encode(messages, tools=tools, continue_final=bool(beginning))
    asked = make_request(Address(kind, "http://there/v1", "m"), Sequence(1, ids, asking(**sampling).sampling))
    assert asked.url == "http://there/v1" + ("/v1" if kind == "tgi" else "") + "/chat/completions"
    return dict(json.loads(asked.body))


def test_chats_are_sent_as_messages() -> None:
    body = _chat("openai")
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert body["tools"] == [{"type": "function", "function": {"name": "look"}}]
    assert "prompt" not in body


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "tailrace", "tgi"])
def test_values_for_the_template_are_sent(kind: UpstreamKind) -> None:
    encoded = MessageEncoder(continues=True).encode([Message("user", "Hi")], values={"enable_thinking": False})
    sequence = Sequence(1, encoded, Sampling(seed=1, max_tokens=2))
    address = Address(kind, "http://h", "m")
    if kind == "tgi":
        with pytest.raises(SequenceFailed, match="does not support chat_template_kwargs"):
            make_request(address, sequence)
    else:
        assert json.loads(make_request(address, sequence).body)["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "tailrace", "tgi"])
def test_an_answer_that_was_begun_is_continued(kind: UpstreamKind) -> None:
    body = _chat(kind, "Hel")
    assert body["messages"] == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    assert ("continue_final_message" in body) is (kind == "vllm")


def test_a_chat_that_an_earlier_version_kept_is_sent() -> None:
    """Its prompt was token ids: the JSON between two special ids, then the beginning of the answer."""
    chat = ChatBody([{"role": "user", "content": "Hi"}])
    ids = (CHAT_ID, *pack(msgspec.json.encode(chat)), CHAT_ID, *pack(b"Hel"))
    asked = make_request(Address("vllm", "http://h", "m"), Sequence(1, (ids,), Sampling(seed=1, max_tokens=2)))
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    assert json.loads(asked.body)["messages"] == begun


def test_an_image_is_passed_on_as_it_came_and_only_in_a_chat() -> None:
    content, sampling, server = b"an image", Sampling(seed=1, max_tokens=2), Address("vllm", "http://h", "m")
    image = Image(content, media_type="image/jpeg")
    messages = [Message("user", f"{IMAGE_MARK}What is it?", images=(image,))]
    segments = MessageEncoder(continues=True).encode(messages)
    asked = make_request(server, Sequence(1, segments, sampling, attachments={image.digest: content}))
    url = "data:image/jpeg;base64," + base64.b64encode(content).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    assert json.loads(asked.body)["messages"] == [{"role": "user", "content": parts}]
    with pytest.raises(SequenceFailed, match="missing"):
        make_request(server, Sequence(1, segments, sampling))
    alone = Attachment.of(content, "image/png", 3)
    with pytest.raises(SequenceFailed, match="only in a chat"):
        make_request(server, Sequence(1, (TextSegment("Hi", 1), alone), sampling, attachments={alone.digest: content}))


def test_unsupported_parameters_are_refused() -> None:
    with pytest.raises(SequenceFailed, match="cannot continue"):
        _chat("openai", "Hel")
    with pytest.raises(SequenceFailed, match="does not support top_k"):
        _chat("tgi", top_k=3)
    with pytest.raises(SequenceFailed, match="not regular expressions"):
        _body("openai", grammar=Grammar("regex", "a+"))
    with pytest.raises(SequenceFailed, match="not other grammars"):
        _body("openai", grammar=Grammar("cfg", 'root ::= "a"'))
    assert "top_k" not in PARAMETERS["openai"]


def test_a_schema_goes_where_the_server_looks_for_it() -> None:
    schema = Grammar("json_schema", '{"type":"object"}')
    assert _body("llamacpp", grammar=schema)[1]["json_schema"] == {"type": "object"}
    assert _body("tailrace", grammar=schema)[1]["guided_json"] == {"type": "object"}
    kinds: tuple[UpstreamKind, ...] = ("tailrace", "vllm")
    for kind in kinds:
        assert _body(kind, grammar=Grammar("regex", "a+"))[1]["structured_outputs"] == {"regex": "a+"}
        assert _body(kind, grammar=Grammar("cfg", "start: A"))[1]["structured_outputs"] == {"grammar": "start: A"}
        assert _chat(kind, grammar=Grammar("tags", "{}"))["response_format"] == {"type": "structural_tag"}
    assert _body("llamacpp", grammar=Grammar("cfg", 'root ::= "a"'))[1]["grammar"] == 'root ::= "a"'
    body, wrapped = _chat("vllm", grammar=schema), {"name": "answer", "schema": {"type": "object"}}
    assert body | {"tool_choice": "none", "response_format": {"type": "json_schema", "json_schema": wrapped}} == body


# What is heard


def test_text_and_usage_come_through() -> None:
    with FakeUpstream(answer_of("Hel", "lo 🌊", usage=(11, 5))) as upstream, engine_at(upstream.port) as engine:
        deltas = run(engine, asking())[1]
    assert text_of(deltas) == "Hello 🌊"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].token_ids, "an end comes with a token"
    assert deltas[-1].usage == (11, 5)


def thought(text: str, name: str = "reasoning_content") -> bytes:
    return chat_chunk({name: text})


@pytest.mark.parametrize(
    ("chunks", "written"),
    [
        (thought("Hm, ") + thought("yes") + chat_chunk({"content": "So."}), "<think>\nHm, yes\n</think>\n\nSo."),
        (thought("Hm", "reasoning") + chat_chunk({"content": "So."}), "<think>\nHm\n</think>\n\nSo."),
        (chat_chunk({"reasoning_content": "Hm", "content": "So."}), "<think>\nHm\n</think>\n\nSo."),
        (thought("Hm"), "<think>\nHm"),
        (chat_chunk({"content": "So."}) + thought("late"), "So."),
        (chat_chunk({"content": "So.", "reasoning": {"no": "text"}, "reasoning_content": None}), "So."),
        (chat_chunk({"content": "<think>Hm</think>So."}), "<think>Hm</think>So."),
    ],
)
def test_reasoning_is_written_before_the_text(chunks: bytes, written: str) -> None:
    answer = SSE + chunks + chat_chunk({}, "stop") + done()
    with FakeUpstream(answer) as upstream, engine_at(upstream.port) as engine:
        assert text_of(run(engine, asking())[1]) == written


def test_without_usage_chunks_are_counted() -> None:
    with FakeUpstream(answer_of("a", "b", "c", usage=None)) as upstream, engine_at(upstream.port) as engine:
        assert run(engine, asking())[1][-1].usage == (1, 3)


def test_counts_may_be_missing_after_the_end() -> None:
    answer = SSE + text_chunk("a", "length")
    with FakeUpstream(answer) as upstream, engine_at(upstream.port) as engine:
        last = run(engine, asking())[1][-1]
    assert (last.finish_reason, text_of([last])) == ("length", "a")


@pytest.mark.parametrize("usage", [(10**23, 1), (-1, 1)])
def test_counts_that_cannot_be_are_none(usage: tuple[int, int]) -> None:
    with FakeUpstream(answer_of("a", usage=usage)) as upstream, engine_at(upstream.port) as engine:
        last = run(engine, asking())[1][-1]
    assert (last.finish_reason, last.usage) == ("stop", (1, 1))


@pytest.mark.parametrize(
    ("details", "expected"),
    [({"cached_tokens": 7}, 7), ({"cached_tokens": 0}, 0), ({"cached_tokens": 12}, None), ({"cached_tokens": -1}, None),
     ({}, None), (None, None)],
)  # fmt: skip
def test_cached_tokens_come_through(details: object, expected: int | None) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 2, "prompt_tokens_details": details}
    counted = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    answer = SSE + text_chunk("ab") + text_chunk("", "stop") + counted + done(None)
    with FakeUpstream(answer) as upstream, engine_at(upstream.port) as engine:
        last = run(engine, asking())[1][-1]
    assert (last.usage, last.num_cached_tokens) == ((11, 2), expected)


def test_an_answer_ends_although_its_server_continues() -> None:
    def chatter(asked: UpstreamRequest) -> bytes:
        asked.sock.sendall(SSE + text_chunk("a", "stop"))
        with suppress(OSError):
            for _ in range(100):
                asked.sock.sendall(b'data: {"choices": []}\n\n')
                time.sleep(0.1)
        return b""

    with FakeUpstream(chatter) as upstream, engine_at(upstream.port) as engine:
        assert run(engine, asking())[1][-1].finish_reason == "stop"


@pytest.mark.parametrize("sign", [b": ping\n\n", b'data: {"choices": []}\n\n'], ids=["comment", "event"])
def test_a_server_that_sends_heartbeats_is_not_timed_out(sign: bytes) -> None:
    def hesitate(asked: UpstreamRequest) -> bytes:
        asked.sock.sendall(SSE)
        for _ in range(20):
            asked.sock.sendall(sign)
            time.sleep(0.1)
        return text_chunk("a", "stop") + done()

    with FakeUpstream(hesitate) as upstream, engine_at(upstream.port, first_s=1.5, idle_s=1.5) as engine:
        assert run(engine, asking())[1][-1].finish_reason == "stop"


def _progress(total: int, cache: int, processed: int) -> bytes:
    counts = {"total": total, "cache": cache, "processed": processed, "time_ms": 5}
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": ""}], "prompt_progress": counts}).encode() + b"\n\n"


def test_progress_comes_through_and_is_no_begun_answer() -> None:
    """The next piece of a prompt may take longer than the next token."""

    def read(asked: UpstreamRequest) -> bytes:
        asked.sock.sendall(SSE)
        for processed in (2, 9, 10):
            asked.sock.sendall(_progress(10, 2, processed))
            time.sleep(0.5)
        return text_chunk("a", "stop") + done()

    with FakeUpstream(read) as upstream, engine_at(upstream.port, kind="llamacpp", idle_s=0.2) as engine:
        engine.submit(asking())
        found: list[Prefill] = []
        while not (deltas := engine.step()):
            found += [one for one in engine.progress() if one not in found]
        assert engine.progress() == []
        assert upstream.asked[0].body["return_progress"] is True
    assert deltas[-1].finish_reason == "stop"
    assert found == [Prefill(1, read, 2, 10) for read in (2, 9, 10)]


def test_progress_that_cannot_be_is_left_out() -> None:
    answer = SSE + _progress(10, 2, 90) + _progress(10, -2, 9) + text_chunk("a", "stop") + done()
    with FakeUpstream(answer) as upstream, engine_at(upstream.port, kind="llamacpp") as engine:
        engine.submit(asking())
        while not (deltas := engine.step()):
            assert engine.progress() == []
    assert text_of(deltas) == "a"


def test_tool_calls_become_text() -> None:
    calls = [
        {"index": 0, "id": "1", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"at": "a'}},
        {"index": 0, "function": {"arguments": ' dog"}'}},
        {"index": 1, "function": {"name": "go", "arguments": "{}"}},
    ]
    answer = SSE + chat_chunk({"role": "assistant", "content": None})
    answer += b"".join(chat_chunk({"tool_calls": [call]}) for call in calls) + chat_chunk({}, "tool_calls") + done()
    with FakeUpstream(answer) as upstream, engine_at(upstream.port) as engine:
        deltas = run(engine, asking())[1]
    assert text_of(deltas) == (
        '<tool_call>\n{"name": "look", "arguments": {"at": "a dog"}}\n</tool_call>'
        '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    )
    assert deltas[-1].finish_reason == "stop"


_OPEN_CALL: dict[str, object] = {"id": "1", "function": {"name": "now"}}
_ODD_CALLS: dict[str, tuple[list[dict[str, object]], list[str]]] = {
    "no arguments": ([_OPEN_CALL], ['{"name": "now", "arguments": {}}']),
    "no index": (
        [{"function": {"name": "now", "arguments": '{"at"'}}, {"function": {"arguments": ": 1}"}}],
        ['{"name": "now", "arguments": {"at": 1}}'],
    ),
    "one index for all": (
        [_OPEN_CALL | {"index": 0}, {"index": 0, "id": "2", "function": {"name": "go", "arguments": "{}"}}],
        ['{"name": "now", "arguments": {}}', '{"name": "go", "arguments": {}}'],
    ),
    "index null": ([_OPEN_CALL | {"index": None}], ['{"name": "now", "arguments": {}}']),
}


@pytest.mark.parametrize("case", _ODD_CALLS)
def test_tool_calls_as_some_servers_write_them(case: str) -> None:
    calls, expected = _ODD_CALLS[case]
    answer = SSE + b"".join(chat_chunk({"tool_calls": [call]}) for call in calls)
    with (
        FakeUpstream(answer + chat_chunk({}, "tool_calls") + done()) as upstream,
        engine_at(upstream.port) as engine,
    ):
        text = text_of(run(engine, asking())[1])
    assert text == "".join(f"<tool_call>\n{call}\n</tool_call>" for call in expected)


def test_content_may_come_in_parts() -> None:
    answer = SSE + chat_chunk({"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]})
    with FakeUpstream(answer + chat_chunk({}, "stop") + done()) as upstream, engine_at(upstream.port) as engine:
        assert text_of(run(engine, asking())[1]) == "Hello"


def test_tgi_events() -> None:
    def event(**fields: object) -> bytes:
        return b"data:" + json.dumps({"generated_text": None, "details": None} | fields).encode() + b"\n\n"

    ending = {"finish_reason": "eos_token", "generated_tokens": 2, "seed": None, "input_length": 9}
    answer = SSE + event(token={"id": 1, "text": "Hi", "logprob": -1.0, "special": False}) + b":\n\n"
    answer += event(token={"id": 2, "text": "</s>", "logprob": -1.0, "special": True}, details=ending)
    with FakeUpstream(answer) as upstream, engine_at(upstream.port, kind="tgi") as engine:
        deltas = run(engine, asking())[1]
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].usage) == ("Hi", "stop", (9, 2))


# What goes wrong

_JSON_ERROR = b'{"error": {"message": "no\\n\\tsuch <thing>\\u0007", "code": 400}}'
_NONSENSE: dict[str, tuple[bytes, str]] = {
    "html": (head(kind="text/html") + b"<html>secret page</html>", "sends text/html instead of a stream"),
    "json": (head(kind="application/json") + b"{}", "sends application/json instead"),
    "no kind": (head(kind="") + b"{}", "sends something instead"),
    "no json": (SSE + b"data: <html>\n\n", "cannot be decoded"),
    "wrong types": (SSE + b'data: {"choices": 7}\n\n', "cannot be decoded"),
    "no utf-8": (SSE + b'data: {"choices": [{"text": "\xff"}]}\n\n', "cannot be decoded"),
    "a line without end": (SSE + b"data: " + b"x" * (2 << 20), "an event that is too long"),
    "gzip": (
        head("200 OK", "text/event-stream", "content-encoding: gzip") + gzip.compress(answer_of("a")),
        "compresses",
    ),
    "redirect": (
        head("307 Temporary Redirect", "text/plain", "location: http://elsewhere/"),
        "a redirect, which is not followed",
    ),
    "refused": (head("400 Bad Request", "application/json") + _JSON_ERROR, "status 400 and says: no such <thing>."),
    "refused in html": (head("404 Not Found", "text/html") + b"<p>secret page</p>", "status 404 and names no reason"),
    "in band": (SSE + text_chunk("a") + b"data: " + _JSON_ERROR + b"\n\n", "says: no such <thing>"),
    "content filter": (SSE + text_chunk("a", "content_filter") + done(), "content filter"),
    "unknown end": (SSE + text_chunk("a", "whim") + done(), "unknown finish_reason"),
}


@pytest.mark.parametrize("case", _NONSENSE)
def test_invalid_bytes_end_one_sequence(case: str) -> None:
    answer, reason = _NONSENSE[case]

    def either(asked: UpstreamRequest) -> bytes:
        return answer if asked.body["prompt"] == "bad" else answer_of("fine")

    with FakeUpstream(either) as upstream, engine_at(upstream.port) as engine:
        heard = run(engine, asking(1, "bad"), asking(2))
        last = heard[1][-1]
        assert last.finish_reason == "error"
        assert not last.is_lost, "the same would come again"
        assert last.is_refused is (case == "refused")
        assert f"127.0.0.1:{upstream.port} " in last.failure
        assert reason.rstrip(".") in last.failure
        assert "secret" not in last.failure
        assert last.failure.isprintable()
        assert text_of(heard[2]) == "fine"
        assert text_of(run(engine, asking(3))[3]) == "fine"


def _fall_silent(asked: UpstreamRequest) -> bytes:
    asked.sock.sendall(SSE + text_chunk("ab"))
    return b"" if asked.is_left() else b"?"


_CUTS: dict[str, Answer | bytes] = {
    "no end": SSE + text_chunk("ab"),
    "half an event": SSE + text_chunk("ab") + b'data: {"choices": [{"te',
    "done without an end": SSE + text_chunk("ab") + b"data: [DONE]\n\n",
    "given up": SSE + text_chunk("ab") + text_chunk("", "abort") + done(),
    "in band": SSE + text_chunk("ab") + b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n',
    "chunks cut off": head("200 OK", "text/event-stream", "transfer-encoding: chunked")
    + b"%x\r\n%b\r\n" % (len(text_chunk("ab")), text_chunk("ab")),
    "silence": _fall_silent,
}


@pytest.mark.parametrize("case", _CUTS)
def test_a_cut_is_reported_after_the_received_text(case: str) -> None:
    idle_s = 1.0 if case == "silence" else LONG_S
    with FakeUpstream(_CUTS[case]) as upstream, engine_at(upstream.port, idle_s=idle_s) as engine:
        deltas = run(engine, asking())[1]
    assert text_of(deltas) == "ab"
    assert (deltas[-1].finish_reason, deltas[-1].is_lost) == ("error", True)
    assert len(upstream.asked) == 1, "who compares is to ask again"


def _unavailable(*headers: str) -> bytes:
    return head("503 Service Unavailable", "application/json", *headers) + b'{"error": "loading"}'


@pytest.mark.parametrize(
    "first",
    [
        _unavailable(),
        _unavailable("retry-after: 0"),
        _unavailable("retry-after: Thu, 01 Jan 1970 00:00:00 GMT"),
        head("429 Too Many Requests", "text/plain"),
        SSE,
        SSE + b'data: {"error": {"message": "overloaded", "code": 429}}\n\n',
        b"",
    ],
    ids=["503", "retry-after", "retry-after a date", "429", "nothing", "in band", "closed"],
)
def test_temporary_errors_are_retried(first: bytes) -> None:
    with FakeUpstream(first, answer_of("here")) as upstream, engine_at(upstream.port) as engine:
        assert text_of(run(engine, asking())[1]) == "here"
        assert len(upstream.asked) == 2


def test_retries_end() -> None:
    with FakeUpstream(_unavailable()) as upstream, engine_at(upstream.port) as engine:
        (last,) = run(engine, asking())[1]
    assert last.is_lost
    assert last.failure == f"127.0.0.1:{upstream.port} answers with status 503 and says: loading"
    assert len(upstream.asked) > 1


def test_a_too_long_retry_after_is_not_waited_for() -> None:
    with FakeUpstream(_unavailable("retry-after: 3600")) as upstream, engine_at(upstream.port) as engine:
        assert run(engine, asking())[1][-1].is_lost
        assert len(upstream.asked) == 1


def test_no_server() -> None:
    with engine_at(1) as engine:
        (last,) = run(engine, asking())[1]
    assert (last.failure, last.is_lost) == ("127.0.0.1:1 cannot be reached", True)


def test_a_server_that_does_not_answer() -> None:
    with (
        FakeUpstream(lambda asked: b"" if asked.is_left() else b"?") as upstream,
        engine_at(upstream.port, first_s=0.3, retry_s=0.1) as engine,
    ):
        assert "did not begin" in run(engine, asking())[1][-1].failure


def test_abort_closes_the_connection() -> None:
    left = threading.Event()

    def hold(asked: UpstreamRequest) -> bytes:
        asked.sock.sendall(SSE + text_chunk("a"))
        if asked.is_left():
            left.set()
        return b""

    with FakeUpstream(hold) as upstream, engine_at(upstream.port) as engine:
        engine.submit(asking())
        while not engine.step():
            pass
        engine.abort(1)
        (last,) = engine.step()
        assert last.finish_reason == "cancelled"
        assert left.wait(LONG_S)


def test_only_the_server_gets_the_key() -> None:
    with FakeUpstream(head("401 Unauthorized", "text/plain")) as upstream:
        with engine_at(upstream.port, key="sk-1") as engine:
            failure = run(engine, asking())[1][-1].failure
        assert upstream.asked[0].headers["authorization"] == "Bearer sk-1"
        assert "sk-1" not in failure
        with pytest.raises(ModelError, match="characters") as refusal, engine_at(upstream.port, key="sk-ö"):
            pass
        assert "sk-" not in refusal.value.message


def test_many_at_once() -> None:
    num_seen = itertools.count()

    def echo(asked: UpstreamRequest) -> bytes:
        next(num_seen)
        return answer_of(*asked.body["prompt"])

    with FakeUpstream(echo) as upstream, engine_at(upstream.port) as engine:
        heard = run(engine, *(asking(n, f"number {n}") for n in range(40)))
    assert {n: text_of(deltas) for n, deltas in heard.items()} == {n: f"number {n}" for n in range(40)}
    assert next(num_seen) == 40


def test_an_address_can_be_written_and_parsed() -> None:
    address = Address("vllm", "https://there:8000/a/v1", "org/model:7b#x")
    assert Address.parse(str(address)) == address
    with pytest.raises(ModelError):
        Address.parse("ftp:x#y")
