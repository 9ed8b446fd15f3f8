"""Vectors without a model: each is a function of its token ids, so that tests know every answer.

`embeds=DIMENSIONS` makes the scripted model embed, and `ranks=1` rank. `prefill_tokens_per_s` is how fast it reads, all
texts of a step together. `<|crash|>` in a text kills the worker, and `<|stall|>` hangs it.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Sequence as Many

import numpy as np

from tailrace.engines.interface import Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace_kit.vectors import Rows, VectorEngine
from tailrace_outer.scripted.scripted_engine import CRASH_ID, STALL_ID, VOCAB_SIZE

__all__ = ["ScriptedVectors", "scripted_vector"]


def scripted_vector(token_ids: tuple[int, ...], size: int) -> Rows:
    """Return the vector of a text, or of size 1 the score of a pair, before it is normalised."""
    random = np.random.default_rng(zlib.crc32(repr(token_ids).encode()))
    return random.standard_normal(size, np.float32)


class ScriptedVectors(VectorEngine):
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, _Runner(spec))


class _Runner:
    """Implements `VectorRunner`."""

    engine = "scripted"
    vocab_size = VOCAB_SIZE
    most_sequences = 2**31
    num_done = 0

    def __init__(self, spec: EngineSpec) -> None:
        self.num_positions = spec.context_tokens
        self._size = int(spec.options.get("embeds", 1))
        speed = spec.options.get("prefill_tokens_per_s")
        self._interval_s = 1 / speed if speed else 0.0

    def run(self, batch: Many[Sequence]) -> Rows:
        texts = [sequence.prompt_ids for sequence in batch]
        time.sleep(sum(map(len, texts)) * self._interval_s)
        if any(CRASH_ID in ids for ids in texts):
            os.kill(os.getpid(), signal.SIGSEGV)
        if any(STALL_ID in ids for ids in texts):
            time.sleep(3600)
        return np.stack([scripted_vector(ids, self._size) for ids in texts])

    def close(self) -> None:
        """It holds nothing."""
