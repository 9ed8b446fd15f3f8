"""Tiny random models of each family, as transformers saves them and as llama.cpp's conversion writes them.

All numbers are representable in float16, so that 16-bit weights are exact. Norms and biases are random too: otherwise,
a norm that is left out would change little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ["CONTEXT_TOKENS", "EXACT", "TINY", "Tiny", "greedy", "logits", "make", "random_rows", "write_gguf"]

CONTEXT_TOKENS = 256
EXACT = {  # the library's options, with which it computes in float32 only
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model of a family. Tests run it with a context of `CONTEXT_TOKENS`."""

    kind: str  # the class in transformers, without ForCausalLM
    architecture: str  # in a GGUF file
    config: dict[str, Any] = field(default_factory=dict)  # Any: values of config.json


def _phi3_rope(*, original_tokens: int) -> dict[str, Any]:  # Any: values of config.json
    """Return a configuration with two sets of frequencies, of which longer contexts than the original one have the
    second."""
    return {
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": original_tokens,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": original_tokens,
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.5, 3.0, 5.0, 8.0],
        },
    }


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA3 = {
    "head_dim": 32,
    "num_hidden_layers": 7,  # the sixth one sees all tokens
    "sliding_window": 20,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
_WIDE_HEADS = {"head_dim": 32, "tie_word_embeddings": True}
TINY = {
    "llama": Tiny("Llama", "llama"),
    "llama with biases and wide heads": Tiny(
        "Llama", "llama", {"attention_bias": True, "mlp_bias": True} | _WIDE_HEADS
    ),
    "llama 3.1": Tiny("Llama", "llama", {"rope_parameters": _LLAMA3}),
    "mistral": Tiny("Mistral", "", {"sliding_window": 20}),
    "mistral without a window": Tiny("Mistral", "llama", {"sliding_window": None, "head_dim": 32}),
    "qwen2": Tiny("Qwen2", "qwen2"),
    "qwen2 with windows": Tiny(
        "Qwen2", "", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "layer_types": None}
    ),
    "qwen3": Tiny("Qwen3", "qwen3", _WIDE_HEADS),
    "gemma3": Tiny("Gemma3", "gemma3", _GEMMA3),
    "phi3": Tiny("Phi3", "phi3", {"sliding_window": None}),
    "phi3 with a window": Tiny("Phi3", "", {"sliding_window": 20}),
    "phi3 short": Tiny("Phi3", "phi3", _phi3_rope(original_tokens=512)),
    "phi3 long": Tiny("Phi3", "phi3", _phi3_rope(original_tokens=32)),
    "granite": Tiny(
        "Granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.125,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": Tiny("SmolLM3", "smollm3", {"num_hidden_layers": 5, "rope_parameters": {"rope_theta": 5_000_000.0}}),
    "olmo2": Tiny("Olmo2", "olmo2"),
}


def make(tiny: Tiny, path: Path) -> Any:  # Any: transformers' model
    """Save a model, and return it."""
    import torch
    import transformers

    config = getattr(transformers, f"{tiny.kind}{'Text' if tiny.kind == 'Gemma3' else ''}Config")(
        **_SHAPE | tiny.config
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = getattr(transformers, f"{tiny.kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    middle = 0.0 if name.endswith("bias") or tiny.kind == "Gemma3" else 1.0
                    parameter.copy_(middle + 0.3 * torch.randn_like(parameter))
                parameter.copy_(parameter.half().float())
    model.save_pretrained(path)
    return model


def logits(model: Any, token_ids: list[int]) -> NDArray[np.float32]:
    """Return transformers' logits after each token."""
    import torch

    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()
    return found


def greedy(model: Any, token_ids: list[int], count: int) -> list[int]:
    """Return the most likely tokens, one after the other."""
    made: list[int] = []
    for _ in range(count):
        made.append(int(logits(model, [*token_ids, *made])[-1].argmax()))
    return made


_PAIRED = ("granite", "llama", "smollm3")  # whose rotated pairs lie side by side in a GGUF file


def write_gguf(
    tiny: Tiny,
    model: Any,
    path: Path,
    kind_of: Callable[[str], str] = lambda name: "F16",
    more: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    add_vocabulary: Callable[[gguf.GGUFWriter, int], None] | None = None,
) -> Path:
    """Write a model by the rules of llama.cpp's convert_hf_to_gguf. `kind_of` gives the type of each matrix by its name
    in the file. The matrices of types other than F16 have other numbers than the model, see `random_rows`. `more` adds
    keys and tensors."""
    writer = gguf.GGUFWriter(path, tiny.architecture)
    _add_config(writer, tiny, model.config)
    (add_vocabulary or _add_vocabulary)(writer, model.config.vocab_size)
    more(writer)
    for name, values in _tensors(tiny, model):
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind_of(name)]
        if kind.name.startswith("F"):
            writer.add_tensor(name, values.astype(np.float32 if kind.name == "F32" else np.float16))
        else:
            writer.add_tensor(name, random_rows(kind.name, *values.shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_rows(kind: str, num_rows: int, num_columns: int, *, scale: float | None = None) -> NDArray[np.uint8]:
    """Return random rows of a type. `scale` is what all blocks have as their scale; None: one that gives the rows the
    size of a model's weights."""
    random = np.random.default_rng(num_rows * num_columns)
    number = gguf.GGMLQuantizationType[kind]
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[number]
    if num_weights == 1:
        weights = random.normal(0, num_columns**-0.5, (num_rows, num_columns)).astype(np.float32)
        if scale is not None:
            weights[num_rows // 2, num_columns // 2] = scale
        return np.ascontiguousarray(gguf.quantize(weights, number)).view(np.uint8)
    blocks = random.integers(0, 256, (num_rows, num_columns // num_weights, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # its scale is an exponent
        blocks[..., 0] = random.integers(118, 122, blocks.shape[:2])
        return blocks.reshape(num_rows, -1)
    if scale is None:
        with np.errstate(over="ignore", invalid="ignore"):
            _put_scale(blocks, kind, 1.0)
            size = gguf.dequantize(blocks.reshape(num_rows, -1), number).std()
        scale = num_columns**-0.5 / size
    _put_scale(blocks, kind, scale)
    return blocks.reshape(num_rows, -1)


_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}


def _put_scale(blocks: NDArray[np.uint8], kind: str, scale: float) -> None:
    for place in _SCALES.get(kind, (0,)):
        blocks[..., place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)


def _add_config(writer: gguf.GGUFWriter, tiny: Tiny, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tiny.kind != "Gemma3":
        writer.add_rope_dimension_count(int(head_size * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if tiny.kind == "Gemma3":
        writer.add_sliding_window(config.sliding_window)
    if tiny.kind == "Granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if tiny.kind == "Phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        if rope["rope_type"] == "longrope":
            original = config.original_max_position_embeddings
            growth = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(growth) / np.log(original))))


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a vocabulary of single bytes, which OpenVINO does not need."""
    tokens = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "\u0120"][: size - 2]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, "ab", "\u010a"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (size - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(tiny: Tiny, model: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    config = model.config
    names = gguf.get_tensor_name_map(_ARCHITECTURES[tiny.architecture], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        values: NDArray[np.float32] = parameter.detach().numpy()
        kind = name.removesuffix(".weight").removesuffix(".bias")
        if tiny.architecture in _PAIRED and kind.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if kind.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if tiny.kind == "Gemma3" and kind.endswith("norm"):
            values = values + 1
        yield f"{names.get_name(kind)}{name.removeprefix(kind)}", values
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(rope, config.hidden_size // config.num_attention_heads)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)


_ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def _llama3_divisors(rope: dict[str, Any], size: int) -> NDArray[np.float32]:
    """Return by what each frequency is divided: 1 for short waves, the factor for long ones."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    length = rope["original_max_position_embeddings"]
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(waves < length / high, 1, np.where(waves > length / low, factor, between))
    return divisors.astype(np.float32)
