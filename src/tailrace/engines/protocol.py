"""The messages between server and worker: length-prefixed msgpack over a socket pair.

The server sends work. The worker sends one frame per step with the new ids of every sequence. Nothing is pickled. A
worker whose message cannot be decoded is replaced.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tailrace.engines.interface import Capabilities, Delta, Prefill, Sequence, Sight
from tailrace.system.frames import framed
from tailrace.types import Task

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Attach",
    "EngineSpec",
    "Fatal",
    "Forget",
    "Frame",
    "FromWorker",
    "Ready",
    "See",
    "Seen",
    "Start",
    "Submit",
    "ToWorker",
    "decode_from_worker",
    "decode_to_worker",
    "encode",
]

PROTOCOL_VERSION = 9

_encoder = msgspec.msgpack.Encoder()


class EngineSpec(msgspec.Struct, frozen=True):
    """The engine to load, and its settings. `path` is a GGUF file, a model directory or the address of a server; "" if
    the engine needs none."""

    engine: str
    path: str = ""
    task: Task = "generate"
    context_tokens: int = 8192
    kv_tokens: int = 65_536
    max_sequences: int = 64
    max_step_tokens: int = 256  # prompt tokens per step, besides running sequences; 0: llamacpp and vllm decide
    threads: int = 0  # 0: the library decides
    eos_token_ids: tuple[int, ...] = ()
    cache_path: str = ""  # directory for a converted model; "": none
    exact: bool = False  # replays must give the same ids, which costs speed
    never_alone: bool = False  # no step has a single row, so that replays need no steps of their own
    prefix_cache: bool = True  # reuse the KV cache of earlier prompts with the same beginning
    device: str = ""  # cpu, cuda, cuda:1, GPU … as the library names it; "": the library decides
    dtype: str = ""  # of the computation: float32, bfloat16, float16; "": the library decides
    weight_bits: Literal[0, 4, 8, 16] = 0  # of the weights; 0: those of the file
    kv_precision: str = ""  # of the KV cache; "": the library decides
    gpus: int = 1  # number of GPUs that share one model
    gpu_memory: float = 0.0  # share of a GPU's memory to take; 0: the library decides
    prompt_lookup_tokens: int = 0  # speculative tokens per step, copied from earlier text
    draft: str = ""  # the path of a smaller model that writes speculative tokens
    draft_tokens: int = 0  # of them in each step; 0: as many as pay
    # Files or directories of LoRA adapters by name. The one named "" is for the sequences that name none.
    adapters: dict[str, str] = {}
    adapter_scale: float = 1.0  # of all of them
    secret: str = ""  # a key for the server at `path`
    options: dict[str, float] = {}  # of the scripted engine, and the timeouts of an upstream server


class Start(msgspec.Struct, tag="start", array_like=True, gc=False):
    """The first message to a worker. Every frame carries `epoch`, so that late frames of a replaced worker are
    ignored.

    The server, which has looked at the engines of all packages, says where the engine is. Without `engine_class` the
    worker looks for it, and says what is missing.
    """

    version: int
    epoch: int
    spec: EngineSpec
    engine_class: str = ""  # module:class
    starts_processes: bool = False  # as in `Kind`


class Attach(msgspec.Struct, tag="attach", array_like=True, gc=False):
    """An attachment, which comes before the sequences that have it."""

    digest: str
    content: bytes


class Forget(msgspec.Struct, tag="forget", array_like=True, gc=False):
    """No sequence has this attachment any more."""

    digest: str


class Submit(msgspec.Struct, tag="submit", array_like=True, gc=False):
    sequence: Sequence  # without the bytes of its attachments


class Abort(msgspec.Struct, tag="abort", array_like=True, gc=False):
    sequence_id: int


class See(msgspec.Struct, tag="see", array_like=True, gc=False):
    """A question: how is this image written in a prompt?"""

    number: int  # of the question
    image: bytes


class Ready(msgspec.Struct, tag="ready", array_like=True, gc=False):
    """The first message from a worker: the model is loaded, with these capabilities."""

    version: int
    epoch: int
    capabilities: Capabilities


class Frame(msgspec.Struct, tag="frame", array_like=True, gc=False):
    """The result of one step. Also sent without deltas (during a long prefill), as a sign of progress."""

    epoch: int
    step: int
    deltas: list[Delta]
    progress: list[Prefill] = []  # of sequences that have no token yet


class Seen(msgspec.Struct, tag="seen", array_like=True, gc=False):
    """The reply to a `See`. `sight` is None if the model cannot read the image."""

    number: int
    sight: Sight | None = None
    failure: str = ""


class Fatal(msgspec.Struct, tag="fatal", array_like=True, gc=False):
    """The last message of a worker: the model did not load, or the engine raised."""

    message: str


ToWorker: TypeAlias = Start | Attach | Forget | Submit | Abort | See
FromWorker: TypeAlias = Ready | Frame | Seen | Fatal

decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def encode(message: ToWorker | FromWorker) -> bytes:
    """Encode a message with its length prefix."""
    return framed(_encoder.encode(message))
