"""Logprobs of the prompt on OpenAI's wires: an echo with logprobs, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.dialects.fake_server import chat, completion
from tests.dialects.transcripts import facts

from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.openai_chunks import TextView
from tailrace.dialects.wire import GenerateCall, View
from tailrace.errors import RequestError
from tailrace.types import End, Prompt, PromptLogprob, TextDelta, Usage

CHAT: JsonBody = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: JsonBody = {"prompt": "Hi"}


def test_echo_with_logprobs_wants_those_of_the_prompt() -> None:
    assert completion(TEXT | {"echo": True}).request == completion(TEXT).request
    for logprobs in (0, 3):
        sampling = completion(TEXT | {"echo": True, "logprobs": logprobs}).request.sampling
        assert (sampling.prompt_logprobs, sampling.top_logprobs) == (logprobs, logprobs)
    only = completion(TEXT | {"echo": True, "logprobs": 1, "max_tokens": 0})
    assert (only.request.sampling.max_tokens, only.view) == (1, TextView(logprobs=True, echo=True, is_only_prompt=True))
    with pytest.raises(RequestError):
        completion(TEXT | {"max_tokens": 0})


@pytest.mark.parametrize(("parse", "body"), [(chat, CHAT), (completion, TEXT)])
def test_logprobs_of_the_prompt(parse: Callable[[JsonBody], GenerateCall], body: JsonBody) -> None:
    assert parse(body | {"prompt_logprobs": 0}).request.sampling.prompt_logprobs == 0
    streamed = parse(body | {"prompt_logprobs": 1, "stream": True})  # whose chunks have no place for them
    assert (streamed.request.sampling.prompt_logprobs, streamed.ignored) == (None, ("prompt_logprobs",))
    assert streamed.view == parse(body | {"stream": True}).view


_KNOWN = (PromptLogprob(-1.5, 2, ((72, -0.5), (105, -1.5))), PromptLogprob(-3.0, 9, ((72, -0.5), (105, -1.5))))


def _scored(view: View, *, stream: bool) -> Any:  # Any: JSON
    """Return the first choice of an answer to "Hi!" whose prompt has logprobs."""
    first = TextDelta("a", (97,), 0, (-0.25,), "length", None, (((97, -0.25), (98, -2.0)),), prompt_logprobs=_KNOWN)
    encoder = view.open(facts(prompts=(Prompt("Hi!", ((72, 105, 33),)),)))
    end = End("done", Usage(3, 1))
    if stream:
        return json.loads(encoder.encode(1, first).removeprefix(b"data: "))["choices"][0]
    return json.loads(encoder.whole([first, end]))["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs(stream: bool) -> None:
    """The form that lm-eval-harness reads."""
    found = _scored(TextView(logprobs=True, echo=True), stream=stream)
    assert (found["text"], found["finish_reason"]) == ("Hi!a", "length")
    assert found["logprobs"] == {
        "tokens": ["H", "i", "!", "a"],
        "token_logprobs": [None, -1.5, -3.0, -0.25],
        "top_logprobs": [
            None,
            {"H": -0.5, "i": -1.5},
            {"H": -0.5, "i": -1.5, "!": -3.0},
            {"a": -0.25, "b": -2.0},
        ],
        "text_offset": [0, 1, 2, 3],
    }
    only = _scored(TextView(logprobs=True, echo=True, is_only_prompt=True), stream=stream)
    assert (only["text"], only["finish_reason"]) == ("Hi!", "length")
    assert only["logprobs"] == {name: values[:3] for name, values in found["logprobs"].items()}


def test_logprobs_of_the_prompt_in_vllms_form() -> None:
    found = _scored(TextView(prompt_logprobs=True), stream=False)
    likeliest = {"logprob": -0.5, "rank": 1, "decoded_token": "H"}
    second = {"logprob": -1.5, "rank": 2, "decoded_token": "i"}
    other = {"logprob": -3.0, "rank": 9, "decoded_token": "!"}
    assert found["prompt_logprobs"] == [
        None,
        {"72": likeliest, "105": second},
        {"72": likeliest, "105": second, "33": other},
    ]
    assert (found["text"], found["logprobs"]) == ("a", None)
