"""Finds what a model's eye is made of: its shape, its tensors, how images are prepared, and how they are written in
prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace.models.gguf_header import Metadata, read_metadata
from tailrace_plugins.openvino.eye_graph import Numbers
from tailrace_plugins.openvino.eye_pixels import Preparation, read_preparation, read_processor
from tailrace_plugins.openvino.eye_shapes import EyeShape, read_eye
from tailrace_plugins.openvino.sources import Raw, eye_name, gguf_tensors_of, tensors_of
from tailrace_plugins.openvino.weights import floats

__all__ = ["EyeFiles", "EyeTensors", "Spelling", "open_eye"]

Config = Mapping[str, Any]  # Any: JSON

_LAYER = re.compile(r"(?:vision\.encoder\.layers|v\.blk)\.(\d+)\.")
_HF_NAMES = {
    "patch": "vision.embeddings.patch_embedding",
    "positions": "vision.embeddings.position_embedding",
    "class": "vision.embeddings.class_embedding",
    "first_norm": "vision.pre_layrnorm",
    "last_norm": "vision.post_layernorm",
    "projector.last": "projector.linear_2",
    "projector.norm": "projector.mm_soft_emb_norm",
}
_HF_FIRST = {"shuffle": "projector.proj", "pool": "projector.mm_input_projection_weight", "mlp": "projector.linear_1"}
_HF_LAYER = {
    "before_attention": "layer_norm1", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.out_proj", "before_mlp": "layer_norm2", "up": "mlp.fc1", "down": "mlp.fc2",
}  # fmt: skip
# Source: gguf's constants, and llama.cpp's conversion.
_GGUF_NAMES = {
    "patch": "v.patch_embd", "positions": "v.position_embd", "last_norm": "v.post_ln",
    "projector.norm": "mm.soft_emb_norm",
}  # fmt: skip
_GGUF_FIRST = {"shuffle": "mm.model.fc", "pool": "mm.input_projection"}
_GGUF_LAYER = {
    "before_attention": "ln1", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_out", "before_mlp": "ln2",
    "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
_SWAPPED = {"up": "down", "down": "up"}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an image is written in a prompt."""

    placeholder: str  # in the chat template
    token: str  # of each of its rows
    token_id: int
    before: str = ""  # what stands around all of them
    after: str = ""
    # Around each square of a grid; the number of its row and column come in between.
    square: str = ""

    def of(self, num_rows: int, grid: tuple[int, int]) -> str:
        """Return an image that is cut into a grid of squares, or, with (0, 0), is one square. `num_rows` are those of
        a square."""
        rows, columns = grid
        tokens = self.token * num_rows
        lines = (
            "".join(f"{self.square}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        cut = "".join(lines) + "\n" if rows else ""
        return f"{cut}{self.before}{tokens}{self.after}"


class EyeTensors:
    """Implements `EyeWeights`. `name_of` gives the name of a tensor in the file, of its name and kind here. Some files
    keep some matrices with inputs before outputs."""

    def __init__(
        self, tensors: Mapping[str, Raw], name_of: Callable[[str, str], str], turned: frozenset[str] = frozenset()
    ) -> None:
        self._tensors = tensors
        self._name_of = name_of
        self._turned = turned
        self._used: set[str] = set()

    def get(self, name: str, kind: str, *shape: int) -> Numbers:
        found = self._name_of(name, kind)
        raw = self._tensors.get(found)
        if raw is None:
            raise ModelError(f"The vision tower lacks the tensor {found}.")
        self._used.add(found)
        try:
            values = floats(raw)
        except FloatingPointError as error:
            raise ModelError(f"The model file is damaged: {found} contains {error}.") from error
        in_file = shape[::-1] if name in self._turned else shape
        if values.size != np.prod(shape) or (len(shape) > 1 and raw.columns != in_file[-1]):
            has, needs = f"{len(raw.rows)} x {raw.columns}", " x ".join(map(str, in_file))
            raise ModelError(f"{found} has {has} numbers, but the vision tower needs {needs}.")
        values = values.reshape(in_file)
        return np.ascontiguousarray(values.T) if name in self._turned else values

    def has(self, name: str, kind: str) -> bool:
        return self._name_of(name, kind) in self._tensors

    def check_all_used(self, num_layers: int) -> None:
        """Raises: ModelError if the layers or the projector have other tensors, which nothing here computes."""
        for name in sorted(set(self._tensors) - self._used):
            layer = _LAYER.match(name)
            if int(layer[1]) < num_layers if layer else name.startswith(("projector.", "mm.")):
                raise ModelError(f"OpenVINO cannot run this vision tower: it has a tensor {name}, which is not known.")


@dataclass(frozen=True, slots=True)
class EyeFiles:
    shape: EyeShape
    preparation: Preparation
    spelling: Spelling
    tensors: EyeTensors


def open_eye(card: ModelCard) -> EyeFiles:
    """Open the eye of a model. Raises: ModelError; OSError."""
    files = _open_directory(card) if card.projector is None else _open_projector(card, card.projector)
    num_tokens = files.preparation.most_squares * files.shape.num_rows
    if num_tokens > card.context_tokens:
        raise ModelError(f"An image may have {num_tokens} tokens, but the model's window has {card.context_tokens}.")
    return files


def _open_directory(card: ModelCard) -> EyeFiles:
    config = json.loads((card.path / "config.json").read_text())
    shape = read_eye(config)
    preparation = read_preparation(read_processor(card.path), shape.image_side)
    tensors = {name: raw for found, raw in tensors_of(card.path).items() if (name := eye_name(found))}
    turned = frozenset({"projector.first"} if shape.projector == "pool" else ())
    weights = EyeTensors(tensors, lambda name, kind: _hf_name(shape, name, kind), turned)
    return EyeFiles(shape, preparation, _spelling(config, _contents(card)), weights)


def _open_projector(card: ModelCard, path: Path) -> EyeFiles:
    """Open a GGUF file that reads images for the model in another one."""
    metadata = read_metadata(path)
    config, processor = _projector_config(metadata)
    shape = replace(read_eye(config), norm_offset=0.0)  # the conversion adds it
    hidden_size = read_metadata(card.path).get(f"{card.architecture}.embedding_length", int)
    if shape.output_size != hidden_size:
        raise ModelError(f"{path.name} belongs to a model of the size {shape.output_size}, not {hidden_size}.")
    tensors = gguf_tensors_of(metadata)
    first = tensors.get("v.blk.0.ffn_up.weight")
    # Earlier conversions have the names of the two layers the other way round.
    is_swapped = first is not None and first.columns != shape.hidden_size
    turned = frozenset({"projector.first"} if shape.projector == "pool" else ())
    weights = EyeTensors(tensors, lambda name, kind: _gguf_name(shape, name, kind, is_swapped=is_swapped), turned)
    contents = _contents(card)
    numbers = {content: number for number, content in contents.items()}
    tokens = {
        "image_token_id": numbers.get(_IMAGE_TOKENS[config["model_type"]], -1),
        "boi_token_index": numbers.get("<start_of_image>", -1),
        "eoi_token_index": numbers.get("<end_of_image>", -1),
    }
    spelling = _spelling({**config, **tokens}, contents)
    return EyeFiles(shape, read_preparation(processor, shape.image_side), spelling, weights)


_IMAGE_TOKENS = {"idefics3": "<image>", "gemma3": "<image_soft_token>"}


def _projector_config(metadata: Metadata) -> tuple[Config, Config]:
    """Return the values of a projector's file under their names in `config.json`, and in that of an image processor.
    Raises: ModelError."""

    def whole(key: str) -> int | None:
        return metadata.get(f"clip.vision.{key}", int)

    kind = metadata.get("clip.projector_type", str) or ""
    side = whole("image_size") or 0
    tower = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": whole("block_count"),
        "hidden_size": whole("embedding_length"),
        "intermediate_size": whole("feed_forward_length"),
        "num_attention_heads": whole("attention.head_count"),
        "image_size": side,
        "patch_size": whole("patch_size"),
        "layer_norm_eps": metadata.get("clip.vision.attention.layer_norm_epsilon", float),
        "hidden_act": "gelu_pytorch_tanh" if metadata.get("clip.use_gelu", bool) else "quick_gelu",
    }
    merged = whole("projector.scale_factor")
    along = side // (whole("patch_size") or 1) // (merged or 4)  # as in llama.cpp: most files of Gemma 3 do not have it
    config = {
        "model_type": kind,
        "vision_config": tower,
        "text_config": {"hidden_size": whole("projection_dim")},
        "scale_factor": merged,
        "mm_tokens_per_image": along**2,
    }
    processor = {
        "image_processor_type": f"{kind.capitalize()}ImageProcessor",
        "size": {"longest_edge": whole("preproc_image_size") or 4 * side},
        "max_image_size": {"longest_edge": side},
        "image_mean": metadata.get("clip.vision.image_mean", list),
        "image_std": metadata.get("clip.vision.image_std", list),
    }
    if kind == "gemma3":
        processor["size"] = {"height": side, "width": side}
    return config, processor


def _gguf_name(shape: EyeShape, name: str, kind: str, *, is_swapped: bool) -> str:
    if name == "projector.first":
        return f"{_GGUF_FIRST[shape.projector]}.{kind}"
    if name.startswith("layers."):
        _, layer, short = name.split(".")
        short = _SWAPPED.get(short, short) if is_swapped else short
        return f"v.blk.{layer}.{_GGUF_LAYER[short]}.{kind}"
    return f"{_GGUF_NAMES[name]}.{kind}"


def _hf_name(shape: EyeShape, name: str, kind: str) -> str:
    if name == "projector.first":
        name = _HF_FIRST[shape.projector]
        return f"{name}.{kind}" if shape.projector != "pool" else name.replace("weight", kind)
    if name.startswith("layers."):
        _, layer, short = name.split(".")
        return f"vision.encoder.layers.{layer}.{_HF_LAYER[short]}.{kind}"
    return _HF_NAMES[name] if name == "class" else f"{_HF_NAMES[name]}.{kind}"


def _contents(card: ModelCard) -> dict[int, str]:
    """Return the control tokens of a tokenizer."""
    return {int(token["id"]): str(token["content"]) for token in json.loads(card.tokenizer_json)["added_tokens"]}


def _spelling(config: Config, contents: Mapping[int, str]) -> Spelling:
    """Raises: ModelError if the tokenizer lacks a token that stands for images."""
    number = int(config.get("image_token_id") or config.get("image_token_index") or 0)
    try:
        token = contents[number]
        if config["model_type"] in ("idefics3", "smolvlm"):
            fake = "<fake_token_around_image>"
            return Spelling(token, token, number, f"{fake}<global-img>", fake, fake)
        if config["model_type"] == "gemma3":
            begin = contents[int(config.get("boi_token_index", 255_999))]
            end = contents[int(config.get("eoi_token_index", 256_000))]
            return Spelling(begin, token, number, f"\n\n{begin}", f"{end}\n\n")
    except KeyError as error:
        raise ModelError(f"The tokenizer lacks the token {error}, which stands for images.") from None
    return Spelling(token, token, number)
