"""What distinguishes the models that read images: the vision tower, and the projector that turns its rows into those
of the decoder's embedding.

Every tower here is a vision transformer (SigLIP or CLIP) over squares of one size. `eye_graph.py` builds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tailrace.errors import ModelError

__all__ = ["EYES", "EyeShape", "decoder_config", "read_eye"]

Config = Mapping[str, Any]  # Any: JSON

_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "tanh", "quick_gelu": "quick"}
# Values that `config.json` may leave out. Source: the configuration classes of transformers.
_TEXT_DEFAULTS: dict[str, Config] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072,
    },
}
_SIGLIP: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_IDEFICS3 = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_TOWER_DEFAULTS: dict[str, Config] = {
    "clip_vision_model": {**_SIGLIP, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": _SIGLIP,
    "idefics3": _IDEFICS3,  # its earlier name
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
}


@dataclass(frozen=True, slots=True)
class EyeShape:
    """The shape of a vision tower and its projector. Sizes are numbers of float values, sides numbers of pixels."""

    num_layers: int  # that are computed
    hidden_size: int
    mlp_size: int
    num_heads: int
    image_side: int
    patch_side: int
    epsilon: float
    activation: str  # of MLPs: gelu, tanh (gelu with it) or quick
    # shuffle: the rows of neighbours become one row; pool: they become their mean, with a norm; mlp: two layers
    projector: Literal["shuffle", "pool", "mlp"]
    output_size: int  # the hidden size of the decoder
    merged: int = 1  # neighbours along each side that become one row
    has_class: bool = False  # CLIP: a row that is no patch comes first, and a norm before the layers
    keeps_class: bool = False
    has_last_norm: bool = True
    projector_activation: str = "gelu"
    sees_each_other: bool = False  # the rows of an image, in the decoder
    norm_offset: float = 0.0  # is added to the weights of the projector's norm

    @property
    def patches_along(self) -> int:
        """Patches along each side."""
        return self.image_side // self.patch_side

    @property
    def num_patches(self) -> int:
        return self.patches_along**2

    @property
    def num_rows(self) -> int:
        """Rows that the decoder gets for each square."""
        return (self.patches_along // self.merged) ** 2 + self.keeps_class

    @property
    def num_parameters(self) -> int:
        """About how many numbers the tower and the projector have."""
        hidden = self.hidden_size
        of_layer = 4 * hidden * hidden + 2 * hidden * self.mlp_size
        return self.num_layers * of_layer + self.num_patches * hidden + self.output_size * hidden * self.merged**2


def decoder_config(config: Config) -> Config:
    """Return the configuration of a model's decoder: a part of its own where the model reads images."""
    text = config.get("text_config")
    if config.get("model_type") not in EYES or not isinstance(text, dict):
        return config
    family = str(text.get("model_type") or "llama")
    return {"model_type": family, **_TEXT_DEFAULTS.get(family, {}), **text}


def read_eye(config: Config) -> EyeShape:
    """Read the eye of a model. Raises: ModelError if its family or a value is not supported."""
    vision = config.get("vision_config") or {}
    if not isinstance(vision, dict):
        raise ModelError("The configuration of the vision tower is not an object.")
    name = str(vision.get("model_type") or "clip_vision_model")
    defaults = _TOWER_DEFAULTS.get(name)
    if defaults is None:
        raise ModelError(f"OpenVINO does not run vision towers of the type {name}.")
    tower = {**defaults, **vision}
    try:
        shape = EYES[str(config["model_type"])](config, tower, int(decoder_config(config)["hidden_size"]))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"The configuration of the vision tower is incomplete: {error}.") from error
    sides = shape.image_side, shape.patch_side, shape.merged
    if min(*sides, shape.num_layers, shape.hidden_size, shape.mlp_size, shape.num_heads, shape.output_size) < 1:
        raise ModelError("The vision tower has a size below 1, or the projector more rows than there are patches.")
    if shape.hidden_size % shape.num_heads or shape.image_side % shape.patch_side:
        raise ModelError("The vision tower has sizes that do not divide each other.")
    if shape.patches_along % shape.merged:
        raise ModelError("The projector merges more patches than there are along a side.")
    return shape


def _tower(tower: Config) -> dict[str, Any]:  # Any: values of EyeShape
    activation = str(tower["hidden_act"])
    if activation not in _ACTIVATIONS:
        raise ModelError(f"OpenVINO does not run vision towers with the activation {activation}.")
    return {
        "num_layers": int(tower["num_hidden_layers"]),
        "hidden_size": int(tower["hidden_size"]),
        "mlp_size": int(tower["intermediate_size"]),
        "num_heads": int(tower["num_attention_heads"]),
        "image_side": int(tower["image_size"]),
        "patch_side": int(tower["patch_size"]),
        "epsilon": float(tower["layer_norm_eps"]),
        "activation": _ACTIVATIONS[activation],
    }


def _idefics3(config: Config, tower: Config, output_size: int) -> EyeShape:
    merged = int(config.get("scale_factor") or 2)
    return EyeShape(**_tower(tower), projector="shuffle", output_size=output_size, merged=merged)


def _gemma3(config: Config, tower: Config, output_size: int) -> EyeShape:
    shape = _tower(tower)
    along = round(int(config.get("mm_tokens_per_image") or 256) ** 0.5)
    return EyeShape(
        **shape,
        projector="pool",
        output_size=output_size,
        merged=shape["image_side"] // shape["patch_side"] // along,
        sees_each_other=True,
        norm_offset=1.0,
    )


def _llava(config: Config, tower: Config, output_size: int) -> EyeShape:
    shape = _tower(tower)
    layer = config.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise ModelError("OpenVINO does not run models that read several layers of their vision tower.")
    shape["num_layers"] = layer if layer >= 0 else shape["num_layers"] + 1 + layer
    activation = str(config.get("projector_hidden_act") or "gelu")
    if activation not in _ACTIVATIONS:
        raise ModelError(f"OpenVINO does not run projectors with the activation {activation}.")
    has_class = tower.get("model_type", "clip_vision_model") == "clip_vision_model"
    keeps_first = config.get("vision_feature_select_strategy", "default") == "full"
    if not has_class and not keeps_first:
        raise ModelError("OpenVINO does not run models that leave out the first patch of an image.")
    return EyeShape(
        **shape,
        projector="mlp",
        output_size=output_size,
        has_class=has_class,
        keeps_class=has_class and keeps_first,
        has_last_norm=False,
        projector_activation=_ACTIVATIONS[activation],
    )


# By the `model_type` of `config.json`.
EYES: dict[str, Callable[[Config, Config, int], EyeShape]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "llava": _llava,
    "smolvlm": _idefics3,
}
