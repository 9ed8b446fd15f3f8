"""From settings to a running server, and down again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp

from tailrace.admission import Gate
from tailrace.dialects.durable_answers import EXPOSED_HEADERS
from tailrace.engines import KINDS, EngineSpec
from tailrace.errors import EngineLost, ModelError, StorageError
from tailrace.generation import Generator, Limits
from tailrace.models import ModelCard
from tailrace.models.upstream import Address, upstream_key
from tailrace.server.access_log import AccessLog
from tailrace.server.bodies import BodyBudget
from tailrace.server.durable import DurableRoutes
from tailrace.server.edge import Edge
from tailrace.server.listening import BACKLOG, Signals, Uvicorn, uvicorn_config
from tailrace.server.metrics import Metrics
from tailrace.server.models import Models, Served
from tailrace.server.routes import Routes
from tailrace.server.settings import Settings, settings_table
from tailrace.server.sockets import Sockets
from tailrace.server.source import Source
from tailrace.streams import DiskJournal, Journal, MemoryJournal, StreamStore, read_key
from tailrace.streams.durable import DurableStore
from tailrace.streams.old_journals import lifetime_s
from tailrace.text import ByteTokenizer, ChatEncoder, ChatTemplate, MessageEncoder, Tokenizer

__all__ = ["Service", "engine_spec", "let_origins_read", "open_journal", "serve", "start_service"]

logger = logging.getLogger("tailrace.server")

_DRAIN_RETRY_S = 5.0
_OF_SOME = sorted({name for kind in KINDS.values() for name in kind.settings})  # settings that not every engine has
# Logs hold millions of events and no circles: little to find, and much to look through.
_GC_THRESHOLD = (20_000, 50, 100)


@dataclass(frozen=True, slots=True)
class Service:
    """Everything behind the sockets."""

    models: Models
    store: StreamStore
    durable: DurableStore
    app: ASGIApp
    num_recovered: int  # streams that an earlier process left, and that go on

    @property
    def generator(self) -> Generator:
        """The first model's."""
        return self.models.first.generator

    @property
    def num_live(self) -> int:
        """Streams without their end."""
        return sum(len(served.generator.live) for served in self.models)


@contextlib.asynccontextmanager
async def start_service(
    source: Source, settings: Settings, *, data_path: Path, cache_path: str = "", more: Sequence[Source] = ()
) -> AsyncIterator[Service]:
    """The application with the engine of the first model loaded, and its journal in `data_path`. `more` are further
    models, which are loaded when they are asked for. Leaving it kills the engines.

    Raises: ModelError if an engine cannot load its model, or the journal cannot be kept.
    """
    sources = [source, *more]
    served = [_served(one, settings, cache_path=cache_path) for one in sources]
    async with open_journal(settings, data_path) as journal, asyncio.TaskGroup() as group:
        served[0].start(group)
        models: Models | None = None
        try:
            store = StreamStore(
                retention_s=settings.retention_s, budget_bytes=settings.retention_bytes, journal=journal
            )
            # The engine loads in its process while this one reads the vocabularies.
            for one, model in zip(sources, served, strict=True):
                model.generator = await _generator(one, model, store)
            models = Models(served, settings, group)
            num_recovered = await _first_start(models, settings)
            durable = DurableStore(budget_bytes=settings.durable_bytes, journal=journal.note)
            durable.restore(journal.notes())
            app = build_app(models, durable, settings)
            yield Service(models, store, durable, app, num_recovered)
            store.close()
        finally:
            if models is not None:
                await models.close()
            await served[0].stop()


def _served(source: Source, settings: Settings, *, cache_path: str) -> Served:
    """Raises: ModelError if its settings do not suit it, or one another."""
    try:
        own = settings.of_model(source.own)
        spec = engine_spec(source, own, cache_path=cache_path)
    except (ValueError, ModelError) as error:
        if not source.own:
            raise
        raise ModelError(f"{source.card.name}: {error}") from None
    return Served(source.card.name, spec, own, weight_bytes=source.weight_bytes)


async def _generator(source: Source, served: Served, store: StreamStore) -> Generator:
    tokenizer, chat = await asyncio.to_thread(_text, source.card)
    settings = served.settings
    generator = Generator(
        model=source.card.name,
        tokenizer=tokenizer,
        chat=chat,
        context_tokens=served.supervisor.spec.context_tokens,
        add_bos=source.card.add_bos,
        supervisor=served.supervisor,
        gate=Gate(max_requests=settings.max_concurrent_requests),
        store=store,
        limits=Limits(
            default_max_tokens=settings.default_max_tokens,
            queue_s=settings.queue_s,
            linger_s=settings.linger_s,
            recover_s=settings.recover_s,
        ),
    )
    generator.rest()
    return generator


async def _first_start(models: Models, settings: Settings) -> int:
    """Wait for what has to be loaded before requests are taken, and take up what an earlier process left; returns how
    many streams go on. Raises: ModelError."""
    try:
        await models.first.started()
        models.begun(models.first)
        num_recovered = models.recover()
        if settings.load == "all":
            for served in models:
                await models.load(served, within_s=2 * served.settings.load_s)  # which ends it first
            if settings.memory_bytes and not all(served.is_loaded for served in models):
                raise ModelError("--memory-bytes has no room for all models at once, and --load all asks for that.")
    except EngineLost as error:
        raise ModelError(_load_failure(error.message)) from None
    except StorageError as error:
        raise ModelError(error.message) from None
    return num_recovered


@contextlib.asynccontextmanager
async def open_journal(settings: Settings, path: Path) -> AsyncIterator[Journal]:
    """Raises: ModelError if it cannot be kept there."""
    if settings.journal == "memory":
        yield MemoryJournal()
        return
    journal = DiskJournal(
        path,
        key=read_key(Path(settings.journal_key_file)) if settings.journal_key_file else None,
        keep_finished=settings.keep_finished,
        lifetime_s=lifetime_s(linger_s=settings.linger_s, retention_s=settings.retention_s),
        sync_s=settings.journal_sync_s,
    )
    try:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(journal.keep_up())
            yield journal
            keeping.cancel()
    finally:
        journal.close()


def engine_spec(source: Source, settings: Settings, *, cache_path: str) -> EngineSpec:
    """What the worker is told to load. Raises: ModelError if more is asked of the model than it was made for, or of the
    engine than it has."""
    if settings.context_tokens > source.card.context_tokens:
        raise ModelError(
            f"--context-tokens is at most {source.card.context_tokens}, what {source.card.name} was made for."
        )
    plain = {row.name: row.default for row in settings_table()}
    kind = KINDS[source.engine]
    kind.check(name for name in _OF_SOME if getattr(settings, name) != plain[name])
    return EngineSpec(
        engine=source.engine,
        path=source.address or str(source.card.path),
        context_tokens=settings.context_tokens or source.card.context_tokens,
        kv_tokens=settings.kv_tokens,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens or kind.step_tokens,
        threads=settings.threads,
        eos_token_ids=source.card.eos_token_ids,
        cache_path=cache_path,
        exact=kind.exact if settings.exact is None else settings.exact,
        prefix_cache=settings.prefix_cache,
        device=settings.device,
        dtype="" if settings.dtype == "auto" else settings.dtype,
        kv_precision="" if settings.kv_precision == "auto" else settings.kv_precision,
        gpus=settings.gpus,
        prompt_lookup_tokens=settings.prompt_lookup_tokens,
        adapter=settings.adapter,
        adapter_scale=settings.adapter_scale,
        secret=upstream_key(Address.parse(source.address).url) if source.address else "",
        options=source.options,
    )


def _text(card: ModelCard) -> tuple[Tokenizer, ChatEncoder | None]:
    if card.format == "upstream":
        return ByteTokenizer(), MessageEncoder(continues=card.architecture != "openai")
    tokenizer = Tokenizer.from_json(card.tokenizer_json)
    if card.chat_template is None:
        return tokenizer, None
    template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
    return tokenizer, ChatEncoder(tokenizer, template)


def _load_failure(reason: str) -> str:
    if "alloc" in reason.lower() or "SIGKILL" in reason or "memory" in reason.lower():
        return f"{reason} If memory is short, try a smaller --kv-tokens or a smaller model."
    return reason


def build_app(models: Models, durable: DurableStore, settings: Settings) -> ASGIApp:
    """The ASGI application over the models."""
    metrics = Metrics(*(served.generator for served in models))
    bodies = BodyBudget(settings)
    routes = Routes(models, settings, metrics, bodies, started_s=int(time.time()))
    sockets = Sockets(models, settings, metrics)
    streams = DurableRoutes(durable, models.first.generator.store, settings, bodies)
    router = Router([*streams.table(), *routes.table(), *sockets.table()], redirect_slashes=False)
    app = let_origins_read(Edge(router, settings), settings)
    return AccessLog(app, models.first.generator.store.get) if settings.access_log else app


def let_origins_read(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Answer browsers' preflights for the origins that are allowed, and let their pages read answers, refusals too."""
    origins = [origin.strip() for origin in settings.allowed_origins.split(",") if origin.strip()]
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "PUT", "POST", "DELETE"],
        allow_headers=["*"],  # the clients of others send their own; an origin that is let in may say what it likes
        expose_headers=[
            "location",
            "retry-after",
            "x-request-id",
            "x-stream-id",
            "x-tailrace-ignored",
            *EXPOSED_HEADERS,
        ],
    )


async def serve(
    source: Source,
    settings: Settings,
    sock: socket.socket,
    *,
    data_path: Path,
    cache_path: str = "",
    more: Sequence[Source] = (),
    on_ready: Callable[[Service], None] = lambda service: None,
    on_drain: Callable[[int], None] = lambda num_streams: None,
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT, then drain. A second signal leaves at once, and so does the
    first while the engine loads.

    Raises: ModelError if the engine cannot load the model.
    """
    signals = Signals()
    ready = asyncio.Event()

    async def run() -> None:
        async with start_service(source, settings, data_path=data_path, cache_path=cache_path, more=more) as service:
            ready.set()
            # What was made so far stays: the collector need not look at it again, nor pause a stream for it.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLD)
            try:
                sock.listen(BACKLOG)
            except OSError as error:  # somebody else began to, meanwhile
                raise ModelError(f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}.") from None
            server = Uvicorn(uvicorn_config(service.app, settings))
            async with asyncio.TaskGroup() as serving:
                serving.create_task(server.serve(sockets=[sock]))
                on_ready(service)
                await signals.leaving.wait()
                on_drain(service.num_live)
                await _drain(service, settings.drain_s, signals.hurrying)
                service.durable.close()
                server.force_exit = signals.hurrying.is_set()
                server.should_exit = True

    async with asyncio.TaskGroup() as group:
        running = group.create_task(run())
        await signals.leaving.wait()
        if not ready.is_set():
            running.cancel()


async def _drain(service: Service, drain_s: float, hurrying: asyncio.Event) -> None:
    """Let running streams finish. What is left waits in the journal for the next process, where somebody may come
    back for it, and else is interrupted."""
    generators = [served.generator for served in service.models]
    for generator in generators:
        generator.gate.drain(_DRAIN_RETRY_S)

    async def idle() -> None:
        for generator in generators:
            await generator.idle()

    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(idle()), group.create_task(hurrying.wait())]
        await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    journal = service.store.journal
    for run in [run for generator in generators for run in generator.live]:
        if journal.is_durable and run.log.record.linger_s:
            run.park()
        else:
            run.interrupt()
    journal.flush()
