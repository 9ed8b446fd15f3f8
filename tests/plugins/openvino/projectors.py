"""Writes a tiny model that reads images as two GGUF files, by the rules of llama.cpp's convert_hf_to_gguf: the decoder,
and the projector (mmproj)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tests.plugins.openvino.tiny_models import TINY, write_gguf

__all__ = ["write_pair"]

_TINY = {"idefics3": "llama", "gemma3": "gemma3"}
_PARTS = {
    "vision_model": "v", "vision_tower": "v", "embeddings.patch_embedding": "patch_embd",
    "embeddings.position_embedding": "position_embd", "encoder.layers": "blk", "layer_norm1": "ln1",
    "layer_norm2": "ln2", "self_attn.out_proj": "attn_out", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "post_layernorm": "post_ln", "connector.modality_projection.proj": "mm.model.fc",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
}  # fmt: skip


def write_pair(architecture: str, path: Path, into: Path, *, is_old: bool = False) -> Path:
    """Write the model of a directory. Returns the file of the decoder. `is_old`: as conversions of the first months."""
    import transformers

    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path)
    decoder = SimpleNamespace(config=model.config.text_config, named_parameters=lambda: _decoder_parameters(model))
    file = into / f"tiny-{architecture}-F16.gguf"
    write_gguf(
        TINY[_TINY[architecture]],
        decoder,
        file,
        add_vocabulary=lambda writer, size: _add_vocabulary(writer, path, size),
    )
    _write_projector(architecture, model, path, into / f"mmproj-tiny-{architecture}-f16.gguf", is_old)
    return file


def _decoder_parameters(model: Any) -> Iterator[tuple[str, Any]]:  # Any: torch's parameters, also below
    for name, parameter in model.named_parameters():
        if "vision" not in name and "projector" not in name and "connector" not in name:
            yield name.replace("language_model.", "").replace("text_model.", ""), parameter


def _write_projector(architecture: str, model: Any, path: Path, file: Path, is_old: bool) -> None:
    config, processor = model.config.vision_config, json.loads((path / "processor_config.json").read_text())
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(architecture)
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(config.image_size)
    writer.add_vision_patch_size(config.patch_size)
    writer.add_vision_embedding_length(config.hidden_size)
    writer.add_vision_feed_forward_length(config.intermediate_size)
    writer.add_vision_block_count(config.num_hidden_layers)
    writer.add_vision_head_count(config.num_attention_heads)
    writer.add_vision_image_mean(processor["image_processor"]["image_mean"])
    writer.add_vision_image_std(processor["image_processor"]["image_std"])
    writer.add_vision_attention_layernorm_eps(config.layer_norm_eps)
    writer.add_vision_use_gelu(True)
    if architecture == "idefics3":
        writer.add_vision_projector_scale_factor(model.config.scale_factor)
        writer.add_vision_preproc_image_size(processor["image_processor"]["size"]["longest_edge"])
    else:
        writer.add_vision_projector_scale_factor(2)
    for name, values in _eye_tensors(model):
        if is_old:
            name = name.replace("ffn_up", "ffn_").replace("ffn_down", "ffn_up").replace("ffn_.", "ffn_down.")
        is_whole = values.ndim == 1 or "_embd" in name
        writer.add_tensor(name, values.astype(np.float32 if is_whole else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _eye_tensors(model: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name, parameter in model.model.named_parameters():
        if name.startswith(("vision", "connector", "multi_modal_projector")):
            values = parameter.detach().numpy()
            for part, short in _PARTS.items():
                name = name.replace(part, short)
            yield name, values + 1 if "soft_emb_norm" in name else values


def _add_vocabulary(writer: gguf.GGUFWriter, path: Path, size: int) -> None:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[number] for number in range(size)])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if number in special else kinds.NORMAL for number in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template((path / "chat_template.jinja").read_text())
