"""The laws that every engine keeps, as code: `check_engine(make)` passes, or says which law is broken, by whom and how.

For authors of engines. The engine is driven in this process through `submit`, `abort` and `step`, as a worker would;
no server is needed. With pytest, one test a law::

    import pytest
    from tailrace.testing import Law, laws

    from my_engine import MyEngine

    @pytest.mark.parametrize("law", laws, ids=str)
    def test_engine(law: Law) -> None:
        if not law.applies_to(MyEngine().capabilities):
            pytest.skip("not among its capabilities")
        law(MyEngine)

or all of them in one: `check_engine(MyEngine)`. `make` is called once a law, and what it returns is closed after it.
Where loading takes long, let `make` return the same engine each time, with a `close` that does nothing: laws use fresh
sequence ids and leave the engine idle. Then look at `closing_twice_is_harmless` once with a real one.

An engine on trial needs room for 128 tokens of context. It should be small: the longest prompt that is tried has as
many tokens as its `context_tokens`, so a test says a few hundred there. Prompts are random ids below `vocab_size`. What
depends on an option (an end of text, say) is only tried as far as the engine that `make` returns gets there.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import sys
import time
from collections.abc import Callable

from tailrace.child import resident_bytes
from tailrace.engines.promise import Engine
from tailrace.errors import SequenceFailed
from tailrace.testing._trial import EngineTrial, Law, hold
from tailrace.testing.sampling_laws import grammar_laws, sampling_laws

__all__ = ["Law", "check_engine", "laws"]

_AT_ONCE_S = 0.1
_LEAK_BYTES = 32 * 2**20  # allocators keep some; a thousand leaked sequences of any size worth finding are more


def check_engine(make: Callable[[], Engine], *, vocab_size: int = 256, num_sequences: int = 1000) -> None:
    """Hold an engine to every law that applies to it. The search for leaks runs `num_sequences` short ones.

    Raises: AssertionError for the first law that is broken; whatever the engine raises.
    """
    for law in laws:
        law(make, vocab_size=vocab_size, num_sequences=num_sequences)


def _idle_steps(trial: EngineTrial) -> None:
    for moment in ("before the first sequence", "after the last one"):
        took_s = []
        for _ in range(5):
            began_s = time.monotonic()
            stepped = trial.step()
            took_s.append(time.monotonic() - began_s)
            hold(stepped == [], None, f"step() gave {stepped} {moment}")
        hold(min(took_s) < _AT_ONCE_S, None, f"step() took {min(took_s):.2f} s {moment}")
        trial.alone(trial.prompts(1)[0], trial.sampling(4))


def _mixed_run(trial: EngineTrial) -> None:
    """Sequences of several lengths that come one after the other, and one step more than they need."""
    for place, prompt in enumerate(trial.prompts(trial.width, "mixed")):
        trial.submit(prompt, trial.sampling(9 + 4 * place))
        trial.step()
    trial.finish()
    trial.step()


def _dense(trial: EngineTrial) -> None:
    _mixed_run(trial)
    hold(not trial.strangers, None, f"deltas of sequences that were never submitted: {trial.strangers}")
    for sequence_id, deltas in trial.deltas.items():
        count = 0
        for delta in deltas:
            hold(delta.start == count, sequence_id, f"start is {delta.start} after {count} tokens, in {delta}")
            count += len(delta.token_ids)


def _one_final(trial: EngineTrial) -> None:
    _mixed_run(trial)
    for sequence_id, deltas in trial.deltas.items():
        reasons = [delta.finish_reason for delta in deltas]
        hold(all(reason is None for reason in reasons[:-1]), sequence_id, f"finish reasons, in order: {reasons}")
        hold(reasons[-1] in ("stop", "length"), sequence_id, f"it ended with {deltas[-1]}")


def _token_ids(trial: EngineTrial) -> None:
    _mixed_run(trial)
    for sequence_id in trial.deltas:
        ids = trial.ids(sequence_id)
        hold(all(isinstance(token, int) and token >= 0 for token in ids), sequence_id, f"token ids {ids}")


def _hold_length(trial: EngineTrial, sequence_id: int, max_tokens: int) -> None:
    """Exactly `max_tokens`, or fewer and an end of text."""
    count, reason = len(trial.ids(sequence_id)), trial.end(sequence_id).finish_reason
    seen = f"{count} tokens and finish_reason {reason!r} with max_tokens={max_tokens}"
    hold(count == max_tokens if reason == "length" else count <= max_tokens, sequence_id, seen)
    hold(reason in ("length", "stop"), sequence_id, seen)


def _max_tokens(trial: EngineTrial) -> None:
    prompt = trial.prompts(1, "length")[0]
    wanted = {trial.submit(prompt, trial.sampling(length)): length for length in (1, 2, 7, 33)[: trial.width]}
    trial.finish()
    for sequence_id, max_tokens in wanted.items():
        _hold_length(trial, sequence_id, max_tokens)


def _ignore_eos(trial: EngineTrial) -> None:
    prompt = trial.prompts(1, "end")[0]
    for first in range(1, 13, trial.width):
        lengths = range(first, min(first + trial.width, 13))
        wanted = {trial.submit(prompt, trial.sampling(length)): length for length in lengths}
        trial.finish()
        for sequence_id, max_tokens in wanted.items():
            reason = trial.end(sequence_id).finish_reason
            hold(reason == "length", sequence_id, f"finish_reason {reason!r} with ignore_eos, {max_tokens=}")
            _hold_length(trial, sequence_id, max_tokens)


def _hold_cancelled(trial: EngineTrial, sequence_id: int) -> None:
    """One step, in which the sequence that was aborted ends."""
    stepped = [delta for delta in trial.step() if delta.sequence_id == sequence_id]
    ended = bool(stepped) and stepped[-1].finish_reason == "cancelled"
    hold(ended, sequence_id, f"the step after abort() gave {stepped}")
    again = [delta for delta in trial.step() if delta.sequence_id == sequence_id]
    hold(not again, sequence_id, f"after its last delta it gave {again}")


def _abort(trial: EngineTrial) -> None:
    sequence_id = trial.start(64)
    trial.engine.abort(sequence_id)
    _hold_cancelled(trial, sequence_id)
    hold(trial.step() == [], sequence_id, "step() gave more deltas although nothing runs")


def _abort_before_step(trial: EngineTrial) -> None:
    sequence_id = trial.submit(trial.prompts(1)[0], trial.sampling(64))
    trial.engine.abort(sequence_id)
    _hold_cancelled(trial, sequence_id)


def _abort_anything(trial: EngineTrial) -> None:
    trial.engine.abort(2**62)
    hold(trial.step() == [], None, "step() gave deltas after abort() of an unknown sequence")
    finished = trial.submit(trial.prompts(1)[0], trial.sampling(2))
    trial.finish(finished)
    count = len(trial.deltas[finished])
    twice = trial.start(64)
    for sequence_id in (finished, twice, twice, 2**62):
        trial.engine.abort(sequence_id)
    _hold_cancelled(trial, twice)
    trial.engine.abort(twice)
    hold(trial.step() == [], twice, "step() gave deltas after abort() of a cancelled sequence")
    late = trial.deltas[finished][count:]
    hold(not late, finished, f"abort() after its end gave {late}")


def _abort_spares_neighbours(trial: EngineTrial) -> None:
    if trial.width < 2:
        return
    victim = trial.start(64)
    prompt, sampling = trial.prompts(1, "spared")[0], trial.sampling(16)
    spared = trial.submit(prompt, sampling)
    trial.step()
    trial.engine.abort(victim)
    trial.finish(spared)
    _hold_length(trial, spared, 16)
    if trial.engine.capabilities.exact:
        _hold_same(spared, trial.ids(spared), trial.alone(prompt, sampling), "beside an aborted neighbour")


def _hold_same(sequence_id: int, seen: tuple[int, ...], expected: tuple[int, ...], where: str) -> None:
    hold(seen == expected, sequence_id, f"{where} it gave {seen}, but alone {expected}")


def _hold_company_changes_nothing(trial: EngineTrial, seeds: list[int | None], salt: str) -> None:
    """The same sequences alone, all at once, and one after the other beside neighbours that come and go."""
    prompts = trial.prompts(len(seeds), salt)
    lengths = [24 - 3 * place for place in range(len(seeds))]
    asked = [(p, trial.sampling(n, seed)) for p, n, seed in zip(prompts, lengths, seeds, strict=True)]
    expected = [trial.alone(*what) for what in asked]
    together = [trial.submit(*what) for what in asked]
    trial.finish()
    staggered = []
    for what in reversed(asked):
        staggered.append(trial.submit(*what))
        trial.step()
        trial.step()
    trial.finish()
    for place, answer in enumerate(expected):
        _hold_same(together[place], trial.ids(together[place]), answer, "in a batch")
        _hold_same(staggered[-1 - place], trial.ids(staggered[-1 - place]), answer, "in a batch that changes")


def _greedy(trial: EngineTrial) -> None:
    _hold_company_changes_nothing(trial, [None] * trial.width, "greedy")
    if trial.width < 2:
        return
    for prompt in trial.prompts(3, "twins"):
        sampling = trial.sampling(24)
        expected = trial.alone(prompt, sampling)
        first = trial.submit(prompt, sampling)
        trial.step()  # a prefix cache may hand the second what the first has computed so far
        second = trial.submit(prompt, sampling)
        trial.finish()
        for twin in (first, second):
            _hold_same(twin, trial.ids(twin), expected, "beside a twin that is one step apart")


def _same_seed(trial: EngineTrial) -> None:
    _hold_company_changes_nothing(trial, [11 + 7 * place for place in range(trial.width)], "seeds")
    prompt, sampling = trial.prompts(1, "again")[0], trial.sampling(16, 5)
    first, second = trial.alone(prompt, sampling), trial.alone(prompt, sampling)
    hold(first == second, None, f"the same prompt and seed gave {first} and then {second}")


def _seeds_differ(trial: EngineTrial) -> None:
    for prompt in trial.prompts(3, "differ"):
        answers = {trial.alone(prompt, trial.sampling(24, seed)) for seed in (1, 2, 99_991)}
        if len(answers) > 1:
            return
    hold(
        False, None, f"three seeds at temperature 1 changed nothing of three prompts, the last of which gave {answers}"
    )


def _logprobs(trial: EngineTrial) -> None:
    prompts = trial.prompts(2, "logprobs")
    asked = trial.submit(prompts[0], trial.sampling(8, logprobs=True))
    if trial.width < 2:
        trial.finish()
    unasked = trial.submit(prompts[1], trial.sampling(8))
    trial.finish()
    for delta in trial.deltas[asked]:
        hold(len(delta.logprobs) == len(delta.token_ids), asked, f"logprobs and tokens differ in number: {delta}")
        sound = all(math.isfinite(logprob) and logprob <= 0 for logprob in delta.logprobs)
        hold(sound, asked, f"that is no logarithm of a probability: {delta}")
    told = [delta for delta in trial.deltas[unasked] if delta.logprobs]
    hold(not told, unasked, f"logprobs that nobody asked for: {told}")


def _try_length(trial: EngineTrial, num_prompt_tokens: int) -> int | None:
    """Submit a prompt of that many tokens for one token more; None if it was refused, as it should be."""
    prompt = [n % 97 % trial.vocab_size for n in range(num_prompt_tokens)]
    try:
        return trial.submit(prompt, trial.sampling(1))
    except SequenceFailed:
        return None


def _long_prompt(trial: EngineTrial) -> None:
    prompt, sampling = trial.prompts(1, "neighbour")[0], trial.sampling(12)
    neighbour = trial.submit(prompt, sampling)
    trial.step()
    length = trial.engine.capabilities.context_tokens + 1
    taken = _try_length(trial, length)
    hold(taken is None, taken, f"a prompt of {length} tokens was taken, with context_tokens={length - 1}")
    trial.finish(neighbour)
    _hold_length(trial, neighbour, 12)
    if trial.engine.capabilities.exact:
        _hold_same(neighbour, trial.ids(neighbour), trial.alone(prompt, sampling), "beside a refused prompt")


def _limit_prompt(trial: EngineTrial) -> None:
    capabilities = trial.engine.capabilities
    limit = min(capabilities.context_tokens, capabilities.kv_tokens)
    for length in (limit - 1, limit):
        sequence_id = _try_length(trial, length)
        if sequence_id is not None:
            trial.finish(sequence_id)
            _hold_length(trial, sequence_id, 1)
    after = trial.submit(trial.prompts(1)[0], trial.sampling(4))
    trial.finish(after)
    _hold_length(trial, after, 4)


def _no_leak(trial: EngineTrial) -> None:
    prompts = trial.prompts(16, "leak")
    width = min(16, trial.engine.capabilities.max_sequences)
    rounds = max(2, trial.num_sequences // width)
    before = 0
    for number in range(rounds):
        if number == rounds // 3:  # what an engine takes once is no leak: compiled kernels of each shape, say
            before = _resident_bytes()
        started = [trial.submit(prompts[place], trial.sampling(1 + place % 3)) for place in range(width)]
        if number % 4 == 0:
            trial.engine.abort(started[-1])
        trial.finish()
        trial.deltas.clear()
    hold(trial.step() == [], None, f"step() gave deltas after {rounds * width} sequences had ended")
    grown = _resident_bytes() - before
    seen = f"{rounds * width} short sequences left {grown / 2**20:.0f} MiB behind"
    hold(grown < _LEAK_BYTES, None, seen)


def _resident_bytes() -> int:
    """What this process occupies, or at its worst has occupied."""
    gc.collect()
    if resident := resident_bytes(os.getpid()):
        return resident
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _close(trial: EngineTrial) -> None:
    trial.alone(trial.prompts(1)[0], trial.sampling(2))
    trial.engine.close()
    trial.engine.close()


_SEEDED = frozenset({"seed", "temperature"})

laws: tuple[Law, ...] = (
    Law("idle_steps_are_empty", "step() returns [] at once when nothing runs", _idle_steps),
    Law("starts_are_dense", "tokens come in order, and each delta starts where the one before it ended", _dense),
    Law("one_final_delta", "a sequence has one delta with a finish_reason, and nothing after it", _one_final),
    Law("token_ids_are_natural", "token ids are whole numbers from 0", _token_ids),
    Law("max_tokens_is_exact", "a sequence ends by length after exactly max_tokens", _max_tokens),
    Law("ignore_eos_is_honoured", "an end of text ends nothing", _ignore_eos, frozenset({"ignore_eos"})),
    Law("abort_takes_one_step", "the step after abort() gives the last delta, which says cancelled", _abort),
    Law("abort_before_first_step", "a sequence may be aborted before anything ran", _abort_before_step),
    Law("abort_is_harmless", "abort() of an unknown or ended sequence, or twice, does nothing", _abort_anything),
    Law("abort_spares_neighbours", "the others of a batch go on untouched", _abort_spares_neighbours),
    Law("greedy_is_exact", "neighbours change nothing of a greedy sequence", _greedy, exact=True),
    Law("same_seed_same_ids", "a seed repeats its answer, in any company", _same_seed, _SEEDED, exact=True),
    Law("seeds_differ", "another seed gives another answer", _seeds_differ, _SEEDED),
    Law("logprobs_when_asked", "one logprob a token, and only when asked", _logprobs, frozenset({"logprobs"})),
    Law("long_prompt_is_refused", "submit() raises SequenceFailed, and the others go on", _long_prompt),
    Law("prompt_of_the_limit", "a prompt as long as the context runs or is refused, and no more", _limit_prompt),
    Law("nothing_leaks", "many short sequences leave an idle engine and no memory behind", _no_leak),
    Law("closing_twice_is_harmless", "close() may be called again", _close),
    *sampling_laws,
    *grammar_laws,
)
