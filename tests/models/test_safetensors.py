"""Which safetensors files are a model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models.safetensors import weight_files


def _file(path: Path, name: str) -> Path:
    head = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    return path


def _index(directory: Path, *names: str) -> None:
    weight_map = {f"tensor {number}": name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_files_of_a_model_are_those_that_transformers_reads(tmp_path: Path) -> None:
    """Some directories have the same weights again, with other names."""
    other = _file(tmp_path / "consolidated.safetensors", "other")
    assert weight_files(tmp_path) == [other]
    parts = [_file(tmp_path / f"model-0000{number}-of-00002.safetensors", "own") for number in (1, 2)]
    _index(tmp_path, parts[1].name, parts[0].name, parts[1].name)
    assert weight_files(tmp_path) == parts
    whole = _file(tmp_path / "model.safetensors", "own")
    assert weight_files(tmp_path) == [whole]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ('{"weight_map": []}', "cannot be read"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names files of other directories"),
    ],
)
def test_a_damaged_index(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=rf"model\.safetensors\.index\.json .*{reason}"):
        weight_files(tmp_path)
