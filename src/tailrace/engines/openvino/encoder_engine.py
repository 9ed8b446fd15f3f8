"""Encoders on OpenVINO: texts in, vectors or scores out.

A step takes the sequence that has waited longest, and those whose lengths are next to it, up to `max_step_tokens`. So
texts of different requests run together, short texts never wait for a long batch, and attention computes little
padding. The arithmetic is float32, unless `exact` is off. What runs beside a text changes its vector by rounding only,
about 1e-7.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from tailrace.engines.interface import Capabilities, Delta, Sequence
from tailrace.engines.openvino.encoder import EncoderWeights, build
from tailrace.engines.openvino.encoder_families import EncoderShape, read_encoder
from tailrace.engines.openvino.model import device_of
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models.card import ModelCard, Pooling
from tailrace.models.resolve import read_card
from tailrace.types import VectorForm

__all__ = ["EncoderEngine"]

_NEVER = np.float32(-1e9)  # is added to the score of a place without a token
_WHOLE = VectorForm()


class EncoderEngine:
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        card = read_card(Path(spec.path), "")
        try:
            self._runner = _Runner(spec, card)
        except (RuntimeError, LookupError, ValueError, MemoryError) as error:  # exceptions of C++, too
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(lines[-1].strip().rstrip(".")[:200]) from error
        self._step_tokens = spec.max_step_tokens
        self._waiting: dict[int, Sequence] = {}  # in order of arrival
        self._aborted: list[int] = []
        self.capabilities = Capabilities(
            engine=f"openvino {ov.__version__.partition('-')[0]}",
            context_tokens=min(spec.context_tokens, self._runner.num_positions),
            kv_tokens=spec.kv_tokens,
            block_tokens=1,
            max_sequences=spec.max_sequences,
            parameters=frozenset(),
            exact=False,
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

    def step(self) -> list[Delta]:
        deltas = [Delta(sequence_id, 0, (), (), "cancelled") for sequence_id in self._aborted]
        self._aborted.clear()
        batch = self._next_batch()
        if batch:
            vectors = self._runner.run(batch)
            deltas += [_delta(*one) for one in zip(batch, vectors, strict=True)]
        return deltas

    def close(self) -> None:
        self._waiting.clear()
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
            if batch and num_tokens > self._step_tokens:
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


class _Runner:
    """A compiled model."""

    def __init__(self, spec: EngineSpec, card: ModelCard) -> None:
        """Raises: ModelError; the library's RuntimeError."""
        self._check(spec)
        encoder = read_encoder(json.loads((card.path / "config.json").read_text()), card.task)
        weights = EncoderWeights(encoder, card.path)
        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"} if spec.exact else {}
        if spec.threads:
            options["INFERENCE_NUM_THREADS"] = spec.threads
        compiled = ov.Core().compile_model(build(encoder, weights), device_of(spec.device), options)
        self._names = {port.any_name for port in compiled.inputs}
        self._request = compiled.create_infer_request()
        self._encoder: EncoderShape = encoder
        self._pooling: Pooling = card.pooling
        self.vocab_size = len(weights.matrix("tokens"))
        self.num_positions = len(weights.matrix("positions")) - encoder.first_position
        self._num_types = len(weights.matrix("types")) if "types" in encoder.other_names else 1
        self.run([Sequence(0, ((0, 0, 0),)), Sequence(0, ((0, 0),))])  # the library packs the weights then

    @staticmethod
    def _check(spec: EngineSpec) -> None:
        """Raises: ModelError for a setting that encoders do not have."""
        for name, value in (("adapter", spec.adapters), ("draft", spec.draft), ("weights", spec.weight_bits % 16)):
            if value:
                raise ModelError(f"--{name} does not apply to a model that embeds or ranks")

    def run(self, batch: Many[Sequence]) -> npt.NDArray[np.float32]:
        """Return a vector for each sequence, (sequences, dimensions); of a model that ranks (sequences, 1)."""
        arrays = {name: array for name, array in self._arrays(batch).items() if name in self._names}
        self._request.infer(arrays, share_inputs=True)
        vectors: npt.NDArray[np.float32] = self._request.get_output_tensor(0).data
        return vectors

    def _arrays(self, batch: Many[Sequence]) -> dict[str, npt.NDArray[Any]]:
        lengths = np.array([sequence.num_prompt_tokens for sequence in batch])
        starts = np.cumsum(lengths) - lengths
        columns = np.arange(lengths.max())
        is_token = columns < lengths[:, None]
        types = [
            min(place, self._num_types - 1)
            for sequence in batch
            for place, segment in enumerate(sequence.segments)
            for _ in range(len(segment) if isinstance(segment, tuple) else segment.num_tokens)
        ]
        return {
            "ids": np.array([token_id for sequence in batch for token_id in sequence.prompt_ids], np.int32),
            "positions": (np.nonzero(is_token)[1] + self._encoder.first_position).astype(np.int32),
            "types": np.array(types, np.int32),
            "rows": np.flatnonzero(is_token).astype(np.int32),
            "places": np.where(is_token, starts[:, None] + columns, 0).astype(np.int32),
            "mask": np.where(is_token, np.float32(0), _NEVER)[:, None, None, :],
            "pool": self._pool(lengths, starts),
        }

    def _pool(self, lengths: npt.NDArray[Any], starts: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the share of each token in the vector of its sequence, (sequences, tokens)."""
        sequences = np.arange(len(lengths))
        pool = np.zeros((len(lengths), lengths.sum()), np.float32)
        match self._pooling:
            case "mean":
                pool[np.repeat(sequences, lengths), np.arange(lengths.sum())] = np.repeat(1 / lengths, lengths)
            case "first":
                pool[sequences, starts] = 1
            case "last":
                pool[sequences, starts + lengths - 1] = 1
        return pool
