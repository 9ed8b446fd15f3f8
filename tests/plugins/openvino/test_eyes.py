"""How images are prepared, and which eyes are read: as transformers does, from the same files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.missing import needs
from tests.seeing import picture

from tailrace.errors import ModelError, SequenceFailed
from tailrace_plugins.openvino.blocks import BLOCK_TOKENS, digests
from tailrace_plugins.openvino.eye_pixels import Preparation, read_preparation
from tailrace_plugins.openvino.eye_shapes import decoder_config, read_eye
from tailrace_plugins.openvino.families import read_decoder

_SIZES = ((90, 50), (50, 90), (7, 300), (32, 32), (33, 31), (1, 64), (641, 480))
_PROCESSORS: dict[str, tuple[dict[str, Any], int]] = {  # Any: JSON
    "Idefics3": ({"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, 32),
    "SmolVLM": ({"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 28}}, 28),
    "CLIP": ({"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}, 32),
    "Gemma3": ({"size": {"height": 32, "width": 32}, "image_mean": [0.2, 0.3, 0.4]}, 32),
    "Siglip": ({"size": {"height": 32, "width": 32}}, 32),
}


@needs("torch", "transformers")
@pytest.mark.parametrize("name", _PROCESSORS)
def test_pixels_are_those_of_the_library(name: str) -> None:
    """Of its processors with Pillow, for images of any shape."""
    from importlib import import_module

    values, side = _PROCESSORS[name]
    module = import_module(f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}")
    processor: Any = getattr(module, f"{name}ImageProcessorPil")(**values)
    prepared = read_preparation(processor.to_dict(), side)
    with_grid = {"return_row_col_info": True} if prepared.kind == "grid" else {}
    for seed, (width, height) in enumerate(_SIZES):
        content = picture(seed, width, height)
        read = processor([Image.open(io.BytesIO(content))], return_tensors="np", **with_grid)
        expected = np.asarray(read["pixel_values"]).reshape(-1, 3, side, side)
        found = np.concatenate(list(prepared.squares(content)))
        assert found.dtype == np.float32
        assert np.array_equal(found, expected)
        if with_grid:
            assert prepared.grid(content) == (read["rows"][0][0], read["cols"][0][0])


def test_narrow_images_need_little_memory() -> None:
    """In the middle of one, the longer side would have millions of pixels."""
    for length, ratio in ((4096, 4), (32, 2**16)):
        middle = Preparation("crop", side=32, length=length, resample=3)
        assert middle.grid(picture(1, ratio, 1)) == (0, 0)
        with pytest.raises(SequenceFailed, match="narrow"):
            middle.grid(picture(1, 1, ratio + 1))
    grid = Preparation("grid", side=32, length=64, resample=1)
    assert grid.grid(picture(1, 60_000, 1)) == (1, 2)
    assert len(list(grid.squares(picture(1, 60_000, 1)))) == 3


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"image_processor_type": "PixtralImageProcessor"}, "PixtralImageProcessor"),
        ({"image_processor_type": None}, "unnamed"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"do_normalize": False}, "left out"),
        ({"size": {"height": 64, "width": 64}}, "another size than 32"),
        ({"image_processor_type": "Idefics3ImageProcessor"}, "makes squares of 364"),
        ({"image_processor_type": "CLIPImageProcessor", "size": 32, "crop_size": 48}, "another size than 32"),
        ({"image_mean": ["a"]}, "incomplete"),
        ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 1_000_000}}, "from 1 to 4096"),
        ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 0}}, "from 1 to 4096"),
        (
            {
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": 4097},
                "max_image_size": {"longest_edge": 32},
            },
            "from 1 to 4096",
        ),
    ],
)
def test_preparations_that_are_not_known_are_refused(changed: dict[str, Any], why: str) -> None:
    config = {"image_processor_type": "Gemma3ImageProcessorFast", "size": {"height": 32, "width": 32}}
    assert read_preparation(config, 32).kind == "square"
    with pytest.raises(ModelError, match=why):
        read_preparation(config | changed, 32)


_SMALL_TEXT = {"vocab_size": 99, "num_hidden_layers": 3}
# As repositories write them, without the values that the library has by default.
_SHORT: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        },
        "text_config": {"model_type": "llama", "rms_norm_eps": 1e-05, **_SMALL_TEXT},
    },
    "gemma3": {
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
        "text_config": {"model_type": "gemma3_text", "sliding_window": 1024, **_SMALL_TEXT},
    },
    "idefics3": {
        "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        "text_config": {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, **_SMALL_TEXT},
        "scale_factor": 4,
    },
    "smolvlm": {"vision_config": {"model_type": "smolvlm_vision"}, "text_config": {"model_type": "llama"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gemma3", {"patch_size": 0}),
        ("gemma3", {"patch_size": 448}),  # fewer patches than `mm_tokens_per_image`
        ("gemma3", {"image_size": -896}),
        ("llava", {"num_attention_heads": 0}),
        ("llava", {"num_hidden_layers": 1}),  # the last but one is computed
        ("llava", {"hidden_size": float("inf")}),
    ],
)
def test_towers_with_impossible_sizes_are_refused(family: str, changed: dict[str, Any]) -> None:
    config = _SHORT[family] | {"model_type": family}
    assert read_eye(config).patch_side == 14
    with pytest.raises(ModelError):
        read_eye(config | {"vision_config": config["vision_config"] | changed})
    with pytest.raises(ModelError):
        read_eye(config | {"vision_config": [1]})


_ROWS = {"llava": 576, "gemma3": 256, "idefics3": 64}


@needs("torch", "transformers")
@pytest.mark.parametrize("family", _SHORT)
def test_values_that_a_file_leaves_out_are_those_of_the_library(family: str) -> None:
    import transformers

    short = {"model_type": family, **_SHORT[family]}
    if family == "idefics3":  # as SmolVLM's own file says it
        short["vision_config"] = {"model_type": "idefics3", **short["vision_config"]}
    whole = transformers.AutoConfig.for_model(**{"model_type": family, **_SHORT[family]}).to_dict()
    if family == "smolvlm":  # its default has sizes that do not divide each other
        short["vision_config"] |= {"image_size": 256}
        whole["vision_config"] |= {"image_size": 256}
    assert read_eye(short) == read_eye(whole)
    assert read_decoder(decoder_config(short), 64) == read_decoder(decoder_config(whole), 64)
    assert read_eye(short).num_rows == _ROWS.get(family, 16)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vision_config": {"model_type": "pixtral"}}, "towers of the type pixtral"),
        ({"vision_feature_layer": [-2, -5]}, "several layers"),
        ({"projector_hidden_act": "relu"}, "projectors with the activation relu"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "first patch"),
        ({"vision_config": {"hidden_act": "relu"}}, "activation relu"),
        ({"vision_config": {"image_size": 333}}, "do not divide"),
        ({"vision_config": {"hidden_size": "wide"}}, "incomplete"),
    ],
)
def test_eyes_that_are_not_known_are_refused(changed: dict[str, Any], why: str) -> None:
    config = {"model_type": "llava", "vision_config": {"image_size": 224}, "text_config": {"hidden_size": 8}}
    assert read_eye(config).num_rows == 49
    with pytest.raises(ModelError, match=why):
        read_eye(config | changed)


def test_blocks_have_the_digests_of_their_images() -> None:
    """An image changes the block in which it begins, and all after it; its place does, too, since its tokens may also
    be written as text."""
    ids = [7] * (4 * BLOCK_TOKENS)
    plain = list(digests(ids))
    one, other, moved = (list(digests(ids, images=[span])) for span in ((40, 70, "a"), (40, 70, "b"), (41, 71, "a")))
    for chain in (one, other, moved):
        assert chain[0] == plain[0]
        assert not set(chain[1:]) & set(plain)
    assert len({plain[0], *one, *other, *moved}) == 10
    assert list(digests(ids, images=[(40, 70, "a")])) == one
    two = list(digests(ids, images=[(40, 50, "a"), (50, 60, "b")]))
    assert two[1] != list(digests(ids, images=[(40, 50, "b"), (50, 60, "a")]))[1]
