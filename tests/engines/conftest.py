"""The real model, for the tests of engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.checkpoints import smollm2_dir, tiny_gpt2_dir
from tests.missing import skip_missing
from tokenizers import Tokenizer

from tailrace.errors import ModelError
from tailrace.models import ModelCard, NoProgress
from tailrace.models.resolve import resolve

__all__ = ["smollm2_dir", "tiny_gpt2_dir"]


@pytest.fixture(scope="module")
def card() -> ModelCard:
    try:
        return resolve("smollm2", NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)


@pytest.fixture(scope="module")
def chat(card: ModelCard) -> Callable[[str], tuple[int, ...]]:
    """Return the ids of a question in the model's chat template."""
    tokenizer = Tokenizer.from_str(card.tokenizer_json)

    def tokens(question: str) -> tuple[int, ...]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return tokens
