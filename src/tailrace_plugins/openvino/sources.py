"""Finds the tensors of a decoder in a GGUF file or in the safetensors of a Hugging Face directory.

Both give the same names: `layers.N.q`, those of `Decoder.matrix_shapes` and `Decoder.norm_sizes` for each layer, with
`.bias` behind those of matrices; and `embedding`, `final_norm` and `head`. A decoder that embeds or ranks has no head.
One that ranks has `score`: one row, or two, of which the second one's result is subtracted from that of the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace.models.gguf_header import GgufTensor, Metadata, read_parts
from tailrace.models.safetensors import read_head, weight_files
from tailrace_plugins.openvino.eye_shapes import decoder_config
from tailrace_plugins.openvino.families import Decoder, gguf_config, read_decoder

__all__ = ["Raw", "TensorSource", "eye_name", "gguf_tensors_of", "open_source", "tensors_of"]

_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
# Source of the names: gguf's constants, and transformers' models.
_GGUF_LAYER = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "before_attention": "attn_norm",
    "after_attention": "post_attention_norm", "before_mlp": "ffn_norm", "after_mlp": "post_ffw_norm",
}  # fmt: skip
_GGUF_OTHERS = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output", "score": "cls.output"}
# Conversions of these families put the two values of a rotated pair side by side.
_PAIRED = ("granite", "llama", "smollm3")
_HF_LAYER = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm", "before_attention": "input_layernorm", "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm", "after_mlp": "post_feedforward_layernorm",
}  # fmt: skip
_HF_OTHERS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head", "score": "score"}
# Of models that read images: the names of the same tensors in different versions of transformers.
_DECODER = (
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?(?!lm_head\.)"), "model."),
    (re.compile(r"language_model\.lm_head\."), "lm_head."),
    (re.compile(r"model\.text_model\."), "model."),
)
_EYE = (
    (re.compile(r"(?:model\.)?vision_tower\.(?:vision_model\.)?|model\.vision_model\."), "vision."),
    (re.compile(r"(?:model\.)?multi_modal_projector\.|model\.connector\.modality_projection\."), "projector."),
)
_HF_BODY = ("embed_tokens.", "layers.", "norm.")
_PHI3_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True, slots=True)
class Raw:
    """Rows of a tensor as they lie in the file, which stays mapped. A vector is one row; but a bias has a row for each
    output, as its matrix has."""

    name: str  # in the file
    kind: str  # ggml's name of the type, F32, F16 and BF16 included
    columns: int
    rows: npt.NDArray[np.uint8]  # (rows, bytes of a row)

    def part(self, first: int, last: int) -> Raw:
        """Return some rows."""
        return replace(self, rows=self.rows[first:last])


class TensorSource(Protocol):
    """The tensors of a model."""

    decoder: Decoder

    def find(self, name: str) -> Raw | None:
        """Return a tensor, or None if the model has none of this name."""

    def unused(self) -> list[str]:
        """Return the tensors of the file that nobody has asked for."""


class _Found:
    """The tensors of all files by name. Notes which were used."""

    def __init__(self, tensors: dict[str, Raw]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()

    def get(self, name: str) -> Raw | None:
        self._used.add(name)
        raw = self._tensors.get(name)
        if raw is None or not name.endswith(".bias"):
            return raw
        return Raw(raw.name, raw.kind, 1, raw.rows.reshape(raw.columns, -1))

    def shape(self, name: str) -> tuple[int, int] | None:
        raw = self._tensors.get(name)
        return None if raw is None else (len(raw.rows), raw.columns)

    def unused(self) -> list[str]:
        return sorted(set(self._tensors) - self._used)


def open_source(path: Path, context_tokens: int, card: ModelCard | None = None) -> TensorSource:
    """Open a GGUF file or a Hugging Face directory. `card`: that of a model that embeds or ranks. Raises: ModelError;
    OSError."""
    source = _HuggingFace(path, context_tokens) if path.is_dir() else _Gguf(path, context_tokens)
    return source if card is None else _Headless(source, card)


def _part(raw: Raw | None, rows: slice | npt.NDArray[np.int64]) -> Raw | None:
    return None if raw is None else Raw(raw.name, raw.kind, raw.columns, raw.rows[rows])


class _Fused:
    """The rows of layers that a file keeps in one tensor: queries, keys and values; gate and up."""

    def __init__(self, decoder: Decoder) -> None:
        queries = decoder.num_heads * decoder.head_size
        keys = decoder.num_kv_heads * decoder.head_size
        self._rows = {
            "q": slice(0, queries),
            "k": slice(queries, queries + keys),
            "v": slice(queries + keys, None),
        }

    def part(self, raw: Raw | None, kind: str) -> Raw | None:
        if raw is None or kind in self._rows:
            return _part(raw, self._rows.get(kind, slice(None)))
        half = len(raw.rows) // 2
        return _part(raw, slice(0, half) if kind == "gate" else slice(half, None))


class _Gguf:
    """Implements `TensorSource`."""

    def __init__(self, path: Path, context_tokens: int) -> None:
        metadata = read_parts(path)
        self._family = metadata.get("general.architecture", str) or ""
        self._found = _Found(gguf_tensors_of(metadata))
        config = gguf_config(metadata)
        self.decoder = read_decoder(config | self._rope_factors(config), context_tokens)
        self._fused = _Fused(self.decoder)

    def find(self, name: str) -> Raw | None:
        if name in _GGUF_OTHERS:
            return self._found.get(f"{_GGUF_OTHERS[name]}.weight")
        _, layer, kind, *rest = name.split(".")
        ending = rest[0] if rest else "weight"
        raw = self._found.get(f"blk.{layer}.{_GGUF_LAYER[kind]}.{ending}")
        if raw is None and kind in "qkv":
            return self._fused.part(self._found.get(f"blk.{layer}.attn_qkv.{ending}"), kind)
        if kind in ("gate", "up") and self._found.shape(f"blk.{layer}.ffn_gate.weight") is None:
            return self._fused.part(self._found.get(f"blk.{layer}.ffn_up.{ending}"), kind)
        if raw is not None and kind in "qk" and self._family in _PAIRED:
            return _part(raw, self._halves(len(raw.rows)))
        return raw

    def unused(self) -> list[str]:
        return self._found.unused()

    def _halves(self, num_rows: int) -> npt.NDArray[np.int64]:
        """Return the order of rows in which the first values of all pairs of a head come before the second ones."""
        heads = np.arange(num_rows).reshape(-1, self.decoder.head_size // 2, 2)
        return heads.swapaxes(1, 2).reshape(-1)

    def _rope_factors(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return what the file has in tensors, and `config.json` as values."""
        plain = self._found.get("rope_freqs.weight")
        short, long = (self._found.get(name) for name in _PHI3_FACTORS)
        if plain is not None:
            return {"rope_factors": _numbers(plain)}
        if short is None or long is None:
            return {}
        factors = {"short_factor": _numbers(short), "long_factor": _numbers(long)}
        return {"rope_scaling": {**config.get("rope_scaling", {}), "rope_type": "longrope", **factors}}


class _Headless:
    """Implements `TensorSource` for a model that embeds or ranks."""

    def __init__(self, source: TensorSource, card: ModelCard) -> None:
        self.decoder = source.decoder
        self._source = source
        self._tokens = np.array(card.score_tokens, np.int64)
        self._ranks = card.task == "rank"

    def find(self, name: str) -> Raw | None:
        found = self._source.find(name)
        if name == "head" or (name == "score" and not self._ranks):
            return None
        if name == "score" and len(self._tokens):  # a token's logit is the product with its row of the head
            return _part(self._source.find("head") or self._source.find("embedding"), self._tokens)
        return found

    def unused(self) -> list[str]:
        return self._source.unused()


def _numbers(raw: Raw) -> list[float]:
    found: list[float] = raw.rows.reshape(-1).view(np.float32).tolist()
    return found


def gguf_tensors_of(metadata: Metadata) -> dict[str, Raw]:
    """Return the tensors of a GGUF file by name. Raises: OSError."""
    return {tensor.name: _of_gguf(tensor) for tensor in metadata.tensors}


def _of_gguf(tensor: GgufTensor) -> Raw:
    *rows, columns = tensor.shape or (1,)
    content = np.memmap(tensor.file, np.uint8, "r", tensor.start, (tensor.num_bytes,))
    return Raw(tensor.name, tensor.type, columns, content.reshape(int(np.prod(rows)), -1))


class _HuggingFace:
    """Implements `TensorSource`."""

    def __init__(self, path: Path, context_tokens: int) -> None:
        whole = json.loads((path / "config.json").read_text())
        config, tensors = decoder_config(whole), tensors_of(path)
        if config is not whole:
            tensors = {_renamed(name, _DECODER) or name: raw for name, raw in tensors.items() if not eye_name(name)}
        elif "embed_tokens.weight" in tensors:  # saved without its head, as models that embed are
            tensors = {f"model.{name}" if name.startswith(_HF_BODY) else name: raw for name, raw in tensors.items()}
        self._found = _Found(tensors)
        self.decoder = read_decoder(config, context_tokens)
        self._is_tied = bool(config.get("tie_word_embeddings", config.get("model_type") == "gemma3_text"))
        self._fused = _Fused(self.decoder)

    def find(self, name: str) -> Raw | None:
        if name in _HF_OTHERS:
            raw = self._found.get(f"{_HF_OTHERS[name]}.weight")
            return None if name == "head" and self._is_tied else raw
        _, layer, kind, *rest = name.split(".")
        ending = rest[0] if rest else "weight"
        prefix = f"model.layers.{layer}"
        raw = self._found.get(f"{prefix}.{self._norm_name(kind)}.{ending}")
        if raw is None and kind in "qkv":
            return self._fused.part(self._found.get(f"{prefix}.self_attn.qkv_proj.{ending}"), kind)
        if raw is None and kind in ("gate", "up"):
            return self._fused.part(self._found.get(f"{prefix}.mlp.gate_up_proj.{ending}"), kind)
        return raw

    def _norm_name(self, kind: str) -> str:
        """Return a module's name. `post_attention_layernorm` is what its name says only where norms come after."""
        if kind == "before_mlp" and self.decoder.norms == "before":
            return _HF_LAYER["after_attention"]
        return _HF_LAYER[kind]

    def unused(self) -> list[str]:
        return [name for name in self._found.unused() if not name.endswith("rotary_emb.inv_freq")]


def eye_name(name: str) -> str:
    """Return the name of a tensor of a vision tower or its projector, without what versions of transformers put before
    it; "" for one of the decoder."""
    return _renamed(name, _EYE)


def _renamed(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, prefix in rules:
        if found := pattern.match(name):
            return prefix + name[found.end() :]
    return ""


def tensors_of(path: Path) -> dict[str, Raw]:
    """Return the tensors of a Hugging Face directory or a GGUF file by name. Raises: ModelError; OSError."""
    if not path.is_dir():
        return gguf_tensors_of(read_parts(path))
    return {name: raw for file in weight_files(path) for name, raw in _of_safetensors(file).items()}


def _of_safetensors(file: Path) -> dict[str, Raw]:
    tensors, start = read_head(file)
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("position_ids"):  # 0, 1, 2 …
            continue
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"OpenVINO does not run models with {tensor.dtype} tensors, as {name} in {file.name}.")
        *rows, columns = tensor.shape or [1]
        begin, end = tensor.data_offsets
        shape = (int(np.prod(rows)), columns * _DTYPES[tensor.dtype])
        if min(shape) < 1 or begin < 0 or end - begin != shape[0] * shape[1]:
            raise ModelError(f"{file} is damaged: {name} has {end - begin:,} bytes. Fetch it again.")
        content = np.memmap(file, np.uint8, "r", start + begin, shape)
        found[name] = Raw(name, tensor.dtype, columns, content)
    return found
