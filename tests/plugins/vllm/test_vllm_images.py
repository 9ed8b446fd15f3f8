"""Images with vLLM: its answers equal those of transformers' own `generate`, token for token.

`test_vllm_engine.py` makes the environment in which these tests run.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from safetensors.numpy import load_file, save_file
from tests.api.process import Server
from tests.engines.shared import run_all
from tests.seeing import answered, generated, make_model, picture
from tokenizers import Tokenizer

from tailrace.engines import Engine, EngineSpec, load_engine
from tailrace.engines.interface import Delta, Seeing, Sequence
from tailrace.errors import SequenceFailed
from tailrace.types import Attachment, Sampling

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # the library has its own
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]

_COUNT = 12
_HEAD_DIM = 32  # vLLM has no kernel for 16


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def find(architecture: str) -> Path:
        path = folder / architecture
        if not path.exists():
            make_model(architecture, path, head_dim=_HEAD_DIM)
            _name_as_published(path / "model.safetensors")
        return path

    return find


@pytest.mark.parametrize("architecture", ["idefics3", "llava"])
def test_answers_equal_those_of_generate(architecture: str, model_of: Callable[[str], Path]) -> None:
    """For one image, another, and two at once."""
    if architecture == "llava":
        pytest.importorskip("torchvision", reason="vLLM imports it for this architecture")
    path = model_of(architecture)
    first, second = picture(1), picture(2, 64, 80)
    asked = [[first], [second], [first, second]]
    with contextlib.closing(Server(str(path), "--engine", "vllm", "--dtype", "float32")) as server:
        server.wait_ready(timeout_s=600)
        found = [answered(server, pictures, _COUNT) for pictures in asked]
        told = server.http.post("/api/show", json={"model": path.name}).json()["capabilities"]
    assert found == [generated(path, pictures, _COUNT) for pictures in asked]
    assert found[0] != found[1]
    assert "vision" in told


@pytest.fixture(scope="module")
def engine(model_of: Callable[[str], Path]) -> Iterator[Engine]:
    spec = EngineSpec(
        "vllm", str(model_of("idefics3")), context_tokens=512, kv_tokens=8192, max_sequences=4, dtype="float32",
        prefix_cache=True,
    )  # fmt: skip
    engine = load_engine(spec)
    yield engine
    engine.close()


@pytest.fixture
def ask(engine: Engine, model_of: Callable[[str], Path]) -> Callable[[int, bytes], Sequence]:
    """Return what makes a sequence about an image, before and behind which are many tokens."""
    tokenizer = Tokenizer.from_file(str(model_of("idefics3") / "tokenizer.json"))

    def make(sequence_id: int, content: bytes) -> Sequence:
        sight = cast("Seeing", engine).see(content)
        ids = tuple(tokenizer.encode(sight.expansion, add_special_tokens=False).ids)
        digest = Attachment.of(content, "image/png", 0).digest
        image = Attachment(digest, "image/png", len(ids), ids)
        text = tuple(range(60, 200))
        sampling = Sampling(temperature=0.0, seed=1, max_tokens=8, ignore_eos=True)
        return Sequence(sequence_id, (text[:20], image, text), sampling, attachments={digest: content})

    return make


def test_the_prefix_cache_knows_images(engine: Engine, ask: Callable[[int, bytes], Sequence]) -> None:
    """A prompt with another image has the same ids, and nothing of the first one's cache behind the image."""
    first, second = picture(1), picture(2)
    prompts = [ask(number, content) for number, content in enumerate([first, second, first, second])]
    assert len({prompt.prompt_ids for prompt in prompts}) == 1
    answers, cached = [], []
    for prompt in prompts:
        deltas = run_all(engine, prompt)[prompt.sequence_id]
        answers.append(_ids(deltas))
        cached.append(max(delta.num_cached_tokens or 0 for delta in deltas))
    assert answers[0] == answers[2] != answers[1] == answers[3]
    assert cached == [0, 0, 128, 128]


def test_sequences_with_different_images_run_beside_each_other(
    engine: Engine, ask: Callable[[int, bytes], Sequence]
) -> None:
    sequences = [ask(10 + seed, picture(seed, 30 * seed, 50)) for seed in (1, 2, 3)]
    together = run_all(engine, *sequences)
    for sequence in sequences:
        alone = run_all(engine, sequence)
        assert _ids(alone[sequence.sequence_id]) == _ids(together[sequence.sequence_id])


def test_refusals(engine: Engine, ask: Callable[[int, bytes], Sequence]) -> None:
    sequence = ask(20, picture(1))
    with pytest.raises(SequenceFailed, match="missing"):
        engine.submit(Sequence(20, sequence.segments, sequence.sampling))
    before, image, behind = sequence.segments
    assert isinstance(image, Attachment)
    assert image.token_ids
    for ids in (image.token_ids[:-3], (*image.token_ids, 7), image.token_ids[::-1]):
        other = Attachment(image.digest, "image/png", len(ids), ids)
        with pytest.raises(SequenceFailed, match="other tokens"):
            engine.submit(Sequence(21, (before, other, behind), sequence.sampling, attachments=sequence.attachments))
    assert _ids(run_all(engine, sequence)[20])


def _name_as_published(weights: Path) -> None:
    """vLLM has LLaVA's tower only under the names that the published files have; transformers reads these, too."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    save_file(
        {name.replace(old, new): tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"}
    )


def _ids(deltas: list[Delta]) -> list[int]:
    assert deltas[-1].finish_reason == "length", deltas[-1].failure
    return [token_id for delta in deltas for token_id in delta.token_ids]
