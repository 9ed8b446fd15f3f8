"""Finds the models and engines that a command line names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

from tailrace.engines import EngineChoice, EngineSpec, FoundModel, Kind, all_kinds, choose
from tailrace.errors import ModelError
from tailrace.models import ModelCard, Progress
from tailrace.models.resolve import resolve
from tailrace.settings import Settings
from tailrace.text import Tokenizer

__all__ = ["Source", "check_owners", "checked_names", "find_named", "find_source"]

_DEFAULTS = Settings()
_MOST_UNUSED = 1024  # tokens at the end of a vocabulary, which fill it up to a round number
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Source:
    """A model, and the engine to run it with."""

    card: ModelCard
    engine: str
    why: str = ""  # why this engine was chosen, as text
    options: dict[str, float] = field(default_factory=dict)
    address: str = ""  # of the upstream server
    secret: str = field(default="", repr=False)  # a key for this server
    own: Mapping[str, Any] = field(default_factory=dict)  # settings of only this model; Any: of each setting's type
    draft: ModelCard | None = None  # the draft model

    def weight_bytes(self, bits: int = 0) -> int:
        """Return an estimate of the weights that a step of this engine reads, without those of the draft model; `bits`
        are `EngineSpec.weight_bits`."""
        return all_kinds()[self.engine].weight_bytes(self.card, bits)

    @property
    def draft_bytes(self) -> int:
        """An estimate of the draft model's weights."""
        return all_kinds()[self.engine].weight_bytes(self.draft, 0) if self.draft is not None else 0

    def memory_bytes(self, spec: EngineSpec) -> int:
        """Return an estimate of the engine's memory without keys and values."""
        estimate = all_kinds()[self.engine].memory_bytes
        if estimate is None:
            return self.weight_bytes(spec.weight_bits) + self.draft_bytes
        own = estimate(self.card, spec)
        return own if self.draft is None else own + estimate(self.draft, EngineSpec(spec.engine, device=spec.device))


def find_source(source: str, progress: Progress, settings: Settings = _DEFAULTS) -> Source:
    """Find or fetch a model, and an engine for it and these settings. Some engines find models themselves: those of
    `openai:URL` and `scripted:option=value`. Raises: ModelError.
    """
    found = _find(source, progress)
    choice = _choose(found.card, settings)
    draft = _find_draft(found.card, choice.kind, settings.draft, progress)
    return Source(
        found.card, choice.kind.name, choice.why, found.options, found.address, secret=found.secret, draft=draft
    )


def _find(source: str, progress: Progress) -> FoundModel:
    prefix = source.partition(":")[0]
    for kind in all_kinds().values():
        if prefix in kind.prefixes:
            found: FoundModel = resolve_name(kind.finds)(source)
            return found
    return FoundModel(resolve(source, progress))


def find_named(
    texts: Sequence[str],
    progress: Progress,
    settings: Settings = _DEFAULTS,
    *,
    first: str | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,  # Any: of each setting's type
) -> list[Source]:
    """Find the models of several `name=source`. `own` has the settings of each model. `first` is a source without a
    name, and comes first.

    Raises: ModelError for a malformed argument, a model that is not found, a name that is used twice, or settings of an
    unknown name.
    """
    own = own or {}
    pairs = checked_names(texts, settings, own)
    names = [name for name, _ in pairs]
    sources = []
    if first is not None:
        sources.append(_with_own(find_source(first, progress, settings), settings, own, progress))
    known = [source.card.name for source in sources] + names
    check_owners(own, known)
    _check_unique(known)
    for name, text in pairs:
        its = _of_model(name, settings, own.get(name, {}))
        try:
            found = find_source(text, progress, its)
        except ModelError as error:
            is_named = settings.engine != "auto"
            hint = f" To choose an engine only for this model: --set {name}.engine=auto." if is_named else ""
            raise ModelError(f"{name}: {error.message}{hint}") from None
        sources.append(replace(found, card=replace(found.card, name=name), own=own.get(name, {})))
    return sources


def checked_names(
    texts: Sequence[str], settings: Settings, own: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:  # Any: of each setting's type
    """Return the names and sources of several `name=source`. Raises: as `find_named`, for what is wrong without the
    models, and if a model's settings contradict each other."""
    pairs = [_pair(text) for text in texts]
    _check_unique([name for name, _ in pairs])
    for name, its in own.items():
        _of_model(name, settings, its)
    return pairs


def check_owners(own: Iterable[str], known: Collection[str]) -> None:
    """Raises: ModelError if a model with own settings is none of the known ones."""
    for name in own:
        if name not in known:
            raise ModelError(f"--set names {name}, but the models are {', '.join(known)}.")


def _check_unique(names: Sequence[str]) -> None:
    """Raises: ModelError."""
    for at, name in enumerate(names):
        if name in names[:at]:
            raise ModelError(f"Two models have the name {name}. Rename one: --model name=source.")


def _with_own(
    source: Source,
    settings: Settings,
    own: Mapping[str, Mapping[str, Any]],  # Any: of each setting's type
    progress: Progress,
) -> Source:
    """Apply the settings of a model whose name was unknown until it was found. Raises: ModelError."""
    if its := own.get(source.card.name):
        both = _of_model(source.card.name, settings, its)
        choice = _choose(source.card, both)
        draft = _find_draft(source.card, choice.kind, both.draft, progress)
        source = replace(source, engine=choice.kind.name, why=choice.why, own=its, draft=draft)
    return source


def _find_draft(card: ModelCard, kind: Kind, draft: str, progress: Progress) -> ModelCard | None:
    """Find or fetch the draft model for a model and its engine. Raises: ModelError if it is not found, the engine has
    no draft models or cannot run this one, or its tokens are others."""
    if not draft:
        return None
    kind.check(["draft"])
    found = resolve(draft, progress)
    if reason := kind.why_not(found):
        raise ModelError(f"{kind.name} cannot run the draft model {found.name}: {reason}.")
    if found.tokenizer_json != card.tokenizer_json:
        ours, theirs = (Tokenizer.from_json(one.tokenizer_json).pieces for one in (card, found))
        same = all(one == other for one, other in zip(ours, theirs, strict=False))
        if not same or abs(len(ours) - len(theirs)) > _MOST_UNUSED:
            raise ModelError(
                f"{found.name} cannot be the draft model of {card.name}: they have different vocabularies. A draft "
                "model is usually the smallest one of the same family."
            )
    return found


def _of_model(name: str, settings: Settings, own: Mapping[str, Any]) -> Settings:  # Any: of each setting's type
    """Return the settings of the model with this name. Raises: ModelError if they contradict each other."""
    try:
        return settings.of_model(own)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from None


def _choose(card: ModelCard, settings: Settings) -> EngineChoice:
    return choose(card, settings.engine, for_one=settings.is_for_one, changed=settings.changed)


def _pair(text: str) -> tuple[str, str]:
    """Raises: ModelError."""
    name, equals, source = text.partition("=")
    if not equals or not source.strip():
        hint = "" if equals else f" A single model needs no name: tailrace serve {text}"
        raise ModelError(f"--model takes name=source, such as chat=smollm2, and not {text!r}.{hint}")
    if not _NAME.fullmatch(name):
        raise ModelError(f"{name!r} cannot be a model's name: use 1 to 128 of the characters A-Z a-z 0-9 . _ : / -")
    return name, source.strip()
