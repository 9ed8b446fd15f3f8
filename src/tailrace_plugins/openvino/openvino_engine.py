"""OpenVINO computes, tailrace decides: the default engine on a CPU.

One step is one call of the library for a batch of rows (`runner`). Which rows, and which pieces of prompts beside them,
is decided here (`scheduler`), as is which tokens come next (`tailrace_kit/sampler.py`, `tailrace_kit/constraints.py`).

The same tokens again (`exact`): the arithmetic is float32, and keys are quantised per token. On a processor with
AVX-512 and with two threads, every batch gives the same bits, whatever is in it and however prompts are cut, into
pieces of two tokens or more. A step with a single row has other kernels, and takes 5 to 15 % less time. So each delta
says whether its row ran alone, and a replay repeats this. With `never_alone`, all rows run in batches. Without AVX-512
(AMD Zen 3), the cut of a prompt changes the bits, and `exact` is not claimed. It is not claimed with more than two
threads either: this was not measured.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import openvino as ov

from tailrace.engines import Capabilities, Delta, EngineSpec, Prefill, Sequence, Sight
from tailrace.errors import ModelError, SequenceFailed
from tailrace.models import ModelCard
from tailrace.system.processors import usable_processors
from tailrace_kit.adapters import numbers_of
from tailrace_kit.constraints import Constraints
from tailrace_kit.sampler import PARAMETERS as SAMPLED
from tailrace_kit.sampler import Logits, Row, check_ids
from tailrace_kit.vectors import card_of
from tailrace_plugins.openvino.blocks import BLOCK_TOKENS
from tailrace_plugins.openvino.draft_model import DraftModel
from tailrace_plugins.openvino.model_loading import ENGINE, images_of, load_eye, load_runner, reason_of, say
from tailrace_plugins.openvino.runner import Piece, Runner
from tailrace_plugins.openvino.scheduler import Scheduler, SequenceState, Work
from tailrace_plugins.openvino.speculation import PromptLookup

__all__ = ["PARAMETERS", "OpenVINOEngine"]

PARAMETERS = SAMPLED | {"prompt_logprobs"}
_MANY_ROWS = 8
_MOST_THREADS = 8
_WAIT_S = 0.005  # for a grammar that is being compiled, if nothing else runs


class OpenVINOEngine:
    """Implements `Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        try:
            card = card_of(spec)
            self._ends = frozenset(spec.eos_token_ids or card.eos_token_ids)
            self._eye = load_eye(spec, card)
            images = images_of(self._eye)
            self._runner = load_runner(spec, card, partial(self._read_vocabulary, card), images)
            self._draft = _load_draft(spec, self._runner) if spec.draft else None
        except (RuntimeError, LookupError, ValueError, MemoryError) as error:  # exceptions of C++, too
            raise ModelError(reason_of(error)) from error
        self._vocab_size = self._runner.vocab_size
        self._exact = spec.exact
        self._adapters = numbers_of(spec.adapters)
        self._lookup_tokens = spec.prompt_lookup_tokens
        self._num_ahead = max(self._lookup_tokens, self._draft.most if self._draft is not None else 0)
        self._num_threads = min(spec.threads or usable_processors(), _MOST_THREADS)
        self._threads = ThreadPoolExecutor(self._num_threads, "sampler")
        self._runs: dict[int, SequenceState] = {}
        self._aborted: list[int] = []
        self._scheduler = Scheduler(
            num_blocks=spec.kv_tokens // BLOCK_TOKENS,
            max_sequences=spec.max_sequences,
            step_tokens=spec.max_step_tokens,
            shares_prefixes=spec.prefix_cache,
            keeps_answers=not spec.exact,
            may_be_alone=not spec.never_alone,
            num_ahead=self._num_ahead,
            cuts_no_image=images == "mutual",
        )
        self.capabilities = Capabilities(
            engine=ENGINE,
            context_tokens=spec.context_tokens,
            kv_tokens=spec.kv_tokens,
            block_tokens=BLOCK_TOKENS,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS if self._constraints.is_usable else PARAMETERS - {"grammar"},
            exact=spec.exact and _is_known_exact(spec) and images != "mutual",  # whose kernel was not measured
            reports_progress=True,
            takes=frozenset({"token_ids"} if self._eye is None else {"token_ids", "image/png"}),
            sees=self._eye is not None,
        )

    def _read_vocabulary(self, card: ModelCard, vocab_size: int) -> None:
        self._constraints = Constraints(card.tokenizer_json, self._ends, vocab_size)

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        check_ids(sequence, self._vocab_size)
        grammar, constraint = sequence.sampling.grammar, None
        if grammar is not None:
            if "grammar" not in self.capabilities.parameters:
                raise SequenceFailed("grammars are not supported for this model's tokenizer")
            constraint = self._constraints(grammar, ignore_eos=sequence.sampling.ignore_eos)
        run = SequenceState(Row(sequence, self._ends, constraint), sequence.schedule, self._adapters[sequence.adapter])
        run.is_background = sequence.is_background
        if self._eye is not None:
            run.pictures = self._eye.pictures(sequence)
        if self._lookup_tokens:
            run.lookup = PromptLookup(self._lookup_tokens)
        self._runs[sequence.sequence_id] = run
        self._scheduler.add(run)

    def see(self, image: bytes) -> Sight:
        assert self._eye is not None
        return self._eye.see(image)

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._runs and sequence_id not in self._aborted:
            self._aborted.append(sequence_id)

    def step(self) -> list[Delta]:
        deltas = [self._end(self._runs[sequence_id]) for sequence_id in self._aborted]
        self._aborted.clear()
        plan = self._scheduler.plan(_is_ready, self._guess)
        if not plan.batch and not plan.alone:
            if self._runs:
                time.sleep(_WAIT_S)
            return deltas
        num_rows = plan.num_rows if self._draft is not None else 0  # counted before the rows have new tokens
        began_s = time.monotonic()
        if plan.batch:
            deltas += self._run(plan.batch, is_alone=False)
        for work in plan.alone:
            deltas += self._run([work], is_alone=True)
        took_s = time.monotonic() - began_s
        self._scheduler.note_time(plan, took_s)
        if self._draft is not None and num_rows:
            self._draft.note_step(num_rows, took_s, is_alone=bool(plan.alone))
        return deltas

    def progress(self) -> list[Prefill]:
        return [
            Prefill(sequence_id, run.num_done, run.num_cached or 0)
            for sequence_id, run in self._runs.items()
            if run.is_prefilling and run.num_done
        ]

    def close(self) -> None:
        self._constraints.close()
        if self._eye is not None:
            self._eye.close()
        self._threads.shutdown(wait=False)
        self._runs.clear()
        self._aborted.clear()

    def _guess(self, runs: list[SequenceState], is_beside: bool) -> list[list[int]]:
        """Guess the next tokens of rows: first by what their texts repeat, else by the draft model. Beside prompts, the
        rows wait long enough without it."""
        guesses: list[list[int]] = [[] for _ in runs]
        if not self._num_ahead:
            return guesses
        most = [_most_guesses(run, self._num_ahead) for run in runs]
        for index, run in enumerate(runs):
            run.guesser = run.lookup
            if run.lookup is not None:
                guesses[index] = run.lookup.guess(run.row.token_ids)[: most[index]]
        if self._draft is not None and not is_beside:
            indexes = [index for index, found in enumerate(guesses) if not found]
            rest = [runs[index] for index in indexes]
            num_rows = len(runs) + sum(map(len, guesses))
            drafted = self._draft.guess(rest, [most[index] for index in indexes], num_rows)
            for index, run, found in zip(indexes, rest, drafted, strict=True):
                if found:
                    guesses[index], run.guesser = found, run.drafted
        return guesses

    def _run(self, works: list[Work], *, is_alone: bool) -> list[Delta]:
        """Compute works in one call of the library, choose their tokens, and return the deltas."""
        pieces: list[list[Piece]] = [list(work.pieces()) for work in works]
        constraints = [
            work.run.row.constraint for work in works if work.run.row.constraint is not None and work.is_last
        ]
        logits = self._runner.run(
            [piece for own in pieces for piece in own],
            is_batch=not is_alone,
            meanwhile=lambda: self._constraints.compute_masks(constraints),
        )
        counts = [sum(piece.num_sampled for piece in own) for own in pieces]
        given = np.split(logits, np.cumsum(counts)[:-1])
        deltas = []
        for work, num_right in zip(works, self._choose(works, given), strict=True):
            self._scheduler.done(work, num_right=num_right)
            if work.run.guesser is not None:
                work.run.guesser.note(len(work.guesses), num_right, len(work.run.row.token_ids))
            deltas += self._take(work.run, is_alone=is_alone and self._exact)
        return deltas

    def _choose(self, works: list[Work], logits: list[Logits]) -> list[int]:
        """Choose the tokens of all works. Returns how many guesses of each were right. Many rows that draw are shared
        among threads, because numpy computes them in parallel."""
        if sum(not work.run.row.is_plain for work in works) < _MANY_ROWS:
            return [_advance(*one) for one in zip(works, logits, strict=True)]
        pairs = list(zip(works, logits, strict=True))
        cuts = range(self._num_threads)
        parts = self._threads.map(lambda cut: [_advance(*one) for one in pairs[cut :: self._num_threads]], cuts)
        chosen = [0] * len(works)
        for cut, part in zip(cuts, parts, strict=True):
            chosen[cut :: self._num_threads] = part
        return chosen

    def _take(self, run: SequenceState, *, is_alone: bool) -> list[Delta]:
        delta = run.row.take(is_alone=is_alone, num_cached_tokens=run.num_cached)
        if delta is None:
            return []
        run.num_cached = None
        if delta.finish_reason is not None:
            self._remove(run)
        return [delta]

    def _end(self, run: SequenceState) -> Delta:
        self._remove(run)
        return run.row.cancel()

    def _remove(self, run: SequenceState) -> None:
        self._scheduler.drop(run)
        if self._eye is not None and run.pictures is not None:
            self._eye.forget(run.pictures)
        del self._runs[run.row.sequence_id]


def _load_draft(spec: EngineSpec, target: Runner) -> DraftModel:
    """Load the draft model, in its own number of bits."""
    card = card_of(msgspec.structs.replace(spec, path=spec.draft))
    own = msgspec.structs.replace(
        spec,
        path=spec.draft,
        context_tokens=min(spec.context_tokens, card.context_tokens),
        weight_bits=0,
        adapters={},
        never_alone=False,
    )
    draft = DraftModel(
        load_runner(own, card),
        context_tokens=own.context_tokens,
        vocab_size=target.vocab_size,
        fixed=spec.draft_tokens,
    )
    draft.measure(target, may_be_alone=not spec.never_alone)
    say(f"the draft model {Path(spec.draft).name} {draft.prospect}.")
    return draft


def _is_ready(run: SequenceState) -> bool:
    return (run.row.constraint is None or run.row.constraint.is_ready) and (
        run.pictures is None or run.pictures.is_ready
    )


def _most_guesses(run: SequenceState, num_ahead: int) -> int:
    """Return how many guesses a row may have, of at most `num_ahead`: no more than it may have tokens after the next
    one, and none of a token that must be computed alone."""
    row = run.row
    most = min(max((row.sampling.max_tokens or 0) - row.count - 1, 0), num_ahead)
    if run.schedule.alone_end <= row.count:
        return most
    return next((ahead for ahead in range(most) if run.schedule.is_alone(row.count + ahead + 1)), most)


def _read_prompt(work: Work, logits: Logits) -> Logits:
    """Note how likely the next tokens of a prompt are, if it is asked. Returns the logits after its last token."""
    run = work.run
    if not run.is_prefilling or not run.row.wants_prompt:
        return logits
    num_known = len(logits) - work.is_last
    run.row.read_prompt(logits[:num_known], run.num_done + 1)
    return logits[num_known:]


def _advance(work: Work, logits: Logits) -> int:
    """Choose the next tokens of a row from the logits after its last token and after each guess. Returns how many
    guesses were right."""
    row, num_right = work.run.row, 0
    logits = _read_prompt(work, logits)
    if not len(logits):
        return 0
    for index, given in enumerate(logits):
        chosen = row.choose(given)
        if row.is_over or index == len(work.guesses) or chosen != work.guesses[index]:
            break
        num_right += 1
    _force(row)
    return num_right


def _force(row: Row) -> None:
    """Append the tokens that the grammar leaves no choice about, unless each needs its own logits."""
    if row.constraint is None or not row.may_be_forced or row.finish is not None:
        return
    for token_id in row.constraint.forced():
        row.force(token_id)
        if row.is_over:
            return


def _is_known_exact(spec: EngineSpec) -> bool:
    """Return whether batches of any kind were measured to give the same bits on this type of processor and number of
    threads."""
    if spec.device or spec.kv_precision or spec.adapters:  # not measured
        return False
    has_avx512 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return has_avx512 and (spec.threads or usable_processors()) <= 2
