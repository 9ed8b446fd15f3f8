"""The real model, for the tests of engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.checkpoints import smollm2_dir, tiny_gpt2_dir
from tests.missing import skip_missing
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec
from tailrace.errors import ModelError
from tailrace.models import ModelCard, NoProgress, models_path
from tailrace.models.resolve import resolve

__all__ = ["smollm2_dir", "tiny_gpt2_dir"]


@pytest.fixture(scope="module")
def card() -> ModelCard:
    try:
        return resolve("smollm2", NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)


@pytest.fixture(scope="module")
def openvino_spec(card: ModelCard) -> EngineSpec:
    """Small, so that a prompt at the limit is fast, with steps so small that it needs three."""
    return EngineSpec(
        engine="openvino",
        path=str(card.path),
        context_tokens=384,
        kv_tokens=8192,
        max_sequences=16,
        max_step_tokens=128,
        eos_token_ids=card.eos_token_ids,
        cache_path=str(models_path().parent / "prepared"),
    )


@pytest.fixture(scope="module")
def chat(card: ModelCard) -> Callable[[str], tuple[int, ...]]:
    """Return the ids of a question in the model's chat template."""
    tokenizer = Tokenizer.from_str(card.tokenizer_json)

    def tokens(question: str) -> tuple[int, ...]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return tokens
