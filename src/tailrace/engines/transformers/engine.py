"""Hugging Face transformers: any causal model, on a CPU or a GPU.

What the library needs us to know (5.23, torch 2.13):

1. Its continuous batching is made for a thread of its own that dies of one bad value. Here its batch processor is
   driven step by step instead, and values are checked before they come to it.
2. It knows temperature, top_k and top_p for each request and nothing else: no seed, no penalties, no logprobs. Its
   place for logits processors is public, and there all of a step's rows come by: what `sampling` does
   there is the sampling, and the library's own takes the likeliest of what is left of each row, which is one token.
3. Models whose layers it cannot page (state spaces, some hybrids) run one sequence at a time within a step, each with
   a cache of its own: slower, and the neighbours change nothing.
4. A model directory may ask to run code of its own. It is not run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers.utils import logging as library_logging

from tailrace.engines.adapters import read_adapter
from tailrace.engines.promise import Capabilities, Delta, Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.transformers.adapters import merge
from tailrace.engines.transformers.batches import BLOCK_TOKENS, Alone, Paged
from tailrace.engines.transformers.grammars import Constraints
from tailrace.engines.transformers.sampling import PARAMETERS, Row
from tailrace.errors import ModelError, SequenceFailed
from tailrace.reasons import in_one_line

__all__ = ["PARAMETERS", "TransformersEngine"]

logger = logging.getLogger("tailrace.engine")


class _Forwards(Protocol):
    """One forward over all rows that it was given."""

    def add(self, row: Row) -> None: ...
    def drop(self, row: Row) -> None: ...
    def step(self) -> None:
        """Gives each row that has read its prompt its next token."""


class TransformersEngine:
    """Keeps the `Engine` promise with a directory of a Hugging Face model."""

    def __init__(self, spec: EngineSpec) -> None:
        library_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as in all of the library
        library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if spec.threads:
            torch.set_num_threads(spec.threads)
        with _named_errors(spec):
            model = _load(spec)
            context_tokens = min(spec.context_tokens, spec.kv_tokens)
            self._rows: dict[int, Row] = {}
            self._aborted: list[int] = []
            self._forwards = _forwards(model, spec)
        self._eos = frozenset(spec.eos_token_ids) or _own_ends(model)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._constraints = Constraints.of_model(Path(spec.path), self._eos, self._vocab_size)
        self.capabilities = Capabilities(
            engine=f"transformers {transformers.__version__}",
            context_tokens=context_tokens,
            kv_tokens=spec.kv_tokens,
            block_tokens=BLOCK_TOKENS,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS if self._constraints is not None else PARAMETERS - {"grammar"},
            exact=isinstance(self._forwards, Alone),
        )

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        if not all(0 <= token_id < self._vocab_size for token_id in sequence.prompt_ids):
            raise SequenceFailed("the prompt names a token that the model does not have")
        constraint = None
        if (grammar := sequence.sampling.grammar) is not None:
            if self._constraints is None:
                raise SequenceFailed("there are no grammars for this model's tokenizer")
            constraint = self._constraints(grammar, ignore_eos=sequence.sampling.ignore_eos)
        row = Row(sequence, self._eos, self._vocab_size, constraint)
        self._forwards.add(row)
        self._rows[sequence.sequence_id] = row

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._rows and sequence_id not in self._aborted:
            self._aborted.append(sequence_id)

    def step(self) -> list[Delta]:
        deltas = []
        for sequence_id in self._aborted:
            row = self._rows.pop(sequence_id)
            self._forwards.drop(row)
            deltas.append(Delta(sequence_id, row.count, (), (), "cancelled"))
        self._aborted.clear()
        if not self._rows:
            return deltas
        self._forwards.step()
        for sequence_id, row in list(self._rows.items()):
            if (delta := row.take()) is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._forwards.drop(row)
                    del self._rows[sequence_id]
        return deltas

    def close(self) -> None:
        self._rows.clear()
        self._aborted.clear()
        self._forwards = Alone(None)


def _load(spec: EngineSpec) -> Any:  # Any: the library's model, whichever it is
    device = spec.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        spec.path,
        dtype=getattr(torch, spec.dtype) if spec.dtype else "auto",
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
    )
    if spec.adapter:
        merge(model, read_adapter(spec.adapter, spec.adapter_scale))
    return model.to(device).eval()


def _forwards(model: Any, spec: EngineSpec) -> _Forwards:
    """By the library's continuous batching where it holds for this model, which is tried."""
    try:
        paged = Paged(
            model,
            kv_tokens=spec.kv_tokens,
            step_tokens=max(spec.max_step_tokens, spec.max_sequences) + spec.max_sequences,
            max_sequences=spec.max_sequences,
            shares_prefixes=spec.prefix_cache,
        )
        _try(paged)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the library raises whatever its layers do
        logger.warning("Its sequences do not run as a batch (%s): one by one in each step.", in_one_line(error))
    else:
        return paged
    alone = Alone(model)
    _try(alone)
    return alone


def _try(forwards: _Forwards) -> None:
    """Two tokens behind two, so that it is known to work and the first request does not pay for it."""
    row = Row.on_trial()
    forwards.add(row)
    while not row.is_over:
        forwards.step()
        row.take()
    forwards.drop(row)


def _own_ends(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)


@contextmanager
def _named_errors(spec: EngineSpec) -> Iterator[None]:
    """What the library raises while it loads, as one line that names the model. Raises: ModelError."""
    name = os.path.basename(spec.path.rstrip("/"))
    try:
        yield
    except ModelError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit into the memory of the device; try a smaller --kv-tokens.") from error
    except Exception as error:  # the library raises whatever its models and loaders do
        text = in_one_line(error)
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            text = "it wants to run code of its own, which is not run here; transformers must know its architecture"
        raise ModelError(f"transformers cannot load {name}: {text}.") from error
