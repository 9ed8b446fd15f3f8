"""Loads a GGUF file into llama.cpp's server, and reads the model's properties from the server."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tailrace.engines import EngineSpec
from tailrace.errors import ModelError
from tailrace_kit.vectors import card_of
from tailrace_plugins.llamacpp.llamacpp_devices import find_gpus, set_device
from tailrace_plugins.llamacpp.llamacpp_eyes import CONTENT_TEMPLATE, Projector, marks_of
from tailrace_plugins.llamacpp.llamacpp_sampling import SPARE_TOKENS
from tailrace_plugins.llamacpp.socket_requests import ask
from tailrace_plugins.llamacpp.token_bytes import TokenBytes

# Read when OpenMP is loaded: how long waiting threads spin (see 7. in engine.py).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import xllamacpp

__all__ = [
    "VERSION", "context_tokens", "has_grammars", "num_slots", "read_pieces", "room_tokens", "start_seeing_server",
    "start_server",
]  # fmt: skip

logger = logging.getLogger("tailrace.engine")

VERSION: str = xllamacpp.__version__

_RESERVED_TOKENS = SPARE_TOKENS + 1  # per slot: llama.cpp ends a sequence one token before its slot is full
# On a CPU, a step with a prompt takes about as long as its tokens one after the other, and decoding sequences wait for
# it. So it has few tokens, but attention takes up to twice as long for each if there are fewer than 64.
_CPU_STEP_TOKENS = 64
_GPU_STEP_TOKENS = 512  # llama.cpp's own batch size
_LEAST_STEP_TOKENS = 32
_WHOLE_STEP_TOKENS = 512  # more than an image of Gemma 3 has
_ERRORS_ONLY = 1


class _Token(msgspec.Struct):
    id: int
    bytes: list[int]


class _First(msgspec.Struct):
    top_logprobs: list[_Token]


class _Likeliest(msgspec.Struct):
    completion_probabilities: list[_First]


class _Settings(msgspec.Struct):
    grammar: str = ""


class _Reply(msgspec.Struct):
    generation_settings: _Settings


class _Defaults(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Defaults


def num_slots(spec: EngineSpec) -> int:
    """Return how many sequences may run. With `exact`, each needs its own memory of the context's length."""
    if not spec.exact:
        return spec.max_sequences
    return max(1, min(spec.max_sequences, spec.kv_tokens // _longest(spec)))


def room_tokens(spec: EngineSpec) -> int:
    """Return the capacity of all slots in tokens, including each slot's reserve."""
    slots = num_slots(spec)
    asked = spec.kv_tokens if _is_shared(spec) else slots * _longest(spec)
    return asked + slots * _RESERVED_TOKENS


def _is_shared(spec: EngineSpec) -> bool:
    """Return whether all sequences share one KV cache. This is slower, because each skips the others' entries, so it is
    used only if the memory is too small for `max_sequences` full contexts."""
    return not spec.exact and spec.max_sequences * _longest(spec) > spec.kv_tokens


def _longest(spec: EngineSpec) -> int:
    return min(spec.context_tokens, spec.kv_tokens)


def start_seeing_server(spec: EngineSpec, socket_path: str) -> tuple[Any, bool, Projector | None]:
    """As `start_server`. Also returns what reads images, if there is a projector beside the model that llama.cpp
    loads."""
    try:
        projector = card_of(spec).projector
    except ModelError:  # llama.cpp says why
        projector = None
    marks = marks_of(projector)
    if marks is None:
        return *start_server(spec, socket_path), None

    def see(params: Any) -> None:  # Any: the library has no stubs
        params.mmproj.path = str(projector)
        params.mmproj_use_gpu = params.n_gpu_layers != 0
        params.chat_template = CONTENT_TEMPLATE
        if marks.is_whole:
            params.n_batch = params.n_ubatch = max(params.n_ubatch, _WHOLE_STEP_TOKENS)

    try:
        return *start_server(spec, socket_path, see), Projector(socket_path, marks)
    except ModelError as error:
        logger.warning("The model reads no images, because its projector does not load (%s).", error.message)
        Path(socket_path).unlink(missing_ok=True)
        return *start_server(spec, socket_path), None


def start_server(
    spec: EngineSpec, socket_path: str, change: Callable[[Any], None] = lambda params: None
) -> tuple[Any, bool]:
    """Start llama.cpp's server on a socket file, whose name has to end with `.sock`. Returns the server, and whether it
    computes on a GPU. `change` may change its parameters. Any: the library has no stubs.

    Raises: ModelError if it does not load the model, or for an unknown device.
    """
    params = xllamacpp.CommonParams()
    is_on_gpu = set_device(params, spec.device, find_gpus(xllamacpp.get_device_info()))
    params.model.path = spec.path
    params.hostnames = [socket_path]
    params.n_ctx = room_tokens(spec)
    params.n_parallel = num_slots(spec)
    params.kv_unified = _is_shared(spec)
    if spec.exact:  # see 6. in engine.py
        params.no_extra_bufts = True
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    step_tokens = spec.max_step_tokens or (_GPU_STEP_TOKENS if is_on_gpu else _CPU_STEP_TOKENS)
    # With fewer tokens than slots, llama.cpp ends the process.
    params.n_batch = params.n_ubatch = max(step_tokens, params.n_parallel, _LEAST_STEP_TOKENS)
    params.cache_ram_mib = 0  # 8 GiB by default
    params.cache_idle_slots = False
    params.endpoint_slots = False
    params.ui = False
    params.verbosity = _ERRORS_ONLY
    if spec.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec.threads
    change(params)
    with _stderr() as stderr_file:
        try:
            server = xllamacpp.Server(params)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"llama.cpp cannot load {spec.path}: {_reason(stderr_file, error)}.") from error
    ask(socket_path, "GET /lora-adapters")  # waits until its loop runs: a server that is freed before that hangs
    return server, is_on_gpu


def read_pieces(socket_path: str) -> TokenBytes:
    """Read the bytes of every token, by requesting the top logprobs of all tokens (0.2 s for 49,152).
    Also warms the model up."""
    reply = ask(socket_path, "POST /completion", {"prompt": [0], "n_predict": 1, "n_probs": 2**30, "top_k": 1})
    tokens = msgspec.json.decode(reply, type=_Likeliest).completion_probabilities[0].top_logprobs
    pieces = [b""] * (1 + max(token.id for token in tokens))
    for token in tokens:
        pieces[token.id] = bytes(token.bytes)
    return TokenBytes(pieces)


def context_tokens(spec: EngineSpec, socket_path: str) -> int:
    """Return the longest length of prompt and answer, limited by the model's training context."""
    props = msgspec.json.decode(ask(socket_path, "GET /props"), type=_Props)
    slot_tokens = props.default_generation_settings.n_ctx
    return min(spec.context_tokens, spec.kv_tokens, slot_tokens - _RESERVED_TOKENS)


def has_grammars(socket_path: str) -> bool:
    """Return whether llguidance is built in: then it converts a schema to llguidance's language, which crashes other
    builds. Also warms it up: the first grammar takes 0.3 s."""
    reply = ask(socket_path, "POST /completion", {"prompt": [0], "n_predict": 1, "json_schema": {"type": "integer"}})
    return msgspec.json.decode(reply, type=_Reply).generation_settings.grammar.startswith("%llguidance")


@contextmanager
def _stderr() -> Iterator[BinaryIO]:
    """Capture stderr, also of C++ code: only there llama.cpp reports why a model cannot be loaded."""
    with tempfile.TemporaryFile() as stderr_file:
        kept = os.dup(2)
        os.dup2(stderr_file.fileno(), 2)
        try:
            yield stderr_file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _reason(stderr_file: BinaryIO, error: Exception) -> str:
    """Return the first error in the log, which is closest to the cause, without its time and position."""
    stderr_file.seek(0)
    for line in stderr_file.read().decode(errors="replace").splitlines():
        _, is_error, text = line.partition(" E ")
        if is_error:
            return text.partition(": ")[2].strip().rstrip(".")[:200] or text[:200]
    return str(error).rstrip(".")[:200]
