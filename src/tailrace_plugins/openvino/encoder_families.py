"""What distinguishes the encoders of different families, read from `config.json`, and the names of their tensors.

Every family here computes as BERT does: learned positions, attention to all tokens, and a norm behind attention and
behind the MLP. A family is one function in `_FAMILIES`. `encoder.py` builds all of them, from tensors of the same
names: `tokens`, `positions`, `types` and `first_norm`; `layers.N.q` and so on (`_BERT`); `head.first` and `head.last`
of a model that ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tailrace.errors import ModelError
from tailrace.models.gguf_header import Metadata
from tailrace.types import Task

__all__ = ["ARCHITECTURES", "GGUF_ENCODERS", "EncoderShape", "read_encoder", "read_gguf_encoder"]

Config = Mapping[str, Any]  # Any: JSON

_BERT = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip
_DISTILBERT = {
    "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "o": "attention.out_lin",
    "attention_norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "mlp_norm": "output_layer_norm",
}  # fmt: skip
_GGUF = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "attention_norm": "attn_output_norm",
    "up": "ffn_up", "down": "ffn_down", "mlp_norm": "layer_output_norm",
}  # fmt: skip
GGUF_ENCODERS = ("bert",)
_ACTIVATIONS: dict[str, Literal["erf", "tanh", "relu"]] = {
    "gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The shape of a model, and the arithmetic that its family changes. Sizes are numbers of float values."""

    task: Task
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    epsilon: float
    activation: Literal["erf", "tanh", "relu"]  # erf, tanh: GELU by this function
    layer_names: Mapping[str, str]  # of tensors in the file, by those here
    other_names: Mapping[str, str]
    layers: str  # what comes before a layer's number
    prefix: str  # of all names but those of the head; some files leave it out
    first_position: int = 0
    head_activation: Literal["tanh", "relu"] = "tanh"  # between the head's layers

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def name_of(self, name: str) -> str:
        """Return the name of a tensor's module in the file, without the prefix."""
        if name in self.other_names:
            return self.other_names[name]
        _, layer, kind = name.split(".")
        return f"{self.layers}.{layer}.{self.layer_names[kind]}"


def read_encoder(config: Config, task: Task) -> EncoderShape:
    """Read a model's shape. Raises: ModelError if the family or a value is not supported."""
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise ModelError(f"OpenVINO does not run encoders of the type {family}.")
    try:
        return _FAMILIES[family](config, task)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"The configuration of the model is incomplete: {type(error).__name__} {error}.") from error


def _bert(config: Config, task: Task) -> EncoderShape:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("OpenVINO does not run encoders with relative positions.")
    if config.get("is_decoder"):
        raise ModelError("OpenVINO does not run encoders that are used as decoders.")
    return EncoderShape(
        task=task,
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        mlp_size=int(config["intermediate_size"]),
        num_heads=int(config["num_attention_heads"]),
        epsilon=float(config["layer_norm_eps"]),
        activation=_activation(config["hidden_act"]),
        layer_names=_BERT,
        other_names={
            "tokens": "embeddings.word_embeddings",
            "positions": "embeddings.position_embeddings",
            "types": "embeddings.token_type_embeddings",
            "first_norm": "embeddings.LayerNorm",
            "head.first": "pooler.dense",
            "head.last": "classifier",
        },
        layers="encoder.layer",
        prefix="bert.",
    )


def _roberta(config: Config, task: Task) -> EncoderShape:
    plain = _bert(config, task)
    return replace(
        plain,
        other_names={**plain.other_names, "head.first": "classifier.dense", "head.last": "classifier.out_proj"},
        prefix="roberta.",
        first_position=int(config["pad_token_id"]) + 1,
    )


def _distilbert(config: Config, task: Task) -> EncoderShape:
    return EncoderShape(
        task=task,
        num_layers=int(config["n_layers"]),
        hidden_size=int(config["dim"]),
        mlp_size=int(config["hidden_dim"]),
        num_heads=int(config["n_heads"]),
        epsilon=1e-12,
        activation=_activation(config["activation"]),
        layer_names=_DISTILBERT,
        other_names={
            "tokens": "embeddings.word_embeddings",
            "positions": "embeddings.position_embeddings",
            "first_norm": "embeddings.LayerNorm",
            "head.first": "pre_classifier",
            "head.last": "classifier",
        },
        layers="transformer.layer",
        prefix="distilbert.",
        head_activation="relu",
    )


def read_gguf_encoder(metadata: Metadata, task: Task) -> EncoderShape:
    """Read the shape of a GGUF file's encoder. Raises: ModelError."""
    name = metadata.get("general.architecture", str) or ""

    def whole(key: str) -> int:
        return metadata.get(f"{name}.{key}", int) or 0

    layers, hidden, mlp = whole("block_count"), whole("embedding_length"), whole("feed_forward_length")
    heads = whole("attention.head_count")
    if name not in GGUF_ENCODERS or not min(layers, hidden, mlp, heads):
        raise ModelError(
            f"OpenVINO does not run encoders of the type {name} from GGUF files, or the file is incomplete."
        )
    return EncoderShape(
        task=task,
        num_layers=layers,
        hidden_size=hidden,
        mlp_size=mlp,
        num_heads=heads,
        epsilon=metadata.get(f"{name}.attention.layer_norm_epsilon", float) or 1e-12,
        activation="erf",
        layer_names=_GGUF,
        other_names={
            "tokens": "token_embd",
            "positions": "position_embd",
            "types": "token_types",
            "first_norm": "token_embd_norm",
            "head.first": "cls",
            "head.last": "cls.output",
        },
        layers="blk",
        prefix="",
    )


def _activation(name: str) -> Literal["erf", "tanh", "relu"]:
    if name not in _ACTIVATIONS:
        raise ModelError(f"OpenVINO does not run encoders with the activation {name}.")
    return _ACTIVATIONS[name]


_FAMILIES: dict[str, Callable[[Config, Task], EncoderShape]] = {
    "bert": _bert,
    "camembert": _roberta,
    "distilbert": _distilbert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
}
ARCHITECTURES = tuple(_FAMILIES)
