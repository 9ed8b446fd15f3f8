"""The draft model that --draft names: found, fetched and checked like the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugins.openvino.pairs import PIECES, tiny_llama, tiny_tokenizer

from tailrace.assembly.service import engine_spec
from tailrace.assembly.source import find_named, find_source
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.settings import Settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("pair") / "model", 1)


def test_it_is_named_like_the_model(model: Path, tmp_path: Path) -> None:
    settings = Settings(draft=str(tiny_llama(tmp_path / "draft", 2)), draft_tokens=3)
    source = find_source(str(model), NoProgress(), settings)
    assert source.draft is not None
    assert source.draft.name == "draft"
    spec = engine_spec(source, settings, cache_path="")
    assert (spec.draft, spec.draft_tokens) == (str(tmp_path / "draft"), 3)
    assert source.draft_bytes == source.weight_bytes() > 0
    assert find_source(str(model), NoProgress()).draft_bytes == 0


def test_one_of_several_models_has_its_own(model: Path) -> None:
    own = {"model": {"draft": str(model)}}
    first, other = find_named([f"other={model}"], NoProgress(), first=str(model), own=own)
    assert first.draft is not None
    assert other.draft is None
    (named,) = find_named([f"model={model}"], NoProgress(), own=own)
    assert named.draft is not None


@pytest.mark.parametrize("num_rows", [PIECES, PIECES + 64])
def test_a_vocabulary_may_be_filled_up(model: Path, tmp_path: Path, num_rows: int) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"[PAD{number}]" for number in range(num_rows - PIECES)])
    longer = tiny_llama(tmp_path / "longer", 2, tokenizer=tokenizer, num_rows=num_rows)
    assert find_source(str(model), NoProgress(), Settings(draft=str(longer))).draft is not None
    assert find_source(str(longer), NoProgress(), Settings(draft=str(model))).draft is not None


def test_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", 2, tokenizer=tiny_tokenizer(end="<|other|>"))
    with pytest.raises(ModelError, match="other cannot be the draft model of model: they have different vocabularies"):
        find_source(str(model), NoProgress(), Settings(draft=str(other)))


def test_what_cannot_be_one_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"The engine scripted does not support --draft. It is supported by openvino"):
        find_source("scripted", NoProgress(), Settings(draft=str(model)))
    foreign = tiny_llama(tmp_path / "foreign", 2)
    config = foreign / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"bloom"'))
    with pytest.raises(ModelError, match="openvino cannot run the draft model foreign: it runs models of the types"):
        find_source(str(model), NoProgress(), Settings(draft=str(foreign)))
    with pytest.raises(ModelError, match="There is no file or directory"):
        find_source(str(model), NoProgress(), Settings(draft=str(tmp_path / "none.gguf")))
    with pytest.raises(ValueError, match="--draft-tokens needs --draft"):
        Settings(draft_tokens=2)
