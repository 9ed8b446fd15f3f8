"""Kills a worker repeatedly, and compares the delivered tokens with those of the next worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from tailrace.engines import EngineSpec
from tailrace.engines.certificate import Finding
from tailrace_outer.measure.certify.killed_worker import RestartedWorker, SequenceTranscript, continuation_of, replay_of
from tailrace_outer.measure.certify.prompt_maker import PromptMaker
from tailrace_outer.measure.certify.situations import Situation, situations

__all__ = ["Tally", "certify"]

_WIDTH = 16  # sequences per kill, limited by the engine
_VISITORS, _VISIT_TOKENS = 4, 6  # beside a single sequence
_REFILL_EVERY = 4  # re-prefills are tested after every fourth kill of a situation


@dataclass(slots=True)
class Tally:
    """The counts of one row."""

    situation: Situation
    wanted: int
    kills: int = 0
    runs: int = 0
    differences: int = 0
    refill_runs: int = 0
    refill_differences: int = 0

    @property
    def is_open(self) -> bool:
        """Whether more kills are needed. Kills that interrupted no sequence are repeated, up to a limit."""
        return self.runs < self.wanted and self.kills < 4 * self.wanted + 8

    def finding(self) -> Finding:
        return Finding(self.situation.name, self.runs, self.differences, self.refill_runs, self.refill_differences)


async def certify(
    spec: EngineSpec,
    prompts: PromptMaker,
    *,
    runs: int,
    seed: int,
    max_tokens: int,
    on_progress: Callable[[str, int], None] = lambda name, num_runs: None,
) -> tuple[str, list[Finding]]:
    """Measure an engine with `runs` replays in total. Returns the engine's name and a finding for each situation.

    Raises: ModelError if the engine does not load or a sequence fails.
    """
    draw = Random(seed)
    async with RestartedWorker.begin(spec) as worker:
        rows = situations(worker.capabilities, max_tokens)
        shares = sum(row.share for row in rows)
        tallies = [Tally(row, max(1, round(runs * row.share / shares))) for row in rows]
        while open_tallies := [tally for tally in tallies if tally.is_open]:
            for tally in open_tallies:  # alternating, so that changes of the machine's speed affect all situations
                before = tally.runs
                await _Kill(worker, prompts, draw, tally, ["", *filter(None, spec.adapters)]).run()
                on_progress(tally.situation.name, tally.runs - before)
        return worker.capabilities.engine, [tally.finding() for tally in tallies]


class _Kill:
    """One kill of a worker with several sequences. The interrupted sequences are replayed."""

    def __init__(
        self, worker: RestartedWorker, prompts: PromptMaker, draw: Random, tally: Tally, adapters: list[str]
    ) -> None:
        self._worker = worker
        self._prompts = prompts
        self._draw = draw
        self._tally = tally
        self._situation = tally.situation
        self._adapters = adapters  # names, which sequences have by turns

    async def run(self) -> None:
        answers = await self._answers()
        await self._start(answers)
        chosen = self._draw.choice(answers)
        await chosen.reach(self._draw.randint(1, (chosen.sampling.max_tokens or 2) - 1))
        cut_off = [answer for answer in answers if answer.ids and not answer.is_over]
        await self._worker.kill()
        self._draw.shuffle(cut_off)
        cut_off = cut_off[: self._tally.wanted - self._tally.runs]
        replays = [replay_of(answer) for answer in cut_off]
        await self._finish(replays)
        pairs = list(zip(cut_off, replays, strict=True))
        self._tally.runs += len(pairs)
        self._tally.differences += sum(new.ids[: len(old.ids)] != old.ids for old, new in pairs)
        if self._tally.kills % _REFILL_EVERY == 0:
            await self._refill([(old, new) for old, new in pairs if new.ids[: len(old.ids)] == old.ids])
        self._tally.kills += 1

    async def _refill(self, pairs: list[tuple[SequenceTranscript, SequenceTranscript]]) -> None:
        """Compare re-prefills. Skips grammars, which would start from the beginning again."""
        pairs = [pair for pair in pairs if pair[0].sampling.grammar is None]
        others = [continuation_of(old) for old, _ in pairs]
        await self._finish(others)
        self._tally.refill_runs += len(pairs)
        self._tally.refill_differences += sum(
            other.ids != new.ids[len(old.ids) :] for other, (old, new) in zip(others, pairs, strict=True)
        )

    async def _finish(self, answers: list[SequenceTranscript]) -> None:
        await self._start(answers)
        for answer in answers:
            await answer.reach(answer.sampling.max_tokens or 0)

    async def _start(self, answers: list[SequenceTranscript]) -> None:
        is_visited = self._situation.company == "visited"
        count = self._draw.randint(1, _VISITORS) if is_visited else len(answers)
        neighbours = [self._answer(ids, index) for index, ids in enumerate(self._questions(count))]
        if is_visited:
            for neighbour in neighbours:
                neighbour.sampling = replace(neighbour.sampling, max_tokens=self._draw.randint(1, _VISIT_TOKENS))
        await self._worker.run(answers, self._situation.company, self._draw, neighbours)

    async def _answers(self) -> list[SequenceTranscript]:
        company, capabilities = self._situation.company, self._worker.capabilities
        width = 1 if company in ("alone", "visited") else min(_WIDTH, capabilities.max_sequences // 2)
        prompts = self._situation.prompts(self._prompts, self._draw, width)
        answers = [self._answer(ids, index) for index, ids in enumerate(prompts)]
        if not self._situation.has_first_turn:
            return answers
        await self._finish(answers)
        follow_up = self._questions(width)
        return [
            SequenceTranscript(
                (*first.prompt_ids, *first.ids, *ids),
                replace(first.sampling, seed=self._seed()),
                adapter=first.adapter,
            )
            for first, ids in zip(answers, follow_up, strict=True)
        ]

    def _questions(self, count: int) -> list[tuple[int, ...]]:
        return [self._prompts.ids(self._prompts.question(self._draw)) for _ in range(count)]

    def _answer(self, ids: tuple[int, ...], index: int) -> SequenceTranscript:
        samplings = self._situation.samplings
        sampling = samplings[(index + self._tally.kills) % len(samplings)]
        adapter = self._adapters[(index + self._tally.kills) % len(self._adapters)]
        return SequenceTranscript(ids, replace(sampling, seed=self._seed()), adapter=adapter)

    def _seed(self) -> int:
        return self._draw.randrange(2**32)
