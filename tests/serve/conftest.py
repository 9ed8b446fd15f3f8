"""Checkpoints for tests that run `transformers`, and a tiny model with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import smollm2_dir, tiny_gpt2_dir

__all__ = ["loaded", "model", "smollm2_dir", "tiny_gpt2_dir", "tokenizer"]

# Models and tokenizers are Any: transformers types neither well enough to be called under mypy's strict rules.


@pytest.fixture(scope="module")
def tokenizer(tiny_gpt2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_gpt2_dir)


@pytest.fixture(scope="module")
def loaded(tiny_gpt2_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir, dtype=torch.float32)


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    """Return the tiny model without the hooks of other tests."""
    hooks: list[Any] = []
    loaded.hang = lambda hook: hooks.append(loaded.register_forward_pre_hook(lambda *_: hook()))
    yield loaded
    for hook in hooks:
        hook.remove()
