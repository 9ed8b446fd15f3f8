"""How much of a stream's prompts the engine has read."""

from __future__ import annotations

import time

from tailrace.engines.interface import Prefill
from tailrace.types import PromptProgress, Record

__all__ = ["PromptReading"]

_REPORT_S = 0.25  # between two reports


class PromptReading:
    """Adds up what the engine reports of each prompt of a stream."""

    __slots__ = ("_of_choices", "_record", "_reported_s")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._of_choices: dict[int, Prefill] = {}
        self._reported_s = 0.0

    def begin_again(self) -> None:
        """The engine was lost: the next one reads the prompts from their start."""
        self._of_choices.clear()

    def take(self, choice: int, prefill: Prefill, admitted_s: float | None) -> PromptProgress | None:
        """Return the progress of all prompts, at most every `_REPORT_S`, and when all of them are read. `prefill` is of
        this choice, of which the first one of each prompt counts."""
        self._of_choices[choice] = prefill
        prompts = enumerate(self._record.prompts)
        found = [(prompt, self._of_choices.get(number * self._record.sampling.n)) for number, prompt in prompts]
        read = [one for _, one in found if one is not None]
        num_tokens = sum(one.num_tokens if one and one.num_tokens else prompt.num_tokens for prompt, one in found)
        num_read_tokens = sum(one.num_read_tokens for one in read)
        now_s = time.monotonic()
        if num_read_tokens != num_tokens and now_s < self._reported_s + _REPORT_S:
            return None
        self._reported_s = now_s
        num_cached_tokens = sum(one.num_cached_tokens for one in read)
        return PromptProgress(num_tokens, num_read_tokens, num_cached_tokens, now_s - (admitted_s or now_s))
