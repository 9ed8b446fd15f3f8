"""The models of one server: which are loaded, and which are unloaded to make room.

All models are served from the start: they are listed, their tokenizers are loaded, and their streams can be followed.
Only their engines, which are processes, are loaded and unloaded. The first model is loaded before requests are
accepted. Another model is loaded by the first request for it, which waits. With `--idle-unload-s` a model that was not
used for so long is unloaded. With `--memory-bytes` idle models are unloaded to make room, the longest unused first, and
then those that only have requests in the background. These wait until their model has room again.

A running server can get further models, and give models up. The streams of such a model go on to their ends. Then its
engine is unloaded.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from tailrace.assembly.served import NamedModel, Served
from tailrace.errors import AdmissionError, EngineLost, KeyRevoked, QueueFull, TailraceError, UnknownModel
from tailrace.generation import Generator, Observers
from tailrace.generation.run import Run
from tailrace.generation.vector_run import VectorRun
from tailrace.settings import Settings
from tailrace.streams import StreamLog
from tailrace.types import means_any_model

__all__ = ["Models"]

_NO_SUCH_MODEL = "There is no such model here. GET /v1/models lists the models."  # if there are several

_T = TypeVar("_T")

logger = logging.getLogger("tailrace.server")

_RETRY_S = 2.0  # Retry-After while a model is loading or has no memory
_SETTLED_S = 10.0  # how long a model was not used that leaves its room to requests in the background
_LEAVING_S = 0.25  # how often it is looked whether a model is still in use that is served no more
_NO_MEMORY = "There is no memory for this model while others are busy."


class Models:
    """All models of the server. `group` is the parent of the engines."""

    def __init__(self, served: Sequence[Served], settings: Settings, group: asyncio.TaskGroup) -> None:
        self.first = served[0]
        self.by_name: dict[str, NamedModel] = {}  # what requests may ask for, with the adapters; it changes in place
        self.generators: list[Generator] = []  # also of models that are given up; it changes in place
        self._served: dict[str, Served] = {}  # also these
        self._settings = settings
        self._group = group
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: dict[str, asyncio.Task[None]] = {}  # engines that end
        self._leaving: dict[str, asyncio.Task[None]] = {}  # of models that are given up
        self._past: dict[str, Served] = {}  # models that have left, as long as their streams can be read
        self._timers: dict[str, asyncio.TimerHandle] = {}
        for one in served:
            self.add(one)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def __getitem__(self, name: str) -> Served:
        return self._served[name]

    def __len__(self) -> int:
        return len(self._served)

    @property
    def names(self) -> tuple[NamedModel, ...]:
        """What requests may ask for: the models and their adapters, the first model first."""
        return tuple(self.by_name.values())

    @property
    def observers(self) -> Observers:
        """Those of the requests of all models."""
        return self.first.generator.observers

    @property
    def live(self) -> list[Run]:
        """The streams of all models that have no terminal event."""
        return [run for generator in self.generators for run in generator.live]

    @property
    def read_images(self) -> bool:
        """Whether any of them reads images."""
        return any(served.generator.sees for served in self)

    def find(self, name: str | None) -> NamedModel | None:
        """Return the model with this name, the first model for no name or a name like `default`, or None."""
        if not name:
            return self.first.names[0]
        return self.by_name.get(name) or (self.first.names[0] if means_any_model(name) else None)

    def unknown(self) -> UnknownModel:
        """Return the error for a request of another model."""
        one = f"This server runs {self.first.model}; there is no such model here."
        return UnknownModel(_NO_SUCH_MODEL if len(self.by_name) > 1 else one, param="model")

    def add(self, served: Served) -> bool:
        """Serve one more model, whose names nobody has. If it was given up and has not left yet, it stays. Returns
        whether it is served: not if another model that is still in use has left its name."""
        old = self._served.get(served.model)
        if old is None:
            self._served[served.model] = old = served
            self.generators.append(served.generator)
            served.generator.store.write_errors.on_give_up.append(served.generator.fail_all)
        elif old.supervisor.spec == served.supervisor.spec:
            self._leaving.pop(served.model).cancel()
            old.use(old.settings.taking(served.settings))
        else:
            return False
        self.by_name.update((one.model, one) for one in old.names)
        return True

    def give_up(self, served: Served) -> None:
        """Take no more requests for a model, which is not the first one."""
        for one in served.names:
            del self.by_name[one.model]
        self._leaving[served.model] = self._start_task(self._leave(served))

    def use(self, settings: Settings) -> None:
        """Use other settings from now on. Those of its models have been changed."""
        self._settings = settings
        for served in self:
            self._unwatch(served)
            if served.is_loaded and served.settings.idle_unload_s:
                self._watch(served, 0.0)  # it is unloaded now, or looked at again when it may be

    def end_streams_of(self, key_id: str) -> None:
        """End the streams that a revoked key has begun."""
        for served in self:
            every: list[Run | VectorRun] = [*served.generator.live, *served.generator.vector_runs]
            for run in every:
                if run.record.key_id == key_id:
                    run.fail(KeyRevoked("The key that began this stream was revoked."))

    def of(self, log: StreamLog) -> Served:
        """Return the model of a stream, also if it was given up; the first model for streams of an earlier process
        whose model is gone, and that have ended."""
        named = self.by_name.get(log.record.model)
        if named is not None:
            return named.served
        others = [*self, *self._past.values()]
        return next((one for one in others if log.record.model in one.generator.names), self.first)

    async def load(self, served: Served, *, within_s: float | None = None, is_background: bool = False) -> None:
        """Load a model, and return when it is loaded. Concurrent calls wait for the same load. `within_s` is by default
        the longest time in the queue. In the background, it takes no room from a model that was in use a moment ago.

        Raises: EngineLost if it cannot be loaded now; AdmissionError if too many requests wait, or the server drains;
        UnknownModel if it was given up.
        """
        if self._served.get(served.model) is not served:  # it has left while the request came in
            raise self.unknown()
        if served.is_loaded:
            return
        served.generator.gate.check_open()
        if served.num_waiting >= served.settings.max_concurrent_requests:
            raise QueueFull("Too many requests wait for this model to be loaded.", retry_after_s=_RETRY_S)
        if served.loading is not None and served.is_loading_behind and not is_background:
            await asyncio.wait([served.loading])  # it may be refused, where this one is not
            await self.load(served, within_s=within_s)
            return
        if served.loading is None:
            self._check_backoff(served)
            served.is_loading_behind = is_background
            served.loading = self._start_task(self._load(served))
        loading = served.loading
        served.num_waiting += 1
        try:
            await asyncio.wait([loading], timeout=self._settings.queue_s if within_s is None else within_s)
        finally:
            served.num_waiting -= 1
        if not loading.done() or loading.cancelled():
            raise EngineLost("The model is still being loaded.", retry_after_s=_RETRY_S)
        error = loading.result()
        if error is not None:
            raise EngineLost(error.message, retry_after_s=error.retry_after_s)

    def preload(self, served: Served) -> None:
        """Start to load a model before the first request for it."""
        if not served.takes_memory:
            served.is_loading_behind = False
            served.loading = self._start_task(self._load(served))
            served.loading.add_done_callback(partial(_log_refusal, served))

    def unload(self, served: Served) -> None:
        """Unload a model, until the next request for it. Raises: EngineLost if it is in use."""
        if served.loading is not None or (served.is_loaded and not served.is_idle):
            raise EngineLost("This model is in use. Try again later.", retry_after_s=_RETRY_S)
        if served.is_loaded:
            self._unload(served, "as an administrator wants")

    def schedule_unload(self, served: Served) -> None:
        """Unload a loaded model when it has been idle for `--idle-unload-s`."""
        served.generator.used_s = time.monotonic()
        if served.settings.idle_unload_s and served.model not in self._timers:
            self._watch(served, served.settings.idle_unload_s)

    async def recover(self, *, waits: bool = False) -> int:
        """Continue the streams of servers that are gone, and load their models. Returns how many continue. If it
        `waits`, first until another server has gone.

        Raises: StorageError.
        """
        store, num_recovered = self.first.generator.store, 0
        leases = await store.take_over(self.by_name.keys(), waits=waits)
        for served in self:
            num_live = served.generator.recover(lease for lease in leases if self.of(lease.log) is served)
            num_recovered += num_live
            if num_live and not served.is_loaded:
                self._start_task(self._load_for_recovery(served))
        return num_recovered

    async def close(self) -> None:
        """End all engines."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(served.stop() for served in self))

    def _start_task(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_backoff(self, served: Served) -> None:
        """Raises: EngineLost if loading this model has just failed."""
        wait_s = served.refused_until_s - time.monotonic()
        if wait_s > 0:
            raise EngineLost(served.refusal, retry_after_s=max(1.0, wait_s))

    async def _load(self, served: Served) -> TailraceError | None:
        try:
            if served.model in self._ending:
                await asyncio.wait([self._ending[served.model]])
            await self._make_room(served)
            began_s = time.monotonic()
            served.start(self._group)
            try:
                await served.wait_loaded()
            except EngineLost as error:
                logger.error("%s was not loaded: %s", served.model, error.message)  # clients must not see its paths
                served.refusal = "This model could not be loaded. The server's log has the reason."
                served.refused_until_s = time.monotonic() + (error.retry_after_s or _RETRY_S)
                return EngineLost(served.refusal, retry_after_s=error.retry_after_s)
            logger.warning("%s was loaded in %.1f s.", served.model, time.monotonic() - began_s)
            self.schedule_unload(served)
            return None
        except EngineLost as error:
            return error
        finally:
            served.loading = None

    async def _make_room(self, served: Served) -> None:
        """Unload models that are idle, the longest unused first, or can wait, until this model fits. It always fits if
        no other is loaded.

        Raises: EngineLost if busy models leave no room.
        """
        budget_bytes = self._settings.memory_bytes
        if not budget_bytes:
            return
        others = [one for one in self if one is not served and one.takes_memory]
        excess_bytes = served.num_bytes() + sum(one.num_bytes() for one in others) - budget_bytes
        waiting = [] if served.is_loading_behind else [one for one in others if one.is_behind and not one.is_idle]
        latest_s = time.monotonic() - _SETTLED_S if served.is_loading_behind else math.inf
        idle = [one for one in others if one.is_idle and one.generator.used_s <= latest_s]
        may_leave = sorted(idle, key=lambda one: one.generator.used_s) + waiting
        leaving = []
        while excess_bytes > 0 and may_leave:
            leaving.append(may_leave.pop(0))
            excess_bytes -= leaving[-1].num_bytes()
        if excess_bytes > 0 and len(leaving) < len(others):
            raise EngineLost(_NO_MEMORY, retry_after_s=_RETRY_S)
        for one in leaving:
            if one.is_idle:
                self._unload(one, "to make room")
            elif await one.generator.leave():
                self._unload(one, "to make room: what it does can wait")
                self._start_task(self._load_for_recovery(one))
            else:
                raise EngineLost(_NO_MEMORY, retry_after_s=_RETRY_S)
        if self._ending:
            await asyncio.wait(list(self._ending.values()))

    async def _leave(self, served: Served) -> None:
        """Forget a model when its last request has ended."""
        # No event tells of all of these ends.
        while served.loading is not None or served.num_arriving or served.generator.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(_LEAVING_S)
        self._unwatch(served)
        if served.is_loaded:
            self._unload(served, "since it is served no more")
        if (ending := self._ending.get(served.model)) is not None:
            await asyncio.wait([ending])
        del self._served[served.model], self._leaving[served.model]
        self.generators.remove(served.generator)
        served.generator.store.write_errors.on_give_up.remove(served.generator.fail_all)
        self._past[served.model] = served
        await asyncio.sleep(served.settings.retention_s)
        if self._past.get(served.model) is served:
            del self._past[served.model]

    def _unload(self, served: Served, why: str) -> None:
        logger.warning("%s is unloaded %s.", served.model, why)
        served.is_loaded = False
        served.generator.on_unload()
        task = self._ending[served.model] = self._start_task(served.stop())
        task.add_done_callback(lambda _: self._ending.pop(served.model, None))

    def _watch(self, served: Served, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[served.model] = loop.call_later(after_s, self._check_idle, served)

    def _unwatch(self, served: Served) -> None:
        if (timer := self._timers.pop(served.model, None)) is not None:
            timer.cancel()

    def _check_idle(self, served: Served) -> None:
        """Unload it if it has been idle for long enough; otherwise check again later."""
        del self._timers[served.model]
        if not served.is_loaded:
            return
        idle_s = served.settings.idle_unload_s
        wait_s = served.generator.used_s + idle_s - time.monotonic() if served.is_idle else idle_s
        if wait_s > 0:
            self._watch(served, wait_s)
        else:
            self._unload(served, f"after {idle_s:g} s without a stream")

    async def _load_for_recovery(self, served: Served) -> None:
        """Try to load a model until it is loaded, or nothing waits for it."""
        while served.generator.is_busy and not served.is_loaded:
            try:
                await self.load(served, is_background=served.generator.is_behind)
            except (EngineLost, AdmissionError) as error:
                await asyncio.sleep(error.retry_after_s or _RETRY_S)


def _log_refusal(served: Served, loading: asyncio.Task[TailraceError | None]) -> None:
    if not loading.cancelled() and (error := loading.result()) is not None:
        logger.warning("%s is not loaded yet: %s", served.model, error.message)
