from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models import CATALOGUE
from tailrace.models.catalogue import HubSource, parse_source
from tailrace.models.directories import models_path


def refused(source: str) -> str:
    with pytest.raises(ModelError) as caught:
        parse_source(source)
    return caught.value.message


@pytest.mark.parametrize("source", ["smollm2", " SmolLM2\n", "SMOLLM2", "smollm2:latest"])
def test_case_and_space_are_ignored(source: str) -> None:
    assert parse_source(source) is CATALOGUE["smollm2"]


def test_hub_sources() -> None:
    assert parse_source("hf:org/name") == HubSource("org/name", None)
    assert parse_source("HF:Org/Na.me-1:sub/q4.gguf") == HubSource("Org/Na.me-1", "sub/q4.gguf")


@pytest.mark.parametrize("source", ["hf:", "hf:name", "hf:org/name/more", "hf:org/name:", "hf:org/ name"])
def test_hub_sources_that_are_none(source: str) -> None:
    assert "hf:org/name" in refused(source)


def test_only_gguf_files_of_a_repository_can_be_picked() -> None:
    assert ".gguf" in refused("hf:org/name:model.safetensors")


def test_paths_are_made_absolute_and_links_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    assert parse_source("./model.gguf") == tmp_path / "model.gguf"
    assert parse_source(str(tmp_path)) == tmp_path


def test_a_catalogue_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_source("smollm2") is CATALOGUE["smollm2"]
    assert parse_source("./smollm2") == tmp_path / "smollm2"


def test_unknown_names_get_a_suggestion() -> None:
    assert "Did you mean smollm2?" in refused("smolm2")
    assert "Did you mean scripted?" in refused("scritped")
    assert "Did you mean" not in refused("zzzzzz")


def test_missing_paths_are_errors() -> None:
    assert "There is no file or directory `./gone.gguf`" in refused("./gone.gguf")
    assert "write hf:org/gone" in refused("org/gone")
    assert "empty" in refused("  ")


def test_scripted_is_not_found_here() -> None:
    assert "built in" in refused("Scripted")


def test_the_directory_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path / "moved"))
    assert models_path() == tmp_path / "moved" / "models"
    monkeypatch.setenv("TAILRACE_HOME", "")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models_path() == tmp_path / "xdg" / "tailrace" / "models"
