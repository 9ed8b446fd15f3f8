"""Two ways to run a step: the library's paged continuous batching, or one sequence after the other."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tailrace.engines import Prefill
from tailrace_kit.sampler import Row
from tailrace_plugins.transformers.transformers_adapters import RowAdapters
from tailrace_plugins.transformers.transformers_names import Batches, LogitsProcessor

__all__ = ["BLOCK_TOKENS", "Paged", "Sequential"]

BLOCK_TOKENS = 32


class _Sampler(LogitsProcessor):
    """A logits processor of the library that chooses the token of each row and masks all others."""

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
        """Process logits of shape (rows, vocab). The last rows may be padding."""
        chosen = torch.tensor(_choose_all(self._now, scores[: len(self._now)]), device=scores.device)
        scores[: len(self._now)].scatter_(1, chosen[:, None], torch.inf)
        return scores


class Paged:
    """The library's continuous batching, run step by step."""

    def __init__(
        self,
        model: Any,
        branches: RowAdapters | None,
        *,
        kv_tokens: int,
        step_tokens: int,
        max_sequences: int,
        shares_prefixes: bool,
    ) -> None:
        # Raises: the library's exceptions if it cannot page the model.
        self._branches = branches
        self._rows: dict[str, Row] = {}
        self._num_cached: dict[str, int] = {}  # tokens of the prompts that are being read
        config = ContinuousBatchingConfig(
            page_size=BLOCK_TOKENS,
            num_blocks=-(-kv_tokens // BLOCK_TOKENS) + max_sequences,
            max_batch_tokens=step_tokens,
            max_requests_per_batch=max_sequences,
            allow_block_sharing=shares_prefixes,
            use_cuda_graph=False,  # the sampler runs Python code for each row, which a graph cannot contain
            use_async_batching=False,
        )
        self._batches = Batches(model, config, _Sampler(self._rows))

    def add(self, row: Row) -> None:
        name = str(row.sequence_id)
        self._rows[name] = row
        # One token more than requested, so that the library never ends a sequence by itself.
        self._batches.add(name, row.token_ids, (row.sampling.max_tokens or 0) + 1)

    def drop(self, row: Row) -> None:
        name = str(row.sequence_id)
        self._batches.cancel(name)
        self._rows.pop(name, None)
        self._num_cached.pop(name, None)

    def progress(self, row: Row) -> Prefill | None:
        """Return how much of a prompt is read after a step; None if nothing is."""
        name = str(row.sequence_id)
        read = self._batches.progress(name)
        if read is None:
            return None
        num_read, num_next = read
        num_cached = self._num_cached.setdefault(name, num_read - num_next)
        return Prefill(row.sequence_id, num_read, num_cached)

    @torch.inference_mode()
    def step(self) -> None:
        self._batches.step(self._set_branches)

    def _set_branches(self, batch: list[tuple[str, int]]) -> None:
        if self._branches is not None:
            self._branches.set([(self._rows[name].adapter, num_tokens) for name, num_tokens in batch])


class Sequential:
    """Each sequence has its own cache, and one forward per step."""

    def __init__(self, model: Any, branches: RowAdapters | None = None) -> None:
        self._model = model
        self._branches = branches
        self._caches: dict[Row, Any] = {}
        self._images: dict[Row, Mapping[str, torch.Tensor]] = {}
        self._shifts: dict[Row, Any] = {}

    def add(self, row: Row, images: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """`images` is what the model gets with the prompt, beside its ids."""
        self._caches[row] = None
        self._images[row] = images

    def drop(self, row: Row) -> None:
        self._caches.pop(row, None)
        self._images.pop(row, None)
        self._shifts.pop(row, None)

    def progress(self, row: Row) -> Prefill | None:
        return None  # a step reads a whole prompt

    @torch.inference_mode()
    def step(self) -> None:
        name = self._cache_name
        for row, cache in self._caches.items():
            new = row.token_ids if cache is None else row.token_ids[-1:]
            if self._branches is not None:
                self._branches.set([(row.adapter, len(new))])
            device = self._model.device
            given: dict[str, Any] = {name: DynamicCache(config=self._model.config) if cache is None else cache}
            given |= self._only_last
            given |= {key: value.to(device) for key, value in self._images.pop(row, {}).items()}
            if (holder := self._shift_holder) is not None:
                holder.rope_deltas = self._shifts.get(row)
            output = self._model(input_ids=torch.tensor([new], device=device), use_cache=True, **given)
            if holder is not None:
                self._shifts[row] = holder.rope_deltas
            self._caches[row] = getattr(output, name)
            _choose_all([row], output.logits[:, -1].float())

    @cached_property
    def _cache_name(self) -> str:
        """The name of a model's parameter and of its result: it was another one before transformers 5.24."""
        return "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"

    @cached_property
    def _only_last(self) -> dict[str, int]:
        """The parameter that computes the logits of the last token only: those of a prompt with images need much
        memory."""
        return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self._model.forward).parameters else {}

    @cached_property
    def _shift_holder(self) -> Any:
        """The part of a model that remembers by how much images have shifted the positions of the last prompt. Each
        sequence has its own. None if the model has no such part."""
        return next((part for part in self._model.modules() if hasattr(part, "rope_deltas")), None)


def _choose_all(rows: list[Row], logits: torch.Tensor) -> list[int]:
    """Choose a token for each row of logits, float32 of shape (rows, vocab), and append it to the row. The logits of
    plain rows stay on their device."""
    chosen: list[int] = logits.argmax(-1).tolist()
    for index, row in enumerate(rows):
        if row.is_plain:
            row.put(chosen[index])
        else:
            chosen[index] = max(row.choose(logits[index].cpu().numpy()), 0)  # negative: the row has failed
    return chosen
