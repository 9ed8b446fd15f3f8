"""The interface of every engine: segments of prompts in, token ids out, one step at a time.

An engine knows nothing about text, streams, queues or sockets. It runs in its own worker process, in one thread.
Requests that exceed its `capabilities` never reach it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from tailrace.engines.schedule import FREE, Schedule
from tailrace.errors import SequenceFailed
from tailrace.types import (
    Attachment,
    FinishReason,
    PromptLogprob,
    Sampling,
    Segment,
    TopLogprobs,
    VectorForm,
    ids_of,
    num_tokens_of,
)

__all__ = [
    "ALL_EXCLUDED",
    "GRAMMAR_TOO_COMPLEX",
    "Capabilities",
    "Delta",
    "Engine",
    "Prefill",
    "Reporting",
    "Seeing",
    "Sequence",
    "Sight",
]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine supports with its loaded model. Other requests are refused with 400."""

    engine: str  # name and version
    context_tokens: int  # prompt and answer together
    kv_tokens: int  # capacity of the KV cache, for all sequences together
    block_tokens: int  # allocation unit of the KV cache
    max_sequences: int  # running at the same time
    parameters: frozenset[str]  # supported fields of `Sampling`
    exact: bool  # a sequence that runs again with the same `schedule` gives the same ids, whatever runs beside it
    reports_progress: bool = False  # it is also `Reporting`
    waits: bool = False  # it is also `Waiting`
    # The segments that a prompt may have: token_ids, text, and media types of attachments, such as image/png.
    takes: frozenset[str] = frozenset({"token_ids"})
    sees: bool = False  # it is also `Seeing`

    def check_length(self, sequence: Sequence) -> None:
        """Raises: SequenceFailed if the prompt and max_tokens together exceed the context or the KV cache."""
        wanted = sequence.num_prompt_tokens + (sequence.sampling.max_tokens or 0)
        if wanted > min(self.context_tokens, self.kv_tokens):
            raise SequenceFailed("the prompt is too long for this engine")


class Sequence(msgspec.Struct, frozen=True):
    """One generation to run. `sampling.seed` and `sampling.max_tokens` are always set.

    A model that embeds or ranks gets sequences with `vector` instead: it reads the prompt, and answers with one delta.
    The prompt of a pair has two segments.
    """

    sequence_id: int
    segments: tuple[Segment, ...]  # of the prompt
    sampling: Sampling = Sampling()
    # Of a replay: in which steps to compute it. Engines that never set `Delta.is_alone` may ignore it.
    schedule: Schedule = FREE
    adapter: str = ""  # the name of one of `EngineSpec.adapters`
    vector: VectorForm | None = None  # what to give of an embedding; without effect on scores
    attachments: dict[str, bytes] = {}  # the bytes of those in `segments`, by digest
    is_background: bool = False  # its prompt is read after those of all others, by engines that read several

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as token ids, with those that stand for its images. Raises: SequenceFailed if it has segments that
        are no token ids."""
        written = tuple(one.token_ids if isinstance(one, Attachment) else one for one in self.segments)
        if not all(isinstance(one, tuple) and (one or len(written) == 1) for one in written):
            raise SequenceFailed("this engine takes only token ids")
        return ids_of(written)

    @property
    def images(self) -> tuple[bytes, ...]:
        """The images of the prompt, in order. Raises: SequenceFailed if one is missing."""
        try:
            return tuple(self.attachments[one.digest] for one in self.segments if isinstance(one, Attachment))
        except KeyError:
            raise SequenceFailed("an image of the prompt is missing") from None

    @property
    def num_prompt_tokens(self) -> int:
        return num_tokens_of(self.segments)


ALL_EXCLUDED = "no token may follow: the request's parameters exclude all"
GRAMMAR_TOO_COMPLEX = "the grammar is too complex"  # found while the answer was generated; a refusal


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one engine step added to one sequence."""

    sequence_id: int
    start: int  # index of the first new token in the sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    # On the last delta of a sequence only. "stop" and "length" come with the token that ends the sequence.
    finish_reason: FinishReason | None = None
    failure: str = ""  # a message for people, with finish_reason "error"
    top_logprobs: tuple[TopLogprobs, ...] = ()  # for each token, if requested
    # Token counts of the prompt and of the answer so far, if they differ from the number of ids.
    usage: tuple[int, int] | None = None
    # With "error": a temporary failure. The sequence may be submitted again, under another id.
    is_lost: bool = False
    # With "error": a permanent failure, caused by the request itself.
    is_refused: bool = False
    # The step had a single row, and the engine uses other kernels for such steps than for a batch.
    is_alone: bool = False
    # Tokens of the prompt that were found in a prefix cache, on one delta of a sequence; None: not known.
    num_cached_tokens: int | None = None
    # On the first delta of a sequence, if requested: for each token of the prompt but the first.
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    vector: bytes = b""  # of a sequence that asks for one: float32, little-endian


class Prefill(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much of its prompt the engine has read for one sequence that has no token yet."""

    sequence_id: int
    num_read_tokens: int  # includes the cached ones
    num_cached_tokens: int = 0  # tokens of the prompt that were found in a prefix cache
    num_tokens: int | None = None  # of the prompt, if it differs from the number of ids


class Engine(Protocol):
    """Runs sequences in a batch. Each submitted sequence ends with exactly one `Delta` with a finish_reason."""

    capabilities: Capabilities

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence for the next step.

        Raises: SequenceFailed if this sequence cannot be run, for example because its prompt is too long.
        """

    def abort(self, sequence_id: int) -> None:
        """End a sequence with finish_reason "cancelled" within one step. Unknown ids are ignored."""

    def step(self) -> list[Delta]:
        """Run one forward over the batch. Returns at once with [] when nothing is running.

        A sequence that fails ends with finish_reason "error", and the others go on. Any exception means that the engine
        is lost.
        """

    def close(self) -> None:
        """Free the model's memory."""


class Reporting(Protocol):
    """An engine that reads long prompts in several steps, and says how far it is."""

    def progress(self) -> list[Prefill]:
        """Return how much is read of each prompt, after a step. Sequences that have tokens or have ended are left out,
        and so may be those whose prompt is not begun."""


class Waiting(Protocol):
    """An engine whose step waits for what others compute: another server, or processes of its library."""

    def return_for(self, descriptor: int) -> None:
        """Called once, before the first step. A step that waits returns as soon as `descriptor` can be read: work has
        come, which those others can take at once."""


class Sight(msgspec.Struct, frozen=True, array_like=True):
    """How an image is written in a prompt: the chat template writes `placeholder`, which becomes `expansion`."""

    placeholder: str
    expansion: str


class Seeing(Protocol):
    """An engine whose model reads images, of which each stands in the prompt as tokens of its own."""

    def see(self, image: bytes) -> Sight:
        """Return how this image, a PNG, is written in a prompt.

        Raises: SequenceFailed if the model cannot read it.
        """
