"""Runs one step: the new tokens of several sequences in, the logits of some of them out.

The model is compiled with dynamic shapes, and once more with static ones for a step of a single row, if the model is
small: with SmolLM2-135M such a step takes a fifth less time. With adapters, a small model is also compiled
without them, for steps in which no row has one. Each form costs a copy of the packed weights.

A *batch* always has two rows at least, and two sampled rows: the library uses other kernels for one, which give other
bits. So an unread row is added where there is only one. Rows of a batch have the same bits, whatever else is in it,
however a prompt is cut, and also when several tokens of one sequence run as rows of their own, each with the tokens
before it as its past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov

from tailrace_plugins.openvino.blocks import BLOCK_TOKENS
from tailrace_plugins.openvino.decoder import without_images

__all__ = ["Piece", "Runner"]

_ROW_INPUTS = ("input_ids", "position_ids", "past_lens", "sampled", "adapters")
_BOUNDS_INPUTS = ("subsequence_begins", "block_indices_begins")


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence, after `past` tokens whose keys and values are in its blocks."""

    ids: Sequence[int]
    past: int
    table: Sequence[int]  # blocks, enough for all
    is_sampled: bool  # return the logits after the last token
    adapter: int = 0  # 0: none
    is_scored: bool = False  # return the logits after every token
    # Of images: the positions among `ids` that have rows, and the rows, float32 of (positions, hidden).
    images: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.ids) if self.is_scored else int(self.is_sampled)


_RowKey: TypeAlias = tuple[int, Sequence[int]]  # its adapter, and its blocks


def _row_key(piece: Piece) -> _RowKey:
    return piece.adapter, piece.table[: piece.past // BLOCK_TOKENS + 1]


class _Form:
    """A compiled form, and the arrays that it reads. They stay the same as long as their shapes do: giving the library
    eight new tensors takes 4 % of a step of one row with SmolLM2-135M."""

    def __init__(self, compiled: Any, caches: dict[str, Any]) -> None:  # Any: the library's objects
        self._request = compiled.create_infer_request()
        for name, cache in caches.items():
            self._request.set_tensor(name, cache)
        self._given: dict[str, npt.NDArray[Any]] = {}
        self.row: _RowKey | None = None  # of the last step, if that had one row
        self._logits: npt.NDArray[np.float32] | None = None  # where a form with static shapes always writes them
        shape = compiled.output("logits").partial_shape
        if shape.is_static:
            self._logits = np.empty(shape.to_shape(), np.float32)
            self._request.set_tensor("logits", ov.Tensor(self._logits, shared_memory=True))

    def give(self, arrays: dict[str, npt.NDArray[Any]], row: _RowKey | None) -> None:
        self.row = row
        for name, value in arrays.items():
            known = self._given.get(name)
            if known is not None and known.shape == value.shape:
                known[...] = value
            else:
                self._given[name] = value
                self._request.set_tensor(name, ov.Tensor(value, shared_memory=True))

    def give_next(self, piece: Piece) -> None:
        """Give the token of a step whose row has the adapter and blocks of the step before: four numbers change."""
        given = self._given
        given["input_ids"][0], given["position_ids"][0], given["past_lens"][0] = piece.ids[0], piece.past, piece.past
        given["max_context_len"][...] = piece.past + 1

    def run(self, meanwhile: Callable[[], object]) -> npt.NDArray[np.float32]:
        self._request.start_async()
        meanwhile()
        self._request.wait()
        if self._logits is not None:
            return self._logits
        logits: npt.NDArray[np.float32] = self._request.get_tensor("logits").data
        return logits


class Runner:
    """A compiled model and its KV cache."""

    def __init__(
        self,
        model: Any,
        device: str,
        options: dict[str, Any],
        num_blocks: int,
        *,
        has_lone_form: bool,
        plain: Any = None,
        meanwhile: Callable[[int], object] = lambda _: None,
    ) -> None:
        """`model` has the inputs of `decoder.py`. `plain` is the same model without adapters, for steps that need none.
        Any: the library's objects. `meanwhile` gets the size of the vocabulary while the library compiles. Raises: the
        library's RuntimeError."""
        core = ov.Core()
        names = {port.any_name: port for port in model.inputs}
        self._has_adapters = "adapters" in names
        rows = names.get("image_rows")
        self._no_rows = None if rows is None else np.empty((0, rows.partial_shape[1].get_length()), np.float32)
        self._has_types = "token_types" in names
        models = [model] if plain is None else [model, plain]
        if has_lone_form:
            models += [_with_one_row(one) for one in models]
        self.vocab_size = int(model.output("logits").partial_shape[-1].get_length())
        with ThreadPoolExecutor(len(models)) as pool:  # a form takes one to two seconds of one processor
            compiling = [pool.submit(core.compile_model, one, device, options) for one in models]
            meanwhile(self.vocab_size)
            forms = [one.result() for one in compiling]
        # The last block is for unread rows.
        self._unread = Piece((0,), 0, (num_blocks,), is_sampled=False)
        caches = {
            port.any_name: ov.Tensor(
                port.element_type,
                ov.Shape([num_blocks + 1 if size.is_dynamic else size.get_length() for size in port.partial_shape]),
            )
            for port in forms[0].inputs
            if _is_cache(port.any_name)
        }
        loaded = [_Form(form, caches) for form in forms]
        count = 1 if plain is None else 2
        self._batch, self._lone = loaded[:count], loaded[-count:]  # with adapters and, if there is one, without

    @property
    def num_kinds(self) -> int:
        """2 if steps with and without adapters have forms of their own, else 1."""
        return len(self._batch)

    def run(
        self, pieces: Sequence[Piece], *, is_batch: bool, meanwhile: Callable[[], object] = lambda: None
    ) -> npt.NDArray[np.float32]:
        """Return the logits of the sampled tokens in their order, (sampled, vocabulary); valid until the next call.

        Without `is_batch` there is one piece of one token. `meanwhile` is called while the model computes.
        """
        forms = self._batch if is_batch else self._lone
        has_adapters = self._has_adapters and (len(forms) == 1 or any(piece.adapter for piece in pieces))
        form = forms[0] if has_adapters else forms[-1]
        num_sampled = sum(piece.num_sampled for piece in pieces)
        if is_batch and sum(len(piece.ids) for piece in pieces) == 1:
            pieces = (*pieces, self._unread)
        row = None if is_batch else _row_key(pieces[0])
        if row is not None and row == form.row:
            form.give_next(pieces[0])
        else:
            form.give(self._arrays(pieces, is_batch=is_batch, has_adapters=has_adapters), row)
        return form.run(meanwhile)[:num_sampled]

    def _arrays(self, pieces: Sequence[Piece], *, is_batch: bool, has_adapters: bool) -> dict[str, npt.NDArray[Any]]:
        lengths = np.array([len(piece.ids) for piece in pieces])
        past = np.array([piece.past for piece in pieces], np.int32)
        ends = np.cumsum(lengths)
        totals = past + lengths
        num_blocks = -(-totals // BLOCK_TOKENS)
        sampled = [
            position
            for end, piece in zip(ends, pieces, strict=True)
            for position in range(int(end) - piece.num_sampled, int(end))
        ]
        if is_batch and len(sampled) < 2:
            sampled = 2 * (sampled or [0])
        blocks = [block for piece, count in zip(pieces, num_blocks, strict=True) for block in piece.table[:count]]
        arrays = {
            "input_ids": np.array([token_id for piece in pieces for token_id in piece.ids], np.int64),
            "position_ids": np.concatenate([np.arange(start, end) for start, end in zip(past, totals, strict=True)]),
            "sampled": np.array(sampled, np.int64),
            "past_lens": past,
            "subsequence_begins": np.concatenate([[0], ends]).astype(np.int32),
            "block_indices": np.array(blocks, np.int32),
            "block_indices_begins": np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int32),
            "max_context_len": np.array(totals.max(), np.int32),
        }
        if has_adapters:
            arrays["adapters"] = np.repeat(np.array([piece.adapter for piece in pieces], np.int64), lengths)
        if is_batch and self._no_rows is not None:
            arrays |= self._images(pieces, ends - lengths, int(ends[-1]))
        return arrays

    def _images(
        self, pieces: Sequence[Piece], begins: npt.NDArray[np.int64], num_tokens: int
    ) -> dict[str, npt.NDArray[Any]]:
        assert self._no_rows is not None
        found = [
            (begin + piece.images[0], piece.images[1])
            for begin, piece in zip(begins, pieces, strict=True)
            if piece.images
        ]
        positions = np.concatenate([np.empty(0, np.int64), *(positions for positions, _ in found)])
        arrays = {
            "image_positions": positions,
            "image_rows": np.concatenate([self._no_rows, *(rows for _, rows in found)]),
        }
        if self._has_types:
            arrays["token_types"] = np.zeros(num_tokens if found else 0, np.int32)
            arrays["token_types"][positions] = 1
        return arrays


def _is_cache(name: str) -> bool:
    return name.startswith(("key_cache.", "value_cache."))


def _with_one_row(model: Any) -> Any:  # Any: the library's model
    """Return a copy for steps with one new token of one sequence."""
    copy = model.clone()
    without_images(copy)
    for port in copy.inputs:
        if port.any_name in _ROW_INPUTS:
            port.get_node().set_partial_shape(ov.PartialShape([1]))
        elif port.any_name in _BOUNDS_INPUTS:
            port.get_node().set_partial_shape(ov.PartialShape([2]))
    copy.validate_nodes_and_infer_types()
    return copy
