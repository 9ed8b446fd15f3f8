"""Requests of llama.cpp's server. `tests/clients/test_infill.py` asks a real model."""

from __future__ import annotations

import json

import pytest
from tests.dialects.fake_server import BOS, parsed, vocabulary

from tailrace.dialects import GenerateCall
from tailrace.errors import RequestError
from tailrace_plugins.llama_server.llama_server_wire import apply_template, detokenize, parse_completion


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
