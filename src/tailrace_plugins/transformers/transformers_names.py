"""transformers' continuous batching, run step by step instead of in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

__all__ = ["Batches", "LogitsProcessor"]

LogitsProcessor = ContinuousBatchingLogitsProcessor


class Batches:
    """Requests by their names."""

    def __init__(self, model: Any, config: ContinuousBatchingConfig, processor: LogitsProcessor) -> None:
        """`processor` needs one row of tensors. Raises: the library's exceptions if it cannot page the model."""
        self._model = model
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]  # the library's
        self._manager = model.init_continuous_batching(greedy, config)
        processors = self._manager.logit_processor
        processors.logits_processor.append(processor)
        processors.tensors_required += 1
        processors.do_processing = True
        self._manager.warmup()
        self._batches = self._manager.batch_processor

    def add(self, name: str, token_ids: Sequence[int], max_new_tokens: int) -> None:
        self._manager.add_request(token_ids, request_id=name, max_new_tokens=max_new_tokens)

    def cancel(self, name: str) -> None:
        """Takes effect before the next batch."""
        self._manager.cancel_request(name)

    def progress(self, name: str) -> tuple[int, int] | None:
        """Return how many tokens of a prompt are read and how many are in the next batch; None if it is not active."""
        state = self._batches.scheduler.active_requests.get(name)
        return None if state is None else (state.position_offset, len(state.tokens_to_process))

    def step(self, before: Callable[[list[tuple[str, int]]], None]) -> None:
        """Compute a batch, if there is one. `before` gets the name and the number of tokens of each of its rows."""
        if self._batches.prepare_next_batch():
            batch = self._batches.inputs_and_outputs.requests_in_batch
            before([(one.state.request_id, one.query_length) for one in batch])
            self._batches._generation_step(self._model)
            self._batches.update_batch()
