"""After an engine's death: brings its streams back behind the next one, and finds the request that kills engines.

Usually somebody killed it, or memory ran out, and all its streams run again at once. A request may have killed it,
though, and would kill the next one as well. So each stream remembers the place (tokens of its answer) that it had come
to when its engine died; those are suspects that die with an engine at the same place again, or are alone with one that
crashes.

1. An engine that crashed by itself may have been taken down by what it had been given last: the youngest stream is held
   back until the others are past the places where they were.
2. The only one that was at the same place for the second time is ended as `poison_request`, and the same request is
   refused for a while. When the engine was killed rather than crashed, it is the third time that counts: whoever kills
   engines at random hits the same place twice now and then.
3. Where several were, they run again one after the other, each until it is past its place.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from tailrace.errors import PoisonRequest
from tailrace.generation.run import Run
from tailrace.streams import Record

__all__ = ["Recovery"]

_QUARANTINE_S = 600.0
_MAX_QUARANTINED = 1000
_CRASHES = 2  # at one place
_KILLS = 3


class Recovery:
    """The streams that wait for an engine to come back, and those that have to prove themselves on it.

    `on_done` is called when all of them run again.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._stranded: list[Run] = []
        self._groups: deque[list[Run]] = deque()  # to be resumed one after the other
        self._unproved: set[Run] = set()  # resumed, and not past the place where an engine died under them
        self._poisons: OrderedDict[bytes, float] = OrderedDict()  # fingerprint to end of quarantine

    def check(self, record: Record) -> None:
        """Raises: PoisonRequest if such a request has killed its engine twice."""
        if self._poisons and self._poisons.get(_fingerprint(record), 0.0) > time.monotonic():
            raise PoisonRequest("This request has stopped the engine twice, and is refused for some minutes.")

    def strand(self, run: Run) -> None:
        """The engine died under this one."""
        self._stranded.append(run)

    def resume(self, *, crashed: bool) -> None:
        """There is an engine again, after one that had crashed by itself, or else was killed."""
        fallen, self._stranded = [run for run in self._stranded if run.is_stranded], []
        suspects = [run for run in fallen if run in self._unproved] or fallen
        for run in fallen:
            run.fell(was_it=crashed and suspects == [run])
        self._unproved.clear()  # else the end of one that is quarantined would bring on the next group
        struck = [run for run in suspects if run.strikes >= (_CRASHES if crashed else _KILLS)]
        if len(struck) == 1:
            self._quarantine(struck[0])
        waiting = [run for group in self._groups for run in group]
        self._groups = deque(self._in_groups([run for run in (*fallen, *waiting) if run.is_stranded], crashed))
        self._next()

    def moved(self, run: Run) -> None:
        """It is past its place, or has ended."""
        if run in self._unproved:
            self._unproved.discard(run)
            if not self._unproved and not self._stranded:
                self._next()

    def abandon(self) -> None:
        """Forget those that wait: they have been ended."""
        self._stranded, self._groups = [], deque()
        self._unproved.clear()

    def _in_groups(self, runs: list[Run], crashed: bool) -> Iterable[list[Run]]:
        runs.sort(key=lambda run: run.age)
        suspects = [run for run in runs if run.strikes >= _CRASHES]
        if len(suspects) > 1:
            return [[run for run in runs if run not in suspects], *([run] for run in suspects)]
        if crashed and len(runs) > 1:
            return [runs[:-1], runs[-1:]]
        return [runs]

    def _next(self) -> None:
        """Resume the next group; the last one need not be waited for, unless it has something to prove."""
        while self._groups and not self._unproved:
            group = [run for run in self._groups.popleft() if run.is_stranded]
            watched = [run for run in group if self._groups or run.strikes >= _CRASHES]
            self._unproved.update(watched)
            for run in group:
                run.resume(is_watched=run in self._unproved)
        if not self._groups and not self._unproved:
            self._on_done()

    def _quarantine(self, run: Run) -> None:
        self._poisons[_fingerprint(run.log.record)] = time.monotonic() + _QUARANTINE_S
        if len(self._poisons) > _MAX_QUARANTINED:
            self._poisons.popitem(last=False)
        run.fail("poison_request", "This request stopped the engine twice, and is not tried again.")


def _fingerprint(record: Record) -> bytes:
    """What makes a request the same one, whatever its seed."""
    asked = [[prompt.ids for prompt in record.prompts], replace(record.sampling, seed=None)]
    return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()
