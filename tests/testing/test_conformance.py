"""`check_engine` passes a correct engine, and names the law that a broken engine breaks."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tailrace.engines import EngineSpec
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.errors import SequenceFailed
from tailrace.testing import Law, ScriptedEngine, check_engine, laws
from tailrace_outer.testing import _harness
from tailrace_outer.testing.sampling_laws import sampling_laws

_CONTEXT_TOKENS = 256


def _scripted(**options: float) -> ScriptedEngine:
    return ScriptedEngine(EngineSpec(engine="scripted", context_tokens=_CONTEXT_TOKENS, options=options))


@pytest.mark.parametrize("law", [law for law in laws if law.applies_to(_scripted().capabilities)], ids=str)
def test_scripted_engine_keeps(law: Law) -> None:
    engine = _scripted(eos_after=5)
    law(lambda: engine)


@pytest.mark.parametrize("max_sequences", [1, *(pytest.param(number, marks=pytest.mark.deep) for number in (2, 64))])
def test_check_engine_passes(max_sequences: int) -> None:
    spec = EngineSpec(engine="scripted", context_tokens=128, max_sequences=max_sequences)
    asked: list[int] = []

    class Counting(ScriptedEngine):
        def submit(self, sequence: Sequence) -> None:
            super().submit(sequence)
            asked.append(len(self._runs))

    check_engine(lambda: Counting(spec))
    assert max(asked) <= max_sequences, "the kit asked for more than the capabilities announce"


class _Broken(ScriptedEngine):
    """A scripted engine with one fault, which the subclass adds."""

    def __init__(self) -> None:
        super().__init__(EngineSpec(engine="scripted", context_tokens=_CONTEXT_TOKENS, options={"eos_after": 5}))


class _Gap(_Broken):
    """Counts starts from 1."""

    def step(self) -> list[Delta]:
        return [replace(delta, start=delta.start + 1) for delta in super().step()]


class _WrongOrder(_Broken):
    """Returns two tokens a step, the later one first."""

    def step(self) -> list[Delta]:
        first, second = super().step(), super().step()
        return second + first


class _Stranger(_Broken):
    """Returns deltas of an unknown sequence."""

    def step(self) -> list[Delta]:
        stepped = super().step()
        return [*stepped, Delta(2**40, 0, (1,))] if stepped else []


class _TwoFinals(_Broken):
    """Returns the last delta twice."""

    def step(self) -> list[Delta]:
        stepped = super().step()
        ends = [delta for delta in stepped if delta.finish_reason in ("length", "stop")]
        return stepped + [replace(delta, start=delta.start + len(delta.token_ids), token_ids=()) for delta in ends]


class _NegativeIds(_Broken):
    """Uses negative ids."""

    def step(self) -> list[Delta]:
        return [replace(delta, token_ids=tuple(-token for token in delta.token_ids)) for delta in super().step()]


class _OneMore(_Broken):
    """Generates one token more than max_tokens."""

    def submit(self, sequence: Sequence) -> None:
        super().submit(sequence)
        self._runs[sequence.sequence_id].limit += 1


class _OneLess(_Broken):
    """Generates one token less than max_tokens, if that is at least one."""

    def submit(self, sequence: Sequence) -> None:
        super().submit(sequence)
        run = self._runs[sequence.sequence_id]
        run.limit = max(1, run.limit - 1)


class _DeafToEos(_Broken):
    """Announces `ignore_eos`, but ends at an end token."""

    def submit(self, sequence: Sequence) -> None:
        super().submit(sequence)
        run = self._runs[sequence.sequence_id]
        run.limit = run.eos_after = min(run.limit, 5)


class _IgnoresAbort(_Broken):
    def abort(self, sequence_id: int) -> None:
        pass


class _SlowAbort(_Broken):
    """Aborts one step late."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[int] = []

    def abort(self, sequence_id: int) -> None:
        self._heard.append(sequence_id)

    def step(self) -> list[Delta]:
        heard, self._heard = self._heard, []
        stepped = super().step()
        for sequence_id in heard:
            super().abort(sequence_id)
        return stepped


class _EarlyAbort(_Broken):
    """Cannot abort before the first step."""

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._runs and self._runs[sequence_id].count:
            super().abort(sequence_id)


class _StrictAbort(_Broken):
    """Raises when it does not know the sequence."""

    def abort(self, sequence_id: int) -> None:
        self._runs[sequence_id].aborted = True


class _EchoingAbort(_Broken):
    """Confirms the abort of sequences that ended long ago."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: set[int] = set()
        self._echoes: list[Delta] = []

    def abort(self, sequence_id: int) -> None:
        super().abort(sequence_id)
        if sequence_id in self._ended:
            self._echoes.append(Delta(sequence_id, 0, (), (), "cancelled"))

    def step(self) -> list[Delta]:
        stepped = super().step()
        self._ended |= {delta.sequence_id for delta in stepped if delta.finish_reason}
        echoes, self._echoes = self._echoes, []
        return stepped + echoes


class _AbortsAll(_Broken):
    """Aborts all sequences."""

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._runs:
            for run in self._runs.values():
                run.aborted = True


class _AbortStirs(_Broken):
    """An abort changes the answers of other sequences."""

    def abort(self, sequence_id: int) -> None:
        super().abort(sequence_id)
        for run in self._runs.values():
            run.key ^= 0x5A5A


class _Neighbourly(_Broken):
    """Claims to be exact, but its ids depend on the batch size."""

    def step(self) -> list[Delta]:
        others = len(self._runs) - 1
        return [replace(d, token_ids=tuple(token + others for token in d.token_ids)) for d in super().step()]


class _Crowded(_Broken):
    """Claims to be exact, but is exact only for up to two sequences."""

    def step(self) -> list[Delta]:
        others = max(0, len(self._runs) - 2)
        return [replace(d, token_ids=tuple(token + others for token in d.token_ids)) for d in super().step()]


class _Random(_Broken):
    """Ignores the seed."""

    def submit(self, sequence: Sequence) -> None:
        super().submit(sequence)
        if sequence.sampling.temperature > 0:
            self._runs[sequence.sequence_id].key = hash((sequence.sequence_id, sequence.prompt_ids)) & 0xFFFFFFFF


class _OneSeed(_Broken):
    """Uses the same seed for all sequences."""

    def submit(self, sequence: Sequence) -> None:
        super().submit(sequence)
        self._runs[sequence.sequence_id].key = hash(sequence.prompt_ids) & 0xFFFFFFFF


class _NoLogprobs(_Broken):
    def step(self) -> list[Delta]:
        return [replace(delta, logprobs=()) for delta in super().step()]


class _UnaskedLogprobs(_Broken):
    def step(self) -> list[Delta]:
        return [replace(delta, logprobs=(-1.0,) * len(delta.token_ids)) for delta in super().step()]


class _Probabilities(_Broken):
    """Returns probabilities instead of their logarithms."""

    def step(self) -> list[Delta]:
        return [replace(delta, logprobs=tuple(0.6 for _ in delta.logprobs)) for delta in super().step()]


class _TakesAnything(_Broken):
    """Cuts a prompt that is too long instead of refusing it."""

    def submit(self, sequence: Sequence) -> None:
        room = self.capabilities.context_tokens - (sequence.sampling.max_tokens or 1)
        super().submit(Sequence(sequence.sequence_id, (sequence.prompt_ids[-room:],), sequence.sampling))


class _RefusesAll(_Broken):
    """Refuses one sequence, and ends the others with it."""

    def submit(self, sequence: Sequence) -> None:
        try:
            super().submit(sequence)
        except SequenceFailed:
            for run in self._runs.values():
                run.aborted = True
            raise


class _RefusalStirs(_Broken):
    """A refusal changes the answers of other sequences."""

    def submit(self, sequence: Sequence) -> None:
        try:
            super().submit(sequence)
        except SequenceFailed:
            for run in self._runs.values():
                run.key ^= 0x5A5A
            raise


class _FullIsTooMuch(_Broken):
    """Ends without an answer if the context is full."""

    def step(self) -> list[Delta]:
        stepped = super().step()
        return [replace(d, finish_reason="error") if d.sequence_id in self._full else d for d in stepped]

    def submit(self, sequence: Sequence) -> None:
        super().submit(sequence)
        if len(sequence.prompt_ids) + 1 == self.capabilities.context_tokens:
            self._full.add(sequence.sequence_id)

    def __init__(self) -> None:
        super().__init__()
        self._full: set[int] = set()


class _Leaks(_Broken):
    """Keeps data of each sequence forever."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[mmap.mmap] = []

    def submit(self, sequence: Sequence) -> None:
        super().submit(sequence)
        kept = mmap.mmap(-1, 100_000)  # not from the heap, where earlier tests may have left room
        kept.write(b"x" * 100_000)
        self._kept.append(kept)


class _NeverIdle(_Broken):
    """Returns deltas when nothing runs."""

    def step(self) -> list[Delta]:
        return super().step() or [Delta(2**40, 0, ())]


class _ClosesOnce(_Broken):
    def close(self) -> None:
        del self.capabilities
        self._runs.clear()


_BREAKS: list[tuple[Callable[[], Engine], str]] = [
    (_NeverIdle, "idle_steps_are_empty"),
    (_Gap, "starts_are_dense"),
    (_WrongOrder, "starts_are_dense"),
    (_Stranger, "starts_are_dense"),
    (_TwoFinals, "one_final_delta"),
    (_NegativeIds, "token_ids_are_natural"),
    (_OneMore, "max_tokens_is_exact"),
    (_OneLess, "max_tokens_is_exact"),
    (_DeafToEos, "ignore_eos_is_honoured"),
    (_IgnoresAbort, "abort_takes_one_step"),
    (_SlowAbort, "abort_takes_one_step"),
    (_EarlyAbort, "abort_before_first_step"),
    (_EchoingAbort, "abort_is_harmless"),
    (_AbortsAll, "abort_spares_neighbours"),
    (_AbortStirs, "abort_spares_neighbours"),
    (_Neighbourly, "abort_spares_neighbours"),
    (_Crowded, "greedy_is_exact"),
    (_Random, "same_seed_same_ids"),
    (_OneSeed, "seeds_differ"),
    (_NoLogprobs, "logprobs_when_asked"),
    (_UnaskedLogprobs, "logprobs_when_asked"),
    (_Probabilities, "logprobs_when_asked"),
    (_TakesAnything, "long_prompt_is_refused"),
    (_RefusesAll, "long_prompt_is_refused"),
    (_RefusalStirs, "long_prompt_is_refused"),
    (_FullIsTooMuch, "prompt_of_the_limit"),
    (_Leaks, "nothing_leaks"),
]


@pytest.mark.parametrize(("make", "law"), _BREAKS, ids=[f"{make.__name__}-{law}" for make, law in _BREAKS])
def test_broken_engine_is_caught(make: Callable[[], Engine], law: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{law} \(.*\): (sequence \d+|the engine)"):
        check_engine(make)


def test_silent_engine_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(_Broken):
        def step(self) -> list[Delta]:
            return []

    monkeypatch.setattr(_harness, "_TIMEOUT_S", 0.05)
    with pytest.raises(AssertionError, match=r"sequence \d+: no delta of any sequence for"):
        check_engine(Mute)


def test_law_that_does_not_apply_is_skipped() -> None:
    class Modest(_Crowded):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = dataclasses.replace(
                self.capabilities, exact=False, parameters=frozenset({"max_tokens"})
            )

    check_engine(Modest)
    passed_over = {law.name for law in laws if not law.applies_to(Modest().capabilities)}
    assert passed_over - {law.name for law in sampling_laws} == {
        "ignore_eos_is_honoured",
        "greedy_is_exact",
        "same_seed_same_ids",
        "seeds_differ",
        "logprobs_when_asked",
        "grammar_holds",
    }


@pytest.mark.parametrize(
    ("make", "law"), [(_StrictAbort, "abort_is_harmless"), (_ClosesOnce, "closing_twice_is_harmless")]
)
def test_exceptions_of_an_engine_have_a_note_with_the_law(make: Callable[[], Engine], law: str) -> None:
    with pytest.raises((KeyError, AttributeError)) as caught:
        next(each for each in laws if each.name == law)(make)
    assert any(law in note for note in caught.value.__notes__)
