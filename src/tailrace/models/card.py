"""The card: everything that the server needs to know about a model before an engine loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tailrace.types import Pooling, Task

__all__ = ["ModelCard", "Pooling", "recommended"]

# How the vectors of a text's tokens become one: their mean, or that of the first or the last token.


# What a model's makers may recommend, by the names in `Sampling`, with the ranges in which it is used.
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def recommended(values: Mapping[str, object]) -> dict[str, float]:
    """Return the recommendations among a file's values. Others, and those outside their range, are left out: a file
    that cannot be used in this respect can be used in all others."""
    found = {name: values.get(name) for name in _RANGES}
    return {
        name: int(value) if name == "top_k" else value
        for name, value in found.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and _RANGES[name][0] <= value <= _RANGES[name][1]
    }


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Describes one model. Use `tokenizer_json` without its post-processor (`add_special_tokens=False`). `add_bos` says
    whether a plain prompt begins with `bos_token`; a chat template adds its own."""

    name: str  # the model's name on the wires
    path: Path  # the GGUF file, or the directory; symlinks are kept
    format: Literal["gguf", "openvino", "huggingface", "scripted", "upstream"]
    tokenizer_json: str  # of Hugging Face `tokenizers`
    chat_template: str | None  # Jinja
    bos_token: str  # "" when there is none
    eos_token: str
    add_bos: bool
    eos_token_ids: tuple[int, ...]  # each of them ends a sequence; the model's EOS comes first
    context_tokens: int
    architecture: str = ""  # as the file names it
    quantized_by: str = ""  # of a Hugging Face directory: the method, such as gptq
    weight_type: str = ""  # of a Hugging Face directory: that of most of its weights, such as BF16
    tensor_types: tuple[str, ...] = ()  # of a GGUF file, by ggml's names
    file_type: int | None = None  # of a GGUF file: the number of its quantization in llama.cpp
    has_vision: bool = False  # it has a part that reads images
    projector: Path | None = None  # that part, if it is a file of its own: beside a GGUF file
    num_parameters: int = 0  # 0: unknown
    weight_bytes: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)  # recommended by its makers, by the names in `Sampling`
    task: Task = "generate"
    pooling: Pooling = "mean"  # of a model that embeds
    # Of a decoder that ranks: the score is the logit of the first token, minus that of the second, if there is one.
    score_tokens: tuple[int, ...] = ()
    pair_template: str = ""  # of a model that ranks: a text with {query} and {document}; "": as its tokenizer joins two
    num_dimensions: int = 0  # of its embeddings
    can_infill: bool = False  # of a model on another server: it fills a gap between two texts
    may_shorten: bool = False  # whether the first dimensions of an embedding are one, too
