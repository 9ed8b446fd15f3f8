"""A pipeline of openvino-genai with a tiny model and the tokenizer of a real model.

The library compiles grammars in its sampler, which only a pipeline can use. This pipeline compiles them like the
engine, with the same library and vocabulary, but computes almost nothing: it loads in 0.2 s and takes 0.5 ms per token.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as ops

from tailrace.engines.openvino.model import num_rows, tokenizer_path
from tailrace.engines.protocol import EngineSpec

__all__ = ["load_toy"]

_WIDTH = 8
_BLOCKS = 8


def load_toy(spec: EngineSpec) -> Any:  # Any: the library's stubs do not hold up
    """Make a `ContinuousBatchingPipeline` in which all tokens are equally likely. Raises: the library's
    RuntimeError."""
    source = tokenizer_path(spec)
    tokenizer = genai.Tokenizer(str(source))
    rows = num_rows(source) if source.is_dir() else 0
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = _BLOCKS
    scheduler.enable_prefix_caching = False
    with TemporaryDirectory(prefix="tailrace-toy-") as directory:
        path = Path(directory) / "openvino_model.xml"
        ov.save_model(_model(rows or 1 + max(tokenizer.get_vocab().values())), path)
        return genai.ContinuousBatchingPipeline(directory, tokenizer, scheduler, "CPU", INFERENCE_NUM_THREADS=1)


def _model(vocab_size: int) -> Any:  # Any: as above
    """Make a model with one attention head, and with the inputs and the KV cache that the library requires."""
    ids, mask, positions = (
        _input(name, [-1, -1], np.int64) for name in ("input_ids", "attention_mask", "position_ids")
    )
    beams = _input("beam_idx", [-1], np.int32)
    numbers = ops.unsqueeze(ops.convert(ops.add(ids, positions), "f32"), _int(2))
    hidden = ops.multiply(numbers, ops.constant(np.ones((1, 1, _WIDTH), np.float32)))
    head = ops.transpose(ops.reshape(hidden, _ints(0, 0, 1, _WIDTH), True), _ints(0, 2, 1, 3))
    batch = ops.gather(ops.shape_of(ids), _ints(0), _int(0))
    nothing = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, _ints(1), _ints(0), _ints(_WIDTH)], 0))
    kept, caches = [], []
    for name in ("past_key_values.0.keypresent.0.key", "past_key_values.0.valuepresent.0.value"):
        shape = ov.PartialShape([-1, 1, -1, _WIDTH])
        past = ops.gather(ov.opset6.read_value(nothing, name, ov.Type.f32, shape), beams, _int(0))
        kept.append(ops.concat([past, head], 2))
        caches.append(ov.opset6.assign(kept[-1], name))
    allowed = ops.convert(ops.unsqueeze(ops.unsqueeze(mask, _int(1)), _int(1)), "f32")
    bias = ops.multiply(ops.subtract(allowed, ops.constant(np.float32(1))), ops.constant(np.float32(1e9)))
    attended = ops.scaled_dot_product_attention(head, *kept, bias)
    rows = ops.reshape(ops.transpose(attended, _ints(0, 2, 1, 3)), _ints(0, 0, _WIDTH), True)
    logits = ops.matmul(rows, ops.constant(np.zeros((_WIDTH, vocab_size), np.float32)), False, False)
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], caches, [ids, mask, positions, beams], "toy")


def _input(name: str, shape: list[int], kind: Any) -> Any:  # Any: as above
    node = ops.parameter(shape, kind, name=name)
    node.output(0).set_names({name})
    return node


def _int(number: int) -> Any:  # Any: as above
    return ops.constant(np.int64(number))


def _ints(*numbers: int) -> Any:  # Any: as above
    return ops.constant(np.array(numbers, np.int64))
