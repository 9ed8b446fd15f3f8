"""The scripted engine answers as the oracle, and has the faults that its options name."""

from __future__ import annotations

import time

import msgspec
import pytest
from tests.engines.sequences import control_id, expected_ids, make_sequence
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Sequence
from tailrace.errors import ModelError, SequenceFailed
from tailrace.testing import ScriptedEngine, scripted_token
from tailrace_outer.scripted.scripted_engine import EOS_ID, TEXTS, recited_tokens, tokenizer_json


def _engine(**options: float) -> ScriptedEngine:
    return ScriptedEngine(EngineSpec(engine="scripted", context_tokens=512, options=options))


def _run(engine: ScriptedEngine, *sequences: Sequence) -> dict[int, list[Delta]]:
    deltas: dict[int, list[Delta]] = {sequence.sequence_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.submit(sequence)
    while stepped := engine.step():
        for delta in stepped:
            deltas[delta.sequence_id].append(delta)
    return deltas


def _ids(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


def test_answers_match_the_oracle() -> None:
    sequences = [
        make_sequence(1, 1),
        make_sequence(2, 40),
        make_sequence(3, 17, seed=0),
        make_sequence(4, 9, seed=2**63),
    ]
    results = _run(_engine(), *sequences)
    assert [_ids(results[sequence.sequence_id]) for sequence in sequences] == [expected_ids(each) for each in sequences]
    assert all(deltas[-1].finish_reason == "length" for deltas in results.values())


def test_tokens_depend_on_prompt_seed_and_position() -> None:
    def answer(prompt: bytes, seed: int) -> tuple[int, ...]:
        return tuple(scripted_token(tuple(prompt), seed, index, utf8=False) for index in range(32))

    answers = {answer(prompt, seed) for prompt in (b"a", b"b", b"ab", b"ba") for seed in (0, 1, 2**40)}
    assert len(answers) == 12
    assert all(len(set(each)) > 8 for each in answers)


def test_characters_are_split_over_tokens(tokenizer: Tokenizer) -> None:
    sequence = make_sequence(1, 64)
    ids = expected_ids(sequence)
    for start in range(0, 64, 8):
        words, character = ids[start : start + 4], ids[start + 4 : start + 8]
        assert min(words) >= 256
        assert len(bytes(character).decode()) == 1
        assert [len(tokenizer.decode(character[:count])) for count in (1, 2, 3)] == [1, 1, 1], (
            "no whole one before the end"
        )
        assert tokenizer.decode(character) == bytes(character).decode()
    assert "\ufffd" not in tokenizer.decode(ids)


def test_without_utf8_all_tokens_are_words(tokenizer: Tokenizer) -> None:
    ids = _ids(_run(_engine(utf8=0), make_sequence(1, 32))[1])
    assert tokenizer.decode(ids).isascii()
    assert ids == tuple(scripted_token(make_sequence(1).prompt_ids, 7, index, utf8=False) for index in range(32))


def test_prompts_tokenise_to_bytes(tokenizer: Tokenizer) -> None:
    text = "Olá, 世界 \x00\x7f\n<|stall|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert bytes(ids[:-1]).decode() + "<|stall|>" == text
    assert ids[-1] == control_id("stall")


def test_eos_after_ends_with_an_end_token() -> None:
    deltas = _run(_engine(eos_after=5), make_sequence(1, 40))[1]
    assert _ids(deltas) == (*expected_ids(make_sequence(1), 4), EOS_ID)
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [3, 5, 40])
def test_ignore_eos_continues(max_tokens: int) -> None:
    sequence = make_sequence(1, max_tokens)
    sampling = msgspec.structs.replace(sequence.sampling, ignore_eos=True)
    deltas = _run(_engine(eos_after=5), msgspec.structs.replace(sequence, sampling=sampling))[1]
    assert _ids(deltas) == expected_ids(sequence)
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("fault_after", [0, 1, 6])
def test_fail_ends_one_sequence_and_spares_the_others(fault_after: int) -> None:
    failing, spared = make_sequence(1, 20, fault="fail"), make_sequence(2, 20)
    deltas = _run(_engine(fault_after=fault_after), failing, spared)
    assert _ids(deltas[1]) == expected_ids(failing, fault_after)
    assert deltas[1][-1].finish_reason == "error"
    assert deltas[1][-1].failure
    assert _ids(deltas[2]) == expected_ids(spared)


def test_a_fault_after_the_end_has_no_effect() -> None:
    failing = make_sequence(1, 5, fault="fail")
    deltas = _run(_engine(fault_after=5), failing)[1]
    assert _ids(deltas) == expected_ids(failing)
    assert deltas[-1].finish_reason == "length"


def test_garbage_raises() -> None:
    engine = _engine(fault_after=2)
    engine.submit(make_sequence(1, fault="garbage"))
    assert engine.step()
    assert engine.step()
    with pytest.raises(RuntimeError, match="the script says so"):
        engine.step()


def test_tokens_per_s_paces_each_sequence() -> None:
    engine = _engine(tokens_per_s=100)
    sequences = [make_sequence(1, 11), make_sequence(2, 11)]
    for sequence in sequences:
        engine.submit(sequence)
    began_s, num_tokens, steps = time.monotonic(), 0, 0
    while num_tokens < 22:
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
        steps += 1
    assert time.monotonic() - began_s >= 0.1
    assert steps < 60, "it waits, and does not spin"


def test_an_abort_does_not_wait_for_a_slow_sequence() -> None:
    engine = _engine(tokens_per_s=0.01)
    engine.submit(make_sequence(1))
    assert [delta.start for delta in engine.step()] == [0]
    engine.abort(1)
    began_s = time.monotonic()
    assert engine.step() == [Delta(1, 1, (), (), "cancelled")]
    assert time.monotonic() - began_s < 50, "half of what the next token takes"


@pytest.mark.parametrize("number", range(len(TEXTS)), ids=list(TEXTS))
def test_it_recites(number: int, tokenizer: Tokenizer) -> None:
    deltas = _run(_engine(text=number), make_sequence(1, 200))[1]
    assert _ids(deltas) == recited_tokens(number)
    assert {len(delta.token_ids) for delta in deltas} == {1}
    assert deltas[-1].finish_reason == "stop"
    assert tokenizer.decode(recited_tokens(number)[:-1], skip_special_tokens=False) == list(TEXTS.values())[number]


def test_texts_have_the_properties_that_tests_need() -> None:
    assert len(set(TEXTS.values())) == len(TEXTS)
    assert not any("<<Response Finished>>" in text for text in TEXTS.values()), "it ends an answer on one wire"
    everything = "".join(TEXTS.values())
    assert {*map(chr, range(0x20)), *"\x7f\x80\x9f\u2028\u2029\ufeff\u200d\u202e"} <= set(everything)
    emoji = recited_tokens(list(TEXTS).index("emoji"))
    assert sum(0x80 <= token_id < 0x100 for token_id in emoji) > 10, "characters come in pieces"
    assert max(len(text.encode()) for text in TEXTS.values()) > 65_536


def test_a_text_may_be_cut_or_repeated() -> None:
    assert _ids(_run(_engine(text=0), make_sequence(1, 4))[1]) == recited_tokens(0)[:4]
    sequence = make_sequence(1, 40)
    sampling = msgspec.structs.replace(sequence.sampling, ignore_eos=True)
    deltas = _run(_engine(text=0), msgspec.structs.replace(sequence, sampling=sampling))[1]
    assert _ids(deltas) == (recited_tokens(0) * 2)[:40]
    assert deltas[-1].finish_reason == "length"


def test_a_prompt_says_what_to_recite() -> None:
    engine = _engine(text=-1)
    deltas = _run(
        engine, make_sequence(1, 99, prompt=b"Text 7, please, and not 8."), make_sequence(2, 99, prompt=b"Anything.")
    )
    assert [_ids(deltas[number]) for number in (1, 2)] == [recited_tokens(7), recited_tokens(0)]
    failing = _run(engine, make_sequence(1, 99, prompt=f"Text {len(TEXTS) + 2}.".encode()))[1]
    assert _ids(failing) == recited_tokens(0)[:3]
    assert failing[-1].finish_reason == "error"


def test_an_unknown_text_is_refused() -> None:
    for number in (-2, len(TEXTS)):
        with pytest.raises(ModelError, match="texts"):
            _engine(text=number)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    engine = _engine()
    engine.submit(make_sequence(1, 12, prompt=b"x" * 500))
    with pytest.raises(SequenceFailed):
        engine.submit(make_sequence(2, 13, prompt=b"x" * 500))
    assert {delta.sequence_id for delta in engine.step()} == {1}


def test_it_says_how_much_of_a_prompt_it_has_seen() -> None:
    engine = _engine(caches=2)
    prompts = [b"one two", b"one three", b"one three", b"four", b"five", b"one three"]
    counts = []
    for number, prompt in enumerate(prompts):
        deltas = _run(engine, make_sequence(number, 3, prompt=prompt))[number]
        assert [delta.num_cached_tokens for delta in deltas[1:]] == [None, None]
        counts.append(deltas[0].num_cached_tokens)
    assert counts == [0, len("one t"), len("one thre"), 0, 1, 0]


def test_load_engine_knows_its_names() -> None:
    assert isinstance(load_engine(EngineSpec(engine="scripted")), ScriptedEngine)
    with pytest.raises(ModelError, match="no engine named 'nonsense'"):
        load_engine(EngineSpec(engine="nonsense"))
