from __future__ import annotations

import json

import pytest

from tailrace.dialects import native
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
from tailrace.types import Message, Sampling


def test_defaults() -> None:
    call = native.parse({"prompt": "Hi"})
    assert call.request.sampling == Sampling()
    assert (call.request.prompt, call.request.messages, call.request.model) == ("Hi", (), None)
    assert (call.request.on_disconnect, call.request.linger_s) == ("detach", None)
    assert (call.stream, call.ignored) == (True, ())


def test_what_other_wires_do_not_have() -> None:
    request = native.parse({"prompt": "", "on_disconnect": "cancel", "linger_s": 0.5, "logprobs": True}).request
    assert (request.prompt, request.on_disconnect, request.linger_s) == ("", "cancel", 0.5)
    assert request.sampling.logprobs


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}, {"role": "assistant"}]}
    assert native.parse(body).request.messages == (
        Message("system", "s"),
        Message("user", "ab"),
        Message("assistant", ""),
    )


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": "a", "messages": [{"role": "user"}]}])
def test_a_prompt_or_messages(body: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="either prompt or messages"):
        native.parse(body)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}] * 10_001])
def test_how_many_messages(messages: list[object]) -> None:
    with pytest.raises(RequestError) as caught:
        native.parse({"messages": messages})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": "a"},
        {"role": "tool", "content": "a"},
        {"role": "<|system|>", "content": "a"},
        {"role": None, "content": "a"},
        {"role": "user", "content": 1},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        "a",
        None,
    ],
)
def test_a_message_that_is_none(message: object) -> None:
    with pytest.raises(RequestError) as caught:
        native.parse({"messages": [{"role": "user", "content": "Hi"}, message]})
    assert str(caught.value.param).startswith("messages[1]")
    assert "passwd" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_disconnect", "never"), ("linger_s", 0), ("linger_s", 86_401), ("linger_s", "1"), ("logprobs", 1)],
)
def test_ranges_of_its_own(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        native.parse({"prompt": "Hi", name: value})
    assert caught.value.param == name


def test_a_typing_mistake_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        native.parse({"prompt": "Hi", "temprature": 1})
    assert (caught.value.param, caught.value.message) == ("temprature", "Unknown field: temprature.")


def test_an_unknown_name_is_shown_as_no_more_than_a_name() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        native.parse({"prompt": "Hi", "a\r\nset-cookie: \u2028<b>" + "x" * 1000: 1})
    assert str(caught.value.param).isascii()
    assert len(str(caught.value.param)) <= 40
    assert not set(str(caught.value.param)) & set("\r\n<>: ")


@pytest.mark.parametrize(
    ("name", "wanted", "harmless"),
    [
        ("best_of", 2, 1),
        ("functions", [{}], []),
        ("logit_bias", {"5": 1}, {}),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tools", [{}], []),
        ("top_logprobs", 1, 0),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, wanted: object, harmless: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        native.parse({"prompt": "Hi", name: wanted})
    assert caught.value.param == name
    assert native.parse({"prompt": "Hi", name: harmless}) == native.parse({"prompt": "Hi"})


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("m", param="p"), 400, "invalid_request_error", "invalid_request"),
        (UnknownModel("m", param="p"), 404, "invalid_request_error", "model_not_found"),
        (QueueFull("m", param="p"), 429, "rate_limit_error", "overloaded"),
        (AdmissionError("m", param="p"), 429, "rate_limit_error", "overloaded"),
        (Draining("m", param="p"), 503, "server_error", "draining"),
        (EngineLost("m", param="p"), 503, "server_error", "engine_lost"),
        (TailraceError("m", param="p"), 500, "server_error", "internal_error"),
    ],
)
def test_errors(error: TailraceError, status: int, kind: str, code: str) -> None:
    shown, body = native.encode_error(error)
    assert shown == status
    assert body == json.dumps(
        {"error": {"message": "m", "type": kind, "code": code, "param": "p"}}, separators=(",", ":")
    ).encode("ascii")


def test_an_error_that_counts() -> None:
    _, body = native.encode_error(ContextLengthExceeded(9000, 8192, max_tokens=5))
    assert json.loads(body)["error"] == {
        "message": "The prompt has 9000 tokens and 5 were asked for, but 8192 is the limit.",
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
        "param": "max_tokens",
    }
