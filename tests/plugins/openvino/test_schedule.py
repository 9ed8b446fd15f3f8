"""A sequence that was alone and in a batch by turns is replayed to the bit, beside others and on an engine that has a
cache."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tailrace.engines import load_engine
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.schedule import FREE, Schedule
from tailrace.types import Sampling

_TOKENS = 32
_PROMPT = tuple(range(100, 160))  # single rows give other bits than a batch only behind the first block of 32 tokens


def _run(engine: Engine, first_id: int, schedule: Schedule, *, visits: tuple[int, ...], seed: int) -> list[Delta]:
    """Run a sequence. At each of its lengths in `visits`, a short neighbour begins."""
    temperature = 0.8 if seed else 0.0
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=_TOKENS, ignore_eos=True, logprobs=True)
    short = Sampling(temperature=0.0, seed=0, max_tokens=3, ignore_eos=True)
    engine.submit(Sequence(first_id, (_PROMPT,), sampling, schedule))
    deltas: list[Delta] = []
    others, waiting = set[int](), list(visits)
    while not deltas or deltas[-1].finish_reason is None or others:
        if waiting and len(deltas) >= waiting[0]:
            waiting.pop(0)
            other = first_id + len(visits) - len(waiting)
            engine.submit(Sequence(other, ((9, 10, other),), short))
            others.add(other)
        for delta in engine.step():
            if delta.sequence_id == first_id:
                deltas.append(delta)
            elif delta.finish_reason is not None:
                others.discard(delta.sequence_id)
    return deltas


def _bits(deltas: list[Delta]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(delta.token_ids, delta.logprobs) for delta in deltas]


@pytest.mark.deep
@pytest.mark.parametrize("seed", [0, 7])
def test_a_replay_computes_the_same_tokens_alone(openvino_spec: EngineSpec, seed: int) -> None:
    engine = load_engine(msgspec.structs.replace(openvino_spec, context_tokens=1024, exact=True))
    try:
        if not engine.capabilities.exact:
            pytest.skip("an engine that is not exact does not promise it")
        first = _run(engine, 1, FREE, visits=(4, 15), seed=seed)
        schedule = Schedule.of((len(delta.token_ids), delta.is_alone) for delta in first)
        assert len(schedule.lengths) > 4, "it was alone and in a batch by turns"
        replays: list[Callable[[], list[Delta]]] = [
            lambda: _run(engine, 10, schedule, visits=(), seed=seed),
            lambda: _run(engine, 20, schedule, visits=(0, 2, 9, 20), seed=seed),
        ]
        for replay in replays:
            assert _bits(replay()) == _bits(first)
        assert _bits(_run(engine, 30, FREE, visits=(), seed=seed)) != _bits(first), "the schedule makes the difference"
    finally:
        engine.close()
