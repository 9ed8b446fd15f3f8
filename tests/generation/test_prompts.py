"""Texts that an answer must not have, as tokens."""

from __future__ import annotations

import pytest
import tokenizers
from tests.generation.harness import tokenizer

from tailrace.errors import RequestError
from tailrace.generation.prompts import PromptEncoder
from tailrace.text import Tokenizer
from tailrace.types import Sampling


def _prompts(known: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer=known, chat=None, context_tokens=64, add_bos=False)


def _with_words() -> Tokenizer:
    vocabulary = {"a": 0, "b": 1, "Ġ": 2, "Ġa": 3}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ġ", "a")]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer.from_json(library.to_str())


def test_a_bad_word_also_after_a_space_if_that_is_another_token() -> None:
    prompts = _prompts(_with_words())
    assert prompts.bad_words(["a"]) == ((0,), (3,))
    assert prompts.bad_words([" a"]) == ((0,), (3,))  # as in vLLM: a space before it changes nothing
    assert prompts.bad_words(["b"]) == ((1,),)  # after a space it has two tokens
    assert prompts.bad_words(["ab", "a"]) == ((0, 1), (3, 1), (0,), (3,))


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_a_token_id_that_the_model_does_not_have(name: str) -> None:
    prompts = _prompts(tokenizer())
    last = tokenizer().vocab_size - 1
    prompts.check_ids(Sampling(**{name: (0, last)}))  # type: ignore[arg-type]  # ids
    with pytest.raises(RequestError) as caught:
        prompts.check_ids(Sampling(**{name: (last + 1,)}))  # type: ignore[arg-type]
    assert caught.value.param == name
