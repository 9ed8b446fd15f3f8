"""Decides what a step computes: which sequences begin, which tokens of which prompts, and which rows run alone.

- A sequence begins when its blocks are sure: those of its prompt and of its longest answer. So a sequence that runs is
  never interrupted for another one.
- Prompts are cut into pieces, which run beside the rows that decode. Pieces are short enough that those rows wait at
  most for `GAP_S`.
- While any other prompt is read, those of background sequences are not.
- A prompt whose beginning another sequence is just computing waits for it, and then shares its blocks. It does not wait
  for a background sequence, unless it is one itself.
- A row that computed a token alone, or in a batch, computes it in the same way when it runs again: `Schedule` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tailrace.engines import Schedule
from tailrace_kit.sampler import Row
from tailrace_plugins.openvino.blocks import BLOCK_TOKENS, Blocks, digests
from tailrace_plugins.openvino.image_thread import Pictures
from tailrace_plugins.openvino.runner import Piece
from tailrace_plugins.openvino.speculation import Drafted, Guesser, PromptLookup

__all__ = ["GAP_S", "Scheduler", "SequenceState", "StepPlan", "Work"]

GAP_S = 0.06  # the longest that rows wait for the pieces of prompts in one step
_PROMPT_ROWS = 64  # of a piece whose logits are all returned: 40 MB with 150,000 tokens in the vocabulary
_LEAST_PIECE = 12  # tokens of a prompt in each step, however long they take
_FIRST_PIECE = 64  # until it is known how long they take


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence that runs or waits."""

    row: Row
    schedule: Schedule
    adapter: int = 0
    lookup: PromptLookup | None = None
    drafted: Drafted | None = None
    guesser: Guesser | None = None  # that made the guesses of this step
    chain: list[bytes] = field(default_factory=list)  # digests of the prompt's blocks that may be shared
    table: list[int] = field(default_factory=list)  # its blocks
    num_done: int = 0  # tokens whose keys and values are in the blocks
    num_cached: int | None = None  # of them, found in the prefix cache; None: has not begun, or was said
    num_reserved: int = 0  # blocks
    pictures: Pictures | None = None
    is_background: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.row.token_ids) - self.row.count

    @property
    def is_prefilling(self) -> bool:
        return self.num_done < self.num_prompt


@dataclass(slots=True)
class Work:
    """What a step computes for a sequence. `guesses` are speculative tokens after its last one."""

    run: SequenceState
    count: int  # tokens after those that are done
    guesses: list[int] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        """Whether a token is chosen after this work."""
        return self.run.num_done + self.count == len(self.run.row.token_ids)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the step. Tokens of an answer are rows of their own, so that their bits do not depend on
        how many of them run together."""
        run = self.run
        ids = run.row.token_ids[run.num_done : run.num_done + self.count]
        if run.is_prefilling:
            images = None
            if run.pictures is not None:
                images = run.pictures.between(run.num_done, run.num_done + self.count)
            yield Piece(ids, run.num_done, run.table, self.is_last, run.adapter, run.row.wants_prompt, images)
            return
        first_sampled = len(ids) - 1
        for index, token_id in enumerate((*ids, *self.guesses)):
            yield Piece((token_id,), run.num_done + index, run.table, index >= first_sampled, run.adapter)


@dataclass(slots=True)
class StepPlan:
    """The works of one step: those of a batch, and those that each run alone."""

    batch: list[Work]
    alone: list[Work]

    @property
    def num_rows(self) -> int:
        """Rows of the call that computes this step, before it is done; 0 if it reads prompts, or is several calls."""
        works = (*self.batch, *self.alone)
        if any(work.run.is_prefilling for work in works) or (self.alone and len(works) > 1):
            return 0
        return sum(work.count + len(work.guesses) for work in works)


class Scheduler:
    def __init__(
        self,
        *,
        num_blocks: int,
        max_sequences: int,
        step_tokens: int,
        shares_prefixes: bool,
        keeps_answers: bool,
        may_be_alone: bool,
        num_ahead: int = 0,
        cuts_no_image: bool = False,
    ) -> None:
        """`num_ahead` is the most speculative tokens that a sequence may have. With `cuts_no_image`, all tokens of an
        image are computed in one step."""
        self._blocks = Blocks(num_blocks)
        self._num_blocks = num_blocks
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self._shares_prefixes = shares_prefixes
        self._keeps_answers = shares_prefixes and keeps_answers
        self._may_be_alone = may_be_alone
        self._num_ahead = num_ahead
        self._cuts_no_image = cuts_no_image
        self._waiting: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._num_reserved = 0
        self._computing: dict[bytes, SequenceState] = {}  # blocks of prompts that are being computed
        self._token_s = 0.0  # of a prompt's token beside other rows, measured

    def add(self, run: SequenceState) -> None:
        """Queue a sequence."""
        row = run.row
        most = len(row.token_ids) + (row.sampling.max_tokens or 0) + self._num_ahead
        run.num_reserved = -(-most // BLOCK_TOKENS)
        if self._shares_prefixes and not row.wants_prompt:  # whose logits must all be computed
            # A piece has two tokens at least.
            run.chain = list(digests(row.token_ids[:-2], _root(run), _images(run)))
        self._waiting.append(run)

    def drop(self, run: SequenceState) -> None:
        """Remove a sequence. The blocks of its answer stay cached only if answers need not be exact: a prompt with the
        same tokens gives other bits."""
        if run in self._waiting:
            self._waiting.remove(run)
            return
        self._running.remove(run)
        self._num_reserved -= run.num_reserved
        self._forget(run)
        if self._keeps_answers:
            done = run.row.token_ids[: run.num_done]
            for block, digest in zip(run.table, digests(done, _root(run), _images(run)), strict=False):
                self._blocks.keep(block, digest)
        self._blocks.release(run.table)

    def plan(
        self,
        is_ready: Callable[[SequenceState], bool],
        guess: Callable[[list[SequenceState], bool], list[list[int]]],
    ) -> StepPlan:
        """Return what to compute next. `is_ready` says whether a row may decode. `guess` gives speculative tokens for
        each of the rows of a batch; it is told whether prompts are computed beside them."""
        self._admit()
        decoding = [run for run in self._running if not run.is_prefilling and is_ready(run)]
        prefilling = [run for run in self._running if run.is_prefilling and is_ready(run)]
        prefilling = [run for run in prefilling if not run.is_background] or prefilling
        alone = [Work(run, 1) for run in decoding if run.schedule.is_alone(run.row.count) and self._is_single(run)]
        apart = {id(work.run) for work in alone}
        for run in decoding:
            self._grow(run, len(run.row.token_ids) + self._num_ahead)
        rows = [run for run in decoding if id(run) not in apart]
        batch = [
            Work(run, len(run.row.token_ids) - run.num_done, guesses)
            for run, guesses in zip(rows, guess(rows, bool(prefilling)), strict=True)
        ]
        for work in self._pieces(prefilling, beside=bool(decoding)):
            self._grow(work.run, work.run.num_done + work.count)
            batch.append(work)
        if len(batch) == 1 and not alone and self._is_free(batch[0]):
            batch, alone = [], batch
        return StepPlan(batch, alone)

    def done(self, work: Work, *, num_right: int = 0) -> None:
        """Note what was computed. `num_right` of the guesses were right."""
        run = work.run
        first, was_prefilling = run.num_done // BLOCK_TOKENS, run.is_prefilling
        run.num_done += work.count + num_right
        if was_prefilling and self._shares_prefixes:
            full = slice(first, run.num_done // BLOCK_TOKENS)
            for block, digest in zip(run.table[full], run.chain[full], strict=False):
                self._blocks.keep(block, digest)
                if self._computing.get(digest) is run:
                    del self._computing[digest]

    def note_time(self, plan: StepPlan, took_s: float) -> None:
        """Note how long a step took, to choose the length of pieces."""
        num_tokens = sum(work.count for work in plan.batch if work.run.is_prefilling)
        if num_tokens >= _LEAST_PIECE:
            now_s = took_s / num_tokens
            self._token_s = 0.7 * self._token_s + 0.3 * now_s if self._token_s else now_s

    def _admit(self) -> None:
        for run in list(self._waiting):
            if len(self._running) == self._max_sequences:
                return
            if self._num_reserved + run.num_reserved > self._num_blocks:
                return  # in the order of arrival: a long one is not passed by short ones for ever
            known = self._blocks.num_known(run.chain)
            other = self._computing.get(run.chain[known]) if known < len(run.chain) else None
            if other is not None and (run.is_background or not other.is_background):
                continue  # another sequence is just computing its beginning
            self._waiting.remove(run)
            self._begin(run, known)

    def _begin(self, run: SequenceState, known: int) -> None:
        """Run a sequence, whose first `known` blocks are cached."""
        run.table = self._blocks.share(run.chain[:known])
        run.num_done = run.num_cached = known * BLOCK_TOKENS
        self._num_reserved += run.num_reserved
        for digest in run.chain[known:]:
            other = self._computing.get(digest)
            if other is None or (other.is_background and not run.is_background):
                self._computing[digest] = run
        self._running.append(run)

    def _forget(self, run: SequenceState) -> None:
        for digest in run.chain:
            if self._computing.get(digest) is run:
                del self._computing[digest]

    def _pieces(self, prefilling: list[SequenceState], *, beside: bool) -> Iterator[Work]:
        """Yield pieces of prompts. The oldest prompt gets half of the room, so that it ends, and the shortest ones get
        the rest, so that they need not wait for a long one."""
        left = self._step_tokens
        if beside:
            left = min(left, max(_LEAST_PIECE, int(GAP_S / self._token_s)) if self._token_s else _FIRST_PIECE)
        wanted = [(run, run.num_prompt - run.num_done) for run in prefilling]
        counts = {id(run): min(count, left - left // 2) for run, count in wanted[:1]}
        left -= sum(counts.values())
        for run, count in sorted(wanted, key=lambda one: one[1]):
            more = min(count - counts.get(id(run), 0), left)
            counts[id(run)] = counts.get(id(run), 0) + more
            left -= more
        for run, most in wanted:
            count = min(counts[id(run)], _PROMPT_ROWS) if run.row.wants_prompt else counts[id(run)]
            if (count := _without_a_single(count, most)) and self._cuts_no_image and run.pictures is not None:
                count = run.pictures.whole(run.num_done, run.num_done + count) - run.num_done
            if count:
                yield Work(run, count)

    def _is_free(self, work: Work) -> bool:
        """Return whether a work may run alone if nothing else runs."""
        run = work.run
        return (
            self._may_be_alone
            and not run.is_prefilling
            and not work.guesses
            and self._is_single(run)
            and run.schedule.is_alone(run.row.count) is not False
        )

    def _is_single(self, run: SequenceState) -> bool:
        return len(run.row.token_ids) - run.num_done == 1

    def _grow(self, run: SequenceState, num_tokens: int) -> None:
        """Give a sequence the blocks for so many tokens. They are reserved for it."""
        while len(run.table) * BLOCK_TOKENS < num_tokens:
            run.table.append(self._blocks.take())


def _without_a_single(count: int, most: int) -> int:
    """Return a number of tokens near `count`, so that neither this piece nor the last one of a prompt has one token:
    attention has another kernel for it, which gives other bits."""
    if count == most - 1:
        count = most if count == 1 else count - 1
    return 0 if count == 1 < most else count


def _images(run: SequenceState) -> list[tuple[int, int, str]]:
    return [] if run.pictures is None else run.pictures.spans


def _root(run: SequenceState) -> bytes:
    """Return what else the content of a sequence's blocks depends on."""
    return f"adapter {run.adapter}".encode()
