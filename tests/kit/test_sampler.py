"""The sampler of all engines that give logits: which tokens it may choose, and how often."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tailrace.engines.interface import Sequence
from tailrace.errors import SequenceFailed
from tailrace.types import Sampling
from tailrace_kit.sampler import Logits, Row, check_ids

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0, -30.0], np.float32)


def _row(seed: int = 1, *, eos: frozenset[int] = frozenset(), **sampling: Any) -> Row:
    """A row whose prompt has the tokens 0 and 1."""
    wanted = replace(Sampling(seed=seed, max_tokens=1000, ignore_eos=not eos), **sampling)
    return Row(Sequence(1, ((0, 1),), wanted), eos)


def _probabilities(logits: Logits) -> np.ndarray[Any, np.dtype[np.float64]]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, range(7)),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, range(7)),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.1, "top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.85}, {0, 1}),
        ({"typical_p": 0.3}, {0, 1}),
        ({"temperature": 0.0}, {0}),
        ({"temperature": 0.0, "logit_bias": ((3, 5.0),)}, {3}),
        ({"temperature": 0.0, "repetition_penalty": 5.0}, {2}),  # 0 and 1 are the prompt's
        ({"allowed_token_ids": (2, 5)}, {2, 5}),
        ({"temperature": 0.0, "allowed_token_ids": (7,)}, {7}),
        ({"bad_words": ((0,), (1,), (5, 2)), "top_k": 1}, {2}),  # 2 is bad only after 5
        ({"temperature": 0.0, "stop_token_ids": (0,), "min_tokens": 1}, {1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_others", [0, 1000], ids=["small", "large"])
def test_allowed_tokens(sampling: dict[str, Any], expected: set[int], num_others: int) -> None:
    """Also among a thousand tokens that are never chosen: the likeliest ones are found by blocks."""
    logits = np.concatenate([LOGITS, np.full(num_others, -200, np.float32)])
    num_draws = 2500 if len(expected) == 7 else 200  # the seventh comes four times in a thousand
    assert {_row(seed, **sampling).choose(logits) for seed in range(num_draws)} == set(expected)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.999999}, {"top_k": 700}, {"min_p": 1e-9}], ids=str)
def test_a_draw_does_not_depend_on_how_the_tokens_are_found(sampling: dict[str, Any]) -> None:
    """Filters that remove nothing that could be drawn, over a vocabulary of several blocks."""
    logits = np.random.default_rng(1).normal(0, 3, 700).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    probabilities = _probabilities(logits)
    for seed in range(200):
        row = _row(seed, temperature=1.0, **sampling)
        chosen = row.choose(logits)
        assert probabilities[chosen] > 0
        if sampling:  # these draw from the tokens in descending order
            assert chosen == _row(seed, temperature=1.0, top_k=699).choose(logits) or chosen in order[690:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_have_the_right_frequencies(temperature: float) -> None:
    counts = Counter(_row(seed, temperature=temperature).choose(LOGITS) for seed in range(4000))
    for token_id, probability in enumerate(_probabilities(LOGITS / np.float32(temperature))):
        spread = 5 * math.sqrt(max(probability * (1 - probability) * 4000, 1))
        assert abs(counts[token_id] - 4000 * probability) < spread


def test_penalties_count_the_answer() -> None:
    row = _row(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.0)
    assert [row.choose(LOGITS) for _ in range(4)] == [0, 1, 0, 0]  # 2-1.5 < 1; then all of 0 and 1 are once there
    row = _row(temperature=0.0, frequency_penalty=0.6)
    assert [row.choose(LOGITS) for _ in range(4)] == [0, 0, 1, 0]


def test_logprobs_are_those_of_the_model() -> None:
    row = _row(temperature=0.0, logit_bias=((3, 50.0),), logprobs=True, top_logprobs=3)
    row.choose(LOGITS)
    delta = row.take()
    assert delta is not None
    expected = np.log(_probabilities(LOGITS))
    assert delta.token_ids == (3,)
    assert delta.logprobs == pytest.approx([expected[3]], abs=1e-5)
    assert [token_id for token_id, _ in delta.top_logprobs[0]] == [0, 1, 2]
    assert [value for _, value in delta.top_logprobs[0]] == pytest.approx(expected[:3].tolist(), abs=1e-5)


def test_a_sequence_of_bad_words_is_never_completed() -> None:
    row = _row(temperature=0.0, bad_words=((0, 0),))
    assert [row.choose(LOGITS) for _ in range(4)] == [0, 1, 0, 1]


def test_no_end_before_min_tokens_and_then_a_stop_token() -> None:
    row = _row(temperature=0.0, eos=frozenset((0,)), ignore_eos=False, min_tokens=2, stop_token_ids=(1,))
    assert [row.choose(LOGITS) for _ in range(2)] == [2, 2]
    assert row.choose(LOGITS) == 0
    assert row.finish == "stop"


def test_a_row_without_a_token_fails() -> None:
    row = _row(temperature=0.0, allowed_token_ids=(0,), bad_words=((0,),))
    assert row.choose(LOGITS) == -1
    delta = row.take()
    assert delta is not None
    assert (delta.finish_reason, delta.is_refused) == ("error", True)


@pytest.mark.parametrize(
    "sampling",
    [{"logit_bias": ((8, 1.0),)}, {"stop_token_ids": (8,)}, {"allowed_token_ids": (8,)}, {"bad_words": ((1, 8),)}],
    ids=str,
)
def test_ids_outside_the_vocabulary_are_refused(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    with pytest.raises(SequenceFailed, match=name):
        check_ids(Sequence(1, ((0, 1),), replace(Sampling(), **sampling)), 8)
