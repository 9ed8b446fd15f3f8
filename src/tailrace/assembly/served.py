"""One model of a server, whose engine is loaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from tailrace import __version__
from tailrace.engines import EngineSpec
from tailrace.engines.certificate import Verdict, read_certificate, subject
from tailrace.engines.kinds import find_kind
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import EngineLost, TailraceError
from tailrace.generation.embedder import Embedder
from tailrace.generation.generator import Generator
from tailrace.generation.limits import Limits
from tailrace.generation.prompts import PromptEncoder
from tailrace.models import ModelCard
from tailrace.models.directories import data_path
from tailrace.settings import Settings
from tailrace.system.child import resident_bytes
from tailrace.text import ChatFacts
from tailrace.types import Arrival, Pooling, Task

__all__ = ["NamedModel", "Served", "limits_of"]

_PROCESS_BYTES = 64 * 2**20  # estimate of a worker's memory without its engine's, until it is measured


class Served:
    """One model of the server, loaded or not. `generator` and `embedder` are set before the first request."""

    generator: Generator
    embedder: Embedder

    def __init__(self, card: ModelCard, spec: EngineSpec, settings: Settings, *, memory_bytes: int = 0) -> None:
        self.model = card.name
        self.card = card
        self.settings = settings
        self.started_s = int(time.time())
        self.names = (
            NamedModel(self, self.model),
            *(NamedModel(self, name, parent=self.model) for name in spec.adapters if name),
        )
        self.is_loaded = False
        self.replay: Verdict | None = None  # how exact replays of this engine are, if that was measured
        self.loading: asyncio.Task[TailraceError | None] | None = None
        self.is_loading_behind = False  # without taking the room of a model that was just in use
        self.num_arriving = 0  # requests that are not streams yet
        self.num_waiting = 0  # requests that wait until it is loaded
        self.refusal = ""  # why it could not be loaded
        self.refused_until_s = 0.0  # monotonic
        self.supervisor = Supervisor(
            spec,
            on_change=self._change,
            stall_s=settings.stall_s,
            load_s=settings.load_s,
            spare=settings.spare_engine,
        )
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._estimated_bytes = memory_bytes + _PROCESS_BYTES
        self._peak_bytes = 0  # the largest measured memory of its workers
        kind = find_kind(spec.engine)  # the weights may be in processes of the worker, which are not measured
        self._least_bytes = self._estimated_bytes if kind is not None and kind.starts_processes else 0

    def use(self, settings: Settings) -> None:
        """Use other settings from now on, of which only those that reload are different."""
        self.settings = settings
        self.generator.use(limits_of(settings))
        self.generator.gate.max_requests = settings.max_concurrent_requests
        self.supervisor.stall_s, self.supervisor.load_s = settings.stall_s, settings.load_s

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, but not in use."""
        return self.is_loaded and not self.num_arriving and not self.generator.is_busy

    @property
    def is_behind(self) -> bool:
        """Whether it is loaded, and all that it does can wait for another model."""
        return self.is_loaded and not self.num_arriving and self.generator.is_behind

    @property
    def takes_memory(self) -> bool:
        return self.is_loaded or self.loading is not None

    @contextlib.contextmanager
    def arriving(self, arrival: Arrival) -> Iterator[None]:
        """Count a request until it is a stream. Meanwhile the model is not unloaded."""
        self.num_arriving += 1
        self.generator.observers.on_arrival(arrival)
        try:
            yield
        except TailraceError as error:
            self.generator.observers.on_refused(arrival, error)
            raise
        finally:
            self.num_arriving -= 1

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start to load it."""
        self._changed.clear()
        self._running = group.create_task(self.supervisor.run())

    async def wait_loaded(self) -> None:
        """Return when it is loaded. Raises: EngineLost with the engine's reason if it cannot be loaded."""
        await self._changed.wait()
        if not self.supervisor.is_ready:
            await self.stop()
            raise EngineLost(self.supervisor.last_reason, retry_after_s=self.supervisor.retry_after_s)
        self.is_loaded = True
        self.replay = _verdict(self.supervisor)
        self.generator.on_load()

    async def stop(self) -> None:
        """Stop the engine, and wait for its end."""
        if self.is_loaded:
            self.is_loaded = False
            self.generator.on_unload()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def num_bytes(self) -> int:
        """Return the memory of its worker: the largest measured value, or an estimate from its weights."""
        if self.supervisor.pid is not None:
            self._peak_bytes = max(self._peak_bytes, resident_bytes(self.supervisor.pid))
        return max(self._peak_bytes, self._least_bytes) or self._estimated_bytes

    def _change(self) -> None:
        """The engine became ready, or was lost."""
        self._changed.set()
        if self.is_loaded:
            self.generator.on_engine_change()


class NamedModel:
    """A model by its own name, or with one of its adapters by the name of that. Wires see it as
    `dialects.ServerFacts`."""

    version = __version__

    def __init__(self, served: Served, model: str, *, parent: str = "") -> None:
        self.served = served
        self.model = model
        self.parent = parent
        self.started_s = served.started_s

    @property
    def max_requests(self) -> int:
        return self.served.settings.max_concurrent_requests

    @property
    def prompt_template(self) -> str:
        return self.served.settings.prompt_template

    @property
    def card(self) -> ModelCard:
        return self.served.card

    @property
    def generator(self) -> Generator:
        return self.served.generator

    @property
    def task(self) -> Task:
        return self.generator.task

    @property
    def num_dimensions(self) -> int:
        return self.served.embedder.num_dimensions

    @property
    def pooling(self) -> Pooling:
        return self.served.embedder.pooling

    @property
    def max_inputs(self) -> int:
        return self.generator.limits.max_inputs

    @property
    def default_max_tokens(self) -> int:
        return self.generator.limits.default_max_tokens

    @property
    def recommended_sampling(self) -> dict[str, float]:
        parameters = self.generator.parameters
        return {name: value for name, value in self.card.sampling.items() if name in parameters}

    @property
    def prompts(self) -> PromptEncoder:
        return self.generator.prompts

    @property
    def chat(self) -> ChatFacts:
        return self.prompts.chat_facts

    @property
    def state(self) -> str:
        return "loading" if self.served.loading is not None else self.generator.state

    @property
    def replay(self) -> str | None:
        return self.served.replay

    @property
    def shared_store(self) -> dict[str, int]:
        peers = self.generator.store.state
        found = {"clock_offset_s": round(peers.clock_offset_s), "servers_other_models": peers.num_with_other_models}
        return {name: number for name, number in found.items() if number}

    @property
    def reports_progress(self) -> bool:
        capabilities = self.served.supervisor.capabilities
        return capabilities is None or capabilities.reports_progress

    @property
    def max_prompts(self) -> int:
        return self.generator.limits.max_choices


def limits_of(settings: Settings) -> Limits:
    """Return the limits of a model with these settings."""
    return Limits(
        default_max_tokens=settings.default_max_tokens,
        max_reasoning_tokens=settings.reasoning_budget if settings.reasoning_budget >= 0 else None,
        queue_s=settings.queue_s,
        linger_s=settings.linger_s,
        recover_s=settings.recover_s,
        fetch_images=settings.fetch_images,
    )


def _verdict(supervisor: Supervisor) -> Verdict | None:
    """Return the result of `tailrace certify` for this engine and machine."""
    if supervisor.capabilities is None:
        return None
    certificate = read_certificate(data_path(), subject(supervisor.capabilities.engine, supervisor.spec))
    return certificate.verdict if certificate is not None else None
