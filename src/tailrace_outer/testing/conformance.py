"""The laws of all engines: `check_engine(make)` passes, or reports the broken law, the sequence and the reason.

For authors of engines. The engine runs in this process, through `submit`, `abort` and `step`, as in a worker; no server
is needed. With pytest, one test for each law::

    import pytest
    from tailrace.testing import Law, laws

    from my_engine import MyEngine

    @pytest.mark.parametrize("law", laws, ids=str)
    def test_engine(law: Law) -> None:
        if not law.applies_to(MyEngine().capabilities):
            pytest.skip("not among its capabilities")
        law(MyEngine)

or all laws in one test: `check_engine(MyEngine)`. `make` is called once for each law, and its engine is closed after
the law. If loading takes long, `make` may return the same engine each time, with a `close` that does nothing: laws use
new sequence ids and leave the engine idle. Then check `closing_twice_is_harmless` separately with a real `close`.

The engine needs a context of at least 128 tokens. The longest prompt of the laws has `context_tokens`, so a test
should set this to a few hundred. Prompts are random ids below `vocab_size`. Laws that depend on an event, such as an
end of text, test it only if the engine produces it.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import cast

from tailrace.engines.interface import Engine, Prefill, Reporting
from tailrace.errors import SequenceFailed
from tailrace.system.child import resident_bytes
from tailrace.types import Sampling
from tailrace_outer.testing._harness import EngineHarness, Law, require
from tailrace_outer.testing.sampling_laws import grammar_laws, sampling_laws

__all__ = ["Law", "check_engine", "laws"]

_AT_ONCE_S = 0.1
_LEAK_BYTES = 32 * 2**20  # allocators keep some memory; a relevant leak of a thousand sequences is larger


def check_engine(make: Callable[[], Engine], *, vocab_size: int = 256, num_sequences: int = 1000) -> None:
    """Check every law that applies to an engine. The search for leaks runs `num_sequences` short sequences.

    Raises: AssertionError for the first broken law; whatever the engine raises.
    """
    for law in laws:
        law(make, vocab_size=vocab_size, num_sequences=num_sequences)


def _idle_steps(harness: EngineHarness) -> None:
    for moment in ("before the first sequence", "after the last one"):
        took_s = []
        for _ in range(5):
            began_s = time.monotonic()
            stepped = harness.step()
            took_s.append(time.monotonic() - began_s)
            require(stepped == [], None, f"step() gave {stepped} {moment}")
        require(min(took_s) < _AT_ONCE_S, None, f"step() took {min(took_s):.2f} s {moment}")
        harness.alone(harness.prompts(1)[0], harness.sampling(4))


def _mixed_run(harness: EngineHarness) -> None:
    """Run sequences of several lengths that start one after the other, and one more step after their end."""
    for index, prompt in enumerate(harness.prompts(harness.width, "mixed")):
        harness.submit(prompt, harness.sampling(9 + 4 * index))
        harness.step()
    harness.finish()
    harness.step()


def _dense(harness: EngineHarness) -> None:
    _mixed_run(harness)
    require(not harness.unknown, None, f"deltas of sequences that were never submitted: {harness.unknown}")
    for sequence_id, deltas in harness.deltas.items():
        count = 0
        for delta in deltas:
            require(delta.start == count, sequence_id, f"start is {delta.start} after {count} tokens, in {delta}")
            count += len(delta.token_ids)


def _one_final(harness: EngineHarness) -> None:
    _mixed_run(harness)
    for sequence_id, deltas in harness.deltas.items():
        reasons = [delta.finish_reason for delta in deltas]
        require(all(reason is None for reason in reasons[:-1]), sequence_id, f"finish reasons, in order: {reasons}")
        require(reasons[-1] in ("stop", "length"), sequence_id, f"it ended with {deltas[-1]}")


def _token_ids(harness: EngineHarness) -> None:
    _mixed_run(harness)
    for sequence_id in harness.deltas:
        ids = harness.ids(sequence_id)
        require(all(isinstance(token, int) and token >= 0 for token in ids), sequence_id, f"token ids {ids}")


def _require_length(harness: EngineHarness, sequence_id: int, max_tokens: int) -> None:
    """Require exactly `max_tokens`, or fewer with an end of text."""
    count, reason = len(harness.ids(sequence_id)), harness.end(sequence_id).finish_reason
    seen = f"{count} tokens and finish_reason {reason!r} with max_tokens={max_tokens}"
    require(count == max_tokens if reason == "length" else count <= max_tokens, sequence_id, seen)
    require(reason in ("length", "stop"), sequence_id, seen)


def _max_tokens(harness: EngineHarness) -> None:
    prompt = harness.prompts(1, "length")[0]
    wanted = {harness.submit(prompt, harness.sampling(length)): length for length in (1, 2, 7, 33)[: harness.width]}
    harness.finish()
    for sequence_id, max_tokens in wanted.items():
        _require_length(harness, sequence_id, max_tokens)


def _ignore_eos(harness: EngineHarness) -> None:
    prompt = harness.prompts(1, "end")[0]
    for first in range(1, 13, harness.width):
        lengths = range(first, min(first + harness.width, 13))
        wanted = {harness.submit(prompt, harness.sampling(length)): length for length in lengths}
        harness.finish()
        for sequence_id, max_tokens in wanted.items():
            reason = harness.end(sequence_id).finish_reason
            require(reason == "length", sequence_id, f"finish_reason {reason!r} with ignore_eos, {max_tokens=}")
            _require_length(harness, sequence_id, max_tokens)


def _require_cancelled(harness: EngineHarness, sequence_id: int) -> None:
    """Require that an aborted sequence ends in the next step."""
    stepped = [delta for delta in harness.step() if delta.sequence_id == sequence_id]
    ended = bool(stepped) and stepped[-1].finish_reason == "cancelled"
    require(ended, sequence_id, f"the step after abort() gave {stepped}")
    again = [delta for delta in harness.step() if delta.sequence_id == sequence_id]
    require(not again, sequence_id, f"after its last delta it gave {again}")


def _abort(harness: EngineHarness) -> None:
    sequence_id = harness.start(64)
    harness.engine.abort(sequence_id)
    _require_cancelled(harness, sequence_id)
    require(harness.step() == [], sequence_id, "step() gave more deltas although nothing runs")


def _abort_before_step(harness: EngineHarness) -> None:
    sequence_id = harness.submit(harness.prompts(1)[0], harness.sampling(64))
    harness.engine.abort(sequence_id)
    _require_cancelled(harness, sequence_id)


def _abort_anything(harness: EngineHarness) -> None:
    harness.engine.abort(2**62)
    require(harness.step() == [], None, "step() gave deltas after abort() of an unknown sequence")
    finished = harness.submit(harness.prompts(1)[0], harness.sampling(2))
    harness.finish(finished)
    count = len(harness.deltas[finished])
    twice = harness.start(64)
    for sequence_id in (finished, twice, twice, 2**62):
        harness.engine.abort(sequence_id)
    _require_cancelled(harness, twice)
    harness.engine.abort(twice)
    require(harness.step() == [], twice, "step() gave deltas after abort() of a cancelled sequence")
    late = harness.deltas[finished][count:]
    require(not late, finished, f"abort() after its end gave {late}")


def _abort_spares_neighbours(harness: EngineHarness) -> None:
    if harness.width < 2:
        return
    victim = harness.start(64)
    prompt, sampling = harness.prompts(1, "spared")[0], harness.sampling(16)
    spared = harness.submit(prompt, sampling)
    harness.step()
    harness.engine.abort(victim)
    harness.finish(spared)
    _require_length(harness, spared, 16)
    if harness.engine.capabilities.exact:
        _require_same(harness, spared, prompt, sampling, "beside an aborted neighbour")


def _require_same(
    harness: EngineHarness, sequence_id: int, prompt: tuple[int, ...], sampling: Sampling, where: str
) -> None:
    """Replay a sequence alone."""
    seen, replayed = harness.ids(sequence_id), harness.alone(prompt, sampling, like=sequence_id)
    require(seen == replayed, sequence_id, f"{where} it gave {seen}, but replayed alone {replayed}")


def _require_batch_invariance(harness: EngineHarness, seeds: list[int | None], salt: str) -> None:
    """Run sequences all at once and in a batch that changes, and replay each."""
    prompts = harness.prompts(len(seeds), salt)
    lengths = [24 - 3 * index for index in range(len(seeds))]
    cases = [(p, harness.sampling(n, seed)) for p, n, seed in zip(prompts, lengths, seeds, strict=True)]
    together = [harness.submit(*case) for case in cases]
    harness.finish()
    staggered = []
    for case in reversed(cases):
        staggered.append(harness.submit(*case))
        harness.step()
        harness.step()
    harness.finish()
    for index, case in enumerate(cases):
        _require_same(harness, together[index], *case, "in a batch")
        _require_same(harness, staggered[-1 - index], *case, "in a batch that changes")


def _greedy(harness: EngineHarness) -> None:
    _require_batch_invariance(harness, [None] * harness.width, "greedy")
    if harness.width < 2:
        return
    for prompt in harness.prompts(3, "twins"):
        sampling = harness.sampling(24)
        first = harness.submit(prompt, sampling)
        harness.step()  # a prefix cache may share the first's computations with the second
        second = harness.submit(prompt, sampling)
        harness.finish()
        for twin in (first, second):
            _require_same(harness, twin, prompt, sampling, "beside an equal sequence that is one step apart")


def _same_seed(harness: EngineHarness) -> None:
    _require_batch_invariance(harness, [11 + 7 * index for index in range(harness.width)], "seeds")
    prompt, sampling = harness.prompts(1, "again")[0], harness.sampling(16, 5)
    first, second = harness.alone(prompt, sampling), harness.alone(prompt, sampling)
    require(first == second, None, f"the same prompt and seed gave {first} and then {second}")


def _seeds_differ(harness: EngineHarness) -> None:
    for prompt in harness.prompts(3, "differ"):
        answers = {harness.alone(prompt, harness.sampling(24, seed)) for seed in (1, 2, 99_991)}
        if len(answers) > 1:
            return
    require(
        False, None, f"three seeds at temperature 1 changed nothing of three prompts, the last of which gave {answers}"
    )


def _logprobs(harness: EngineHarness) -> None:
    prompts = harness.prompts(2, "logprobs")
    requested = harness.submit(prompts[0], harness.sampling(8, logprobs=True))
    if harness.width < 2:
        harness.finish()
    without = harness.submit(prompts[1], harness.sampling(8))
    harness.finish()
    for delta in harness.deltas[requested]:
        require(
            len(delta.logprobs) == len(delta.token_ids), requested, f"logprobs and tokens differ in number: {delta}"
        )
        is_valid = all(math.isfinite(logprob) and logprob <= 0 for logprob in delta.logprobs)
        require(is_valid, requested, f"these are not logarithms of probabilities: {delta}")
    unwanted = [delta for delta in harness.deltas[without] if delta.logprobs]
    require(not unwanted, without, f"logprobs that were not requested: {unwanted}")


def _progress(harness: EngineHarness) -> None:
    engine = harness.engine
    if not engine.capabilities.reports_progress:
        return
    reporting = cast("Reporting", engine)
    length = engine.capabilities.context_tokens - 8
    prompt = [n % 89 % harness.vocab_size for n in range(length)]
    sequence_id = harness.submit(prompt, harness.sampling(4))
    reports: list[Prefill] = []
    while not harness.deltas[sequence_id]:
        harness.step()
        found = [one for one in reporting.progress() if one.sequence_id == sequence_id]
        require(len(found) <= 1, sequence_id, f"several reports at once: {found}")
        reports += found if not harness.deltas[sequence_id] else []
    seen = f"the reports of a prompt of {length} tokens: {reports}"
    counts = [report.num_read_tokens for report in reports]
    require(counts == sorted(counts) and all(count <= length for count in counts), sequence_id, seen)
    require(all(0 <= one.num_cached_tokens <= one.num_read_tokens for one in reports), sequence_id, seen)
    late = [one for one in reporting.progress() if one.sequence_id == sequence_id]
    require(not late, sequence_id, f"after the first token: {late}")
    harness.finish(sequence_id)
    require(reporting.progress() == [], None, "progress() gave something although nothing runs")


def _try_length(harness: EngineHarness, num_prompt_tokens: int) -> int | None:
    """Submit a prompt of this length, for one new token. Returns None if it was refused with SequenceFailed."""
    prompt = [n % 97 % harness.vocab_size for n in range(num_prompt_tokens)]
    try:
        return harness.submit(prompt, harness.sampling(1))
    except SequenceFailed:
        return None


def _long_prompt(harness: EngineHarness) -> None:
    prompt, sampling = harness.prompts(1, "neighbour")[0], harness.sampling(12)
    neighbour = harness.submit(prompt, sampling)
    harness.step()
    length = harness.engine.capabilities.context_tokens + 1
    taken = _try_length(harness, length)
    require(taken is None, taken, f"a prompt of {length} tokens was taken, with context_tokens={length - 1}")
    harness.finish(neighbour)
    _require_length(harness, neighbour, 12)
    if harness.engine.capabilities.exact:
        _require_same(harness, neighbour, prompt, sampling, "beside a refused prompt")


def _limit_prompt(harness: EngineHarness) -> None:
    capabilities = harness.engine.capabilities
    limit = min(capabilities.context_tokens, capabilities.kv_tokens)
    for length in (limit - 1, limit):
        sequence_id = _try_length(harness, length)
        if sequence_id is not None:
            harness.finish(sequence_id)
            _require_length(harness, sequence_id, 1)
    after = harness.submit(harness.prompts(1)[0], harness.sampling(4))
    harness.finish(after)
    _require_length(harness, after, 4)


def _no_leak(harness: EngineHarness) -> None:
    prompts = harness.prompts(16, "leak")
    width = min(16, harness.engine.capabilities.max_sequences)
    rounds = max(2, harness.num_sequences // width)
    before = 0
    for number in range(rounds):
        if number == rounds // 3:  # memory that is allocated once, such as for compiled kernels, is not a leak
            before = _resident_bytes()
        started = [harness.submit(prompts[index], harness.sampling(1 + index % 3)) for index in range(width)]
        if number % 4 == 0:
            harness.engine.abort(started[-1])
        harness.finish()
        harness.deltas.clear()
    require(harness.step() == [], None, f"step() gave deltas after {rounds * width} sequences had ended")
    grown = _resident_bytes() - before
    seen = f"{rounds * width} short sequences left {grown / 2**20:.0f} MiB behind"
    require(grown < _LEAK_BYTES, None, seen)


def _resident_bytes() -> int:
    """Return the memory of this process; where this is unknown, its peak."""
    gc.collect()
    if resident := resident_bytes(os.getpid()):
        return resident
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _close(harness: EngineHarness) -> None:
    harness.alone(harness.prompts(1)[0], harness.sampling(2))
    harness.engine.close()
    harness.engine.close()


_SEEDED = frozenset({"seed", "temperature"})

laws: tuple[Law, ...] = (
    Law("idle_steps_are_empty", "step() returns [] at once when nothing runs", _idle_steps),
    Law("starts_are_dense", "tokens are in order, and each delta starts at the end of the last one", _dense),
    Law("one_final_delta", "a sequence has one delta with a finish_reason, and no delta after it", _one_final),
    Law("token_ids_are_natural", "token ids are integers from 0", _token_ids),
    Law("max_tokens_is_exact", "a sequence ends by length after exactly max_tokens", _max_tokens),
    Law("ignore_eos_is_honoured", "a sequence continues after an end of text", _ignore_eos, frozenset({"ignore_eos"})),
    Law("abort_takes_one_step", "the step after abort() gives the last delta, with reason cancelled", _abort),
    Law("abort_before_first_step", "a sequence may be aborted before its first step", _abort_before_step),
    Law("abort_is_harmless", "abort() of an unknown or ended sequence, or twice, does nothing", _abort_anything),
    Law("abort_spares_neighbours", "abort() does not change the other sequences of a batch", _abort_spares_neighbours),
    Law("greedy_is_exact", "a greedy sequence gives the same ids when it is replayed", _greedy, exact=True),
    Law(
        "same_seed_same_ids",
        "a sequence with a seed gives the same ids when it is replayed",
        _same_seed,
        _SEEDED,
        exact=True,
    ),
    Law("seeds_differ", "another seed gives another answer", _seeds_differ, _SEEDED),
    Law("logprobs_when_asked", "one logprob for each token, only if requested", _logprobs, frozenset({"logprobs"})),
    Law("progress_is_counted", "progress() grows up to the prompt's length, and ends with the first token", _progress),
    Law("long_prompt_is_refused", "submit() of a too long prompt raises SequenceFailed; others continue", _long_prompt),
    Law("prompt_of_the_limit", "a prompt as long as the context is answered, or only it is refused", _limit_prompt),
    Law("nothing_leaks", "after many short sequences the engine is idle, and its memory has not grown", _no_leak),
    Law("closing_twice_is_harmless", "close() may be called twice", _close),
    *sampling_laws,
    *grammar_laws,
)
