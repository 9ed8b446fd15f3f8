"""Models that embed with llama.cpp: GGUF files of any architecture that it has. It gives no scores for token ids."""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import xllamacpp

from tailrace.engines import EngineSpec, Sequence
from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace_kit.scratch import scratch_directory
from tailrace_kit.vectors import Rows, VectorEngine, card_of, vocab_size_of
from tailrace_plugins.llamacpp.llamacpp_model import VERSION, start_server
from tailrace_plugins.llamacpp.socket_requests import ask

__all__ = ["LlamaCppVectors"]

_LEAST_STEP_TOKENS = 512
_POOLINGS = {"mean": 1, "first": 2, "last": 3}  # llama.cpp's numbers


class LlamaCppVectors(VectorEngine):
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, _Runner(spec, card_of(spec)))


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[list[float]]


class _Runner:
    """Implements `VectorRunner`."""

    engine = f"llamacpp {VERSION}"
    most_sequences = 16
    num_done = 0

    def __init__(self, spec: EngineSpec, card: ModelCard) -> None:
        self._stack = ExitStack()
        self._socket_path = str(self._stack.enter_context(scratch_directory("tailrace-llamacpp-")) / "llama.sock")
        self.num_positions = min(card.context_tokens, spec.context_tokens)
        self.vocab_size = vocab_size_of(card)

        def embed(params: xllamacpp.CommonParams) -> None:
            params.embedding = True
            params.pooling_type = xllamacpp.llama_pooling_type(_POOLINGS[card.pooling])
            params.n_parallel = self.most_sequences
            params.kv_unified = True
            # A text has to fit into one batch.
            params.n_ctx = params.n_batch = params.n_ubatch = max(self.num_positions, _LEAST_STEP_TOKENS)

        self._server: Any = None  # Any: the library has no stubs
        try:
            self._server, _ = start_server(spec, self._socket_path, embed)
        except BaseException:
            self.close()
            raise

    def run(self, batch: Many[Sequence]) -> Rows:
        inputs = [list(sequence.prompt_ids) for sequence in batch]
        reply = ask(self._socket_path, "POST /embedding", {"input": inputs, "embd_normalize": -1})
        try:
            found = msgspec.json.decode(reply, type=list[_Embedding])
        except msgspec.DecodeError as error:
            raise ModelError("llama.cpp made no embeddings of a text.") from error
        return np.array([one.embedding[0] for one in sorted(found, key=lambda one: one.index)], np.float32)

    def close(self) -> None:
        self._server = None
        self._stack.close()
