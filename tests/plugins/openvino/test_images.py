"""Images on OpenVINO: equal to transformers' own `generate`, and no answer depends on what else runs."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.api.process import Server
from tests.engines.shared import run_all
from tests.missing import needs
from tests.seeing import ARCHITECTURES, answered, data_url, generated, picture, seeing_dir
from tests.waiting import LONG_S, until
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Sequence
from tailrace.engines.kinds import choose
from tailrace.engines.schedule import Schedule
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models.resolve import read_card
from tailrace.types import Attachment, Sampling

__all__ = ["seeing_dir"]

pytestmark = [needs("torch", "transformers"), pytest.mark.timeout(240)]

_COUNT = 12


# Over HTTP, one architecture in `make test`. The tests of the engine below have all of them.
@pytest.mark.parametrize(
    "architecture", [one if one == "llava" else pytest.param(one, marks=pytest.mark.deep) for one in ARCHITECTURES]
)
def test_answers_equal_those_of_generate(architecture: str, seeing_dir: Callable[[str], Path]) -> None:
    """For one image, another, and two at once, in float32."""
    path = seeing_dir(architecture)
    first, second = picture(1), picture(2, 64, 80)
    asked = [[first], [second], [first, second]]
    exactly = ("--engine", "openvino", "--threads", "1", "--weights", "16", "--kv-precision", "f32")
    with contextlib.closing(Server(str(path), *exactly)) as server:
        server.wait_ready()
        found = [answered(server, pictures, _COUNT) for pictures in asked]
        shown = server.http.post("/api/show", json={"model": path.name}).json()["capabilities"]
    assert found == [generated(path, pictures, _COUNT) for pictures in asked]
    assert found[0] != found[1]
    assert "vision" in shown


def test_a_preparation_that_it_does_not_know_leaves_the_model_to_another_engine(
    seeing_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(seeing_dir("gemma3"), path)
    assert choose(read_card(path, "")).kind.name == "openvino"
    file = next(path / name for name in ("processor_config.json", "preprocessor_config.json") if (path / name).exists())
    content = json.loads(file.read_text())
    content.get("image_processor", content)["do_pan_and_scan"] = True
    file.write_text(json.dumps(content))
    assert choose(read_card(path, "")).kind.name == "transformers"
    with pytest.raises(ModelError, match="do_pan_and_scan"):
        choose(read_card(path, ""), "openvino")


Engines = Callable[..., Any]  # an engine that sees


@pytest.fixture(scope="module")
def engine_of(seeing_dir: Callable[[str], Path]) -> Iterator[Engines]:
    """Return a function that loads an engine with an architecture, once for each specification."""
    made: dict[tuple[Any, ...], Any] = {}

    def load(architecture: str, **more: Any) -> Any:
        key = (architecture, *sorted(more.items()))
        if key not in made:
            spec = EngineSpec(
                "openvino", str(seeing_dir(architecture)), context_tokens=1024, kv_tokens=8192, max_sequences=8,
                threads=1, weight_bits=16, kv_precision="f32", exact=True,
            )  # fmt: skip
            made[key] = load_engine(msgspec.structs.replace(spec, **more))
        return made[key]

    yield load
    for engine in made.values():
        engine.close()


_next_id = iter(range(1, 2**31))


@pytest.fixture
def ask(seeing_dir: Callable[[str], Path]) -> Callable[..., Sequence]:
    def make(
        engine: Any, architecture: str, *pictures: bytes, before: str = "user: ", text: str = "What is it?", **more: Any
    ) -> Sequence:
        tokenizer = Tokenizer.from_file(str(seeing_dir(architecture) / "tokenizer.json"))

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        segments: list[Any] = [ids(before)]
        attachments = {}
        for content in pictures:
            own = ids(engine.see(content).expansion)
            attachment = Attachment.of(content, "image/png", len(own))
            segments.append(msgspec.structs.replace(attachment, token_ids=own))
            attachments[attachment.digest] = content
        sampling = Sampling(temperature=0.0, seed=1, max_tokens=_COUNT, ignore_eos=True, logprobs=True)
        return Sequence(
            next(_next_id), (*segments, ids(f"{text}\nassistant:")), msgspec.structs.replace(sampling, **more),
            attachments=attachments,
        )  # fmt: skip

    return make


def _answer(engine: Any, sequence: Sequence) -> tuple[list[int], list[float]]:
    deltas = run_all(engine, sequence)[sequence.sequence_id]
    assert not any(delta.failure for delta in deltas)
    return _joined(deltas)


def _joined(deltas: list[Delta]) -> tuple[list[int], list[float]]:
    return [one for delta in deltas for one in delta.token_ids], [one for delta in deltas for one in delta.logprobs]


def _cached(engine: Any, sequence: Sequence) -> int:
    deltas = run_all(engine, sequence)[sequence.sequence_id]
    return next(delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_transformers(
    architecture: str, engine_of: Engines, ask: Callable[..., Sequence], seeing_dir: Callable[[str], Path]
) -> None:
    import io

    import torch
    import transformers
    from PIL import Image

    content = picture(3)
    sequence = ask(engine_of(architecture), architecture, content)
    ids, found = _answer(engine_of(architecture), sequence)
    path = seeing_dir(architecture)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path)
    processor: Any = transformers.AutoProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]
    placeholder = engine_of(architecture).see(content).placeholder
    given = processor(text=[placeholder], images=[Image.open(io.BytesIO(content))], return_tensors="pt")
    images = {name: value for name, value in given.items() if name.startswith("pixel")}
    whole = torch.tensor([[*sequence.prompt_ids, *ids]])
    if architecture == "gemma3":  # whose tokens of an image see each other
        images["token_type_ids"] = (whole == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(whole, **images).logits[0]
    expected = logits.log_softmax(-1)[len(sequence.prompt_ids) - 1 : -1]
    for token_id, logprob, row in zip(ids, found, expected, strict=True):
        assert math.isclose(logprob, row[token_id], abs_tol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_answer_depends_on_what_else_runs(
    architecture: str, engine_of: Engines, ask: Callable[..., Sequence]
) -> None:
    """Sequences with an image, with the same image, with another, with both, and with none; alone, together, and with
    prompts that are cut."""
    engine = engine_of(architecture)
    cut = engine_of(architecture, max_step_tokens=20, prefix_cache=False)
    first, second = picture(1), picture(2, 64, 80)
    sequences = [ask(engine, architecture, *own) for own in ([first], [first], [second], [second, first], [])]
    alone = [_answer(engine, one) for one in sequences]
    for other in (engine, cut):
        together = run_all(other, *sequences)
        for sequence, expected in zip(sequences, alone, strict=True):
            ids, logprobs = _joined(together[sequence.sequence_id])
            assert ids == expected[0]
            assert np.allclose(logprobs, expected[1], atol=1e-4)
    assert alone[0] == alone[1] != alone[2]


def test_the_same_image_shares_blocks_and_another_does_not(engine_of: Engines, ask: Callable[..., Sequence]) -> None:
    engine = engine_of("idefics3")
    tall = (picture(5, 40, 80), picture(6, 40, 80))  # the same tokens
    first, other = (ask(engine, "idefics3", one) for one in tall)
    assert first.prompt_ids == other.prompt_ids
    expected = _answer(engine, first)
    assert _cached(engine, ask(engine, "idefics3", tall[0])) == 32
    assert _cached(engine, other) == 0
    assert _answer(engine, ask(engine, "idefics3", tall[0])) == expected  # from the cache


def test_an_image_may_be_partly_cached(engine_of: Engines, ask: Callable[..., Sequence]) -> None:
    """Its tokens see each other, and the first ones are in a block of the prefix cache."""
    engine, plain = engine_of("gemma3"), engine_of("gemma3", prefix_cache=False)
    pictures = [picture(seed) for seed in range(10, 16)]
    before = "user: zzzzzz"
    sequence = ask(engine, "gemma3", *pictures, before=before)
    soft = [place for place, token_id in enumerate(sequence.prompt_ids) if token_id == 3]
    assert {31, 32} <= set(soft)  # the first block ends in an image
    expected = _answer(plain, sequence)
    assert _answer(engine, sequence)[0] == expected[0]
    assert _cached(engine, ask(engine, "gemma3", *pictures, before=before)) >= 32
    ids, logprobs = _answer(engine, ask(engine, "gemma3", *pictures, before=before))
    assert ids == expected[0]
    assert np.allclose(logprobs, expected[1], atol=1e-4)


def test_a_replay_gives_the_same_bits(engine_of: Engines, ask: Callable[..., Sequence]) -> None:
    """Also on another engine, as after a crash: without the prefix cache, the image and its rows of the first."""
    default = {"kv_precision": "", "weight_bits": 0, "threads": 2}
    engine, other = engine_of("idefics3", **default), engine_of("idefics3", prefix_cache=False, **default)
    sampled = {"temperature": 1.0, "seed": 5}
    sequence = ask(engine, "idefics3", picture(7), **sampled)
    deltas = run_all(engine, sequence, ask(engine, "idefics3", picture(8)))[sequence.sequence_id]
    schedule = Schedule.of([(len(delta.token_ids), delta.is_alone) for delta in deltas])
    again = msgspec.structs.replace(ask(other, "idefics3", picture(7), **sampled), schedule=schedule)
    assert _answer(other, again) == _joined(deltas)


@pytest.mark.deep
def test_a_stream_about_an_image_survives_its_engine(engine_of: Engines, seeing_dir: Callable[[str], Path]) -> None:
    """Two choices with the same image go on with the same tokens, where the engine promises it."""
    path = seeing_dir("idefics3")
    content = [{"type": "image_url", "image_url": {"url": data_url(picture(1))}}, {"type": "text", "text": "Tell."}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 700, "seed": 3, "n": 2}
    body |= {"temperature": 1.0, "ignore_eos": True}
    with contextlib.closing(Server(str(path), "--engine", "openvino", "--threads", "1")) as server:
        server.wait_ready()
        kept = server.wait_state(server.create(body), "done")
        stream_id = server.create(body)
        until(lambda: len(server.state(stream_id)["text"]) > 20)
        server.worker().kill()
        state = server.wait_state(stream_id, "done")
        events = server.http.get(f"/v1/streams/{stream_id}/events").text
    assert len(state["text"]) > 20
    if engine_of("idefics3", kv_precision="").capabilities.exact:
        assert '"continuity":"replayed"' in events
        assert state["text"] == kept["text"]


@pytest.mark.parametrize("is_draft", [False, True])
def test_guessed_tokens_change_no_answer(
    is_draft: bool, engine_of: Engines, ask: Callable[..., Sequence], seeing_dir: Callable[[str], Path]
) -> None:
    """By prompt lookup, and by a draft model, which is the model itself: it reads the prompt without the image."""
    more = {"draft": str(seeing_dir("idefics3")), "draft_tokens": 3} if is_draft else {"prompt_lookup_tokens": 4}
    engine, guessing = engine_of("idefics3"), engine_of("idefics3", never_alone=True, **more)
    for seed in range(4):
        sequence = ask(engine, "idefics3", picture(seed), text="dogs dogs dogs dogs")
        ids, logprobs = _answer(guessing, sequence)
        expected = _answer(engine, sequence)
        assert ids == expected[0]
        assert np.allclose(logprobs, expected[1], atol=1e-4)


def test_an_image_that_nobody_waits_for_is_given_up(engine_of: Engines, ask: Callable[..., Sequence]) -> None:
    engine = engine_of("llava")
    gone, other = ask(engine, "llava", picture(9)), ask(engine, "llava", picture(9))
    expected = _answer(engine, other)
    for _ in range(3):
        engine.submit(gone)
        engine.abort(gone.sequence_id)
        assert [delta.finish_reason for delta in engine.step()] == ["cancelled"]
    assert _answer(engine, other) == expected


def test_prompts_that_do_not_fit_their_image_are_refused(engine_of: Engines, ask: Callable[..., Sequence]) -> None:
    engine = engine_of("llava")
    sequence = ask(engine, "llava", picture(1))
    with pytest.raises(SequenceFailed, match="missing"):
        engine.submit(msgspec.structs.replace(sequence, attachments={}))
    first, image, last = sequence.segments
    assert isinstance(image, Attachment)
    short = msgspec.structs.replace(image, token_ids=image.token_ids[1:])
    with pytest.raises(SequenceFailed, match="not those that this model has"):
        engine.submit(msgspec.structs.replace(sequence, segments=(first, short, last)))
    with pytest.raises(SequenceFailed, match="too narrow"):
        engine.see(picture(1, 2**17, 1))


_OLDER = {
    "llava": (("vision_tower.", "vision_tower.vision_model."),),
    "gemma3": (
        ("vision_tower.", "model.vision_tower.vision_model."),
        ("language_model.model.", "model.language_model."),
    ),
}


@pytest.mark.parametrize("architecture", _OLDER)
def test_names_of_other_versions_of_transformers(
    architecture: str,
    engine_of: Engines,
    ask: Callable[..., Sequence],
    seeing_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from safetensors.numpy import load_file, save_file

    path = seeing_dir(architecture)
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    processor = json.loads((path / "processor_config.json").read_text())  # earlier, in another file
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor.pop("image_processor")))
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    tensors = load_file(path / "model.safetensors")
    for new, old in _OLDER[architecture]:
        tensors = {name.replace(new, old): value for name, value in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    engine = engine_of(architecture)
    older = load_engine(
        EngineSpec("openvino", str(tmp_path), context_tokens=1024, kv_tokens=1024, threads=1, weight_bits=16,
                   kv_precision="f32", exact=True)
    )  # fmt: skip
    assert _answer(older, ask(older, architecture, picture(1))) == _answer(
        engine, ask(engine, architecture, picture(1))
    )
    older.close()


_CHILD = """
import sys
from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Sequence
from tailrace.types import Attachment, Sampling

content = sys.stdin.buffer.read()
engine = load_engine(EngineSpec("openvino", sys.argv[1], context_tokens=256, kv_tokens=256, threads=1))
count = engine.see(content).expansion.count("<image>")
image = Attachment.of(content, "image/png", count)
image = Attachment(image.digest, "image/png", count, (1,) * count)
sampling = Sampling(temperature=0.0, seed=1, max_tokens=4, ignore_eos=True)
engine.submit(Sequence(1, ((5, 6), image, (7, 8)), sampling, attachments={image.digest: content}))
while not any(delta.finish_reason for delta in engine.step()):
    pass
print([name for name in ("torch", "transformers", "torchvision") if name in sys.modules])
"""


def test_images_are_read_without_torch(seeing_dir: Callable[[str], Path]) -> None:
    command = [sys.executable, "-c", _CHILD, str(seeing_dir("llava"))]
    ran = subprocess.run(command, input=picture(1), capture_output=True, timeout=LONG_S, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, b"[]"), ran.stderr


def test_a_tower_with_tensors_that_nothing_computes_does_not_load(
    seeing_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    path = seeing_dir("llava")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    save_file(
        tensors | {"vision_tower.encoder.layers.0.q_norm.weight": np.ones(4, np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelError, match="q_norm"):
        load_engine(EngineSpec("openvino", str(tmp_path), context_tokens=256, kv_tokens=256))
