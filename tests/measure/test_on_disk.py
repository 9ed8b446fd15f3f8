"""`tailrace ls` and `tailrace rm`, with separate home directories."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tailrace.cli import main
from tailrace.models.catalogue import CATALOGUE
from tailrace.models.directories import prepared_path

_ENTRY = CATALOGUE["smollm2"]


def _write(path: Path, num_bytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(num_bytes)  # a hole
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a home with a model of the catalogue and its prepared form, a model of the hub, and other files."""
    hub = tmp_path / "hub"
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    _write(tmp_path / "models" / _ENTRY.file, _ENTRY.file_bytes)
    _write(tmp_path / "prepared" / f"{Path(_ENTRY.file).stem}-0123456789abcdef" / "model.bin", 400_000)
    _write(tmp_path / "prepared" / f"{Path(_ENTRY.file).stem}-form5-0123456789abcdef" / "model.bin", 600_000)
    _write(tmp_path / "prepared" / "another-0123456789abcdef" / "model.bin", 5)
    models = ("models--org--name", "model.gguf", "a" * 40), ("models--org--words", "words.txt", "b" * 40)
    for name, file, commit in models:
        _write(hub / name / "blobs" / "b", 2_000_000)
        snapshot = hub / name / "snapshots" / commit
        snapshot.mkdir(parents=True)
        os.symlink(hub / name / "blobs" / "b", snapshot / file)
        (hub / name / "refs").mkdir()
        (hub / name / "refs" / "main").write_text(commit)
    return tmp_path


def _run(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=typed)


def _names() -> dict[str, int]:
    return {model["name"]: model["bytes"] for model in json.loads(_run("ls", "--json").stdout)}


def test_models_are_listed_with_all_their_files(home: Path) -> None:
    assert _names() == {"smollm2": _ENTRY.file_bytes + 1_000_000, "hf:org/name": 2_000_000}
    shown = _run("ls").stdout
    assert "99 MB" in shown
    assert "hf:org/name" in shown


def test_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "`tailrace pull` downloads one" in _run("ls").stderr
    assert _run("rm", "smollm2", "--yes").exit_code == 1


def test_deleted(home: Path) -> None:
    removed = _run("rm", "SmolLM2", "hf:org/name", "--yes")
    assert removed.exit_code == 0, removed.stderr
    assert _names() == {}
    assert [path.name for path in Path(prepared_path()).iterdir()] == ["another-0123456789abcdef"]
    assert (home / "hub" / "models--org--words").is_dir()


def test_nothing_is_deleted_without_confirmation(home: Path) -> None:
    refused = _run("rm", "smollm2")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    own = _write(home / "own.gguf", 3)
    for name in (str(own), "models", "words", "hf:org/words", "hf:x"):
        assert _run("rm", "smollm2", name, "--yes").exit_code == 1, name
    assert own.exists()
    assert set(_names()) == {"smollm2", "hf:org/name"}


@pytest.mark.deep
def test_available_models_say_whether_they_fit(home: Path) -> None:
    rows = {row["name"]: row for row in json.loads(_run("ls", "--available", "--json").stdout)}
    assert rows["smollm2"]["is_here"]
    assert rows["smollm2"]["tokens_per_s"] > rows["qwen3-32b"]["tokens_per_s"] > 0
    assert not rows["qwen3-4b"]["is_here"]
    assert rows["qwen3-4b"]["can"] == ["tools", "reasoning"]
    assert rows["minilm"]["tokens_per_s"] == 0


def test_a_model_of_the_hub_is_removed_by_its_known_name(home: Path) -> None:
    repository = home / "hub" / "models--Qwen--Qwen3-4B-GGUF"
    (home / "hub" / "models--org--name").rename(repository)
    link = repository / "snapshots" / ("a" * 40) / "model.gguf"
    link.unlink()
    link.symlink_to(repository / "blobs" / "b")
    assert "hf:Qwen/Qwen3-4B-GGUF (qwen3-4b)" in _run("ls").stdout
    assert _run("rm", "qwen3:4b", "--yes").exit_code == 0
    assert "hf:Qwen/Qwen3-4B-GGUF" not in _names()
