"""Hugging Face transformers: any causal model, also one that reads images, on a CPU or a GPU.

Properties of the library that matter here (5.23, torch 2.13):

1. Its continuous batching is designed for its own thread, which dies after one bad value. Here, its batch processor is
   called step by step instead, and all values are checked first.
2. Per request, it supports only temperature, top_k and top_p: no seed, penalties or logprobs. Its logits processors are
   public and get all rows of a step. `tailrace_kit.sampler` chooses the tokens there, and all others are masked, so
   that the library's own greedy choice returns the same tokens.
3. Models whose layers it cannot page (state spaces, some hybrids) run one sequence after the other within a step, each
   with its own cache. This is slower, but sequences do not affect each other.
4. A model directory may contain code. It is never run.
5. Its continuous batching takes no images, so a model that reads them runs one sequence after the other.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from tailrace.engines import Capabilities, Delta, EngineSpec, Prefill, Sequence, Sight, in_one_line
from tailrace.errors import SequenceFailed
from tailrace_kit.adapters import read_adapters
from tailrace_kit.constraints import Constraints
from tailrace_kit.sampler import PARAMETERS, Row, check_ids
from tailrace_plugins.transformers.transformers_adapters import RowAdapters, merge
from tailrace_plugins.transformers.transformers_batches import BLOCK_TOKENS, Paged, Sequential
from tailrace_plugins.transformers.transformers_eyes import Eyes, has_eyes
from tailrace_plugins.transformers.transformers_loading import load_model, named_errors

__all__ = ["PARAMETERS", "TransformersEngine"]

logger = logging.getLogger("tailrace.engine")


class _Forwards(Protocol):
    """Runs one forward over all rows."""

    def add(self, row: Row) -> None: ...
    def drop(self, row: Row) -> None: ...
    def progress(self, row: Row) -> Prefill | None:
        """Return how much of a prompt is read after a step; None if nothing is."""

    def step(self) -> None:
        """Put the next token into each row whose prompt is complete."""


class TransformersEngine:
    """Implements `Engine` with a Hugging Face model directory."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.threads:
            torch.set_num_threads(spec.threads)
        with named_errors(spec):
            model, branches = _load(spec)
            self._eyes = _eyes(spec)
            context_tokens = min(spec.context_tokens, spec.kv_tokens)
            self._rows: dict[int, Row] = {}
            self._aborted: list[int] = []
            # The library's continuous batching takes no images.
            self._alone = Sequential(model, branches) if self._eyes is not None else None
            if self._alone is not None:
                _try(self._alone)
            self._forwards = self._alone or _forwards(model, branches, spec)
        self._eos = frozenset(spec.eos_token_ids) or _eos_token_ids(model)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._constraints = _constraints(Path(spec.path), self._eos, self._vocab_size)
        self.capabilities = Capabilities(
            engine=f"transformers {transformers.__version__}",
            context_tokens=context_tokens,
            kv_tokens=spec.kv_tokens,
            block_tokens=BLOCK_TOKENS,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS if self._constraints is not None else PARAMETERS - {"grammar"},
            exact=isinstance(self._forwards, Sequential),
            reports_progress=not isinstance(self._forwards, Sequential),
            takes=frozenset({"token_ids"} if self._eyes is None else {"token_ids", "image/png"}),
            sees=self._eyes is not None,
        )

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        check_ids(sequence, self._vocab_size)
        constraint = None
        if (grammar := sequence.sampling.grammar) is not None:
            if self._constraints is None:
                raise SequenceFailed("grammars are not supported for this model's tokenizer")
            constraint = self._constraints(grammar, ignore_eos=sequence.sampling.ignore_eos)
        row = Row(sequence, self._eos, constraint)
        if (images := sequence.images) and self._eyes is not None and self._alone is not None:
            self._alone.add(row, self._eyes.inputs(images, sequence.prompt_ids))
        else:
            self._forwards.add(row)
        self._rows[sequence.sequence_id] = row

    def see(self, image: bytes) -> Sight:
        assert self._eyes is not None
        return self._eyes.see(image)

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._rows and sequence_id not in self._aborted:
            self._aborted.append(sequence_id)

    def step(self) -> list[Delta]:
        deltas = []
        for sequence_id in self._aborted:
            row = self._rows.pop(sequence_id)
            self._forwards.drop(row)
            deltas.append(row.cancel())
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

    def progress(self) -> list[Prefill]:
        return [found for row in self._rows.values() if not row.count and (found := self._forwards.progress(row))]

    def close(self) -> None:
        self._rows.clear()
        self._aborted.clear()
        self._forwards = Sequential(None)


def _constraints(path: Path, ends: frozenset[int], vocab_size: int) -> Constraints | None:
    """Return the grammars of a model directory. Returns None if it has no tokenizer that can be used."""
    file = path / "tokenizer.json"
    if not ends or not file.is_file():
        return None
    constraints = Constraints(file.read_text(encoding="utf-8"), ends, vocab_size)
    return constraints if constraints.is_usable else None


def _load(spec: EngineSpec) -> tuple[Any, RowAdapters | None]:  # Any: the library's model, whichever it is
    kind = transformers.AutoModelForImageTextToText if has_eyes(spec.path) else transformers.AutoModelForCausalLM
    model = load_model(spec, kind)
    adapters = read_adapters(spec)
    if list(adapters) == [""]:
        merge(model, adapters[""])
        adapters = {}
    return model, RowAdapters(model, adapters) if adapters else None


def _forwards(model: Any, branches: RowAdapters | None, spec: EngineSpec) -> _Forwards:
    """Return the library's continuous batching if a trial succeeds with this model, else sequential execution."""
    try:
        paged = Paged(
            model,
            branches,
            kv_tokens=spec.kv_tokens,
            step_tokens=max(spec.max_step_tokens, spec.max_sequences) + spec.max_sequences,
            max_sequences=spec.max_sequences,
            shares_prefixes=spec.prefix_cache and branches is None,  # the library knows no adapters
        )
        _try(paged)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the library raises whatever its layers do
        logger.warning(
            "The model's sequences cannot run as a batch (%s). They run one after the other.", in_one_line(error)
        )
    else:
        return paged
    alone = Sequential(model, branches)
    _try(alone)
    return alone


def _eyes(spec: EngineSpec) -> Eyes | None:
    """Return what reads images, if the model has it and the library can load it."""
    if not has_eyes(spec.path):
        return None
    try:
        return Eyes(spec.path)
    except Exception as error:  # the library raises whatever its processors do
        logger.warning("The model reads no images, because its processor does not load (%s).", in_one_line(error))
        return None


def _try(forwards: _Forwards) -> None:
    """Generate two tokens, to test the model and to warm it up before the first request."""
    row = Row.for_probe()
    forwards.add(row)
    while not row.is_over:
        forwards.step()
        row.take()
    forwards.drop(row)


def _eos_token_ids(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)
