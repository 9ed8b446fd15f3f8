"""Reads the card of a GGUF file."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import ModelError
from tailrace.models._tokenizer import WORDPIECE, read_scheme, tokenizer_json
from tailrace.models._vector_card import ENCODERS, VectorCard
from tailrace.models._vocabulary import CONTROL, Vocabulary, is_end, read_vocabulary
from tailrace.models.card import ModelCard, Pooling, recommended
from tailrace.models.gguf_header import Metadata, read_parts
from tailrace.models.shards import projector_of

__all__ = ["read"]

_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}  # llama.cpp's numbers
_RANKS = 4

# As llama.cpp's converter copies them from generation_config.json.
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def read(path: Path, name: str) -> ModelCard:
    metadata = read_parts(path)
    architecture = metadata.get("general.architecture", str)
    if architecture == "clip":
        raise ModelError(f"{path} is a projector, which reads images for a model. Name the .gguf file of the model.")
    if not architecture:
        raise ModelError(f"{path} does not name its architecture: it is not a model, or its conversion is incomplete.")
    scheme = read_scheme(path, metadata)
    vocabulary = read_vocabulary(path, metadata)
    bos_token = _token(path, metadata, vocabulary, "tokenizer.ggml.bos_token_id")
    vectors = _vectors(path, metadata, architecture)
    end_token = ""
    if vectors.task != "generate":
        bos_token = _token(path, metadata, vocabulary, "tokenizer.ggml.cls_token_id") or bos_token
        end_token = _behind(path, metadata, vocabulary, is_default=scheme is WORDPIECE)
    says_bos = metadata.get("tokenizer.ggml.add_bos_token", bool)
    add_bos = scheme.always_bos or (scheme.add_bos if says_bos is None else says_bos)
    has_bos = add_bos or vectors.task == "generate"  # texts of the others always have what the tokenizer adds
    context_tokens = metadata.get(f"{architecture}.context_length", int)
    if not context_tokens or context_tokens < 0:
        raise ModelError(f"{path} does not say how long its context is ({architecture}.context_length).")
    projector = _projector(path) if vectors.task == "generate" else None
    return ModelCard(
        name=name,
        path=path,
        format="gguf",
        tokenizer_json=tokenizer_json(vocabulary, scheme, bos_token if has_bos else "", end_token),
        chat_template=metadata.get("tokenizer.chat_template", str),
        bos_token=bos_token,
        eos_token=_token(path, metadata, vocabulary, "tokenizer.ggml.eos_token_id"),
        add_bos=bool(bos_token) and add_bos,
        eos_token_ids=_ends(path, metadata, vocabulary),
        context_tokens=context_tokens,
        architecture=architecture,
        task=vectors.task,
        pooling=vectors.pooling,
        num_dimensions=vectors.num_dimensions,
        pair_template=metadata.get("tokenizer.chat_template.rerank", str) or "",
        has_vision=projector is not None,
        projector=projector,
        tensor_types=tuple(sorted({tensor.type for tensor in metadata.tensors})),
        file_type=metadata.get("general.file_type", int),
        num_parameters=sum(tensor.num_elements for tensor in metadata.tensors),
        weight_bytes=sum(tensor.num_bytes for tensor in metadata.tensors),
        sampling=recommended(
            {name: metadata.get(f"general.sampling.{key}", object) for name, key in _SAMPLING_KEYS.items()}
        ),
    )


def _vectors(path: Path, metadata: Metadata, architecture: str) -> VectorCard:
    number = metadata.get(f"{architecture}.pooling_type", int)
    if number == _RANKS:
        return VectorCard("rank", "first" if architecture in ENCODERS else "last")
    if number in _POOLINGS or architecture in ENCODERS:
        size = metadata.get(f"{architecture}.embedding_length", int) or 0
        return VectorCard("embed", _POOLINGS.get(number or 0, "mean"), size)
    return VectorCard("generate")


def _behind(path: Path, metadata: Metadata, vocabulary: Vocabulary, *, is_default: bool) -> str:
    """Return the token that a model which embeds or ranks has behind a text, or ""."""
    says = metadata.get("tokenizer.ggml.add_eos_token", bool)
    if not (is_default if says is None else says):
        return ""
    own = _token(path, metadata, vocabulary, "tokenizer.ggml.seperator_token_id") if is_default else ""  # its spelling
    return own or _token(path, metadata, vocabulary, "tokenizer.ggml.eos_token_id")


def _projector(path: Path) -> Path | None:
    try:
        found = projector_of(path.name, [file.name for file in path.parent.iterdir()])
    except OSError:  # a directory that may be entered, but not listed
        return None
    return path.with_name(found) if found else None


def _token_id(path: Path, metadata: Metadata, vocabulary: Vocabulary, key: str) -> int | None:
    token_id = metadata.get(key, int)
    if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
        raise ModelError(f"{path} is damaged: its `{key}` is not in its vocabulary. Fetch the file again.")
    return token_id


def _token(path: Path, metadata: Metadata, vocabulary: Vocabulary, key: str) -> str:
    token_id = _token_id(path, metadata, vocabulary, key)
    return "" if token_id is None else vocabulary.tokens[token_id]


def _ends(path: Path, metadata: Metadata, vocabulary: Vocabulary) -> tuple[int, ...]:
    named = [_token_id(path, metadata, vocabulary, key) for key in _END_KEYS]
    control = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == CONTROL
    }
    known = [token_id for token, token_id in control.items() if is_end(token, control)]
    return tuple(dict.fromkeys(token_id for token_id in [*named, *known] if token_id is not None))
