"""Runs encoders: the tokens of a batch in, one vector or score for each sequence out."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from tailrace.engines import EngineSpec, Sequence
from tailrace.errors import ModelError
from tailrace.models import ModelCard, Pooling
from tailrace.models.gguf_header import read_parts
from tailrace_plugins.openvino.encoder import EncoderWeights, build
from tailrace_plugins.openvino.encoder_families import EncoderShape, read_encoder, read_gguf_encoder
from tailrace_plugins.openvino.model_loading import ENGINE, device_of

__all__ = ["EncoderRunner"]

_NEVER = np.float32(-1e9)  # is added to the score of a cell without a token


class EncoderRunner:
    """Implements `VectorRunner`."""

    engine = ENGINE
    most_sequences = 2**31
    num_done = 0

    def __init__(self, spec: EngineSpec, card: ModelCard) -> None:
        """Raises: ModelError; the library's RuntimeError."""
        self._check(spec)
        if card.format == "gguf":
            encoder = read_gguf_encoder(read_parts(card.path), card.task)
        else:
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
        if spec.weight_bits % 16:
            raise ModelError("--weights does not apply to an encoder")

    def run(self, batch: Many[Sequence]) -> npt.NDArray[np.float32]:
        """Return a vector for each sequence, (sequences, dimensions); of a model that ranks (sequences, 1)."""
        arrays = {name: array for name, array in self._arrays(batch).items() if name in self._names}
        self._request.infer(arrays, share_inputs=True)
        vectors: npt.NDArray[np.float32] = self._request.get_output_tensor(0).data
        return vectors

    def close(self) -> None:
        """It frees its memory by itself."""

    def _arrays(self, batch: Many[Sequence]) -> dict[str, npt.NDArray[Any]]:
        lengths = np.array([sequence.num_prompt_tokens for sequence in batch])
        starts = np.cumsum(lengths) - lengths
        columns = np.arange(lengths.max())
        is_token = columns < lengths[:, None]
        types = [
            min(index, self._num_types - 1)
            for sequence in batch
            for index, segment in enumerate(sequence.segments)
            for _ in range(len(segment) if isinstance(segment, tuple) else segment.num_tokens)
        ]
        return {
            "ids": np.array([token_id for sequence in batch for token_id in sequence.prompt_ids], np.int32),
            "positions": (np.nonzero(is_token)[1] + self._encoder.first_position).astype(np.int32),
            "types": np.array(types, np.int32),
            "rows": np.flatnonzero(is_token).astype(np.int32),
            "cells": np.where(is_token, starts[:, None] + columns, 0).astype(np.int32),
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
