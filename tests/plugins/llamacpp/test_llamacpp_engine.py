"""The laws on llama.cpp with the default model, and its special cases: ids missing in its stream, full memory, and
invalid files."""

from __future__ import annotations

import itertools
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.engines.shared import ON_ITS_OWN, SHARED_LAWS, Shared

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models import ModelCard
from tailrace.testing import Law, laws
from tailrace.text import Tokenizer
from tailrace.types import Sampling

# It says how its threads wait, before they are loaded.
pytest.importorskip("tailrace_plugins.llamacpp.llamacpp_engine")

import xllamacpp

from tailrace_plugins.llamacpp.llamacpp_devices import find_gpus, set_device
from tailrace_plugins.llamacpp.llamacpp_engine import LlamaCppEngine
from tailrace_plugins.llamacpp.llamacpp_model import read_pieces
from tailrace_plugins.llamacpp.socket_requests import ask
from tailrace_plugins.llamacpp.token_bytes import TokenBytes, is_open

pytestmark = pytest.mark.timeout(300)  # of which nearly all is for a machine that has to fetch the model first

_VOCAB_SIZE = 40_000


@pytest.fixture(scope="module")
def spec(card: ModelCard) -> EngineSpec:
    """Return a small engine: a prompt at the limit is fast, and takes three steps. It has one thread, because several
    threads spin while they wait for each other."""
    return EngineSpec(
        engine="llamacpp",
        threads=1,
        path=str(card.path),
        context_tokens=384,
        kv_tokens=4096,
        max_sequences=16,
        max_step_tokens=128,
        eos_token_ids=card.eos_token_ids,
    )


@pytest.fixture(scope="module")
def engine(spec: EngineSpec) -> Iterator[Shared]:
    loaded = load_engine(spec)
    yield Shared(loaded)
    loaded.close()


@pytest.fixture(scope="module")
def small_engine(spec: EngineSpec) -> Iterator[Shared]:
    """An engine with little memory."""
    loaded = load_engine(msgspec.structs.replace(spec, context_tokens=128, kv_tokens=512, max_sequences=8))
    yield Shared(loaded)
    loaded.close()


@pytest.fixture(scope="module")
def exact_engine(spec: EngineSpec) -> Iterator[LlamaCppEngine]:
    loaded = load_engine(msgspec.structs.replace(spec, exact=True, max_sequences=3))
    assert isinstance(loaded, LlamaCppEngine)
    yield loaded
    loaded.close()


# Those that take longest, and are about the step loop, which the other tests run, too, or about one parameter.
_LONG = (
    "idle_steps_are_empty",
    "ignore_eos_is_honoured",
    "nothing_leaks",
    "progress_is_counted",
    "prompt_of_the_limit",
    "repetition_is_penalised",
    "starts_are_dense",
)
# test_narrow_sampling_equals_greedy has the same parameters, and needs a twentieth of the time.
_NARROW = ("cold_is_greedy", "min_p_narrows", "top_k_narrows", "top_p_narrows")
_DEEP = (*_LONG, *_NARROW)
_LAWS = [pytest.param(law, marks=pytest.mark.deep if law.name in _DEEP else (), id=str(law)) for law in SHARED_LAWS]


@pytest.mark.parametrize("law", _LAWS)
def test_engine_keeps(law: Law, engine: Shared) -> None:
    if not law.applies_to(engine.capabilities):
        pytest.skip("not among its capabilities")
    law(engine, vocab_size=_VOCAB_SIZE, num_sequences=64)


@pytest.mark.deep
@pytest.mark.parametrize("law", [law for law in laws if law.exact], ids=str)
def test_exact_engine_keeps(law: Law, exact_engine: LlamaCppEngine) -> None:
    law(Shared(exact_engine), vocab_size=_VOCAB_SIZE)


@pytest.mark.deep
def test_a_long_prompt_is_read_in_steps(engine: Shared) -> None:
    prompt = _new_prompt(300)
    engine.submit(Sequence(9400, (prompt,), Sampling(temperature=0.0, seed=0, max_tokens=1)))
    counts: list[int] = []
    while not any(delta.sequence_id == 9400 for delta in engine.step()):
        counts += [one.num_read_tokens for one in engine.progress()]
    assert len(set(counts)) > 1
    # A step takes at most 128 tokens; fewer if a sequence of an earlier test is still in it.
    assert all(0 <= after - before <= 128 for before, after in itertools.pairwise([0, *counts, len(prompt)]))


def test_closing(spec: EngineSpec) -> None:
    """It may be closed twice, and during a sequence. Only its user can open the socket, and no file remains."""
    law = next(law for law in laws if law.name == ON_ITS_OWN)
    folders = []

    def make() -> Engine:
        engine = load_engine(msgspec.structs.replace(spec, max_sequences=2))
        assert isinstance(engine, LlamaCppEngine)
        folders.append(Path(engine._socket_path).parent)
        assert stat.S_IMODE(folders[0].stat().st_mode) == 0o700
        engine.submit(_asked(2**40, (1, 2, 3), 64))
        engine.step()
        return engine

    law(make, vocab_size=_VOCAB_SIZE)
    assert not folders[0].exists()


@pytest.mark.deep
def test_a_thousand_sequences_leak_nothing(engine: Shared) -> None:
    next(law for law in laws if law.name == "nothing_leaks")(engine, vocab_size=_VOCAB_SIZE)


def _new_prompt(num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that the engine has not read, also if the test runs a second time."""
    return tuple(random.SystemRandom().choices(range(100, 40_000), k=num_tokens))


def _asked(sequence_id: int, prompt_ids: tuple[int, ...], max_tokens: int, **sampling: object) -> Sequence:
    greedy = Sampling(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(sequence_id, (prompt_ids,), replace(greedy, **sampling))


def _finish(engine: Engine, *sequence_ids: int) -> dict[int, tuple[tuple[int, ...], Delta]]:
    """Return the ids of each answer, and its last delta."""
    ids: dict[int, tuple[int, ...]] = dict.fromkeys(sequence_ids, ())
    ends: dict[int, Delta] = {}
    while len(ends) < len(ids):
        for delta in engine.step():
            ids[delta.sequence_id] += delta.token_ids
            if delta.finish_reason is not None:
                ends[delta.sequence_id] = delta
    return {sequence_id: (ids[sequence_id], ends[sequence_id]) for sequence_id in ids}


def _answer(engine: Engine, prompt_ids: tuple[int, ...], max_tokens: int, **sampling: object) -> tuple[int, ...]:
    engine.submit(_asked(1, prompt_ids, max_tokens, **sampling))
    ids, end = _finish(engine, 1)[1]
    assert end.finish_reason in ("stop", "length"), end
    return ids


@pytest.mark.deep
def test_it_says_how_much_of_a_prompt_was_cached(engine: Shared) -> None:
    prompt = _new_prompt(80)
    cached: list[int | None] = []
    while not cached or (len(cached) < 20 and cached[-1] == 0):  # llama.cpp may free a slot after it ends a sequence
        engine.submit(_asked(1, prompt, 4))
        deltas: list[Delta] = []
        while not deltas or deltas[-1].finish_reason is None:
            deltas += [delta for delta in engine.step() if delta.sequence_id == 1]
        cached += [delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None]
    assert (cached[0], cached[-1]) == (0, len(prompt) - 1)


# The ids that the stream leaves out.


def _streamed(pieces: list[bytes], ids: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parts that llama.cpp sends for these tokens: a text and its tokens, at each end of a character."""
    chunks, text, begin, covered = [], b"", 0, 0
    for end, token_id in enumerate(ids, 1):
        text += pieces[token_id]
        if not is_open(text):
            chunks.append((text[begin:].decode(errors="replace"), ids[covered:end]))
            begin, covered = len(text), end
    return chunks


_BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("text", ["né", "日本", "🎉🚀", "👩‍👧 ॐ", "∮ E⋅da ∀x"])
def test_lost_ids_of_single_bytes(text: str) -> None:
    pieces = TokenBytes(_BYTES)
    for shown, ids in _streamed(_BYTES, tuple(text.encode())):
        assert pieces.recover(shown, len(ids), ids[-1]) == ids


def test_lost_ids_are_found_by_their_number() -> None:
    table = [*_BYTES, b"\xf0\x9f", b"\x8e\x89", b" \xf0", b"\x9f\x8e"]
    pieces = TokenBytes(table)
    for ids in ((256, 257), (256, 0x8E, 0x89), (0xF0, 0x9F, 0x8E, 0x89), (258, 259, 0x89)):
        shown = b"".join(table[token_id] for token_id in ids).decode()
        assert pieces.recover(shown, len(ids), ids[-1]) == ids


@pytest.mark.deep
def test_lost_ids_without_text_show_the_same_text() -> None:
    pieces = TokenBytes(_BYTES)
    draw = random.Random(7)
    for _ in range(100):
        ids = tuple(draw.choices(range(256), k=12))
        for shown, covered in _streamed(_BYTES, ids):
            found = pieces.recover(shown, len(covered), covered[-1])
            assert len(found) == len(covered)
            if len(covered) == 2:
                assert bytes(found).decode(errors="replace") == shown


@pytest.mark.deep
def test_lost_ids_are_those_of_an_unstreamed_answer(
    exact_engine: LlamaCppEngine, chat: Callable[[str], tuple[int, ...]]
) -> None:
    prompt = chat("Repeat exactly: 你好世界 🎉🚀 日本語 👩‍👩‍👧 ॐ")
    pieces = read_pieces(exact_engine._socket_path)
    for temperature, seed in ((0.0, 0), (0.8, 1), (0.8, 2)):
        asked = _asked(1, prompt, 48, temperature=temperature, seed=seed)
        exact_engine.submit(asked)
        body = msgspec.json.decode(exact_engine._runs[1].body) | {"stream": False}
        streamed = _finish(exact_engine, 1)[1][0]
        unstreamed = msgspec.json.decode(ask(exact_engine._socket_path, "POST /completion", body))
        assert tuple(unstreamed["tokens"][:48]) == streamed
        assert any(is_open(pieces[token_id]) for token_id in streamed), "or nothing was lost, and nothing shown"


# Memory.


@pytest.mark.deep
def test_cached_prompts_are_dropped_for_memory(small_engine: Shared) -> None:
    """All slots have a cached prompt, and the new sequences need the whole memory."""
    draw = random.Random(3)
    for first in range(100, 124, 8):
        ids = range(first, first + 8)
        for sequence_id in ids:
            small_engine.submit(_asked(sequence_id, tuple(draw.choices(range(100, 40_000), k=60)), 4))
        assert {end.finish_reason for _, end in _finish(small_engine, *ids).values()} == {"length"}


@pytest.mark.deep
def test_a_sequence_waits_for_memory_of_aborted_ones(small_engine: Shared) -> None:
    """A sequence must not get memory that llama.cpp still uses: if memory runs out, all sequences end."""
    draw = random.Random(4)
    prompts = [tuple(draw.choices(range(100, 40_000), k=108)) for _ in range(7)]
    for sequence_id in range(4):
        small_engine.submit(_asked(sequence_id, prompts[sequence_id], 20))
    small_engine.step()
    for sequence_id in (1, 2, 3):
        small_engine.abort(sequence_id)
        small_engine.submit(_asked(sequence_id + 3, prompts[sequence_id + 3], 20))
    ends = {sequence_id: end.finish_reason for sequence_id, (_, end) in _finish(small_engine, *range(7)).items()}
    assert ends == {**dict.fromkeys((0, 4, 5, 6), "length"), **dict.fromkeys((1, 2, 3), "cancelled")}


@pytest.mark.deep
def test_each_sequence_may_use_the_whole_context(spec: EngineSpec) -> None:
    """If memory is enough for the longest sequences, no sequence waits or is cut."""
    loaded = load_engine(msgspec.structs.replace(spec, context_tokens=128, kv_tokens=512, max_sequences=4))
    draw = random.Random(6)
    for sequence_id in range(4):
        loaded.submit(_asked(sequence_id, tuple(draw.choices(range(100, 40_000), k=100)), 28))
    answers = _finish(loaded, *range(4))
    loaded.close()
    assert [(len(ids), end.finish_reason) for ids, end in answers.values()] == [(28, "length")] * 4


# What a request may ask.


def test_end_of_text_ends_it_unless_it_is_ignored(
    engine: Shared, card: ModelCard, chat: Callable[[str], tuple[int, ...]]
) -> None:
    prompt = chat("Answer with one word: is water wet?")
    answer = _answer(engine, prompt, 120, ignore_eos=False)
    assert answer[-1] in card.eos_token_ids
    assert len(answer) < 120
    assert len(_answer(engine, prompt, 120)) == 120


@pytest.mark.deep
def test_an_end_token_that_the_library_does_not_know(spec: EngineSpec, engine: Shared) -> None:
    third = _answer(engine, (5, 6, 7), 8)[2]
    other = load_engine(msgspec.structs.replace(spec, max_sequences=1, eos_token_ids=(third,)))
    other.submit(_asked(1, (5, 6, 7), 8, ignore_eos=False))
    ids, end = _finish(other, 1)[1]
    other.close()
    assert (ids[-1], end.finish_reason) == (third, "stop")
    assert len(ids) <= 3


def test_logit_bias(engine: Shared) -> None:
    assert _answer(engine, (5, 6, 7), 4, logit_bias=((1234, 1000.0),)) == (1234,) * 4


@pytest.mark.deep
def test_repetition_penalty_counts_prompt_and_answer(engine: Shared) -> None:
    prompt = tuple(_answer(engine, (504, 905), 32))
    answer = _answer(engine, prompt, 32, repetition_penalty=50.0)
    assert len(set(answer)) == 32
    assert not set(answer) & set(prompt)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}], ids=str)
def test_narrow_sampling_equals_greedy(engine: Shared, narrow: dict[str, float]) -> None:
    greedy = _answer(engine, (5, 6, 7), 1)
    for seed in range(4):
        assert _answer(engine, (5, 6, 7), 1, **({"temperature": 1.0, "seed": seed} | narrow)) == greedy


def test_a_refusal_of_the_library_fails_one_sequence(engine: Shared) -> None:
    engine.submit(_asked(2, (5, 6, 7), 8))
    engine.submit(_asked(3, (5, 6, 10**6), 8))
    results = _finish(engine, 2, 3)
    assert results[3][1].finish_reason == "error"
    assert "invalid tokens" in results[3][1].failure
    assert len(results[2][0]) == 8
    with pytest.raises(SequenceFailed):
        engine.submit(_asked(4, (5,) * 400, 1))


def test_invalid_model_files(card: ModelCard, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"GGUF" + bytes(100), b"GGUF\3\0\0\0" + b"\xa5" * 4000, card.path.read_bytes()[:3_000_000]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"cannot load .*: \S"):
            load_engine(EngineSpec(engine="llamacpp", path=str(path)))


def test_tokens_are_allowed_and_end_the_answer(engine: Shared, card: ModelCard) -> None:
    _answer(engine, (5, 6, 7), 4)  # with the prompt in its cache, llama.cpp may choose other tokens than without
    free = _answer(engine, (5, 6, 7), 4)
    warm = {"allowed_token_ids": (7, 11, 13), "temperature": 5.0, "typical_p": 0.99}
    drawn = [_answer(engine, (5, 6, 7), 8, seed=seed, **warm) for seed in range(4)]
    assert {token_id for ids in drawn for token_id in ids} == {7, 11, 13}
    assert _answer(engine, (5, 6, 7), 4, allowed_token_ids=free) == free
    assert _answer(engine, (5, 6, 7), 4, stop_token_ids=free[:1]) == free[:1]  # later ones depend on its cache, too
    engine.submit(_asked(5, (5, 6, 7), 4, allowed_token_ids=card.eos_token_ids[:1]))  # which are to be ignored
    end = _finish(engine, 5)[5][1]
    assert (end.finish_reason, end.is_refused) == ("error", True)
    assert "exclude all" in end.failure


# Devices.


def _device(name: str, kind: int, device_id: str = "") -> dict[str, object]:
    return {"name": name, "type": kind, "device_id": device_id}


def test_gpus_are_found_as_the_library_takes_them() -> None:
    cpu, integrated = _device("CPU", 0), _device("Vulkan1", 2)
    twice = [_device("CUDA0", 1, "0000:01"), _device("CUDA1", 1, "0000:02"), _device("Vulkan0", 1, "0000:01")]
    assert find_gpus([cpu, integrated, *twice]) == ["CUDA0", "CUDA1"]
    assert find_gpus([cpu, integrated]) == ["Vulkan1"]
    assert find_gpus([cpu]) == []


def test_a_device_is_chosen_by_its_name() -> None:
    gpus = ["CUDA0", "CUDA1", "MTL0"]

    def placed(device: str) -> tuple[bool, int, int, str]:
        params = xllamacpp.CommonParams()
        is_gpu = set_device(params, device, gpus)
        return is_gpu, params.main_gpu, params.n_gpu_layers, xllamacpp.llama_split_mode(params.split_mode).name[17:]

    assert placed("") == (True, 0, -1, "LAYER")  # all of them, as many layers as fit
    assert placed("cuda") == placed("CUDA0") == placed("cuda:0") == (True, 0, -1, "NONE")
    assert placed("cuda:1") == (True, 1, -1, "NONE")
    assert placed("metal") == placed("MTL0") == (True, 2, -1, "NONE")
    assert placed("cpu") == placed("CPU") == (False, -1, 0, "NONE")
    with pytest.raises(ModelError, match=r"no device 'cuda:2'\. Its devices are: cpu, CUDA0, CUDA1, MTL0\.$"):
        placed("cuda:2")


@pytest.mark.deep
def test_the_engine_runs_on_the_device_that_is_asked_for(spec: EngineSpec, engine: Shared) -> None:
    # Few tokens in a step, and many sequences: llama.cpp would end the process.
    on_cpu = load_engine(msgspec.structs.replace(spec, max_sequences=64, max_step_tokens=1, device="cpu"))
    assert len(_answer(on_cpu, (5, 6, 7), 4)) == 4
    on_cpu.close()
    with pytest.raises(ModelError, match=r"has no device 'vulkan:9'\. Its devices are: cpu"):
        load_engine(msgspec.structs.replace(spec, device="vulkan:9"))


@pytest.mark.deep
def test_typical_p_leaves_one_token_to_the_seeds(exact_engine: LlamaCppEngine, card: ModelCard) -> None:
    engine = Shared(exact_engine)  # so that the nearest to the entropy is the same one each time
    prompt = tuple(Tokenizer.from_json(card.tokenizer_json).encode("A river is", special=False))

    def answers(typical_p: float) -> set[tuple[int, ...]]:
        return {_answer(engine, prompt, 3, temperature=1.0, typical_p=typical_p, seed=seed) for seed in (1, 2, 3)}

    assert (len(answers(1e-4)), len(answers(1.0))) == (1, 3)
