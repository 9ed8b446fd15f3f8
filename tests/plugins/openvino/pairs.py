"""Tiny random models with one vocabulary, of which each can be the draft model of another. Made without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.engines.lora import save_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["PIECES", "tiny_llama", "tiny_tokenizer"]

PIECES = 320
_WIDTH, _LAYERS, _HEADS, _INNER = 64, 2, 2, 96


def tiny_tokenizer(*, end: str = "<|end|>") -> Tokenizer:
    """Return a byte-level tokenizer. `end` is its first token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["Once upon a time there was a small dog who liked to swim in the sea."] * 2, trainer)
    return tokenizer


def tiny_llama(path: Path, seed: int, *, tokenizer: Tokenizer | None = None, num_rows: int = PIECES) -> Path:
    """Write a random model as a Hugging Face directory. `num_rows` are those of its embedding."""
    random = np.random.default_rng(seed)

    def matrix(height: int, width: int) -> NDArray[np.float32]:
        return random.normal(0, 2 * width**-0.5, (height, width)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(num_rows, _WIDTH), "model.norm.weight": np.ones(_WIDTH, np.float32)}
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        for part in ("q", "k", "v", "o"):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = matrix(_WIDTH, _WIDTH)
        tensors[f"{name}.mlp.gate_proj.weight"] = matrix(_INNER, _WIDTH)
        tensors[f"{name}.mlp.up_proj.weight"] = matrix(_INNER, _WIDTH)
        tensors[f"{name}.mlp.down_proj.weight"] = matrix(_WIDTH, _INNER)
        for part in ("input", "post_attention"):
            tensors[f"{name}.{part}_layernorm.weight"] = np.ones(_WIDTH, np.float32)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": num_rows,
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (tokenizer or tiny_tokenizer()).save(str(path / "tokenizer.json"))
    save_tensors(path / "model.safetensors", tensors)
    return path
