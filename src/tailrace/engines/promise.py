"""The promise that every engine keeps: token ids in, token ids out, one step at a time.

An engine knows nothing of text, streams, queues or sockets. It runs in a worker process of its own, is driven by one
thread, and is never asked for more than its `capabilities` announce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from tailrace.errors import SequenceFailed
from tailrace.types import FinishReason, Sampling, TopLogprobs

__all__ = ["Capabilities", "Delta", "Engine", "RestartNeeded", "Sequence"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do with the model that it has loaded. What is not in here is refused with 400."""

    engine: str  # name and version
    context_tokens: int  # prompt and answer together
    kv_tokens: int  # what its memory holds, all sequences together
    block_tokens: int  # granularity in which that memory is handed out
    max_sequences: int  # running at once
    parameters: frozenset[str]  # names of the `Sampling` fields that it honours
    exact: bool  # greedy output does not depend on the neighbours in the batch

    def check_length(self, sequence: Sequence) -> None:
        """Raises: SequenceFailed if prompt and longest answer together do not fit into context or memory."""
        wanted = len(sequence.prompt_ids) + (sequence.sampling.max_tokens or 0)
        if wanted > min(self.context_tokens, self.kv_tokens):
            raise SequenceFailed("the prompt is too long for this engine")


@dataclass(frozen=True, slots=True)
class Sequence:
    """One generation to run. `sampling.seed` and `sampling.max_tokens` are always set."""

    sequence_id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one engine step added to one sequence."""

    sequence_id: int
    start: int  # index of the first new token in the sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    # On the last one of a sequence, and only there. "stop" and "length" come with the token that they are about.
    finish_reason: FinishReason | None = None
    failure: str = ""  # for people, with finish_reason "error"
    top_logprobs: tuple[TopLogprobs, ...] = ()  # for each token, where asked for
    # Tokens of the prompt and of the answer so far, where they are not the ids that went in and came out.
    usage: tuple[int, int] | None = None
    # With "error": what the sequence ran on went away. It may be submitted again, under another id.
    is_lost: bool = False
    # With "error": it cannot be run, now or later, because of what was asked.
    is_refused: bool = False


class RestartNeeded(Exception):
    """An engine has to be replaced by a new one, through no fault of a sequence; the text says why, for the log."""


class Engine(Protocol):
    """Runs sequences in a batch. Every submitted sequence ends with exactly one `Delta` that has a finish_reason."""

    capabilities: Capabilities

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence for the next step.

        Raises: SequenceFailed if this one cannot be run (an over-long prompt, say); the others are untouched.
        """

    def abort(self, sequence_id: int) -> None:
        """End a sequence with finish_reason "cancelled" within one step. Unknown ids are ignored."""

    def step(self) -> list[Delta]:
        """Run one forward over the batch. Returns at once with [] when nothing is running.

        A sequence that fails ends with finish_reason "error" and its neighbours go on; anything raised means that the
        engine is lost; `RestartNeeded` means so, too, and that no sequence is to blame.
        """

    def close(self) -> None:
        """Let go of the model's memory."""
