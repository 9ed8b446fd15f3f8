"""What crosses between server and worker: length-prefixed msgpack over a socket pair.

One direction carries work, the other one frame a step with every sequence's new ids. Nothing is pickled. Both ends
know every message type, so a peer that talks something else fails to decode and is replaced.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tailrace.engines.promise import Capabilities, Delta, Sequence
from tailrace.frames import framed

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "EngineSpec",
    "Fatal",
    "Frame",
    "FromWorker",
    "Ready",
    "Start",
    "Submit",
    "ToWorker",
    "decode_from_worker",
    "decode_to_worker",
    "encode",
]

PROTOCOL_VERSION = 2

_encoder = msgspec.msgpack.Encoder()


class EngineSpec(msgspec.Struct, frozen=True):
    """Which engine to load, with what. `path` is a GGUF file, a model directory or the address of a server; "" where
    the engine needs none."""

    engine: str
    path: str = ""
    context_tokens: int = 8192
    kv_tokens: int = 65_536
    max_sequences: int = 64
    max_step_tokens: int = 256  # prompt tokens that one step may prefill beside the running sequences; 0: vLLM decides
    threads: int = 0  # 0: the library decides
    eos_token_ids: tuple[int, ...] = ()
    cache_path: str = ""  # where an engine may keep a prepared form of the model; "": nowhere
    exact: bool = False  # ask for output that does not depend on neighbours, at some cost
    prefix_cache: bool = True  # reuse what earlier prompts began with
    device: str = ""  # cpu, cuda, cuda:1, GPU … in the library's own words; "": it decides
    dtype: str = ""  # that it computes in: float32, bfloat16, float16; "": it decides
    kv_precision: str = ""  # what keys and values are kept in; "": the library decides
    gpus: int = 1  # over which one model is spread
    prompt_lookup_tokens: int = 0  # guessed ahead from what was said before, and checked in one step
    adapter: str = ""  # a LoRA adapter's file or directory
    adapter_scale: float = 1.0
    grammar_memory_bytes: int = 0  # what compiled grammars may take before the process is replaced; 0: no limit
    secret: str = ""  # a key for the server at `path`
    options: dict[str, float] = {}  # the scripted engine's speed and faults


class Start(msgspec.Struct, tag="start", array_like=True, gc=False):
    """The first message to a worker. `epoch` stamps every frame, so that a replaced worker's late ones are refused."""

    version: int
    epoch: int
    spec: EngineSpec


class Submit(msgspec.Struct, tag="submit", array_like=True, gc=False):
    sequence: Sequence


class Abort(msgspec.Struct, tag="abort", array_like=True, gc=False):
    sequence_id: int


class Ready(msgspec.Struct, tag="ready", array_like=True, gc=False):
    """The first message from a worker: the model is loaded, and this is what can be done with it."""

    version: int
    epoch: int
    capabilities: Capabilities


class Frame(msgspec.Struct, tag="frame", array_like=True, gc=False):
    """One step. Sent even when `deltas` is empty (a long prefill), since frames are the sign of progress."""

    epoch: int
    step: int
    deltas: list[Delta]


class Fatal(msgspec.Struct, tag="fatal", array_like=True, gc=False):
    """The worker's last words: the model did not load, the engine raised, or it has to be replaced (no crash)."""

    message: str
    is_crash: bool = True


ToWorker: TypeAlias = Start | Submit | Abort
FromWorker: TypeAlias = Ready | Frame | Fatal

decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def encode(message: ToWorker | FromWorker) -> bytes:
    """The message with its length in front, ready for the socket."""
    return framed(_encoder.encode(message))
