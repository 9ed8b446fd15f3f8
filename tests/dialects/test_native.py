from __future__ import annotations

import json

import pytest
from tests.dialects.fake_server import native as parse
from tests.dialects.fake_server import parsed, prompt_of
from tests.dialects.transcripts import STREAMS, facts, facts_for

from tailrace.dialects import GenerateCall, native
from tailrace.dialects.wire import Following
from tailrace.errors import (
    AdmissionError,
    ContextLengthExceeded,
    Draining,
    EngineLost,
    QueueFull,
    RequestError,
    TailraceError,
    UnknownModel,
    UnsupportedParameter,
)
from tailrace.types import Message, PromptLogprob, Sampling, TextDelta


def test_defaults() -> None:
    call = parse({"prompt": "Hi"})
    assert call.request.sampling == Sampling()
    assert (call.request.prompts, call.request.messages, call.request.model) == (("Hi",), (), None)
    assert (call.request.on_disconnect, call.request.linger_s) == ("detach", None)
    assert (call.stream, call.at_once, call.status, call.ignored) == (False, True, 201, ())


def test_fields_that_other_wires_do_not_have() -> None:
    request = parse({"prompt": "", "on_disconnect": "cancel", "linger_s": 0.5, "logprobs": True}).request
    assert (prompt_of(request), request.on_disconnect, request.linger_s) == ("", "cancel", 0.5)
    assert request.sampling.logprobs


@pytest.mark.parametrize(
    ("accept", "streams"),
    [
        ("text/event-stream", True),
        ("application/json, text/event-stream;q=0.9", True),
        ("*/*", False),
        ("application/json", False),
        ("", False),
    ],
)
def test_the_accept_header_decides_about_streaming(accept: str, streams: bool) -> None:
    call = native.parse(parsed({"prompt": "Hi"}, headers={"accept": accept}))
    assert isinstance(call, GenerateCall)
    assert call.stream is streams


def test_a_post_with_a_cursor_follows_the_stream() -> None:
    stream_id = facts().record.stream_id
    found = native.parse(parsed({"nonsense": 1}, headers={"last-event-id": f"{stream_id}-7"}))
    assert isinstance(found, Following)
    assert (found.stream_id, found.after, found.replay) == (stream_id, 7, False)


@pytest.mark.parametrize(
    ("header", "query", "after"),
    [
        (None, None, 0),
        ("3", "9", 3),
        (None, "9", 9),
        (f"{'s' * 22}-4", "9", 4),
        ("", "5", 5),
        (None, f"{'s' * 22}-6", 6),
    ],
)
def test_the_position_of_a_reader(header: str | None, query: str | None, after: int) -> None:
    headers = {} if header is None else {"last-event-id": header}
    asking = parsed(query={} if query is None else {"after": query}, path={"stream_id": "s" * 22}, headers=headers)
    found = native.parse_following(asking)
    assert (found.stream_id, found.after) == ("s" * 22, after)


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}, {"role": "assistant"}]}
    assert parse(body).request.messages == (
        Message("system", "s"),
        Message("user", "ab"),
        Message("assistant", ""),
    )


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": "a", "messages": [{"role": "user"}]}])
def test_a_prompt_or_messages(body: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="either prompt or messages"):
        parse(body)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}] * 10_001])
def test_how_many_messages(messages: list[object]) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"messages": messages})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": "a"},
        {"role": "<|system|>", "content": "a"},
        {"role": None, "content": "a"},
        {"role": "user", "content": 1},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        "a",
        None,
    ],
)
def test_an_invalid_message(message: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"messages": [{"role": "user", "content": "Hi"}, message]})
    assert str(caught.value.param).startswith("messages[1]")
    assert "passwd" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_disconnect", "never"), ("linger_s", 0), ("linger_s", 86_401), ("linger_s", "1"), ("logprobs", 1)],
)
def test_ranges_of_native_fields(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"prompt": "Hi", name: value})
    assert caught.value.param == name


def test_parameters_about_tokens() -> None:
    given = {
        "logit_bias": {"5": 1.5},
        "top_logprobs": 2,
        "prompt_logprobs": 0,
        "bad_words": ["a"],
        "stop_token_ids": [3],
    }
    request = parse({"prompt": "Hi", **given}).request
    sampling = request.sampling
    assert (sampling.logit_bias, sampling.logprobs, sampling.top_logprobs) == (((5, 1.5),), True, 2)
    assert (sampling.prompt_logprobs, sampling.stop_token_ids, request.bad_words) == (0, (3,), ("a",))


def test_an_event_with_logprobs() -> None:
    prompt = (PromptLogprob(-1.5, 4, ((7, -0.5),)),)
    event = TextDelta(
        "a", (97,), 0, (-0.25,), top_logprobs=(((97, -0.25), (98, float("-inf"))),), prompt_logprobs=prompt
    )
    assert json.loads(native.event_json(event)) == {
        "text": "a",
        "token_ids": [97],
        "logprobs": [-0.25],
        "top_logprobs": [[[97, -0.25], [98, -9999.0]]],
        "prompt_logprobs": [{"logprob": -1.5, "rank": 4, "top_logprobs": [[7, -0.5]]}],
    }


def test_a_misspelled_field_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse({"prompt": "Hi", "temprature": 1})
    assert (caught.value.param, caught.value.message) == ("temprature", "Unknown field: temprature.")


def test_unknown_names_are_shown_safely() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse({"prompt": "Hi", "a\r\nset-cookie: \u2028<b>" + "x" * 1000: 1})
    assert str(caught.value.param).isascii()
    assert len(str(caught.value.param)) <= 40
    assert not set(str(caught.value.param)) & set("\r\n<>: ")


@pytest.mark.parametrize(
    ("name", "wanted", "harmless"),
    [
        ("best_of", 2, 1),
        ("functions", [{}], []),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tools", [{}], []),
    ],
)
def test_unsupported_fields_are_refused_by_name(name: str, wanted: object, harmless: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse({"prompt": "Hi", name: wanted})
    assert caught.value.param == name
    assert parse({"prompt": "Hi", name: harmless}) == parse({"prompt": "Hi"})


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("m", param="p"), 400, "invalid_request_error", "invalid_request"),
        (UnknownModel("m", param="p"), 404, "invalid_request_error", "model_not_found"),
        (QueueFull("m", param="p"), 429, "rate_limit_error", "overloaded"),
        (AdmissionError("m", param="p"), 429, "rate_limit_error", "overloaded"),
        (Draining("m", param="p"), 503, "server_error", "draining"),
        (EngineLost("m", param="p"), 503, "server_error", "engine_unavailable"),
        (TailraceError("m", param="p"), 500, "server_error", "internal_error"),
    ],
)
def test_errors(error: TailraceError, status: int, kind: str, code: str) -> None:
    shown, body = native.encode_error(error)
    assert shown == status
    assert body == json.dumps(
        {"error": {"message": "m", "type": kind, "code": code, "param": "p"}}, separators=(",", ":")
    ).encode("ascii")


def test_the_state_of_a_stream_that_has_ended() -> None:
    shown = json.loads(native.NativeEncoder(facts()).whole(STREAMS["stop"]))
    path = f"/v1/streams/{facts().record.stream_id}"
    assert shown == {
        "id": facts().record.stream_id,
        "status": facts().status,
        "model": "scripted",
        "created": 1_700_000_000,
        "last_event_id": f"{facts().record.stream_id}-5",
        "events_url": path + "/events",
        "cancel_url": path + "/cancel",
        "expires_in_s": None,
        "text": " the",
    } | {"status": "done", "usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}}


def test_the_state_of_a_stream_that_has_just_begun() -> None:
    encoder = native.NativeEncoder(facts())
    shown = json.loads(encoder.whole([]))
    assert (shown["status"], shown["text"], shown["last_event_id"]) == ("running", "", f"{facts().record.stream_id}-0")
    assert not {"usage", "choices", "error"} & set(shown)
    shown = json.loads(encoder.whole(STREAMS["plain"][:2]))
    assert (shown["text"], shown["last_event_id"]) == (" the river", f"{facts().record.stream_id}-2")


def test_the_state_shows_every_choice_and_why_it_failed() -> None:
    shown = json.loads(native.NativeEncoder(facts_for(STREAMS["two"])).whole(STREAMS["two"]))
    assert (shown["text"], shown["choices"]) == (" the river runs", [" the river runs", " over"])
    shown = json.loads(native.NativeEncoder(facts()).whole(STREAMS["error"]))
    assert (shown["status"], shown["error"]["code"], shown["text"]) == ("error", "engine_unavailable", " the")


def test_an_error_with_counts() -> None:
    _, body = native.encode_error(ContextLengthExceeded(9000, 8192, max_tokens=5))
    assert json.loads(body)["error"] == {
        "message": "The maximum context length is 8192 tokens. The prompt has 9000, and the answer may have 5. "
        "Shorten the prompt, or ask for a shorter answer.",
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
        "param": "max_tokens",
    }
