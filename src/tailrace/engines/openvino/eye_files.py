"""Finds what a model's eye is made of: its shape, its tensors, how images are prepared, and how they are written in
prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.engines.openvino.eye_graph import Numbers
from tailrace.engines.openvino.eye_pixels import Preparation, read_preparation
from tailrace.engines.openvino.eye_shapes import EyeShape, read_eye
from tailrace.engines.openvino.sources import Raw, eye_name, tensors_of
from tailrace.engines.openvino.weights import floats
from tailrace.errors import ModelError
from tailrace.models import ModelCard

__all__ = ["EyeFiles", "EyeTensors", "Spelling", "open_eye", "read_directory"]

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
        if values.size != np.prod(shape):
            raise ModelError(f"{found} has {values.size:,} numbers, but the vision tower needs {np.prod(shape):,}.")
        if name in self._turned:
            return np.ascontiguousarray(values.reshape(shape[::-1]).T)
        return values.reshape(shape)

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
    config = json.loads((card.path / "config.json").read_text())
    shape, preparation = read_directory(card)
    tensors = {name: raw for found, raw in tensors_of(card.path).items() if (name := eye_name(found))}
    turned = frozenset({"projector.first"} if shape.projector == "pool" else ())
    weights = EyeTensors(tensors, lambda name, kind: _hf_name(shape, name, kind), turned)
    return EyeFiles(shape, preparation, _spelling(config, _contents(card)), weights)


def read_directory(card: ModelCard) -> tuple[EyeShape, Preparation]:
    """Read the eye of a Hugging Face directory without its tensors. Raises: ModelError; OSError; ValueError."""
    shape = read_eye(json.loads((card.path / "config.json").read_text()))
    return shape, read_preparation(_processor(card.path), shape.image_side)


def _processor(path: Path) -> Config:
    """Return the configuration of the image processor, which newer versions keep in another file."""
    both = path / "processor_config.json"
    config: Config = json.loads(both.read_text()) if both.is_file() else {}
    if isinstance(own := config.get("image_processor"), dict):
        return own
    old: Config = json.loads((path / "preprocessor_config.json").read_text())
    return old


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
