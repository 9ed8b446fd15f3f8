"""Two ways to run a step of several sequences: in the library's pages, or one sequence after the other."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from tailrace.engines.transformers.sampling import Row, choose_all

__all__ = ["BLOCK_TOKENS", "Alone", "Paged"]

BLOCK_TOKENS = 32


class _Sampler(ContinuousBatchingLogitsProcessor):
    """Sits where the library lets logits be processed, and leaves of each row the one token that was chosen."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - the library's
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, rows: dict[str, Row]) -> None:
        self._rows = rows
        self._now: list[Row] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:  # Any: the library's states
        self._now = [self._rows[request.state.request_id] for request in requests_with_new_token]
        return torch.zeros(len(self._now), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Logits of shape (rows, vocab), of which padding may be the last."""
        chosen = torch.tensor(choose_all(self._now, scores[: len(self._now)]), device=scores.device)
        scores[: len(self._now)].scatter_(1, chosen[:, None], torch.inf)
        return scores


class Paged:
    """The library's continuous batching, driven a step at a time."""

    def __init__(
        self, model: Any, *, kv_tokens: int, step_tokens: int, max_sequences: int, shares_prefixes: bool
    ) -> None:
        # Raises: whatever the library does with a model that it cannot page.
        self._model = model
        self._rows: dict[str, Row] = {}
        config = ContinuousBatchingConfig(
            page_size=BLOCK_TOKENS,
            num_blocks=-(-kv_tokens // BLOCK_TOKENS) + max_sequences,
            max_batch_tokens=step_tokens,
            max_requests_per_batch=max_sequences,
            allow_block_sharing=shares_prefixes,
            use_cuda_graph=False,  # the sampler looks at each row, which no graph can hold
            use_async_batching=False,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]  # the library's
        self._manager = model.init_continuous_batching(greedy, config)
        processors = self._manager.logit_processor
        processors.logits_processor.append(_Sampler(self._rows))
        processors.tensors_required += 1
        processors.do_processing = True
        self._manager.warmup()
        self._batches = self._manager.batch_processor

    def add(self, row: Row) -> None:
        name = str(row.sequence_id)
        self._rows[name] = row
        # One token more than is wanted, so that it never ends one by itself: what is over is dropped.
        self._manager.add_request(row.token_ids, request_id=name, max_new_tokens=(row.sampling.max_tokens or 0) + 1)

    def drop(self, row: Row) -> None:
        name = str(row.sequence_id)
        self._manager.cancel_request(name)  # which is done before the next batch is put together
        self._rows.pop(name, None)

    @torch.inference_mode()
    def step(self) -> None:
        if self._batches.prepare_next_batch():
            self._batches._generation_step(self._model)
            self._batches.update_batch()


class Alone:
    """Each sequence with a cache of its own, one forward after the other."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._pasts: dict[Row, Any] = {}

    def add(self, row: Row) -> None:
        self._pasts[row] = None

    def drop(self, row: Row) -> None:
        self._pasts.pop(row, None)

    @torch.inference_mode()
    def step(self) -> None:
        for row, past in self._pasts.items():
            new = row.token_ids if past is None else row.token_ids[-1:]
            ids = torch.tensor([new], device=self._model.device)
            state = {"past_key_values": DynamicCache(config=self._model.config) if past is None else past}
            output = self._model(input_ids=ids, use_cache=True, **state)
            self._pasts[row] = output.past_key_values
            choose_all([row], output.logits[:, -1].float())
