"""Models in several GGUF files, files that are no models of their own, and the choice among files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.models.parts import split

from tailrace.errors import ModelError
from tailrace.models import CATALOGUE, NoProgress
from tailrace.models.fetch import fetch
from tailrace.models.resolve import resolve
from tailrace.models.shards import gguf_choices, part_of, parts_of, projector_of

WriteGguf = Callable[..., Path]


@pytest.fixture
def parts(write_gguf: WriteGguf, tmp_path: Path) -> list[Path]:
    folder = tmp_path / "folder"
    folder.mkdir()
    return split(write_gguf(), folder / "a")


def _refusal(source: Path) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(str(source), NoProgress())
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("has_tensors_first", [True, False])
def test_all_parts_are_one_model(write_gguf: WriteGguf, tmp_path: Path, has_tensors_first: bool) -> None:
    whole = resolve(str(write_gguf()), NoProgress())
    first, _ = split(whole.path, tmp_path / "a", has_tensors_first=has_tensors_first)
    card = resolve(str(first), NoProgress())
    assert (card.name, card.path) == ("a", first)
    assert (card.num_parameters, card.weight_bytes) == (whole.num_parameters, whole.weight_bytes)
    assert card.tokenizer_json == whole.tokenizer_json


def test_a_folder_with_one_model(parts: list[Path]) -> None:
    (parts[0].parent / "mmproj-a.gguf").touch()
    (parts[0].parent / "README.md").touch()
    card = resolve(str(parts[0].parent), NoProgress())
    assert (card.name, card.path) == ("folder", parts[0])


def test_a_folder_with_several_models(parts: list[Path]) -> None:
    (parts[0].parent / "b.gguf").touch()
    assert _refusal(parts[0].parent).endswith(f"contains 2 GGUF models. Name one of them: {parts[0].name}, b.gguf.")


def test_another_part_than_the_first(parts: list[Path]) -> None:
    assert _refusal(parts[1]).endswith(f"is part 2 of 2 of one model. Name its first part, {parts[0].name}.")
    renamed = parts[1].rename(parts[1].with_name("b.gguf"))
    assert _refusal(renamed).endswith("is part 2 of 2 of one model. Name its first part.")


def test_a_missing_part(parts: list[Path]) -> None:
    parts[1].unlink()
    assert _refusal(parts[0]).endswith(f"these parts are missing: {parts[1].name}.")


def test_a_first_part_with_another_name(parts: list[Path]) -> None:
    assert "its name does not end in -00001-of-00002.gguf" in _refusal(parts[0].rename(parts[0].with_name("b.gguf")))


def test_a_damaged_part(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:40])
    assert f"{parts[1]} (40 bytes) is damaged" in _refusal(parts[0])


def test_a_projector(write_gguf: WriteGguf) -> None:
    assert "is a projector, which reads images for a model" in _refusal(write_gguf("x.gguf", architecture="clip"))


def test_names() -> None:
    names = ["q8.gguf", "Q4/m-00002-of-00003.gguf", "Q4/m-00001-of-00003.gguf", "mmproj-f16.gguf", "m.mmproj.gguf"]
    names += ["m-mmproj-q8.gguf", "mmprojector.gguf", "config.json", "m-00001-of-2.gguf"]
    assert gguf_choices(names) == ["Q4/m-00001-of-00003.gguf", "m-00001-of-2.gguf", "mmprojector.gguf", "q8.gguf"]
    assert part_of("m-00002-of-00003.gguf") == (2, 3)
    assert part_of("m.gguf") == (1, 1)
    assert [path.name for path in parts_of(Path("x/m-00002-of-00002.gguf"))] == [
        "m-00001-of-00002.gguf", "m-00002-of-00002.gguf",
    ]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("engine", ["openvino", "llamacpp"])
def test_engines_run_a_model_in_parts(engine: str, tmp_path: Path) -> None:
    whole = fetch(CATALOGUE["smollm2"], NoProgress())
    first, _, _ = split(whole, tmp_path / "a", num_parts=3)
    texts = []
    for path in (first, whole):
        with closing(Server(str(path), "--engine", engine)) as server:
            server.wait_ready(timeout_s=300)
            body = {"prompt": "A river is", "max_tokens": 20, "temperature": 0}
            texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])
    assert texts[0] == texts[1]


def test_the_projector_of_a_model() -> None:
    names = ["SmolVLM-256M-Q8_0.gguf", "mmproj-SmolVLM-256M-Q8_0.gguf", "mmproj-SmolVLM-256M-f16.gguf", "other-q4.gguf"]
    assert projector_of("SmolVLM-256M-Q8_0.gguf", names) == "mmproj-SmolVLM-256M-f16.gguf"
    assert projector_of("SmolVLM-256M-f32-00001-of-00002.gguf", names) == "mmproj-SmolVLM-256M-f16.gguf"
    assert projector_of("other-q4.gguf", names) is None
    assert projector_of("sub/SmolVLM-256M-Q8_0.gguf", names) is None
    for general in ("mmproj-F16.gguf", "mmproj-model-f16.gguf", "mmproj.gguf"):
        assert projector_of("other-q4.gguf", [*names, general]) == general
        assert projector_of("SmolVLM-256M-Q8_0.gguf", [*names, general]) == "mmproj-SmolVLM-256M-f16.gguf"
    assert projector_of("m.gguf", ["m-mmproj-bf16.gguf", "m.mmproj-Q8_0.gguf", "mmproj-m.bin"]) == "m-mmproj-bf16.gguf"
    assert projector_of("m.gguf", ["mmproj-m2-f16.gguf", "m.gguf"]) is None
