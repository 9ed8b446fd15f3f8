"""Writes BERT models as llama.cpp's conversion does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["write_bert"]


def write_bert(
    directory: Path, tensors: dict[str, Any], path: Path, *, pooling: int, kind: str = "F32", old_words: bool = False
) -> Path:
    """Write the model of a Hugging Face directory, with tensors by their names in transformers. Any: arrays.
    `old_words`: as older conversions, which leave words in brackets as they are."""
    config = json.loads((directory / "config.json").read_text())
    vocabulary = json.loads((directory / "tokenizer.json").read_text())
    words = sorted(vocabulary["model"]["vocab"], key=vocabulary["model"]["vocab"].__getitem__)
    special = {token["content"] for token in vocabulary["added_tokens"]}
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(2)
    writer.add_token_list([_phantom(word, special, old_words=old_words) for word in words])
    types = [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words]
    writer.add_token_types(types)
    writer.add_unk_token_id(words.index("[UNK]"))
    writer.add_sep_token_id(words.index("[SEP]"))
    writer.add_bos_token_id(words.index("[CLS]"))
    writer.add_pad_token_id(words.index("[PAD]"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, values in tensors.items():
        module, _, ending = name.removeprefix("bert.").rpartition(".")
        ours = {"pooler.dense": "cls", "classifier": "cls.output"}.get(module) or names.get_name(module)
        if ours is not None:
            _add(writer, f"{ours}.{ending}", np.asarray(values), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _phantom(word: str, special: set[str], *, old_words: bool) -> str:
    if word in special or (old_words and word.startswith("[") and word.endswith("]")):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def _add(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> None:
    is_plain = values.ndim == 1 or name in ("position_embd.weight", "token_types.weight")  # llama.cpp needs it
    number = gguf.GGMLQuantizationType["F32" if is_plain else kind]
    if number == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(values.astype(np.float32), number), raw_dtype=number)
