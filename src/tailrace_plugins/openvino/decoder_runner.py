"""Runs decoders that embed or rank: the graph of `decoder.py` without its head.

A vector is made of the hidden states behind the last norm. A decoder's token sees only those before it, so a text of
more tokens than a step has is computed in pieces, with their keys and values in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.engines import EngineSpec, Sequence
from tailrace.models import ModelCard
from tailrace_kit.scratch import scratch_directory
from tailrace_kit.vectors import Rows
from tailrace_plugins.openvino.blocks import BLOCK_TOKENS
from tailrace_plugins.openvino.decoder import build
from tailrace_plugins.openvino.model_files import vector_bits
from tailrace_plugins.openvino.model_loading import ENGINE, device_of, say
from tailrace_plugins.openvino.openvino_adapters import Branches
from tailrace_plugins.openvino.prepared import prepare
from tailrace_plugins.openvino.runner import Piece, Runner

__all__ = ["DecoderRunner"]


class DecoderRunner:
    """Implements `VectorRunner`."""

    engine = ENGINE
    most_sequences = 64  # each has a block of the cache at least

    def __init__(self, spec: EngineSpec, card: ModelCard) -> None:
        """Raises: ModelError; the library's RuntimeError."""
        bits = vector_bits(card, spec.weight_bits)
        self._step_tokens = spec.max_step_tokens
        self._pooling = card.pooling
        self.num_positions = card.context_tokens
        num_blocks = max(_num_blocks(spec.context_tokens), self.most_sequences + _num_blocks(spec.max_step_tokens))
        with ExitStack() as stack:
            cache = Path(spec.cache_path or stack.enter_context(scratch_directory("tailrace-prepared-")))
            decoder, weights = prepare(card.path, cache, spec.context_tokens, bits=bits, say=say, card=card)
            stack.enter_context(weights.released())
            self.vocab_size = weights.shape("embedding")[0]
            score = weights.vector("score") if card.task == "rank" else None
            self._score = None if score is None else score.reshape(-1, decoder.hidden_size).copy()
            self._runner = Runner(
                build(decoder, weights, Branches(), has_head=False),
                device_of(spec.device),
                _options(spec, bits),
                num_blocks,
                has_lone_form=False,
            )
            self.run([Sequence(0, ((0, 0, 0),))])  # the library packs the weights then
        self._batch: Many[Sequence] = ()
        self.num_done = 0
        self._sum: Rows | None = None

    def run(self, batch: Many[Sequence]) -> Rows | None:
        """Return a vector for each sequence, (sequences, dimensions), or a score, (sequences, 1). None: call this again
        with the same batch, which is one text that takes several steps."""
        if len(batch) == 1 and batch[0].num_prompt_tokens > self._step_tokens:
            return self._run_piece(batch)
        pieces, first = [], 0
        for sequence in batch:
            count = _num_blocks(sequence.num_prompt_tokens)
            pieces.append(self._piece(sequence, 0, range(first, first + count), is_last=True))
            first += count
        rows = self._runner.run(pieces, is_batch=True)
        ends = np.cumsum([piece.num_sampled for piece in pieces])
        return self._results([self._pooled(own) for own in np.split(rows, ends[:-1])])

    def close(self) -> None:
        """It frees its memory by itself."""

    def _run_piece(self, batch: Many[Sequence]) -> Rows | None:
        """Run the next piece of the only text."""
        if batch is not self._batch:
            self._batch, self.num_done, self._sum = batch, 0, None
        (sequence,) = batch
        num_tokens = sequence.num_prompt_tokens
        end = min(self.num_done + self._step_tokens, num_tokens)
        piece = self._piece(sequence, self.num_done, range(_num_blocks(end)), is_last=end == num_tokens, end=end)
        rows = self._runner.run([piece], is_batch=True)
        self.num_done = end
        if self._pooling == "mean":
            self._sum = rows.sum(0) + (0 if self._sum is None else self._sum)
        elif self._sum is None and piece.num_sampled:
            self._sum = self._pooled(rows).copy()
        if end < num_tokens:
            return None
        self._batch = ()
        assert self._sum is not None
        if self._pooling == "mean":
            self._sum /= np.float32(num_tokens)
        return self._results([self._sum])

    def _piece(self, sequence: Sequence, start: int, table: range, *, is_last: bool, end: int | None = None) -> Piece:
        ids = sequence.prompt_ids[start:end]
        if self._pooling == "last":
            return Piece(ids, start, table, is_sampled=is_last)
        return Piece(ids, start, table, is_sampled=True, is_scored=self._pooling == "mean" or start == 0)

    def _pooled(self, rows: Rows) -> Rows:
        """Return the vector of a text whose sampled rows these are."""
        pooled: Rows = rows.mean(0) if self._pooling == "mean" else rows[0]
        return pooled

    def _results(self, vectors: Many[Rows]) -> Rows:
        stacked = np.stack(vectors)
        if self._score is None:
            return stacked
        scores = stacked @ self._score.T
        return scores[:, :1] - scores[:, 1:] if scores.shape[1] == 2 else scores


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def _options(spec: EngineSpec, bits: int) -> dict[str, Any]:  # Any: as the library has it
    options: dict[str, Any] = {}
    if spec.exact:
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        if bits >= 16:
            options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    if spec.threads:
        options["INFERENCE_NUM_THREADS"] = spec.threads
    return options
