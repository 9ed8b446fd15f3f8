"""Encoders and decoders on OpenVINO that make vectors or scores of texts.

A step takes the sequence that has waited longest, and those whose lengths are next to it, up to `max_step_tokens`. So
texts of different requests run together, short texts never wait for a long batch, and attention computes little
padding. The arithmetic is float32, unless `exact` is off. What runs beside a text changes its vector by rounding only,
about 1e-7.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import openvino as ov

from tailrace.engines.interface import Capabilities, Delta, Prefill, Sequence
from tailrace.engines.openvino.decoder_runner import DecoderRunner
from tailrace.engines.openvino.encoder_runner import EncoderRunner
from tailrace.engines.openvino.model_files import is_encoder
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models.resolve import read_card
from tailrace.types import VectorForm

__all__ = ["VectorEngine"]

_WHOLE = VectorForm()


class VectorRunner(Protocol):
    """A compiled model."""

    vocab_size: int
    num_positions: int  # the most tokens of a sequence
    most_sequences: int  # of a batch
    num_done: int  # tokens of a text that takes several steps

    def run(self, batch: Many[Sequence]) -> npt.NDArray[np.float32] | None:
        """Return a vector for each sequence, (sequences, dimensions); of a model that ranks (sequences, 1). None: call
        this again with the same batch, which is one text that takes several steps."""


class VectorEngine:
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        card = read_card(Path(spec.path), "")
        try:
            for name, value in (("adapter", spec.adapters), ("draft", spec.draft)):
                if value:
                    raise ModelError(f"--{name} does not apply to a model that embeds or ranks")
            make = EncoderRunner if is_encoder(card) else DecoderRunner
            self._runner: VectorRunner = make(spec, card)
        except (RuntimeError, LookupError, ValueError, MemoryError) as error:  # exceptions of C++, too
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(lines[-1].strip().rstrip(".")[:200]) from error
        self._step_tokens = spec.max_step_tokens
        self._waiting: dict[int, Sequence] = {}  # in order of arrival
        self._batch: list[Sequence] = []  # one text that takes several steps
        self._aborted: list[int] = []
        self.capabilities = Capabilities(
            engine=f"openvino {ov.__version__.partition('-')[0]}",
            context_tokens=min(spec.context_tokens, self._runner.num_positions),
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
        self._batch.clear()
        self._aborted.clear()

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
