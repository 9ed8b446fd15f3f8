"""Makes the models of a server from its settings, with their log store, engines, tokenizers and gates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias

from tailrace.admission import Gate
from tailrace.assembly.models import Models
from tailrace.assembly.served import Served, limits_of
from tailrace.assembly.source import Source
from tailrace.engines import OPTIONAL_SETTINGS, EngineSpec, all_kinds
from tailrace.engines.devices import read_device
from tailrace.errors import EngineLost, ModelError, StorageError, TemplateError
from tailrace.generation.embedder import Embedder
from tailrace.generation.generator import Generator
from tailrace.generation.observers import Observers
from tailrace.generation.prompts import PromptEncoder
from tailrace.models import ModelCard
from tailrace.models.directories import expanded
from tailrace.settings import Settings
from tailrace.streams import LogStore
from tailrace.streams.opening import Store, open_log_store
from tailrace.text import ChatEncoder, ChatTemplate, Tokenizer
from tailrace.text.calls import FORMATS, CallFormat
from tailrace.text.reasoning import THINK, find_format
from tailrace.text.templates import Turn
from tailrace.types import ReasoningFormat, means_any_model
from tailrace.wording import did_you_mean

__all__ = ["Service", "engine_spec", "load_text", "settings_of_model", "start_service"]

logger = logging.getLogger("tailrace.engine")

TextOf: TypeAlias = Callable[
    [ModelCard, ReasoningFormat | None, CallFormat | None], tuple[Tokenizer, ChatEncoder | None]
]  # of `Kind.text_of`


@dataclass(frozen=True, slots=True)
class Service:
    """Everything below HTTP, for applications with their own sockets or without any."""

    models: Models
    store: Store
    num_recovered: int  # streams of an earlier process that continue
    prepare: Callable[[Sequence[Source], Settings], Awaitable[list[Served]]]  # for `models.add`. Raises: ModelError

    @property
    def generator(self) -> Generator:
        """The generator of the first model."""
        return self.models.first.generator

    @property
    def num_live(self) -> int:
        """The number of streams without a terminal event."""
        return len(self.models.live)


@contextlib.asynccontextmanager
async def start_service(
    source: Source,
    settings: Settings,
    *,
    data_path: Path,
    cache_path: str = "",
    more: Sequence[Source] = (),
    on_loaded: Callable[[Models], None] = lambda models: None,
) -> AsyncIterator[Service]:
    """Load the first model, and open the log store in `data_path`. The models in `more` are loaded by requests.
    `on_loaded` is called before streams of an earlier process continue, so that it can add observers of their ends.
    Leaving the context kills the engines.

    Raises: ModelError if an engine cannot load its model, or the journal cannot be written.
    """
    sources = [source, *more]
    served = [_served(one, settings, cache_path=cache_path, shares=bool(more)) for one in sources]
    _check_names(served)
    async with open_log_store(settings, data_path) as store, asyncio.TaskGroup() as group:
        served[0].start(group)
        models: Models | None = None
        try:
            # Load the tokenizers while the engine loads in its own process.
            observers = Observers()
            for one, model in zip(sources, served, strict=True):
                await _complete(one, model, store, observers)

            async def prepare(sources: Sequence[Source], settings: Settings) -> list[Served]:
                assert models is not None
                new = [_served(one, settings, cache_path=cache_path, shares=True) for one in sources]
                _check_names([*(named.served for named in models.names if not named.parent), *new])
                for one, model in zip(sources, new, strict=True):
                    await _complete(one, model, store, observers)
                return new

            models = Models(served, settings, group)
            num_recovered = await _first_start(models, settings, on_loaded)
            taking_over = group.create_task(_take_over_orphans(models))
            yield Service(models, store, num_recovered, prepare)
            taking_over.cancel()
        finally:
            if models is not None:
                await models.close()
            await served[0].stop()


async def _take_over_orphans(models: Models) -> None:
    """Continue the streams of other servers when these die. Never returns."""
    while True:
        with contextlib.suppress(StorageError):  # whatever is left is found again
            await models.recover(waits=True)


def _served(source: Source, settings: Settings, *, cache_path: str, shares: bool) -> Served:
    """Raises: ModelError if the settings contradict the model or the engine."""
    own = settings_of_model(source.card, settings, source.own, shares=shares)
    try:
        spec = engine_spec(source, own, cache_path=cache_path)
    except ModelError as error:
        if not source.own:
            raise
        raise ModelError(f"{source.card.name}: {error}") from None
    return Served(source.card, spec, own, memory_bytes=source.memory_bytes(spec))


def settings_of_model(card: ModelCard, settings: Settings, own: Mapping[str, Any], *, shares: bool) -> Settings:
    """Return the settings of one model, which has some of its `own`. `shares` says whether `settings` are also those of
    other models. Raises: ValueError if they contradict each other."""
    its = settings.of_model(own)
    if shares and "context_tokens" not in own and its.context_tokens > card.context_tokens:
        return replace(its, context_tokens=0)  # meant for a model with a larger window, as beside one of embeddings
    return its


def _check_names(served: Sequence[Served]) -> None:
    """Raises: ModelError if a name is used twice, or an adapter's name means the first model."""
    counts = Counter(named.model for one in served for named in one.names)
    for one in served:
        for named in one.names[1:]:
            if means_any_model(named.model):
                raise ModelError(f"An adapter cannot have the name {named.model}, which means the first model.")
            if counts[named.model] > 1:
                raise ModelError(
                    f"The adapter {named.model} has the name of another model or adapter. Rename it, or give it to one "
                    f"model only: --set {one.model}.adapter=NAME=PATH."
                )
        if counts[one.model] > 1:
            raise ModelError(f"Two models have the name {one.model}. Rename one.")


async def _complete(source: Source, served: Served, store: LogStore, observers: Observers) -> None:
    """Load the tokenizer of a model, and make what needs it. Raises: ModelError."""
    settings, card = served.settings, source.card
    tokenizer, chat = await asyncio.to_thread(load_text, source, settings)
    served.generator = Generator(
        model=card.name,
        prompts=PromptEncoder(
            tokenizer=tokenizer,
            chat=chat,
            context_tokens=served.supervisor.spec.context_tokens,
            add_bos=card.add_bos,
            is_framed=card.task != "generate",
        ),
        supervisor=served.supervisor,
        gate=Gate(max_requests=settings.max_concurrent_requests),
        store=store,
        limits=limits_of(settings),
        may_see=all_kinds()[source.engine].sees(card),
        observers=observers,
    )
    served.generator.on_unload()
    served.embedder = Embedder(
        served.generator,
        num_dimensions=card.num_dimensions,
        may_shorten=card.may_shorten,
        pair_template=pair_template(card),
        pooling=card.pooling,
    )


async def _first_start(models: Models, settings: Settings, on_loaded: Callable[[Models], None]) -> int:
    """Load what must be loaded before requests are accepted, and continue streams of an earlier process. Returns how
    many continue. Raises: ModelError."""
    try:
        await models.first.wait_loaded()
        models.schedule_unload(models.first)
        on_loaded(models)
        num_recovered = await models.recover()
        if settings.load == "all":
            for served in models:
                await models.load(served, within_s=2 * served.settings.load_s)  # load_s ends it first
            if settings.memory_bytes and not all(served.is_loaded for served in models):
                raise ModelError("--load all needs more memory for all models than --memory-bytes allows.")
    except EngineLost as error:
        raise ModelError(_load_failure(error.message)) from None
    except StorageError as error:
        raise ModelError(error.message) from None
    return num_recovered


def engine_spec(source: Source, settings: Settings, *, cache_path: str) -> EngineSpec:
    """Return what the worker has to load. Raises: ModelError if the model or the engine does not support a setting."""
    if settings.context_tokens > source.card.context_tokens:
        most = source.card.context_tokens
        raise ModelError(f"--context-tokens must be at most {most}, the context window of {source.card.name}.")
    kind = all_kinds()[source.engine]
    kind.check(sorted(OPTIONAL_SETTINGS & settings.changed.keys()))
    if settings.weights != "auto" and source.card.format == "openvino":
        raise ModelError(f"--weights does not apply to {source.card.name}: an OpenVINO export has its own weights.")
    adapters = settings.adapters
    for path in adapters.values():
        if not expanded(path).exists():
            raise ModelError(f"The adapter {path} cannot be used: there is no such file or directory.")
    return EngineSpec(
        engine=source.engine,
        path=source.address or str(source.card.path),
        task=source.card.task,
        context_tokens=settings.context_tokens or source.card.context_tokens,
        kv_tokens=settings.kv_tokens,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens or kind.step_tokens,
        threads=settings.threads,
        eos_token_ids=source.card.eos_token_ids,
        cache_path=cache_path,
        exact=kind.exact if settings.exact is None else settings.exact,
        never_alone=settings.shares_streams,
        prefix_cache=settings.prefix_cache,
        device=read_device(settings.device),
        dtype="" if settings.dtype == "auto" else settings.dtype,
        kv_precision="" if settings.kv_precision == "auto" else settings.kv_precision,
        gpus=settings.gpus,
        gpu_memory=settings.gpu_memory,
        prompt_lookup_tokens=settings.prompt_lookup_tokens,
        draft=str(source.draft.path) if source.draft is not None else "",
        draft_tokens=settings.draft_tokens,
        weight_bits=0 if settings.weights == "auto" else int(settings.weights),  # type: ignore[arg-type]  # choices
        adapters=adapters,
        adapter_scale=settings.adapter_scale,
        secret=source.secret,
        options=source.options,
    )


def load_text(source: Source, settings: Settings) -> tuple[Tokenizer, ChatEncoder | None]:
    """Return the tokenizer of a model, and the encoder of its chats; None if it has no chat template that can be used.

    Raises: ModelError if the files cannot be read, or for an unknown --tool-format.
    """
    card, splits_reasoning = source.card, settings.reasoning == "auto"
    calls = FORMATS.get(settings.tool_format)
    if calls is None and settings.tool_format != "auto":
        hint = did_you_mean(settings.tool_format, FORMATS)
        raise ModelError(f"--tool-format must be auto, {', '.join(FORMATS)}.{hint}")
    if function := all_kinds()[source.engine].text_of:
        text_of: TextOf = resolve_name(function)
        return text_of(card, THINK if splits_reasoning else None, calls)
    tokenizer = Tokenizer.from_json(card.tokenizer_json)
    if card.chat_template is None:
        return tokenizer, None
    template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
    reasoning = find_format(card.chat_template, tokenizer.pieces) if splits_reasoning else None
    chat = ChatEncoder(tokenizer, template, reasoning, calls)
    if not chat.shows_messages:
        logger.warning("the chat template of %s shows no messages, so chats are refused", card.name)
        return tokenizer, None
    return tokenizer, chat


def pair_template(card: ModelCard) -> str:
    """Return the template of a query and a document for a model that ranks; "" if its tokenizer joins them.

    A chat template of a model that ranks has the messages `query` and `document`. *Source:* sentence-transformers'
    CrossEncoder; vLLM's score templates.
    """
    if card.task != "rank" or card.pair_template or card.chat_template is None:
        return card.pair_template
    template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
    turns: list[Turn] = [{"role": name, "content": f"{{{name}}}"} for name in ("query", "document")]
    try:
        rendered = template.render_turns(turns)
    except TemplateError:
        rendered = ""
    if rendered.count("{query}") == rendered.count("{document}") == 1:
        return rendered
    logger.warning("the chat template of %s shows no query and document, so they are joined as they are", card.name)
    return ""


def _load_failure(reason: str) -> str:
    if "alloc" in reason.lower() or "SIGKILL" in reason or "memory" in reason.lower():
        return f"{reason} If memory is short, try a smaller --kv-tokens or a smaller model."
    return reason
