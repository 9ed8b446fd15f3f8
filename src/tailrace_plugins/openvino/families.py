"""What distinguishes the decoders of different families, read from `config.json` or from the metadata of a GGUF file.

Every family here is a decoder with RMS norms, rotary positions, grouped attention and a gated MLP. A family is one
function in `_FAMILIES`, which reads what differs. `decoder.py` builds all of them. Both sources come in one form: the
values of a GGUF file are renamed to those of `config.json` (`gguf_config`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tailrace.errors import ModelError
from tailrace.models.gguf_header import Metadata

__all__ = ["ARCHITECTURES", "GGUF_ARCHITECTURES", "Decoder", "Rope", "gguf_config", "read_decoder"]

Config = Mapping[str, Any]  # Any: JSON

# The architectures of GGUF files, by the `model_type` of the Hugging Face models that they come from.
GGUF_ARCHITECTURES = {
    "gemma3": "gemma3_text",
    "granite": "granite",
    "llama": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
_LOCAL_ROPE_BASE = 10_000.0  # of Gemma 3's layers with a window; GGUF files do not have it
_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu": ("gelu", "gelu_pytorch_tanh")}  # by their names in config.json
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: angle `position * frequency` for each pair of a head's first `2 * len(frequencies)` values."""

    frequencies: tuple[float, ...]
    magnitude: float = 1.0  # of sines and cosines


@dataclass(frozen=True, slots=True)
class Decoder:
    """The shape of a model, and the arithmetic that its family changes. Sizes are numbers of float values."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    ropes: tuple[Rope | None, ...]  # of each layer; None: no positions
    attention_scale: float
    windows: tuple[int, ...]  # of each layer: tokens that a token sees, with itself; 0: all
    activation: Literal["silu", "gelu"] = "silu"  # gelu: with tanh
    head_norms: Literal["", "each", "all"] = ""  # norms of queries and keys: of each head, or of all heads together
    norms: Literal["before", "after", "both"] = "before"  # of attention and MLP
    norm_offset: float = 0.0  # is added to the weights of norms
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the outputs and inputs of each matrix of a layer."""
        hidden, mlp = self.hidden_size, self.mlp_size
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
            "gate": (mlp, hidden),
            "up": (mlp, hidden),
            "down": (hidden, mlp),
        }

    def norm_sizes(self) -> dict[str, int]:
        """Return the size of each norm of a layer."""
        sizes: dict[str, int] = {}
        if self.norms != "after":
            sizes |= {"before_attention": self.hidden_size, "before_mlp": self.hidden_size}
        if self.norms != "before":
            sizes |= {"after_attention": self.hidden_size, "after_mlp": self.hidden_size}
        if self.head_norms:
            queries, keys = (1, 1) if self.head_norms == "each" else (self.num_heads, self.num_kv_heads)
            sizes |= {"q_norm": queries * self.head_size, "k_norm": keys * self.head_size}
        return sizes


def read_decoder(config: Config, context_tokens: int) -> Decoder:
    """Read a model's shape. `context_tokens` is the longest sequence that will run: some models choose their
    frequencies by it. Raises: ModelError if the family or a value is not supported."""
    family = str(config.get("model_type"))
    read = _FAMILIES.get(family)
    if read is None:
        raise ModelError(f"OpenVINO does not run models of the type {family}.")
    try:
        decoder = read(config, _plain(config, context_tokens))
        _check(config, decoder)
        return decoder
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError) as error:
        raise ModelError(f"The configuration of the model is incomplete: {type(error).__name__} {error}.") from error


def _check(config: Config, decoder: Decoder) -> None:
    """Raises: ModelError for what no family here computes."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or decoder.activation
    if activation not in _ACTIVATIONS[decoder.activation]:
        raise ModelError(f"OpenVINO does not run models of this type with the activation {activation}.")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ModelError(f"OpenVINO does not run models of this type with {key}.")
    if config.get("is_causal") is False:
        raise ModelError("OpenVINO does not run decoders whose tokens see those after them.")


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return the values of a GGUF file under their names in `config.json`. Raises: ModelError."""
    name = metadata.get("general.architecture", str) or ""

    def number(key: str) -> float | None:
        return metadata.get(f"{name}.{key}", float)

    def whole(key: str) -> int | None:
        return metadata.get(f"{name}.{key}", int)

    config: dict[str, Any] = {
        "model_type": GGUF_ARCHITECTURES.get(name, name),
        "num_hidden_layers": whole("block_count"),
        "hidden_size": whole("embedding_length"),
        "intermediate_size": whole("feed_forward_length"),
        "num_attention_heads": whole("attention.head_count"),
        "num_key_value_heads": whole("attention.head_count_kv"),
        "head_dim": whole("attention.key_length") or whole("rope.dimension_count"),
        "rotary_size": whole("rope.dimension_count"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "max_position_embeddings": whole("context_length"),
        "original_max_position_embeddings": whole("rope.scaling.original_context_length"),
        "rope_local_base_freq": number("rope.freq_base_swa"),
        "sliding_window": whole("attention.sliding_window"),
        "attention_multiplier": number("attention.scale"),
        "embedding_multiplier": number("embedding_scale"),
        "residual_multiplier": number("residual_scale"),
        "logits_scaling": number("logit_scale"),
        "rope_scaling": _gguf_scaling(metadata, name),
        "norms_have_offset": True,  # the conversion adds it
    }
    if name == "phi3":  # its heads are not smaller than the hidden size allows
        config["head_dim"] = None
    if name == "gemma3" and config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:  # as in llama.cpp: files do not have it
        config["query_pre_attn_scalar"] = (config["hidden_size"] or 0) // (config["num_attention_heads"] or 1)
    return {key: value for key, value in config.items() if value is not None}


def _gguf_scaling(metadata: Metadata, name: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{name}.rope.scaling.type", str) or ""
    factor = metadata.get(f"{name}.rope.scaling.factor", float)
    scaling: dict[str, Any] = {"rope_type": kind or "linear"}
    if factor:
        scaling["factor"] = factor
    if attention := metadata.get(f"{name}.rope.scaling.attn_factor", float):
        scaling["attention_factor"] = attention
    return scaling if (factor or kind) and kind != "none" else None


def _plain(config: Config, context_tokens: int) -> Decoder:
    """Return what all families read in the same way, with the rotation of Llama in each layer."""
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    rope = _rope(config, size, context_tokens)
    return Decoder(
        num_layers=layers,
        hidden_size=hidden,
        mlp_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=size,
        epsilon=float(config["rms_norm_eps"]),
        ropes=(rope,) * layers,
        attention_scale=size**-0.5,
        windows=(0,) * layers,
    )


def _rope(config: Config, head_size: int, context_tokens: int, parameters: Config | None = None) -> Rope:
    """`parameters`: those of one type of layers, where a model has several."""
    scaling = parameters or config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    share = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    size = int(config.get("rotary_size") or head_size * share)
    plain = [base ** (-2 * pair / size) for pair in range(size // 2)]
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if factors := config.get("rope_factors"):  # of a GGUF file: divisors, whatever they come from
        return Rope(tuple(f / d for f, d in zip(plain, factors, strict=True)))
    if kind == "default":
        return Rope(tuple(plain))
    if kind == "linear":
        return Rope(tuple(frequency / float(scaling["factor"]) for frequency in plain))
    if kind == "llama3":
        return Rope(tuple(_llama3(frequency, scaling) for frequency in plain))
    if kind in ("longrope", "su"):  # the same; su is its first name
        return _long_rope(config, scaling, plain, context_tokens)
    raise ModelError(f"OpenVINO does not run models with positions of the type {kind}.")


def _llama3(frequency: float, scaling: Config) -> float:
    """Return a frequency of Llama 3.1. Source: transformers' modeling_rope_utils."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = int(scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _long_rope(config: Config, scaling: Config, plain: list[float], context_tokens: int) -> Rope:
    """Return the short or the long factors: sequences of a server have one set, so that a long one never changes the
    keys of its beginning. Source: transformers' modeling_rope_utils."""
    longest = int(config["max_position_embeddings"])
    original = int(
        config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or longest
    )
    factors = scaling["long_factor" if context_tokens > original else "short_factor"]
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        growth = float(scaling.get("factor") or longest / original)
        magnitude = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    return Rope(tuple(f / float(d) for f, d in zip(plain, factors, strict=True)), float(magnitude))


def _with_windows(decoder: Decoder, config: Config) -> Decoder:
    """Put the window into the layers that have one. Models without a list of layer types have it in all layers."""
    window = int(config.get("sliding_window") or 0)
    types = config.get("layer_types") or ["sliding_attention"] * decoder.num_layers
    return replace(decoder, windows=tuple(window if one == "sliding_attention" else 0 for one in types))


def _llama(config: Config, plain: Decoder) -> Decoder:
    return plain


def _mistral(config: Config, plain: Decoder) -> Decoder:
    return _with_windows(plain, config)


def _qwen2(config: Config, plain: Decoder) -> Decoder:
    if not config.get("use_sliding_window"):
        return plain
    first = int(config.get("max_window_layers") or 0)  # with a window
    types = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(plain.num_layers)
    ]
    return _with_windows(plain, {**config, "layer_types": types})


def _qwen3(config: Config, plain: Decoder) -> Decoder:
    return replace(_qwen2(config, plain), head_norms="each")


def _gemma3(config: Config, plain: Decoder) -> Decoder:
    pattern = int(config.get("sliding_window_pattern") or 6)  # each sixth layer sees all tokens
    types = config.get("layer_types") or [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(plain.num_layers)
    ]
    by_type = config.get("rope_parameters") or {}
    local: Config = by_type.get("sliding_attention") or {
        "rope_theta": config.get("rope_local_base_freq") or _LOCAL_ROPE_BASE
    }
    ropes = {
        "sliding_attention": _rope(config, plain.head_size, 0, local),
        "full_attention": _rope(config, plain.head_size, 0, by_type.get("full_attention")),
    }
    return replace(
        _with_windows(plain, {**config, "layer_types": types}),
        ropes=tuple(ropes[one] for one in types),
        attention_scale=float(config.get("query_pre_attn_scalar") or plain.head_size) ** -0.5,
        activation="gelu",
        head_norms="each",
        norms="both",
        norm_offset=0.0 if config.get("norms_have_offset") else 1.0,
        embedding_scale=plain.hidden_size**0.5,
    )


def _phi3(config: Config, plain: Decoder) -> Decoder:
    return _with_windows(plain, config)


def _granite(config: Config, plain: Decoder) -> Decoder:
    return replace(
        plain,
        attention_scale=float(config.get("attention_multiplier") or plain.attention_scale),
        embedding_scale=float(config.get("embedding_multiplier") or 1.0),
        residual_scale=float(config.get("residual_multiplier") or 1.0),
        logit_scale=1 / float(config.get("logits_scaling") or 1.0),
    )


def _smollm3(config: Config, plain: Decoder) -> Decoder:
    step = int(config.get("no_rope_layer_interval") or 4)
    turned = config.get("no_rope_layers") or [(layer + 1) % step for layer in range(plain.num_layers)]  # 0: not turned
    return replace(
        _qwen2(config, plain),
        ropes=tuple(rope if has else None for rope, has in zip(plain.ropes, turned, strict=True)),
    )


def _olmo2(config: Config, plain: Decoder) -> Decoder:
    return replace(plain, head_norms="all", norms="after")


_FAMILIES: dict[str, Callable[[Config, Decoder], Decoder]] = {
    "gemma3_text": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}
ARCHITECTURES = tuple(_FAMILIES)
