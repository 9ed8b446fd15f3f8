"""After an engine's death: brings its streams back behind the next one, and finds the request that kills engines.

Usually somebody killed the engine, or memory ran out, and all its streams run again at once. A request may have crashed
it or made it hang, though, and would do that again. Whoever was in the engine is a *suspect*, until it is seen to come
past the position (tokens that the engine had given of it) where the engine died. A suspect is named, and ended as
`poison_request`, only when an engine dies again while that suspect alone runs.

After a crash:

1. The likely suspects are tried, the youngest first, each alone on the engine and each only past its position: those
   that had just begun, and those that were at the same position when an engine died before. Their streams wait
   meanwhile.
2. All streams that are left run again together. The gate is opened when each has come on by a token, so that whoever
   kills the next engine finds them further on.
3. If the engine crashes in step 2, both steps are done once more. If it crashes again, or nobody is left to try, the
   streams run in halves, each half to its end; a half that crashes is halved again. That finds a request that kills
   only late, and it keeps apart two that kill only together.

New requests wait meanwhile, but only for a limited time. When it is over, a trial is stopped and counts for nothing,
all streams run (or the half whose turn it is), and the gate is opened. From then on nothing runs alone, so nobody is
named. If the engine crashes before all streams have come on, the next limit is twice as long, up to `_MAX_HOLD_S`: a
request that is slow to come to its position is found then. Trials that the limit has cut short, when some were done, go
on with those that are left and do not count as one of the two times: halves would hold up the streams for longer.

An engine that was killed from outside is little evidence. The second time that it happens to a stream at one
position, this stream is tried, and it is named at the fifth time, the last three of them alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from tailrace.errors import EngineLost, PoisonRequest
from tailrace.generation.blame import Blame
from tailrace.generation.engine_side import EngineSide, SequenceRunner
from tailrace.generation.trial import Suspect, Trial

__all__ = ["Recovery"]

_BEGUN_TOKENS = 16  # whoever has given fewer is tried first: it is likely, and its trial is short
_ROUNDS = 2  # of trials, before streams run in halves
_KILLS_TO_TRY = 2  # by somebody else, at one position
_KILLS_TO_NAME = 5
_MAX_REST_S = 15.0
_HOLD_S = 30.0  # how long new requests wait for a recovery, the loading of engines not counted
_MAX_HOLD_S = 480.0


class Recovery:
    """The streams that wait for an engine to come back, and those that have to prove themselves on it.

    What is proven goes into `blame`. `on_done` is called when new requests may begin, with the seconds for which
    callers who keep killing engines have to wait now: as long as this recovery took if it named a request, or else 0.
    `on_caught_up` is called after that, when all streams have come past the position where their engine died.
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
        self._lost_s: float | None = None  # when the first engine died of those that this recovery is about
        self._has_named = False
        self._num_crashes = 0  # since everybody was through the last time
        self._num_rounds = 0  # of trials, since then
        self._num_tried = 0  # in this round
        self._lost_runs: dict[EngineSide, Suspect] = {}  # who was in the engine that died last
        self._suspended: dict[EngineSide, None] = {}  # who waits, in order of suspension
        self._trials: deque[Suspect] = deque()  # to come
        self._trial: Trial | None = None
        self._groups: deque[list[EngineSide]] = deque()  # to run to their end, one after the other
        self._group: list[EngineSide] = []  # the one that does
        self._behind: set[EngineSide] = set()  # resumed, and not yet past the position where their engine died
        self._unproven: set[EngineSide] = set()  # resumed after a crash, and not seen to come on
        self._proven: set[EngineSide] = set()
        self._alone: EngineSide | None = None  # nothing else is in the engine, and it is not proved
        self._hold_s = _HOLD_S
        self._left_s = _HOLD_S  # of that
        self._ready_s = 0.0  # since when there is an engine
        self._is_late = False  # the time is over
        self._is_open = False  # new requests begin
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_trying(self) -> bool:
        """A suspect is on the engine, or will be; nobody else may know of it."""
        return bool(self._lost_runs or self._trials or self._trial is not None)

    # What the engine does

    def lost(self, *, crashed: bool) -> None:
        """An engine that ran died: it crashed or hung, or else was killed from outside. Its streams hear of it next."""
        self._crashed = crashed
        self._stop_timer()
        if self._is_open:
            if self._is_late:
                self._hold_s = min(2 * self._hold_s, _MAX_HOLD_S)
            self._left_s = self._hold_s
        elif self._is_ready:
            self._left_s -= time.monotonic() - self._ready_s
        self._is_ready = self._is_open = self._is_late = False
        if self._lost_s is None:
            self._lost_s = time.monotonic()

    def on_engine_lost(self, run: EngineSide) -> None:
        """The engine died with some of this one's sequences in it. Called for each of them, while they are known."""
        if run in self._lost_runs:
            return
        sequences = tuple(choice.sequence for choice in run.choices if choice.is_on_engine)
        position = sum(choice.num_generated for choice in run.choices if choice.is_on_engine)
        suspect = Suspect(run, run.culprit, sequences, position)
        if run.num_generated != run.lost_at:
            run.num_losses = run.num_kills = 0
        run.num_losses += 1
        run.num_kills += not self._crashed
        run.lost_at = run.num_generated
        self._lost_runs[run] = suspect
        if run is self._alone and self._crashed:
            self._name(suspect)

    def on_suspended(self, run: EngineSide) -> None:
        """This one has to run again, on another engine."""
        self._suspended[run] = None

    def resume(self) -> None:
        """There is an engine."""
        self._is_ready = True
        self._ready_s = time.monotonic()
        lost, self._lost_runs = list(self._lost_runs.values()), {}
        suspects = [suspect for suspect in lost if suspect.run not in self._proven]
        group, self._group, self._alone = self._group, [], None
        self._unproven.clear()
        self._behind.clear()
        if group:
            # Those who came when the gate was open belong to it.
            group = list(dict.fromkeys((*group, *(suspect.run for suspect in lost))))
            self._groups.extendleft(reversed(self._halves(group) if self._crashed else [group]))
        elif lost and self._crashed:
            self._suspect(suspects)
        elif lost:
            self._trials.extend(one for one in suspects if one.run.num_kills >= _KILLS_TO_TRY)
        self._stop_timer()
        if self._left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._be_late)
            self._next()
        else:
            self._be_late()

    # What the streams do

    def on_progress(self, run: EngineSide) -> bool:
        """It has given a token more. Returns whether there is nothing left to see: it has come past its position, and
        has proved itself."""
        is_past = run.num_generated > run.lost_at or run.continuity == "continued"  # that one counts anew
        if is_past and run in self._behind:
            self._behind.discard(run)
            self._look_around()
        if is_past and run in self._unproven and not self._group:
            self._prove(run)
        return is_past and run not in self._unproven

    def on_released(self, run: EngineSide) -> None:
        """It has ended, and the engine is done with it."""
        is_waited_for = run in self._suspended or run in self._behind
        self._suspended.pop(run, None)
        self._behind.discard(run)
        if run in self._unproven and self._is_ready:
            self._prove(run)
        self._proven.discard(run)
        if is_waited_for:
            self._look_around()

    def abandon(self) -> None:
        """There is no engine, and none is expected. Forget those that wait: they have been ended."""
        self._is_ready = False
        self._stop_timer()
        if self._trial is not None:
            self._trial.forget()
            self._trial = None
        waiting = (self._lost_runs, self._suspended, self._trials, self._groups, self._group)
        for those in (*waiting, self._behind, self._unproven):
            those.clear()
        self._alone = None

    # What follows from it

    def _suspect(self, suspects: list[Suspect]) -> None:
        """Plan what is to be done after a crash in which these were."""
        self._num_crashes += 1
        likely = [
            one
            for one in suspects
            if not one.run.was_tried and (one.position < _BEGUN_TOKENS or one.run.num_losses > 1)
        ]
        if self._num_rounds == _ROUNDS or (self._num_crashes > 1 and not likely):
            self._groups.extend(self._halves([run for run in self._suspended if run.is_suspended]))
        else:
            self._num_rounds += 1
            self._num_tried = 0
            self._trials = deque(sorted(likely, key=lambda one: one.run.age, reverse=True))

    def _halves(self, runs: list[EngineSide]) -> list[list[EngineSide]]:
        """The older ones and the younger ones."""
        runs = sorted((run for run in runs if run.end is None), key=lambda run: run.age)
        middle = (len(runs) + 1) // 2
        return [half for half in (runs[:middle], runs[middle:]) if half]

    def _next(self) -> None:
        """Go on, if what was begun is over."""
        if not self._is_ready or self._trial is not None or self._unproven:
            return
        if self._trials:
            self._try(self._trials.popleft())
            return
        self._group = []
        while self._groups and not self._unproven:
            self._group = [run for run in self._groups.popleft() if run.is_suspended]
            self._run(self._group, must_prove=True)
        if not self._unproven and not self._groups:
            self._group = []
            self._run([run for run in self._suspended if run.is_suspended], must_prove=self._num_crashes > 0)
        if not self._unproven:
            self._finish()

    def _run(self, runs: list[EngineSide], *, must_prove: bool) -> None:
        """Resume these, all at once."""
        if must_prove:
            self._unproven.update(runs)
            self._alone = runs[0] if len(runs) == 1 and not self._is_late else None
        self._behind.update(runs)
        for run in runs:
            self._suspended.pop(run, None)
            run.resume(is_watched=True)

    def _prove(self, run: EngineSide) -> None:
        self._unproven.discard(run)
        self._proven.add(run)
        run.was_tried = False
        if run is self._alone:
            self._alone = None
        self._next()

    def _try(self, suspect: Suspect) -> None:
        trial = Trial(suspect, self._engine, self._new_sequence_id, on_over=self._tried, on_death=self._died_on_trial)
        try:
            trial.start()
        except EngineLost:
            self._trials.appendleft(suspect)
        else:
            self._trial = trial

    def _tried(self) -> None:
        assert self._trial is not None
        trial, self._trial = self._trial, None
        if trial.is_complete:
            run = trial.suspect.run
            run.was_tried, run.num_losses, run.num_kills = True, 0, 0
            self._num_tried += 1
        self._next()
        if self._is_late:
            self._open()

    def _died_on_trial(self) -> None:
        assert self._trial is not None
        trial, self._trial = self._trial, None
        run, is_same_position = trial.suspect.run, trial.num_tokens == trial.suspect.position
        run.num_kills = run.num_kills + 1 if is_same_position else 0
        if self._crashed or run.num_kills >= _KILLS_TO_NAME:
            self._name(trial.suspect)
        else:
            self._trials.appendleft(trial.suspect)

    def _name(self, suspect: Suspect) -> None:
        self._has_named = True
        self._num_tried += 1
        self._blame.add(suspect.culprit)
        self._engine.failures = 0  # it is not the engine that fails
        suspect.run.fail(PoisonRequest("This request stopped the engine while nothing else ran on it."))

    def _be_late(self) -> None:
        """New requests have waited for long enough."""
        self._is_late = True
        self._alone = None
        if self._num_tried and (self._trials or self._trial is not None):
            self._num_rounds -= 1  # those who are left have their turn in the next
            self._num_tried = 0
        self._trials.clear()
        if self._trial is not None:
            self._trial.stop()
        else:
            self._next()
            self._open()

    def _finish(self) -> None:
        """All run again, and have come on."""
        self._stop_timer()
        self._num_crashes = self._num_rounds = 0
        self._proven.clear()
        self._hold_s, self._is_late = _HOLD_S, False
        self._open()

    def _open(self) -> None:
        """Let new requests begin."""
        self._is_open = True
        held_up_s = time.monotonic() - self._lost_s if self._lost_s is not None and self._has_named else 0.0
        self._lost_s, self._has_named = None, False
        self._on_done(min(held_up_s, _MAX_REST_S))
        self._look_around()

    def _look_around(self) -> None:
        """Tell when everybody is where they were."""
        waits = self._behind or self._trials or self._groups or self._trial is not None
        if self._is_open and not waits and not any(run.is_suspended for run in self._suspended):
            self._on_caught_up()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
