"""Models that read images: equal to transformers' own `generate`, token for token, over HTTP and on the engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.api.process import Server
from tests.engines.shared import run_all
from tests.seeing import ARCHITECTURES, answered, generated, picture, seeing_dir, shifting
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Sequence
from tailrace.errors import SequenceFailed
from tailrace.models.resolve import read_card
from tailrace.types import Attachment, Sampling
from tailrace_kit.sampler import Row

__all__ = ["seeing_dir"]

pytestmark = pytest.mark.timeout(240)

_COUNT = 12


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.mark.deep
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_equal_those_of_generate(architecture: str, seeing_dir: Callable[[str], Path]) -> None:
    """For one image, another, two at once, and a text without any."""
    path = seeing_dir(architecture)
    first, second = picture(1), picture(2, 64, 80)
    asked = [[first], [second], [first, second]]
    with contextlib.closing(Server(str(path), "--engine", "transformers", "--threads", "1")) as server:
        server.wait_ready()
        found = [answered(server, pictures, _COUNT) for pictures in asked]
        assert server.http.post("/api/show", json={"model": path.name}).json()["capabilities"] == [
            "completion",
            "vision",
        ]
    assert found == [generated(path, pictures, _COUNT) for pictures in asked]
    assert found[0] != found[1]


def test_sequences_with_different_images_run_beside_each_other(seeing_dir: Callable[[str], Path]) -> None:
    """Each has the answer that it has alone. One with an image, one with another, and one without any."""
    path = seeing_dir("idefics3")
    spec = EngineSpec("transformers", str(path), context_tokens=512, kv_tokens=4096, max_sequences=4, threads=1)
    engine = load_engine(spec)
    sequences = [_sequence(engine, path, place, seed) for place, seed in enumerate((1, 2, None))]
    together = run_all(engine, *sequences)
    for sequence in sequences:
        alone = run_all(engine, sequence)
        assert alone[sequence.sequence_id] == together[sequence.sequence_id]
    with pytest.raises(SequenceFailed, match="missing"):
        engine.submit(Sequence(9, sequences[0].segments, Sampling(seed=1, max_tokens=2)))
    engine.close()


def _sequence(engine: Any, path: Path, sequence_id: int, seed: int | None) -> Sequence:  # Any: an engine that sees
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=8, ignore_eos=True)
    if seed is None:
        return Sequence(sequence_id, ((60, 61, 62),), sampling)
    content = picture(seed, 40 * seed)
    expansion = engine.see(content).expansion
    ids = tuple(Tokenizer.from_file(str(path / "tokenizer.json")).encode(expansion, add_special_tokens=False).ids)
    digest = Attachment.of(content, "image/png", 0).digest
    image = Attachment(digest, "image/png", len(ids), ids)
    return Sequence(sequence_id, ((60, 61), image, (62,)), sampling, attachments={digest: content})


def test_sequences_of_a_model_whose_images_shift_positions_run_beside_each_other() -> None:
    """Qwen2-VL's model remembers by how much the images of the last prompt shift the positions behind them."""
    import torch

    from tailrace_plugins.transformers.transformers_batches import Sequential

    model, read = shifting()
    forwards, rows, expected = Sequential(model), [], []
    for sequence_id, content in enumerate([picture(1), picture(2, 64, 80), None]):
        ids, given = read(content)
        sampling = Sampling(temperature=0.0, seed=1, max_tokens=8, ignore_eos=True)
        rows.append(Row(Sequence(sequence_id, (tuple(ids),), sampling), frozenset()))
        forwards.add(rows[-1], given)
        asked = torch.tensor([ids])
        answer = model.generate(
            asked, attention_mask=torch.ones_like(asked), **given, max_new_tokens=8, do_sample=False, eos_token_id=-1
        )
        expected.append(answer[0].tolist())
    for _ in range(8):
        forwards.step()
    assert [row.token_ids for row in rows] == expected


@pytest.mark.deep
@pytest.mark.parametrize(
    ("changed", "width"),
    [
        ({"size": {"shortest_edge": 4096}}, 4),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True}, 8192),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": False}, 2**16),
    ],
)
def test_narrow_images_need_little_memory(
    changed: dict[str, object], width: int, seeing_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their processors would make them very large before they cut them."""
    from tailrace_plugins.transformers.transformers_eyes import Eyes

    for file in seeing_dir("llava").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "processor_config.json").read_text())
    config["image_processor"] |= changed
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    eyes = Eyes(str(tmp_path))
    assert eyes.see(picture(1, width, 1)).placeholder == "<image>"
    with pytest.raises(SequenceFailed, match="narrow"):
        eyes.see(picture(1, width + 1, 1))


def test_the_card_says_whether_a_model_reads_images(seeing_dir: Callable[[str], Path], tmp_path: Path) -> None:
    path = seeing_dir("llava")
    assert read_card(path, "tiny").has_vision
    for file in path.iterdir():
        if file.name != "processor_config.json":
            (tmp_path / file.name).symlink_to(file)
    assert not read_card(tmp_path, "tiny").has_vision
