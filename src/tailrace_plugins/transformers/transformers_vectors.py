"""Models that embed or rank with transformers: all that it has, also those that OpenVINO does not run."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
import transformers

from tailrace.engines import EngineSpec, Sequence
from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace_kit.vectors import Rows, VectorEngine, card_of
from tailrace_plugins.transformers.transformers_loading import load_model, named_errors

__all__ = ["TransformersVectors"]


class TransformersVectors(VectorEngine):
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.adapters:
            raise ModelError("--adapter does not apply to a model that embeds or ranks")
        if spec.threads:
            torch.set_num_threads(spec.threads)
        with named_errors(spec):
            super().__init__(spec, _Runner(spec, card_of(spec)))


class _Runner:
    """Implements `VectorRunner`. Sequences are padded behind their ends, which a mask hides from all tokens."""

    engine = f"transformers {transformers.__version__}"
    most_sequences = 2**31
    num_done = 0

    def __init__(self, spec: EngineSpec, card: ModelCard) -> None:
        self._card = card
        if card.task == "embed":
            self._model = load_model(spec, transformers.AutoModel)
        elif card.score_tokens:
            self._model = load_model(spec, transformers.AutoModelForCausalLM)
        else:
            self._model = load_model(spec, transformers.AutoModelForSequenceClassification)
        self.vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self.num_positions = card.context_tokens
        self._pad = self._model.config.get_text_config().pad_token_id or 0
        self._has_types = getattr(self._model.config, "type_vocab_size", 0) > 1
        self.run([Sequence(0, ((1, 2, 3),)), Sequence(0, ((1, 2),))])

    def run(self, batch: Many[Sequence]) -> Rows:
        lengths = torch.tensor([sequence.num_prompt_tokens for sequence in batch])
        shape = (len(batch), int(lengths.max()))
        ids, types = torch.full(shape, self._pad), torch.zeros(shape, dtype=torch.int64)
        for row, sequence in enumerate(batch):
            ids[row, : lengths[row]] = torch.tensor(sequence.prompt_ids)
            first, *second = sequence.segments
            if second and isinstance(first, tuple):
                types[row, len(first) : lengths[row]] = 1
        mask = (torch.arange(shape[1]) < lengths[:, None]).long()
        given = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if self._has_types else {})
        with torch.inference_mode():
            output: Any = self._model(**{name: value.to(self._model.device) for name, value in given.items()})
            found: Rows = self._result(output, mask, lengths).float().cpu().numpy()
        return found

    def close(self) -> None:
        del self._model

    def _result(self, output: Any, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return vectors or scores. Any: the library's output."""
        card = self._card
        if card.task == "rank" and not card.score_tokens:
            scores: torch.Tensor = output.logits
            return scores
        states: torch.Tensor = output.logits if card.task == "rank" else output.last_hidden_state
        if card.pooling == "mean":
            weights = mask.to(states.device)[..., None]
            return (states.float() * weights).sum(1) / weights.sum(1)
        pooled = states[torch.arange(len(lengths)), lengths - 1] if card.pooling == "last" else states[:, 0]
        if card.task == "embed":
            return pooled
        yes, *no = card.score_tokens
        return (pooled[:, yes] - (pooled[:, no[0]] if no else 0))[:, None]
