"""The card: everything that the server needs to know about a model before an engine loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ModelCard"]


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
    tokenizer_model: str = ""  # of a GGUF file: gpt2 (byte-level BPE), llama (SentencePiece)
    quantized_by: str = ""  # of a Hugging Face directory: the method, such as gptq
    tensor_types: tuple[str, ...] = ()  # of a GGUF file, by ggml's names
    num_parameters: int = 0  # 0: unknown
    weight_bytes: int = 0
