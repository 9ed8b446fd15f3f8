"""The card: all that the server must know about a model before an engine loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ModelCard"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model, described. `tokenizer_json` is to be used without its post-processor (`add_special_tokens=False`):
    `add_bos` says whether a plain prompt begins with `bos_token`; a chat template writes its own."""

    name: str  # what the wires call it
    path: Path  # the GGUF file, or the directory; symlinks are kept
    format: Literal["gguf", "openvino", "huggingface", "scripted", "upstream"]
    tokenizer_json: str  # of Hugging Face `tokenizers`
    chat_template: str | None  # Jinja
    bos_token: str  # "" when there is none
    eos_token: str
    add_bos: bool
    eos_token_ids: tuple[int, ...]  # any of them ends a sequence; the model's own EOS comes first
    context_tokens: int
    architecture: str = ""  # as the file names it
    tokenizer_model: str = ""  # of a GGUF file, as it names it: gpt2 (bytes), llama (SentencePiece)
    tensor_types: tuple[str, ...] = ()  # of a GGUF file, by ggml's names
    num_parameters: int = 0  # 0: not known
    weight_bytes: int = 0
