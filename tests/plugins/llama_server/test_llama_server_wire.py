"""Requests of llama.cpp's server. `tests/clients/test_infill.py` asks a real model."""

from __future__ import annotations

import json

import pytest
from tests.dialects.fake_server import BOS, FakeServer, parsed, vocabulary
from tests.dialects.transcripts import facts

from tailrace.dialects import GenerateCall
from tailrace.errors import RequestError
from tailrace.types import End, Event, TextDelta, Usage
from tailrace_plugins.llama_server.llama_server_wire import (
    apply_template,
    detokenize,
    parse_completion,
    show_properties,
)


def _call(prompt: object, **fields: object) -> GenerateCall:
    return parse_completion(parsed({"prompt": prompt, **fields}))


def test_biases_are_pairs_or_an_object() -> None:
    for given in ([[7, 1.5], [9, False]], {"7": 1.5, "9": -100}):
        call = _call("Hi", logit_bias=given)
        assert (call.request.sampling.logit_bias, call.ignored) == (((7, 1.5), (9, -100)), ())
    with pytest.raises(RequestError) as caught:
        _call("Hi", logit_bias=[[7, 101]])
    assert caught.value.param == "logit_bias"


def test_a_prompt_of_texts_and_ids() -> None:
    text = [token_id for token_id, *_ in vocabulary().offsets("Hi there")]
    assert _call(["Hi there", 7, 9, "Hi there"]).request.prompts == (((BOS, *text, 7, 9, *text),),)
    assert _call([7, 9]).request.prompts == (((7, 9),),)
    assert _call(["Hi there"]).request.prompts == ("Hi there",)


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], ["a\0", 1], [1, "a" * 8_193], [1.5], [-1, "a"]])
def test_prompts_that_are_none(prompt: object) -> None:
    with pytest.raises(RequestError) as caught:
        _call(prompt)
    assert str(caught.value.param).partition("[")[0] == "prompt"


A, B, C = (vocabulary().encode(letter, special=False)[0] for letter in "abc")
EVENTS: list[Event] = [
    TextDelta("", (A,), logprobs=(-0.5,), top_logprobs=(((A, -0.5), (B, -1.0)),)),
    TextDelta("ab", (B,), logprobs=(-2.0,), top_logprobs=(((C, -0.25), (B, -2.0)),)),
    TextDelta("c", (C,), finish_reason="length", logprobs=(-0.75,), top_logprobs=(((C, -0.75), (A, float("-inf"))),)),
    End("done", Usage(2, 3)),
]


def _shown(token_id: int, letter: str, logprob: float) -> dict[str, object]:
    return {"id": token_id, "token": letter, "logprob": logprob, "bytes": list(letter.encode())}


PROBABILITIES = [
    {**_shown(A, "a", -0.5), "top_logprobs": [_shown(A, "a", -0.5), _shown(B, "b", -1.0)]},
    {**_shown(B, "b", -2.0), "top_logprobs": [_shown(C, "c", -0.25), _shown(B, "b", -2.0)]},
    {**_shown(C, "c", -0.75), "top_logprobs": [_shown(C, "c", -0.75), _shown(A, "a", -9999.0)]},
]


def test_the_likeliest_tokens() -> None:
    """In the form of llama.cpp's server since December 2024."""
    call = _call("Hi", n_probs=2)
    assert (call.request.sampling.logprobs, call.request.sampling.top_logprobs, call.ignored) == (True, 2, ())
    whole = json.loads(call.view.open(facts()).whole(EVENTS))
    assert whole["completion_probabilities"] == PROBABILITIES
    encoder = call.view.open(facts())
    frames = [encoder.encode(seq, event) for seq, event in enumerate(EVENTS, 1)]
    assert frames[0] == b""  # its text comes with the next token, and so do its probabilities
    shown = [json.loads(frame.removeprefix(b"data: ")) for frame in frames[1:]]
    assert [one.get("completion_probabilities") for one in shown] == [PROBABILITIES[:2], PROBABILITIES[2:], None]
    chosen = _call("Hi", n_probs=2, response_fields=["completion_probabilities"]).view.open(facts()).whole(EVENTS)
    assert json.loads(chosen) == {"completion_probabilities": PROBABILITIES}


@pytest.mark.parametrize("fields", [{}, {"n_probs": 0}, {"n_probs": None}])
def test_without_n_probs_there_are_none(fields: dict[str, object]) -> None:
    call = _call("Hi", **fields)
    assert (call.request.sampling.logprobs, call.ignored) == (False, ())
    assert "completion_probabilities" not in json.loads(call.view.open(facts()).whole(EVENTS))


@pytest.mark.parametrize(
    ("parameters", "asked", "is_given", "given", "ignored"),
    [
        ({"logprobs", "top_logprobs"}, 100, True, 20, ("n_probs (is 20)",)),
        ({"logprobs"}, 2, True, 0, ("n_probs (is 0)",)),
        (set(), 2, False, 0, ("n_probs",)),
    ],
)
def test_more_probabilities_than_the_engine_has(
    parameters: set[str], asked: int, is_given: bool, given: int, ignored: tuple[str, ...]
) -> None:
    server = FakeServer(parameters=frozenset({"max_tokens", "seed", *parameters}))
    call = parse_completion(parsed({"prompt": "Hi", "n_probs": asked}, server=server))
    assert (call.request.sampling.logprobs, call.request.sampling.top_logprobs) == (is_given, given)
    assert call.ignored == ignored


def test_the_text_of_tokens() -> None:
    text = "a h\u00e9 <|user|>"
    ids = vocabulary().encode(text, special=True)
    assert json.loads(detokenize(parsed({"tokens": ids})).body) == {"content": text, "prompt": text}
    assert json.loads(detokenize(parsed({"tokens": []})).body) == {"content": "", "prompt": ""}
    for wrong in ([2**31 - 1], [-1], ["a"], 1, None):
        with pytest.raises(RequestError) as caught:
            detokenize(parsed({"tokens": wrong}))
        assert str(caught.value.param).partition("[")[0] == "tokens"


def test_the_prompt_of_a_chat() -> None:
    reply = apply_template(parsed({"messages": [{"role": "user", "content": "Hi"}], "tools": []}))
    assert json.loads(reply.body) == {"prompt": "<|user|>Hi\n<|assistant|>"}
    assert reply.ignored == ("tools",)


@pytest.mark.parametrize("sees", [False, True])
def test_clients_learn_whether_the_model_takes_images(sees: bool) -> None:
    shown = json.loads(show_properties(parsed(server=FakeServer(sees=sees))).body)
    assert shown["modalities"] == {"vision": sees, "audio": False}


def test_a_model_without_eyes_refuses_images() -> None:
    with pytest.raises(RequestError, match="takes no images") as refused:
        _call({"prompt_string": "<__media__>", "multimodal_data": ["AAAA"]})
    assert refused.value.param == "prompt.multimodal_data"
    assert _call({"prompt_string": "Hi"}).request.prompts == ("Hi",)
    assert _call("Hi <__media__>").request.prompts == ("Hi <__media__>",)
