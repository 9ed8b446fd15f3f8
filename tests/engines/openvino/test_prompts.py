"""The queue of prompts: how it splits them, and which prompts share cached blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.engines.interface import Prefill
from tailrace.engines.openvino.prompts import Piece, Prompts

_BLOCK = 32
_ROWS = 1000


def _queue(*, cached: bool = True, rows: int = _ROWS, step_tokens: int = 128) -> Prompts:
    return Prompts(step_tokens=step_tokens, block_tokens=_BLOCK, num_blocks=1000 if cached else 0, num_rows=rows)


def _all(queue: Prompts, num_decoding: int = 0) -> list[list[Piece]]:
    """What each step takes, until nothing is left."""
    steps = []
    while pieces := queue.take(num_decoding, is_prefilling=False):
        steps.append(pieces)
    return steps


def _plain(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(token_id % _ROWS for token_id in ids)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.integers(0, 200), st.sampled_from([1, 64, 100, 256]))
def test_every_prompt_is_complete_and_no_piece_is_one_token(
    lengths: list[int], num_decoding: int, step_tokens: int
) -> None:
    queue = _queue(step_tokens=step_tokens)
    prompts = {number: tuple((number + place) % _ROWS for place in range(n)) for number, n in enumerate(lengths)}
    for number, ids in prompts.items():
        queue.add(number, ids, unchanged=False)
    done: dict[int | None, int] = {}  # how far each is in the cache, by the first id of what is being cut
    finished: list[int] = []
    for pieces in _all(queue, num_decoding):
        computed = 0
        for piece in pieces:
            oldest = min(set(prompts) - set(finished))  # which is the one that is cut
            number = oldest if piece.sequence_id is None else piece.sequence_id
            position = done.get(number, 0)
            if piece.sequence_id is None:
                stop = len(piece.ids) - 2
                assert stop % _BLOCK == 0, "what is not a whole block would not be found again"
                assert stop > position
                assert _plain(piece.ids[:stop]) == prompts[number][:stop]
                done[number] = stop
                computed += stop - position
            else:
                assert _plain(piece.ids) == prompts[piece.sequence_id]
                assert len(piece.ids) - position > 1 or len(piece.ids) == 1
                computed += len(piece.ids) - position
                finished.append(piece.sequence_id)
        assert computed <= max(step_tokens - num_decoding, 64)
    assert sorted(finished) == list(prompts)


def test_short_prompts_overtake_and_the_oldest_keeps_half_of_each_step() -> None:
    queue = _queue(step_tokens=256)
    queue.add(1, tuple(range(1000)), unchanged=False)
    for number in range(2, 10):
        queue.add(number, tuple(range(number, number + 60)), unchanged=False)
    steps = _all(queue)
    assert [[piece.sequence_id for piece in pieces] for pieces in steps[:5]] == [
        [2, 3, None], [4, 5, None], [6, 7, None], [8, 9, None], [None],
    ]  # fmt: skip
    assert [len(pieces[-1].ids) - 2 for pieces in steps[:4]] == [128, 256, 384, 512]
    assert steps[-1][-1].sequence_id == 1


def _hits(ids: tuple[int, ...], others: list[tuple[int, ...]]) -> int:
    """How many tokens of a prompt a cache would give back that files `others` by their ids, in whatever pieces."""
    return max((_common(ids, other) for other in others), default=0)


def _common(ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    same = 0
    for one, two in zip(ids, other, strict=False):
        if one != two:
            break
        same += 1
    whole = same // _BLOCK * _BLOCK
    return same if same == len(other) else whole  # a block that is not full is found only as it is


@given(st.integers(24, 300))
def test_a_repeated_prompt_has_its_own_tail(length: int) -> None:
    queue = _queue(step_tokens=1000)
    previous: list[tuple[int, ...]] = []
    for number in range(6):
        queue.add(number, tuple(range(length)), unchanged=False)
        ((piece,),) = _all(queue)
        hit = _hits(piece.ids, previous)
        assert length - hit >= 24
        assert number == 0 or hit >= length - 24 - _BLOCK, "and no more than that"
        previous.append(piece.ids)


@given(st.integers(1, 100), st.integers(1, 100))
def test_blocks_of_answers_are_never_reused(prompt_length: int, answer_length: int) -> None:
    queue = _queue(step_tokens=1000)
    queue.add(1, tuple(range(prompt_length)), unchanged=False)
    ((first,),) = _all(queue)
    answer = tuple(range(500, 500 + answer_length))  # in the only form in which a model says it
    queue.add(2, (*range(prompt_length), *answer, *range(40)), unchanged=False)
    ((second,),) = _all(queue)
    assert _hits(second.ids, [(*first.ids, *answer)]) <= prompt_length


def test_cached_blocks_use_no_tokens_of_a_step() -> None:
    queue = _queue(step_tokens=128)
    prompt = tuple(range(600))
    queue.add(1, prompt, unchanged=False)
    assert len(_all(queue)) == 5
    for number in (2, 3):
        queue.add(number, prompt, unchanged=False)
    (pieces,) = _all(queue)
    assert {piece.sequence_id for piece in pieces} == {2, 3}


def test_dropped_prompts_never_run() -> None:
    queue = _queue()
    for number in (1, 2, 3):
        queue.add(number, tuple(range(100)), unchanged=False)
    queue.take(0, is_prefilling=False)
    queue.drop(2)
    queue.drop(99)
    assert [piece.sequence_id for pieces in _all(queue) for piece in pieces] == [3]


def test_ids_are_not_changed_without_spare_rows_or_with_penalties() -> None:
    for queue, unchanged in ((_queue(rows=0), False), (_queue(), True)):
        queue.add(1, tuple(range(100)), unchanged=unchanged)
        assert _all(queue) == [[Piece(1, tuple(range(100)))]]


def test_without_a_cache_a_prompt_that_fits_into_a_step_is_not_split() -> None:
    queue = _queue(cached=False, rows=0, step_tokens=128)
    for number, length in enumerate((100, 40, 300, 20)):
        queue.add(number, tuple(range(length)), unchanged=False)

    def taken(*, is_prefilling: bool = False) -> list[int | None]:
        return [piece.sequence_id for piece in queue.take(0, is_prefilling=is_prefilling)]

    assert taken() == [0]
    assert taken() == [1]
    assert taken() == [2]
    assert taken(is_prefilling=True) == []
    assert taken() == [3]


def test_progress_says_what_is_computed_and_what_was_found() -> None:
    queue = _queue()
    queue.add(1, tuple(range(400)), unchanged=False)
    reports = []
    while queue.take(0, is_prefilling=False):
        reports += queue.progress()
    assert reports == [Prefill(1, 128, 0), Prefill(1, 256, 0), Prefill(1, 352, 0)]
    queue.add(2, (*range(256), *range(300)), unchanged=False)  # of which as much is in the cache
    queue.take(0, is_prefilling=False)
    assert queue.progress() == [Prefill(2, 256 + 128, 256)]
    queue.drop(2)
    assert queue.progress() == []
