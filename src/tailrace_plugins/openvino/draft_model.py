"""Guesses of a draft model: a smaller model with the same vocabulary writes the next tokens of all rows that decode.

Its keys and values lie in blocks of its own, which have the numbers of the model's blocks. So a sequence has one table,
and what the draft model has read of a shared beginning is found by the same digests. Those of wrong guesses are
overwritten.

It reads a prompt after the model has, in pieces, so that the first token does not wait. It guesses where that pays by
the measured times of both models (`costs`). Elsewhere it may use a hundredth of the time to look again, because texts
change and measurements may be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tailrace_plugins.openvino.blocks import BLOCK_TOKENS
from tailrace_plugins.openvino.costs import Costs, Gain
from tailrace_plugins.openvino.runner import Piece, Runner
from tailrace_plugins.openvino.scheduler import GAP_S, SequenceState
from tailrace_plugins.openvino.speculation import Drafted

__all__ = ["DraftModel"]

_MOST = 5  # guesses of a row in one step
_NEAR = 16  # tokens that the draft model may have missed of a row which gets guesses in this step
_PIECE = 64  # tokens of a prompt whose time is measured
_LEAST_PIECE = 16
_LEAST_SHARE = 0.2  # of right guesses, below which a row gets none
_FIRST_SHARE = 0.7  # as long as nothing is known
_USUAL_TOKENS = 128  # that an answer has, as long as it is not longer
_LOOK_SHARE = 0.01  # of the time, to look again
_LOOK_MOST_S = 2.0
_ROUNDS = 3  # of the first measurement


class DraftModel:
    """Guesses for all sequences."""

    def __init__(self, runner: Runner, *, context_tokens: int, vocab_size: int, fixed: int = 0) -> None:
        """`vocab_size` is the model's: a vocabulary may have other unused tokens at its end. `fixed` is the number of
        guesses; 0: as many as pay."""
        self._runner = runner
        self._context_tokens = context_tokens
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._fixed = fixed
        self._filled: dict[int, bytes] = {}  # digests of the blocks that are full
        self._share = _FIRST_SHARE  # of right guesses, of all sequences
        self._look_s = 0.0  # that may be used to look again
        self.costs = Costs()

    @property
    def most(self) -> int:
        """The most guesses of a row in one step."""
        return self._fixed or _MOST

    def measure(self, target: Runner, *, may_be_alone: bool) -> None:
        """Measure both models, before sequences use their blocks. `may_be_alone`: the model may compute a single row in
        another form."""
        rows = [Piece((1,), index, (0,), is_sampled=True) for index in range(1 + _MOST)]
        piece = Piece((1,) * _PIECE, 0, range(_PIECE // BLOCK_TOKENS), is_sampled=False)
        self.costs.target.note(1, _least_s(target, rows[:1]))
        self.costs.target.note(len(rows), _least_s(target, rows))
        if may_be_alone:
            self.costs.alone.note(1, _least_s(target, rows[:1], is_batch=False))
        self.costs.draft.note(1, _least_s(self._runner, rows[:1], is_batch=False))
        self.costs.draft.note(len(rows), _least_s(self._runner, rows))
        self.costs.prompt.note(1, _least_s(self._runner, [piece]) / _PIECE)

    @property
    def prospect(self) -> str:
        """What the measurement says about a single stream, as the end of a sentence."""
        if self._fixed:
            return f"guesses {self._fixed} tokens in each step"
        took = f"needs {1000 * self.costs.draft(1):.1f} ms for a token, the model {1000 * self.costs.plain_s(1):.1f} ms"
        least = self.costs.least_share(_MOST)
        if least is None:
            return f"{took}: it saves no time for a single stream, and rests"
        return f"{took}: it guesses for a single stream while {max(least, _LEAST_SHARE):.0%} of its guesses are right"

    def note_step(self, num_rows: int, took_s: float, *, is_alone: bool) -> None:
        """Note how long the model took for a step without prompts."""
        (self.costs.alone if is_alone else self.costs.target).note(num_rows, took_s)
        self._look_s = min(self._look_s + _LOOK_SHARE * took_s, _LOOK_MOST_S)

    def guess(self, runs: Sequence[SequenceState], most: Sequence[int], num_rows: int) -> list[list[int]]:
        """Return guesses for some of these sequences, at most `most` for each. The model computes `num_rows` rows
        without them."""
        able = [index for index, run in enumerate(runs) if most[index] > 0 and self._is_short(run)]
        rows = {index: self._drafted(runs[index]) for index in able}
        self._share += sum(0.01 * (drafted.share - self._share) for drafted in rows.values())
        good = [index for index in able if self._fixed or rows[index].share >= _LEAST_SHARE]
        gain = self._gain([rows[index].share for index in good], num_rows)
        if gain.num_guesses:
            return self._guesses(runs, most, good, gain)
        began_s = time.monotonic()
        if not (good := self._worth_a_look(runs, able, num_rows)):
            return [[] for _ in runs]
        guesses = self._guesses(runs, most, good, Gain(self.most, saved_s=float("inf")))
        num_guesses = len(guesses[good[0]])
        checked_s = self.costs.target(num_rows + num_guesses) - self.costs.plain_s(num_rows) if num_guesses else 0.0
        self._look_s -= time.monotonic() - began_s + checked_s
        return guesses

    def _gain(self, shares: list[float], num_rows: int) -> Gain:
        if self._fixed:
            return Gain(self._fixed, saved_s=float("inf"))
        return self.costs.best(shares, num_rows, _MOST) if shares else Gain(0)

    def _guesses(
        self, runs: Sequence[SequenceState], most: Sequence[int], good: list[int], gain: Gain
    ) -> list[list[int]]:
        """Read on where the draft model is behind, if that pays, and guess where it is not."""
        missing = {index: _num_missing(runs[index]) for index in good}
        self._read([runs[index] for index in good if missing[index] > _NEAR and self._is_worth(runs[index], gain)])
        near = [index for index in good if missing[index] <= _NEAR]
        found: list[list[int]] = [[] for _ in runs]
        counts = [min(gain.num_guesses, most[index]) for index in near]
        if near:
            for index, guesses in zip(near, self._draft([runs[index] for index in near], counts), strict=True):
                found[index] = guesses
        return found

    def _is_short(self, run: SequenceState) -> bool:
        return len(run.row.token_ids) + self.most <= self._context_tokens

    def _is_worth(self, run: SequenceState, gain: Gain) -> bool:
        """Return whether it pays to read what is missing, if an answer goes on for as long as it already is."""
        left = (run.row.sampling.max_tokens or 0) - run.row.count
        return self.costs.prompt(1) * _num_missing(run) < gain.saved_s * min(max(run.row.count, _USUAL_TOKENS), left)

    def _worth_a_look(self, runs: Sequence[SequenceState], able: list[int], num_rows: int) -> list[int]:
        """Return the sequence of which the draft model misses least, if there is time for a guess that will not pay."""
        if self._look_s <= 0 or not able:
            return []
        index = min(able, key=lambda index: _num_missing(runs[index]))
        read_s = self.costs.prompt(1) * _num_missing(runs[index])
        return [index] if read_s + self.costs.extra_s(num_rows, 1, self.most) <= self._look_s else []

    def _drafted(self, run: SequenceState) -> Drafted:
        if run.drafted is None:
            num_blocks = 0
            for block, digest in zip(run.table, run.chain, strict=False):
                if self._filled.get(block) != digest:
                    break
                num_blocks += 1
            run.drafted = Drafted(num_blocks * BLOCK_TOKENS, self._share)
        return run.drafted

    def _read(self, runs: list[SequenceState]) -> None:
        """Compute keys and values of tokens that are missing, as many as may take half of a gap."""
        token_s = self.costs.prompt(1)
        left = max(_LEAST_PIECE, int(GAP_S / 2 / token_s)) if token_s else _PIECE
        pieces, num_tokens = [], 0
        for run in runs:
            if count := min(left - num_tokens, _num_missing(run) - 1):
                drafted, num_tokens = self._drafted(run), num_tokens + count
                ids = run.row.token_ids[drafted.num_done : drafted.num_done + count]
                pieces.append(self._piece(run, ids, drafted.num_done, is_sampled=False))
                drafted.num_done += count
        if num_tokens:
            took_s = _timed(self._runner, pieces)
            if num_tokens >= _LEAST_PIECE:
                self.costs.prompt.note(1, took_s / num_tokens)

    def _draft(self, runs: list[SequenceState], counts: list[int]) -> list[list[int]]:
        """Return the likeliest tokens, one after the other: `counts` of them for each sequence."""
        guesses: list[list[int]] = [[] for _ in runs]
        began_s = time.monotonic()
        for num_guessed in range(max(counts)):
            indexes = [index for index, count in enumerate(counts) if num_guessed < count]
            pieces = []
            for index in indexes:
                drafted, ids = self._drafted(runs[index]), runs[index].row.token_ids
                new, past = ids[drafted.num_done :], drafted.num_done
                if num_guessed:
                    new, past = guesses[index][-1:], len(ids) + num_guessed - 1
                pieces.append(self._piece(runs[index], new, past, is_sampled=True))
            is_batch = len(pieces) > 1 or len(pieces[0].ids) > 1
            logits = self._runner.run(pieces, is_batch=is_batch)
            for index, token_id in zip(indexes, logits[:, : self._vocab_size].argmax(-1).tolist(), strict=True):
                guesses[index].append(token_id)
        for run, count in zip(runs, counts, strict=True):
            drafted = self._drafted(run)
            drafted.num_done, drafted.num_fed = len(run.row.token_ids), count - 1
        self.costs.draft.note(len(runs), (time.monotonic() - began_s) / max(counts))
        return guesses

    def _piece(self, run: SequenceState, ids: Sequence[int], past: int, *, is_sampled: bool) -> Piece:
        """Return a piece, and note which blocks are full after it."""
        end = past + len(ids)
        for index in range(past // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            if (index + 1) * BLOCK_TOKENS <= end and index < len(run.chain):
                self._filled[run.table[index]] = run.chain[index]
            else:
                self._filled.pop(run.table[index], None)
        known = [token_id if token_id < self._runner.vocab_size else 0 for token_id in ids]
        return Piece(known, past, run.table, is_sampled)


def _num_missing(run: SequenceState) -> int:
    """Return how many tokens of a sequence the draft model has not read."""
    return len(run.row.token_ids) - (run.drafted.num_done if run.drafted is not None else 0)


def _least_s(runner: Runner, pieces: list[Piece], *, is_batch: bool = True) -> float:
    """Return the seconds of the fastest of some steps: others only slow one down."""
    return min(_timed(runner, pieces, is_batch=is_batch) for _ in range(_ROUNDS))


def _timed(runner: Runner, pieces: list[Piece], *, is_batch: bool = True) -> float:
    """Compute, and return the seconds that it took."""
    began_s = time.monotonic()
    runner.run(pieces, is_batch=is_batch)
    return time.monotonic() - began_s
