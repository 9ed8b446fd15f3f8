"""Engines that make vectors or scores of texts: what runs in a step. A library only computes a batch.

A step takes the sequence that has waited longest, and those whose lengths are next to it, up to `max_step_tokens`. So
texts of different requests run together, short texts never wait for a long batch, and attention computes little
padding. What runs beside a text changes its vector by rounding only, in float32 by about 1e-7.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tailrace.engines import Capabilities, Delta, EngineSpec, Prefill, Sequence
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models import ModelCard
from tailrace.models.gguf_header import read_parts
from tailrace.models.resolve import read_card
from tailrace.types import VectorForm

__all__ = ["Rows", "VectorEngine", "VectorRunner", "card_of", "vocab_size_of"]

Rows = npt.NDArray[np.float32]
_WHOLE = VectorForm()
_STEP_TOKENS = 256  # where the engine's kind has no number of its own


def card_of(spec: EngineSpec) -> ModelCard:
    """Return the card of the model that is to be loaded. Raises: ModelError."""
    return read_card(Path(spec.path), "")


def vocab_size_of(card: ModelCard) -> int:
    """Return how many token ids a GGUF file has vectors for. Raises: ModelError."""
    sizes = [tensor.shape[0] for tensor in read_parts(card.path).tensors if tensor.name == "token_embd.weight"]
    if not sizes:
        raise ModelError(f"{card.path.name} has no embedding of tokens.")
    return sizes[0]


class VectorRunner(Protocol):
    """A loaded model."""

    engine: str  # the library and its version
    vocab_size: int
    num_positions: int  # the most tokens of a sequence
    most_sequences: int  # of a batch
    num_done: int  # tokens of a text that takes several steps

    def run(self, batch: Many[Sequence]) -> Rows | None:
        """Return a vector for each sequence, (sequences, dimensions); of a model that ranks (sequences, 1). None: call
        this again with the same batch, which is one text that takes several steps."""

    def close(self) -> None: ...


class VectorEngine:
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec, runner: VectorRunner) -> None:
        self._runner = runner
        self._step_tokens = spec.max_step_tokens or _STEP_TOKENS
        self._waiting: dict[int, Sequence] = {}  # in order of arrival
        self._batch: list[Sequence] = []  # one text that takes several steps
        self._aborted: list[int] = []
        self.capabilities = Capabilities(
            engine=runner.engine,
            context_tokens=min(spec.context_tokens, runner.num_positions),
            kv_tokens=spec.kv_tokens,
            block_tokens=1,
            max_sequences=spec.max_sequences,
            parameters=frozenset(),
            exact=False,
            reports_progress=True,
        )

    def submit(self, sequence: Sequence) -> None:
        if not 0 < sequence.num_prompt_tokens <= self.capabilities.context_tokens:
            raise SequenceFailed("the input is empty, or too long for this engine")
        ids = sequence.prompt_ids
        if min(ids) < 0 or max(ids) >= self._runner.vocab_size:
            raise SequenceFailed("the input has a token id that the model does not have")
        self._waiting[sequence.sequence_id] = sequence

    def abort(self, sequence_id: int) -> None:
        if self._waiting.pop(sequence_id, None) is not None:
            self._aborted.append(sequence_id)
        elif any(one.sequence_id == sequence_id for one in self._batch):
            self._batch = []
            self._aborted.append(sequence_id)

    def step(self) -> list[Delta]:
        deltas = [Delta(sequence_id, 0, (), (), "cancelled") for sequence_id in self._aborted]
        self._aborted.clear()
        batch = self._batch or self._next_batch()
        vectors = self._runner.run(batch) if batch else ()
        self._batch = batch if vectors is None else []
        if vectors is not None:
            deltas += [_delta(*one) for one in zip(batch, vectors, strict=True)]
        return deltas

    def progress(self) -> list[Prefill]:
        return [Prefill(one.sequence_id, self._runner.num_done, 0) for one in self._batch]

    def close(self) -> None:
        self._waiting.clear()
        self._aborted.clear()
        self._batch = []
        self._runner.close()

    def _next_batch(self) -> list[Sequence]:
        waiting = list(self._waiting.values())
        if not waiting:
            return []
        length = waiting[0].num_prompt_tokens
        waiting.sort(key=lambda one: abs(one.num_prompt_tokens - length))  # the first one stays the first
        batch: list[Sequence] = []
        num_tokens = 0
        for sequence in waiting:
            num_tokens += sequence.num_prompt_tokens
            if batch and (num_tokens > self._step_tokens or len(batch) == self._runner.most_sequences):
                break
            batch.append(self._waiting.pop(sequence.sequence_id))
        return batch


def _delta(sequence: Sequence, vector: npt.NDArray[np.float32]) -> Delta:
    form = sequence.vector or _WHOLE
    if len(vector) > 1:  # not a score
        vector = vector[: form.num_dimensions or None]
        if form.is_normalized:
            vector = vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))
    return Delta(sequence.sequence_id, 0, (), (), "stop", vector=vector.astype("<f4").tobytes())
