"""GGUF files with a projector (mmproj) beside them: equal to transformers' own `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.api.process import Server
from tests.missing import needs
from tests.plugins.openvino.projectors import write_pair
from tests.seeing import answered, generated, picture, seeing_dir

from tailrace.engines import EngineSpec, load_engine, own_kinds
from tailrace.models.resolve import read_card

__all__ = ["seeing_dir"]

pytestmark = [needs("torch", "transformers"), pytest.mark.timeout(240)]

_COUNT = 12
_EXACTLY = ("--engine", "openvino", "--threads", "1", "--weights", "16", "--kv-precision", "f32")


@pytest.mark.parametrize(
    ("architecture", "is_old"),
    [("gemma3", False), *(pytest.param("idefics3", one, marks=pytest.mark.deep) for one in (False, True))],
)
def test_answers_equal_those_of_generate(
    architecture: str, is_old: bool, seeing_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    path = seeing_dir(architecture)
    file = write_pair(architecture, path, tmp_path, is_old=is_old)
    first, second = picture(1), picture(2, 64, 80)
    asked = [[first], [second], [first, second]]
    with contextlib.closing(Server(str(file), *_EXACTLY)) as server:
        server.wait_ready()
        found = [answered(server, pictures, _COUNT) for pictures in asked]
        shown = server.http.post("/api/show", json={"model": file.stem}).json()["capabilities"]
    assert found == [generated(path, pictures, _COUNT) for pictures in asked]
    assert found[0] != found[1]
    assert "vision" in shown


def _load(file: Path) -> Any:  # Any: an engine that may see
    return load_engine(EngineSpec("openvino", str(file), context_tokens=256, kv_tokens=256, threads=1))


def test_a_projector_that_does_not_fit_is_left_out(
    seeing_dir: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model runs, since nobody has asked for the projector, and a line says why it reads no images."""
    file = write_pair("idefics3", seeing_dir("idefics3"), tmp_path)
    (projector,) = tmp_path.glob("mmproj-*")
    content = projector.read_bytes()
    key = b"clip.vision.projection_dim\4\0\0\0"
    assert content.count(key + b"\x20") == 1
    projector.write_bytes(content.replace(key + b"\x20", key + b"\x21"))
    engine = _load(file)
    assert not engine.capabilities.sees
    assert engine.capabilities.takes == {"token_ids"}
    engine.close()
    assert "belongs to a model of the size 33, not 32" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("clip.vision.patch_size", 0, "size below 1"),
        ("clip.vision.image_size", 2**31, "not from 1 to 4096"),
        ("clip.vision.preproc_image_size", 4096, "the model's window has"),
        ("clip.vision.block_count", 9, "lacks the tensor"),
    ],
)
def test_a_damaged_projector_is_left_out(
    key: str, value: int, why: str, seeing_dir: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_pair("idefics3", seeing_dir("idefics3"), tmp_path)
    (projector,) = tmp_path.glob("mmproj-*")
    content = projector.read_bytes()
    start = content.index(key.encode() + b"\4\0\0\0") + len(key) + 4
    projector.write_bytes(content[:start] + value.to_bytes(4, "little") + content[start + 4 :])
    engine = _load(file)
    assert not engine.capabilities.sees
    engine.close()
    assert why in capfd.readouterr().err


def test_projectors_of_other_kinds_are_not_loaded(seeing_dir: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_pair("idefics3", seeing_dir("idefics3"), tmp_path)
    assert own_kinds()["openvino"].sees(read_card(file, "tiny"))
    (projector,) = tmp_path.glob("mmproj-*")
    writer = gguf.GGUFWriter(projector, "clip")
    writer.add_clip_projector_type("pixtral")
    writer.add_tensor("v.patch_embd.bias", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = read_card(file, "tiny")
    assert card.projector == projector
    assert not own_kinds()["openvino"].sees(card)
    engine = _load(file)
    assert not engine.capabilities.sees
    engine.close()
    projector.write_bytes(b"damaged")
    assert not own_kinds()["openvino"].sees(read_card(file, "tiny"))
