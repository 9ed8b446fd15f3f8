"""The models of one server: which are loaded, and which go when another needs their place.

A model is served from the start: its tokenizer is read, its streams can be followed, it is listed. What comes and
goes is its engine, a process of its own. The first model's is loaded before requests are taken; the others' are loaded
by the first request for them, which waits. With `--idle-unload-s` a model that nobody has used for so long is unloaded.
With `--memory-bytes` those that are idle make room for the next one, the one unused for longest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from tailrace import __version__
from tailrace.child import resident_bytes
from tailrace.engines import EngineSpec, Supervisor
from tailrace.engines.certificate import Verdict, read_certificate, subject
from tailrace.errors import AdmissionError, EngineLost, KeyRevoked, QueueFull, TailraceError
from tailrace.generation import Generator
from tailrace.models.places import data_path
from tailrace.settings import Settings
from tailrace.streams import StreamLog
from tailrace.types import Asked, GenerateRequest, Message, means_any_model

__all__ = ["NO_SUCH_MODEL", "Models", "Served"]

NO_SUCH_MODEL = "There is no such model here. GET /v1/models names those that are."  # where there are several

_T = TypeVar("_T")

logger = logging.getLogger("tailrace.server")

_PROCESS_BYTES = 64 * 2**20  # of a worker besides its weights, until it was measured
_RETRY_S = 2.0  # for whoever asks for a model that has no room now, or loads for too long


class Served:
    """One model that is served, whether it is loaded or not, and what wires may know of it (`dialects.ServerFacts`).
    Its generator is set before anybody asks."""

    version = __version__
    generator: Generator

    def __init__(self, model: str, spec: EngineSpec, settings: Settings, *, weight_bytes: int = 0) -> None:
        self.model = model
        self.settings = settings
        self.started_s = int(time.time())
        self.is_loaded = False
        self.replay: Verdict | None = None  # how exactly the engine repeats itself, where that was measured
        self.loading: asyncio.Task[TailraceError | None] | None = None
        self.num_asking = 0  # requests that have come for it, and are not streams yet
        self.num_waiting = 0  # of those, while it is loaded
        self.refusal = ""  # why it could not be loaded
        self.refused_until_s = 0.0
        self.supervisor = Supervisor(
            spec,
            on_change=self._change,
            stall_s=settings.stall_s,
            load_s=settings.load_s,
            spare=settings.spare_engine,
        )
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._likely_bytes = weight_bytes + _PROCESS_BYTES
        self._seen_bytes = 0  # the most that its workers took when somebody looked

    @property
    def is_live(self) -> bool:
        return self.generator.is_live

    @property
    def is_ready(self) -> bool:
        return self.generator.is_taking

    @property
    def state(self) -> str:
        return "loading" if self.loading is not None else self.generator.state

    @property
    def parameters(self) -> frozenset[str]:
        return self.generator.parameters

    @property
    def can_chat(self) -> bool:
        return self.generator.prompts.chat is not None

    @property
    def takes_tools(self) -> bool:
        chat = self.generator.prompts.chat
        return chat is not None and chat.takes_tools

    @property
    def splits_reasoning(self) -> bool:
        chat = self.generator.prompts.chat
        return chat is not None and chat.reasoning is not None

    @property
    def takes_reasoning(self) -> bool:
        chat = self.generator.prompts.chat
        return chat is not None and chat.takes_reasoning

    @property
    def template_values(self) -> frozenset[str]:
        chat = self.generator.prompts.chat
        return chat.value_names if chat is not None else frozenset()

    @property
    def context_tokens(self) -> int:
        return self.generator.prompts.context_tokens

    @property
    def max_total_tokens(self) -> int:
        return self.generator.limit_tokens()

    @property
    def max_prompts(self) -> int:
        return self.generator.limits.max_choices

    @property
    def max_requests(self) -> int:
        return self.settings.max_concurrent_requests

    @property
    def prompt_template(self) -> str:
        return self.settings.prompt_template

    def tokenize(self, text: str) -> list[tuple[int, int, int]]:
        return self.generator.prompts.tokenize(text)

    def tokenize_chat(self, messages: tuple[Message, ...]) -> tuple[str, list[tuple[int, int, int]]]:
        return self.generator.prompts.tokenize_chat(messages)

    def count_tokens(self, request: GenerateRequest) -> int:
        return self.generator.count_tokens(request)

    @property
    def is_idle(self) -> bool:
        """Loaded, and nobody would miss it."""
        return self.is_loaded and not self.num_asking and not self.generator.is_busy

    @property
    def takes_memory(self) -> bool:
        return self.is_loaded or self.loading is not None

    @contextlib.contextmanager
    def asking(self, asked: Asked) -> Iterator[None]:
        """Around a request, until it is a stream: the model stays meanwhile."""
        self.num_asking += 1
        self.generator.observers.on_asked(asked)
        try:
            yield
        except TailraceError as error:
            self.generator.observers.on_refused(asked, error)
            raise
        finally:
            self.num_asking -= 1

    def start(self, group: asyncio.TaskGroup) -> None:
        """Begin to load."""
        self._changed.clear()
        self._running = group.create_task(self.supervisor.run())

    async def started(self) -> None:
        """Return when it is loaded. Raises: EngineLost if it cannot be, in the engine's own words."""
        await self._changed.wait()
        if not self.supervisor.is_ready:
            await self.stop()
            raise EngineLost(self.supervisor.last_reason, retry_after_s=self.supervisor.retry_after_s)
        self.is_loaded = True
        self.replay = _verdict(self.supervisor)
        self.generator.wake()

    async def stop(self) -> None:
        """Take the engine away, and wait until it is gone."""
        if self.is_loaded:
            self.is_loaded = False
            self.generator.rest()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def num_bytes(self) -> int:
        """The memory that its worker takes, or will take going by what is known: its size when it was seen last, or
        else its weights'."""
        if self.supervisor.pid is not None:
            self._seen_bytes = max(self._seen_bytes, resident_bytes(self.supervisor.pid))
        return self._seen_bytes or self._likely_bytes

    def _change(self) -> None:
        """The engine came or went."""
        self._changed.set()
        if self.is_loaded:
            self.generator.on_engine_change()


class Models:
    """All of them, the first one first. `group` is the parent of the engines."""

    def __init__(self, served: Sequence[Served], settings: Settings, group: asyncio.TaskGroup) -> None:
        self.first = served[0]
        self._served = {one.model: one for one in served}
        self._settings = settings
        self._group = group
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def __getitem__(self, name: str) -> Served:
        return self._served[name]

    def __len__(self) -> int:
        return len(self._served)

    def find(self, name: str | None) -> Served | None:
        """The model that a client means; None if there is no such model."""
        if not name:
            return self.first
        return self._served.get(name) or (self.first if means_any_model(name) else None)

    def end_streams_of(self, key_id: str) -> None:
        """End the streams that were begun with a key, which was revoked."""
        for served in self:
            for run in list(served.generator.live):
                if run.log.record.key_id == key_id:
                    run.fail(KeyRevoked("The key that began this stream was revoked."))

    def of(self, log: StreamLog) -> Served:
        """The model of a stream, or another one if it is no longer served: its stream has ended then."""
        return self._served.get(log.record.model, self.first)

    async def load(self, served: Served, *, within_s: float | None = None) -> None:
        """Return when a model is loaded. Those who ask meanwhile wait together, as long as requests may wait if nothing
        else is said.

        Raises: EngineLost if it cannot be, or not now; AdmissionError if too many wait, or the server leaves.
        """
        if served.is_loaded:
            return
        served.generator.gate.check_open()
        if served.num_waiting >= served.settings.max_concurrent_requests:
            raise QueueFull("Too many requests wait for this model to be loaded.", retry_after_s=_RETRY_S)
        if served.loading is None:
            self._check_refused(served)
            served.loading = self._begin(self._load(served))
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
        """Begin to load a model for which nobody has asked yet."""
        if not served.takes_memory:
            served.loading = self._begin(self._load(served))

    def begun(self, served: Served) -> None:
        """It has been loaded: unload it when its time has come."""
        if served.settings.idle_unload_s and served.model not in self._timers:
            served.generator.used_s = time.monotonic()
            self._watch(served, served.settings.idle_unload_s)

    async def recover(self) -> int:
        """Take up the streams that an earlier process left, and load what they need; returns how many go on.

        Raises: StorageError.
        """
        leases, num_recovered = await self.first.generator.store.take_over(), 0
        for served in self:
            num_live = served.generator.recover(lease for lease in leases if self.of(lease.log) is served)
            num_recovered += num_live
            if num_live and not served.is_loaded:
                self._begin(self._bring_back(served))
        return num_recovered

    async def close(self) -> None:
        """End all engines."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(served.stop() for served in self))

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_refused(self, served: Served) -> None:
        """What has just failed is not tried again at once. Raises: EngineLost."""
        wait_s = served.refused_until_s - time.monotonic()
        if wait_s > 0:
            raise EngineLost(served.refusal, retry_after_s=max(1.0, wait_s))

    async def _load(self, served: Served) -> TailraceError | None:
        try:
            if served.model in self._leaving:
                await asyncio.wait([self._leaving[served.model]])
            await self._make_room(served)
            began_s = time.monotonic()
            served.start(self._group)
            try:
                await served.started()
            except EngineLost as error:
                logger.error("%s was not loaded: %s", served.model, error.message)  # its paths are no client's business
                served.refusal = "This model could not be loaded."
                served.refused_until_s = time.monotonic() + (error.retry_after_s or _RETRY_S)
                return EngineLost(served.refusal, retry_after_s=error.retry_after_s)
            logger.warning("%s was loaded in %.1f s.", served.model, time.monotonic() - began_s)
            self.begun(served)
            return None
        except EngineLost as error:
            return error
        finally:
            served.loading = None

    async def _make_room(self, served: Served) -> None:
        """Unload what is idle, the one unused for longest first, until another model fits.

        Raises: EngineLost if it does not, for what is busy. What has no neighbour is loaded, whatever it takes.
        """
        budget_bytes = self._settings.memory_bytes
        if not budget_bytes:
            return
        others = [one for one in self if one is not served and one.takes_memory]
        excess_bytes = served.num_bytes() + sum(one.num_bytes() for one in others) - budget_bytes
        idle = sorted((one for one in others if one.is_idle), key=lambda one: one.generator.used_s)
        leaving = []
        while excess_bytes > 0 and idle:
            leaving.append(idle.pop(0))
            excess_bytes -= leaving[-1].num_bytes()
        if excess_bytes > 0 and len(leaving) < len(others):
            raise EngineLost("There is no memory for this model while others are busy.", retry_after_s=_RETRY_S)
        for one in leaving:
            self._unload(one, "to make room")
        if self._leaving:
            await asyncio.wait(list(self._leaving.values()))

    def _unload(self, served: Served, why: str) -> None:
        logger.warning("%s is unloaded %s.", served.model, why)
        served.is_loaded = False
        served.generator.rest()
        task = self._leaving[served.model] = self._begin(served.stop())
        task.add_done_callback(lambda _: self._leaving.pop(served.model, None))

    def _watch(self, served: Served, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[served.model] = loop.call_later(after_s, self._look_at, served)

    def _look_at(self, served: Served) -> None:
        """Unload it if it has not been used for so long, and look again if it has."""
        del self._timers[served.model]
        if not served.is_loaded:
            return
        idle_s = served.settings.idle_unload_s
        wait_s = served.generator.used_s + idle_s - time.monotonic() if served.is_idle else idle_s
        if wait_s > 0:
            self._watch(served, wait_s)
        else:
            self._unload(served, f"after {idle_s:g} s without a stream")

    async def _bring_back(self, served: Served) -> None:
        """Load a model that streams wait for, as long as any do."""
        while served.generator.live and not served.is_loaded:
            try:
                await self.load(served)
            except (EngineLost, AdmissionError) as error:
                await asyncio.sleep(error.retry_after_s or _RETRY_S)


def _verdict(supervisor: Supervisor) -> Verdict | None:
    """What `tailrace certify` has found here about such an engine."""
    if supervisor.capabilities is None:
        return None
    certificate = read_certificate(data_path(), subject(supervisor.capabilities.engine, supervisor.spec))
    return certificate.verdict if certificate is not None else None
