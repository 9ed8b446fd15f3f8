"""The laws on the real engine with the default model, and what is its own: exactness, companions, what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest
from tokenizers import Tokenizer

from tailrace.engine import Capabilities, Delta, Engine, Sequence
from tailrace.engines import EngineSpec, load_engine
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models import ModelCard, NoProgress, models_path, resolve
from tailrace.testing import Law, laws
from tailrace.types import Sampling

pytestmark = pytest.mark.timeout(120)

_SLOW = {"nothing_leaks"}
_ALONE = ["closing_twice_is_harmless"]


class _Shared:
    """An engine that several laws use: closing is for the fixture."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.capabilities: Capabilities = engine.capabilities
        self.submit = engine.submit
        self.abort = engine.abort
        self.step = engine.step

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def card() -> ModelCard:
    try:
        return resolve("smollm2", NoProgress())
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def spec(card: ModelCard) -> EngineSpec:
    """Small enough that a prompt of the limit is quick."""
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
