"""While another prompt is read, those of background sequences are not."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tests.plugins.openvino.pairs import PIECES

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Engine, Sequence
from tailrace.types import Sampling

_STEP_TOKENS = 64


@pytest.fixture(scope="module")
def engine(tiny_spec: EngineSpec) -> Iterator[Engine]:
    engine = load_engine(msgspec.structs.replace(tiny_spec, context_tokens=1024, max_step_tokens=_STEP_TOKENS))
    yield engine
    engine.close()


def _ids(first: int, length: int) -> tuple[int, ...]:
    return tuple(1 + (first + 7 * number) % (PIECES - 1) for number in range(length))


def _sequence(sequence_id: int, prompt_ids: tuple[int, ...], *, is_background: bool) -> Sequence:
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=4, ignore_eos=True)
    return Sequence(sequence_id, (prompt_ids,), sampling, is_background=is_background)


def _first_of(engine: Engine) -> list[int]:
    """Run all sequences. Return them in the order of their first tokens."""
    first: dict[int, None] = {}
    num_ended = 0
    while num_ended < 4:
        for delta in engine.step():
            first.setdefault(delta.sequence_id)
            num_ended += delta.finish_reason is not None
    return list(first)


def test_others_are_read_first(engine: Engine) -> None:
    for number in (1, 2, 3):
        engine.submit(_sequence(number, _ids(number, 100), is_background=True))
    engine.step()
    engine.submit(_sequence(4, _ids(10, 300), is_background=False))  # longer than each of them
    assert _first_of(engine) == [4, 1, 2, 3]


def test_others_with_the_same_beginning_wait_for_each_other(engine: Engine) -> None:
    """Also if one in the background, which is not read meanwhile, has the beginning, too."""
    beginning = _ids(20, 500)
    engine.submit(_sequence(1, (*beginning, 201), is_background=True))
    engine.step()
    for number in (2, 3):
        engine.submit(_sequence(number, (*beginning, 210 + number), is_background=False))
    cached: dict[int, int | None] = {}
    num_ended = 0
    while num_ended < 3:
        for delta in engine.step():
            cached.setdefault(delta.sequence_id, delta.num_cached_tokens)
            num_ended += delta.finish_reason is not None
    assert (cached[3] or 0) > 400


def test_one_does_not_wait_for_the_same_beginning(engine: Engine) -> None:
    beginning = _ids(30, 500)  # which the engine has not read before
    for number in (1, 2, 3):
        engine.submit(_sequence(number, (*beginning, 220 + number), is_background=True))
    engine.step()
    engine.submit(_sequence(4, (*beginning, 230), is_background=False))
    assert _first_of(engine)[0] == 4
