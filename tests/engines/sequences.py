"""Requests to the scripted engine, and the expected answers."""

from __future__ import annotations

from tailrace.engines.interface import Sequence
from tailrace.testing import CONTROL_TOKENS, scripted_token
from tailrace.types import Sampling

__all__ = ["control_id", "expected_ids", "make_sequence"]


def make_sequence(
    sequence_id: int, max_tokens: int = 8, *, fault: str = "", prompt: bytes = b"", seed: int = 7
) -> Sequence:
    """Return a sequence with its own prompt, so that no two are equal."""
    ids = tuple(prompt or b"ask %d" % sequence_id) + ((control_id(fault),) if fault else ())
    return Sequence(sequence_id, (ids,), Sampling(temperature=0.0, seed=seed, max_tokens=max_tokens))


def control_id(name: str) -> int:
    """Return the id of a control token: `control_id("stall")` is that of `<|stall|>`."""
    return 256 + CONTROL_TOKENS.index(f"<|{name}|>")


def expected_ids(sequence: Sequence, count: int | None = None) -> tuple[int, ...]:
    """Return the first `count` tokens of the answer; by default all."""
    wanted = sequence.sampling.max_tokens if count is None else count
    assert wanted is not None
    assert sequence.sampling.seed is not None
    return tuple(scripted_token(sequence.prompt_ids, sequence.sampling.seed, index) for index in range(wanted))
