"""Loads a model into openvino-genai's continuous batching pipeline."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openvino as ov
import openvino_genai as genai

from tailrace.engines.adapters import read_adapter
from tailrace.engines.openvino.adapters import write_adapted
from tailrace.engines.openvino.prepared import prepare, prepared_path
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.scratch import scratch_directory
from tailrace.errors import ModelError

__all__ = [
    "BLOCK_TOKENS",
    "COMPANION_TOKENS",
    "LoadedPipeline",
    "has_tokenizer",
    "load_pipeline",
    "num_rows",
    "tokenizer_path",
]

BLOCK_TOKENS = 32  # the library's KV block size on a CPU
COMPANION_TOKENS = 256  # length of the throw-away companion: a longer context would cost time


def has_tokenizer(spec: EngineSpec) -> bool:
    """Return whether the library has the model's tokenizer, which grammars need. A GGUF file always has it."""
    path = Path(spec.path)
    return not path.is_dir() or (path / "openvino_tokenizer.xml").is_file()


class LoadedPipeline(NamedTuple):
    pipeline: Any  # Any: the library's stubs do not hold up
    num_rows: int  # of the embedding, which may exceed the tokenizer's vocabulary; 0 if the model does not say


def load_pipeline(spec: EngineSpec) -> LoadedPipeline:
    """Load a GGUF file or an OpenVINO directory. Raises: ModelError; the library's RuntimeError."""
    scheduler = genai.SchedulerConfig()
    blocks = -(-spec.kv_tokens // BLOCK_TOKENS)
    if spec.prompt_lookup_tokens:
        blocks += spec.max_sequences  # for each sequence's speculative tokens
    scheduler.num_kv_blocks = blocks + (-(-COMPANION_TOKENS // BLOCK_TOKENS) + 2 if spec.exact else 0)
    scheduler.enable_prefix_caching = spec.prefix_cache
    scheduler.dynamic_split_fuse = True
    # With the prefix cache, the library must never split a prompt: see prompts.py.
    most = spec.context_tokens + spec.kv_tokens if spec.prefix_cache else spec.max_step_tokens
    scheduler.max_num_batched_tokens = max(most, (spec.max_sequences + 1) * (spec.prompt_lookup_tokens + 1))
    scheduler.max_num_seqs = spec.max_sequences + 1
    properties: dict[str, Any] = {}
    if spec.exact:
        properties["INFERENCE_PRECISION_HINT"] = "f32"
        # The default, per channel, quantises a partly filled block again with each piece of a prompt.
        properties["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
    if spec.threads:
        properties["INFERENCE_NUM_THREADS"] = spec.threads
    if spec.kv_precision:
        properties["KV_CACHE_PRECISION"] = spec.kv_precision
        if spec.kv_precision == "f32":  # required by the library
            properties["INFERENCE_PRECISION_HINT"] = "f32"
    if spec.prompt_lookup_tokens:
        properties["prompt_lookup"] = True
    path, device = Path(spec.path), _device(spec.device)

    def load(directory: Path) -> LoadedPipeline:
        rows = num_rows(directory)
        return LoadedPipeline(genai.ContinuousBatchingPipeline(str(directory), scheduler, device, properties), rows)

    with ExitStack() as stack:
        cache = (
            Path(spec.cache_path) if spec.cache_path else stack.enter_context(scratch_directory("tailrace-prepared-"))
        )
        directory = path if path.is_dir() else prepare(path, cache)
        if spec.adapter:
            adapter = read_adapter(spec.adapter, spec.adapter_scale)
            adapted = stack.enter_context(scratch_directory("adapting-", cache))
            write_adapted(directory, adapter, adapted)
            return load(adapted)
        try:
            return load(directory)
        except RuntimeError:  # convert the file again; if the result is not the cause, that fails too
            if path.is_dir():
                raise
            return load(prepare(path, cache, again=True))


def _device(name: str) -> str:
    """Return a device by the library's name. Raises: ModelError if this machine does not have it."""
    if not name:
        return "CPU"
    wanted, devices = name.upper(), ov.Core().available_devices  # the library looks for them, which takes 0.1 s
    if wanted.partition(".")[0] not in {device.partition(".")[0] for device in devices}:
        raise ModelError(f"OpenVINO has no device {name} on this machine. --device can be {', '.join(devices)}.")
    return wanted


def num_rows(directory: Path) -> int:
    """Return the number of rows of a model's embedding; 0 if the model does not say. Raises: the library's RuntimeError
    if there is no model."""
    rows = ov.Core().read_model(directory / "openvino_model.xml").outputs[0].partial_shape[-1]
    return int(rows.get_length()) if rows.is_static else 0


def tokenizer_path(spec: EngineSpec) -> Path:
    """Return the directory or GGUF file from which the library loads the tokenizer."""
    path = Path(spec.path)
    if path.is_dir() or not spec.cache_path:
        return path
    prepared = prepared_path(path, Path(spec.cache_path))
    return prepared if prepared.is_dir() else path
