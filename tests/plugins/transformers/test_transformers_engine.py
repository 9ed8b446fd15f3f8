"""The laws on transformers, with a small random GPT-2 and with the default model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # of the library

import msgspec
import pytest
from msgspec.structs import replace
from tests.engines.shared import ON_ITS_OWN, SHARED_LAWS, Shared, run_all
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Engine, Prefill, Sequence
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models.resolve import read_card
from tailrace.testing import Law, laws
from tailrace.types import Sampling

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    """Import the libraries in tests only, because each test process collects the tests, and the import takes
    seconds."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def spec(tiny_gpt2_dir: Path) -> EngineSpec:
    """Return a small engine with one thread: torch's threads spin while they wait for each other, which slows other
    tests down."""
    return EngineSpec(
        "transformers", str(tiny_gpt2_dir), context_tokens=128, kv_tokens=4096, max_sequences=16, max_step_tokens=64,
        threads=1,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["paged", "alone"])
def shared(request: pytest.FixtureRequest, spec: EngineSpec) -> Iterator[Shared]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "alone":
            patch.setattr("tailrace_plugins.transformers.transformers_engine.Paged", _no_pages)
        engine = load_engine(spec)
    assert engine.capabilities.exact is (request.param == "alone")
    yield Shared(engine)
    engine.close()


def _no_pages(*_: object, **__: object) -> None:
    raise ValueError("no pages here")


@pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
def test_engine_keeps(law: Law, shared: Shared) -> None:
    if not law.applies_to(shared.capabilities):
        pytest.skip("an engine that is not exact does not promise it")
    law(shared, vocab_size=300, num_sequences=64)


def test_a_long_prompt_is_read_in_steps(shared: Shared) -> None:
    """A step has 64 tokens, and one for each of 16 sequences. The second prompt has a beginning that is cached."""
    prompt = range(299, 199, -1)  # of no law
    counts = [_read(shared, _ask(9400 + place, (*prompt, last), max_tokens=1)) for place, last in enumerate((5, 6))]
    assert counts == ([[(80, 0)], []] if shared.capabilities.reports_progress else [[], []])


def _read(engine: Shared, sequence: Sequence) -> list[tuple[int, int]]:
    """Return how much of a prompt is read, and was cached, after each step but the last."""
    engine.submit(sequence)
    found: list[Prefill] = []
    while not engine.step():
        found += engine.progress() if engine.capabilities.reports_progress else []
    return [(one.num_read_tokens, one.num_cached_tokens) for one in found]


def test_a_bias_outside_the_model_is_refused(shared: Shared) -> None:
    """Tokenizers may have more tokens than the model's embedding."""
    with pytest.raises(SequenceFailed, match="outside the model's vocabulary"):
        shared.submit(_ask(9300, (5, 6), logit_bias=((10**6, 1.0),)))


def test_closing(spec: EngineSpec) -> None:
    def make() -> Engine:
        engine = load_engine(spec)
        engine.submit(_ask(1, (1, 2, 3), max_tokens=64))
        engine.step()
        return engine

    next(law for law in laws if law.name == ON_ITS_OWN)(make, vocab_size=300)


def _ask(sequence_id: int, prompt_ids: tuple[int, ...], **sampling: object) -> Sequence:
    wanted = replace(Sampling(temperature=0.0, seed=1, max_tokens=16, ignore_eos=True), **sampling)
    return Sequence(sequence_id, (prompt_ids,), wanted)


def _ids(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_answers_equal_those_of_generate(shared: Shared, tiny_gpt2_dir: Path) -> None:
    """The library's own `generate` is the oracle of greedy answers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    prompts = [(5, 6, 7), (8,) * 40, (9, 10)]
    found = run_all(shared, *(_ask(9000 + place, prompt) for place, prompt in enumerate(prompts)))
    for prompt, deltas in zip(prompts, found.values(), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, eos_token_id=-1)
        assert _ids(deltas) == expected[0, len(prompt) :].tolist()


@pytest.mark.deep
@pytest.mark.timeout(300)  # a minute and more of which may go into making the directory
def test_the_default_model(smollm2_dir: Path) -> None:
    """Compared with `generate`, too, for prompts of different lengths at the same time."""
    import torch
    from transformers import AutoModelForCausalLM

    card = read_card(smollm2_dir, "smollm2")
    tokenizer = Tokenizer.from_str(card.tokenizer_json)
    prompts = [tuple(tokenizer.encode(text).ids) for text in ("Once upon a time", "The capital of France is")]
    spec = EngineSpec(
        "transformers", str(smollm2_dir), context_tokens=128, kv_tokens=512, max_sequences=2, dtype="float32"
    )
    engine = load_engine(spec)
    found = run_all(engine, *(_ask(place, prompt, max_tokens=12) for place, prompt in enumerate(prompts)))
    engine.close()
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for prompt, deltas in zip(prompts, found.values(), strict=True):
        ids = torch.tensor([prompt])
        more = {"max_new_tokens": 12, "eos_token_id": -1, "do_sample": False}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
        assert _ids(deltas) == expected[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(_ids(found[1]))


def test_the_end_of_a_text(spec: EngineSpec) -> None:
    engine = load_engine(spec)
    third = _ids(run_all(engine, _ask(1, (5, 6, 7)))[1])[2]
    engine.close()
    engine = load_engine(msgspec.structs.replace(spec, eos_token_ids=(third,)))
    deltas = run_all(engine, _ask(1, (5, 6, 7), ignore_eos=False))[1]
    assert (_ids(deltas)[-1], deltas[-1].finish_reason) == (third, "stop")
    engine.close()


def test_ids_beyond_the_vocabulary_are_refused(shared: Shared) -> None:
    with pytest.raises(SequenceFailed):
        shared.submit(_ask(9100, (1, 10**6)))


def test_logprobs_and_top_logprobs(shared: Shared) -> None:
    deltas = run_all(shared, _ask(9200, (5, 6, 7), logprobs=True, top_logprobs=3, max_tokens=4))[9200]
    for delta in deltas:
        ((top, *_),) = (delta.top_logprobs[0],)
        assert top == (delta.token_ids[0], delta.logprobs[0])
        values = [value for _, value in delta.top_logprobs[0]]
        assert values == sorted(values, reverse=True)
        assert all(value < 0 for value in values)


def test_a_gpt2_without_tokenizer_json(tiny_gpt2_dir: Path, tmp_path: Path) -> None:
    """DialoGPT's repository has its vocabulary in two files beside the weights."""
    path = tmp_path / "old"
    shutil.copytree(tiny_gpt2_dir, path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    card = read_card(path, "old")
    assert (card.format, card.architecture, card.context_tokens, card.eos_token) == (
        "huggingface", "gpt2", 128, "<|endoftext|>",
    )  # fmt: skip
    text = "Dogs swim. Über den Wölken 🐶<|endoftext|>"
    assert Tokenizer.from_str(card.tokenizer_json).encode(text).ids == tokenizer.encode(text).ids


def test_invalid_models(spec: EngineSpec, tiny_gpt2_dir: Path, tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(ModelError) as caught:
            load_engine(msgspec.structs.replace(spec, path=str(path)))
        assert "\n" not in caught.value.message
        return caught.value.message

    path = tmp_path / "broken"
    shutil.copytree(tiny_gpt2_dir, path)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "broken" in refused()
    weights.write_bytes((2**60).to_bytes(8, "little") + whole[8:])  # a head that lies about its length
    assert "broken" in refused()
    weights.write_bytes(whole)
    (path / "config.json").write_text(json.dumps({"model_type": "nonsense", "max_position_embeddings": 8}))
    assert "nonsense" in refused()
    (path / "config.json").write_text(
        json.dumps({"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}})
    )
    (path / "own.py").write_text("raise SystemExit('ran')")
    assert "its own code" in refused()
    weights.unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match="pickled"):
        read_card(path, "x")
