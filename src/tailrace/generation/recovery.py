"""After an engine dies: resumes its streams on the next engine, and finds the request that kills engines.

Usually the engine was killed from outside, and all its streams run again at once. But a request may have crashed the
engine or made it hang, and would do so again. Each stream on the dead engine is a *suspect*, until it has passed its
position: the number of its tokens when the engine died. A suspect is blamed, and ended as `poison_request`, only if an
engine dies again while this suspect runs alone.

After a crash:

1. Likely suspects run in trials: each alone on the engine, only past its position, the youngest first. Likely are those
   that had just begun, and those that were at the same position when an earlier engine died. Meanwhile all streams
   wait.
2. All remaining streams run again together. The gate opens when each has a new token, so that streams make progress
   even if the next engine dies too.
3. If the engine crashes in step 2, both steps are done once more. If it crashes again, or no suspect is left to try,
   the streams run in halves, each half to its end; a half that crashes is halved again. This finds a request that kills
   only late, and separates two that kill only together.

Meanwhile new requests wait, but only for a limited time. After it, a running trial is stopped without a result, all
streams run (or the half whose turn it is), and the gate opens. From then on nothing runs alone, so nothing is blamed.
If the engine crashes before all streams have a new token, the next limit is twice as long, up to `_MAX_HOLD_S`, so that
a slow suspect is found. If the limit stopped the trials when some were done, the next trials continue with the rest,
and do not count as one of the two times: running in halves would delay the streams more.

An engine that was killed from outside is weak evidence. The second time that it happens to a stream at one position,
the stream is tried. The fifth time it is blamed; the last three times are trials.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tailrace.errors import EngineLost, PoisonRequest
from tailrace.generation.blame import Blame, Culprit
from tailrace.generation.choice import Choice
from tailrace.generation.run import Run, SequenceRunner
from tailrace.generation.trial import Suspect, Trial

__all__ = ["Recovery"]

_EARLY_TOKENS = 16  # suspects with fewer tokens are likely, and their trials are short
_ROUNDS = 2  # of trials, before streams run in halves
_KILLS_TO_TRY = 2  # engines killed from outside, at one position
_KILLS_TO_BLAME = 5
_MAX_PAUSE_S = 15.0
_HOLD_S = 30.0  # how long new requests wait for a recovery, not counting the loading of engines
_MAX_HOLD_S = 480.0


@dataclass(slots=True)
class _Deaths:
    """The engines in a row that died while a stream was at one position."""

    position: int = -1  # tokens generated in all its sequences
    num_engines: int = 0
    num_killed: int = 0  # those of them that were killed from outside
    was_tried: bool = False  # the stream survived a trial; reset when it makes progress


class Recovery:
    """The streams that wait for the next engine, and the suspects.

    Proven kills go into `blame`. `on_done` is called when new requests may start, with the seconds for which callers
    who kill engines have to wait: the duration of this recovery if it blamed a request, otherwise 0. `on_caught_up` is
    called later, when all streams have passed the position where their engine died.
    """

    def __init__(
        self,
        engine: SequenceRunner,
        new_sequence_id: Callable[[], int],
        blame: Blame,
        *,
        on_done: Callable[[float], None],
        on_caught_up: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._new_sequence_id = new_sequence_id
        self._blame = blame
        self._on_done = on_done
        self._on_caught_up = on_caught_up
        self._is_ready = False
        self._crashed = False  # how the last engine died
        self._lost_s: float | None = None  # when the first engine of this recovery died
        self._found_culprit = False
        self._num_crashes = 0  # since the last complete recovery
        self._num_rounds = 0  # of trials, since the last complete recovery
        self._num_tried = 0  # in this round
        self._deaths: WeakKeyDictionary[Run, _Deaths] = WeakKeyDictionary()  # suspects outlive their streams
        self._lost_runs: dict[Run, Suspect] = {}  # those on the engine that died last
        self._suspended: dict[Run, None] = {}  # in order of suspension
        self._trials: deque[Suspect] = deque()  # not yet started
        self._trial: Trial | None = None
        self._groups: deque[list[Run]] = deque()  # not yet started; each runs to its end before the next
        self._group: list[Run] = []  # the running one
        self._catching_up: set[Run] = set()  # resumed, and not past the position where their engine died
        self._unproven: set[Run] = set()  # resumed after a crash, and without a new token
        self._proven: set[Run] = set()
        self._alone: Run | None = None  # unproven, and alone on the engine
        self._hold_s = _HOLD_S
        self._hold_left_s = _HOLD_S  # the rest of `_hold_s`
        self._ready_s = 0.0  # when the engine became ready
        self._is_hold_over = False  # new requests have waited for `_hold_s`
        self._is_open = False  # new requests start
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_trying(self) -> bool:
        """Whether a trial runs, or suspects may need one. Their streams may have ended."""
        return bool(self._lost_runs or self._trials or self._trial is not None)

    # The engine

    def on_engine_down(self, *, crashed: bool) -> None:
        """The engine died: it crashed or hung, or it was killed from outside. Called before `on_lost`."""
        self._crashed = crashed
        self._stop_timer()
        if self._is_open:
            if self._is_hold_over:
                self._hold_s = min(2 * self._hold_s, _MAX_HOLD_S)
            self._hold_left_s = self._hold_s
        elif self._is_ready:
            self._hold_left_s -= time.monotonic() - self._ready_s
        self._is_ready = self._is_open = self._is_hold_over = False
        if self._lost_s is None:
            self._lost_s = time.monotonic()

    def on_lost(self, run: Run, choices: Collection[Choice]) -> None:
        """The engine died while it had the sequences of these choices; of none if it was gone before they were
        submitted. Unless the stream is complete, it waits to run again on the next engine. May be called more than
        once for one death."""
        if not run.is_complete:
            self._suspended[run] = None
        if not choices or run in self._lost_runs:
            return
        sequences = tuple(choice.sequence for choice in choices)
        position = sum(choice.num_generated for choice in choices)
        suspect = Suspect(run, Culprit.of_record(run.record), sequences, position)
        deaths = self._deaths.setdefault(run, _Deaths())
        if run.num_generated != deaths.position:
            deaths.position, deaths.num_engines, deaths.num_killed = run.num_generated, 0, 0
        deaths.num_engines += 1
        deaths.num_killed += not self._crashed
        self._lost_runs[run] = suspect
        if run is self._alone and self._crashed:
            self._blame_request(suspect)

    def resume(self) -> None:
        """An engine is ready: start trials, or run the streams again."""
        self._is_ready = True
        self._ready_s = time.monotonic()
        lost, self._lost_runs = list(self._lost_runs.values()), {}
        suspects = [suspect for suspect in lost if suspect.run not in self._proven]
        group, self._group, self._alone = self._group, [], None
        self._unproven.clear()
        self._catching_up.clear()
        if group:
            # Streams that started while the gate was open belong to the group.
            group = list(dict.fromkeys((*group, *(suspect.run for suspect in lost))))
            self._groups.extendleft(reversed(self._halves(group) if self._crashed else [group]))
        elif lost and self._crashed:
            self._plan(suspects)
        elif lost:
            self._trials.extend(one for one in suspects if self._deaths[one.run].num_killed >= _KILLS_TO_TRY)
        self._stop_timer()
        if self._hold_left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._hold_left_s, self._on_hold_timeout)
            self._advance()
        else:
            self._on_hold_timeout()

    # The streams

    def on_progress(self, run: Run) -> bool:
        """A watched stream has a new token. Returns whether it is past its position and proven."""
        deaths = self._deaths.get(run)  # None: it is from an earlier process
        # `continue_from` counts from 0.
        is_past = deaths is None or run.num_generated > deaths.position or run.continuity == "continued"
        if is_past and run in self._catching_up:
            self._catching_up.discard(run)
            self._check_caught_up()
        if is_past and run in self._unproven and not self._group:
            self._prove(run)
        return is_past and run not in self._unproven

    def on_released(self, run: Run) -> None:
        """The stream has ended, and has left the engine."""
        was_catching_up = run in self._suspended or run in self._catching_up
        self._suspended.pop(run, None)
        self._catching_up.discard(run)
        if run in self._unproven and self._is_ready:
            self._prove(run)
        self._proven.discard(run)
        if was_catching_up:
            self._check_caught_up()

    def abandon(self) -> None:
        """No engine is expected. Forget all waiting streams."""
        self._is_ready = False
        self._stop_timer()
        if self._trial is not None:
            self._trial.forget()
            self._trial = None
        waiting = (self._lost_runs, self._suspended, self._trials, self._groups, self._group)
        for runs in (*waiting, self._catching_up, self._unproven):
            runs.clear()
        self._alone = None

    # Steps

    def _plan(self, suspects: list[Suspect]) -> None:
        """Plan the trials or the halves after a crash with these suspects."""
        self._num_crashes += 1
        likely = [one for one in suspects if self._is_likely(one)]
        if self._num_rounds == _ROUNDS or (self._num_crashes > 1 and not likely):
            self._groups.extend(self._halves([run for run in self._suspended if run.is_suspended]))
        else:
            self._num_rounds += 1
            self._num_tried = 0
            self._trials = deque(sorted(likely, key=lambda one: one.run.times.arrived_s)[::-1])

    def _is_likely(self, suspect: Suspect) -> bool:
        deaths = self._deaths[suspect.run]
        return not deaths.was_tried and (suspect.position < _EARLY_TOKENS or deaths.num_engines > 1)

    def _halves(self, runs: list[Run]) -> list[list[Run]]:
        """Split into an older and a younger half."""
        runs = sorted((run for run in runs if run.end is None), key=lambda run: run.times.arrived_s)
        middle = (len(runs) + 1) // 2
        return [half for half in (runs[:middle], runs[middle:]) if half]

    def _advance(self) -> None:
        """Start the next step, if the current one is over."""
        if not self._is_ready or self._trial is not None or self._unproven:
            return
        if self._trials:
            self._start_trial(self._trials.popleft())
            return
        self._group = []
        while self._groups and not self._unproven:
            self._group = [run for run in self._groups.popleft() if run.is_suspended]
            self._resume_all(self._group, must_prove=True)
        if not self._unproven and not self._groups:
            self._group = []
            self._resume_all([run for run in self._suspended if run.is_suspended], must_prove=self._num_crashes > 0)
        if not self._unproven:
            self._finish()

    def _resume_all(self, runs: list[Run], *, must_prove: bool) -> None:
        """Resume all these streams at once."""
        if must_prove:
            self._unproven.update(runs)
            self._alone = runs[0] if len(runs) == 1 and not self._is_hold_over else None
        self._catching_up.update(runs)
        for run in sorted(runs, key=lambda run: not run.was_alone):
            self._suspended.pop(run, None)
            run.resume(is_watched=True)

    def _prove(self, run: Run) -> None:
        self._unproven.discard(run)
        self._proven.add(run)
        if run in self._deaths:
            self._deaths[run].was_tried = False
        if run is self._alone:
            self._alone = None
        self._advance()

    def _start_trial(self, suspect: Suspect) -> None:
        trial = Trial(
            suspect, self._engine, self._new_sequence_id, on_over=self._on_trial_over, on_death=self._on_trial_death
        )
        try:
            trial.start()
        except EngineLost:
            self._trials.appendleft(suspect)
        else:
            self._trial = trial

    def _on_trial_over(self) -> None:
        assert self._trial is not None
        trial, self._trial = self._trial, None
        if trial.is_complete:
            deaths = self._deaths[trial.suspect.run]
            deaths.was_tried, deaths.num_engines, deaths.num_killed = True, 0, 0
            self._num_tried += 1
        self._advance()
        if self._is_hold_over:
            self._open()

    def _on_trial_death(self) -> None:
        assert self._trial is not None
        trial, self._trial = self._trial, None
        deaths, is_same_position = self._deaths[trial.suspect.run], trial.num_tokens == trial.suspect.position
        deaths.num_killed = deaths.num_killed + 1 if is_same_position else 0
        if self._crashed or deaths.num_killed >= _KILLS_TO_BLAME:
            self._blame_request(trial.suspect)
        else:
            self._trials.appendleft(trial.suspect)

    def _blame_request(self, suspect: Suspect) -> None:
        self._found_culprit = True
        self._num_tried += 1
        self._blame.add(suspect.culprit)
        self._engine.failures = 0  # the request failed, and not the engine
        suspect.run.fail(PoisonRequest("This request stopped the engine while nothing else ran on it."))

    def _on_hold_timeout(self) -> None:
        """New requests have waited for the longest time: stop trials, and open the gate."""
        self._is_hold_over = True
        self._alone = None
        if self._num_tried and (self._trials or self._trial is not None):
            self._num_rounds -= 1  # the next trials continue with the rest
            self._num_tried = 0
        self._trials.clear()
        if self._trial is not None:
            self._trial.stop()
        else:
            self._advance()
            self._open()

    def _finish(self) -> None:
        """All streams run again, and are proven."""
        self._stop_timer()
        self._num_crashes = self._num_rounds = 0
        self._proven.clear()
        self._hold_s, self._is_hold_over = _HOLD_S, False
        self._open()

    def _open(self) -> None:
        """Let new requests start."""
        self._is_open = True
        pause_s = time.monotonic() - self._lost_s if self._lost_s is not None and self._found_culprit else 0.0
        self._lost_s, self._found_culprit = None, False
        self._on_done(min(pause_s, _MAX_PAUSE_S))
        self._check_caught_up()

    def _check_caught_up(self) -> None:
        """Call `on_caught_up` if all streams are past the position where their engine died."""
        waits = self._catching_up or self._trials or self._groups or self._trial is not None
        if self._is_open and not waits and not any(run.is_suspended for run in self._suspended):
            self._on_caught_up()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
