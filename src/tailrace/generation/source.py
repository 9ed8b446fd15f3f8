"""Which model and which engine a command line means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tailrace.engines import all_kinds, choose
from tailrace.engines.scripted.engine import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    EOS_ID,
    OPTIONS,
    THINKING_TEMPLATE,
    tokenizer_json,
)
from tailrace.errors import ModelError
from tailrace.models import ModelCard, Progress, resolve
from tailrace.models.upstream import find_upstream

__all__ = ["Source", "find_named", "find_source"]

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Source:
    """A model, and the engine to run it with."""

    card: ModelCard
    engine: str
    why: str = ""  # this engine, for people
    options: dict[str, float] = field(default_factory=dict)
    address: str = ""  # of the server that runs it already
    own: Mapping[str, Any] = field(default_factory=dict)  # settings of this model alone; Any: of each setting's type

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory, as the engine keeps them."""
        return all_kinds()[self.engine].weight_bytes(self.card)


def find_source(source: str, progress: Progress, engine: str = "auto") -> Source:
    """Find or fetch a model, and an engine for it. `scripted`, or `scripted:option=value,…`, needs no files;
    `openai:URL` and `tgi:URL` mean a server that runs one.

    Raises: ModelError.
    """
    kind, _, rest = source.partition(":")
    address = ""
    if kind == "scripted":
        options = _options(rest)
        card = _scripted_card(thinks=bool(options.get("thinks")))
    elif kind in ("openai", "tgi"):
        card, place = find_upstream(source)
        options, address = {}, str(place)
    else:
        card, options = resolve(source, progress), {}
    choice = choose(card, engine)
    return Source(card, choice.kind.name, choice.why, options, address)


def find_named(
    texts: Sequence[str],
    progress: Progress,
    engine: str = "auto",
    *,
    first: str | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,  # Any: of each setting's type
) -> list[Source]:
    """The models of several `name=source`, each under its name, with what settings are its `own`. `first` comes before
    them, under the name that it has.

    Raises: ModelError for one that is not written so, is not there, or has another one's name, and for settings of one
    that is not among them.
    """
    pairs = [_pair(text) for text in texts]
    names = [name for name, _ in pairs]
    own = own or {}
    sources = [_with_own(find_source(first, progress, engine), own)] if first is not None else []
    known = [source.card.name for source in sources] + names
    for name in own:
        if name not in known:
            raise ModelError(f"--set speaks of {name}, and the models are {', '.join(known)}.")
    taken = {source.card.name for source in sources}
    for name in names:
        if name in taken:
            raise ModelError(f"Two models have the name {name}. Give each another one: --model name=source.")
        taken.add(name)
    for name, text in pairs:
        try:
            found = find_source(text, progress, own.get(name, {}).get("engine", engine))
        except ModelError as error:
            alone = f" For this model alone: --set {name}.engine=auto." if engine != "auto" else ""
            raise ModelError(f"{name}: {error.message}{alone}") from None
        sources.append(replace(found, card=replace(found.card, name=name), own=own.get(name, {})))
    return sources


def _with_own(source: Source, own: Mapping[str, Mapping[str, Any]]) -> Source:  # Any: of each setting's type
    """A model whose name was not known before it was found. Raises: ModelError."""
    settings = own.get(source.card.name, {})
    if "engine" in settings:
        choice = choose(source.card, settings["engine"])
        source = replace(source, engine=choice.kind.name, why=choice.why)
    return replace(source, own=settings)


def _pair(text: str) -> tuple[str, str]:
    """Raises: ModelError."""
    name, equals, source = text.partition("=")
    if not equals or not source.strip():
        alone = "" if equals else f" A single model needs no name: tailrace serve {text}"
        raise ModelError(f"--model takes name=source, such as chat=smollm2, and not {text!r}.{alone}")
    if not _NAME.fullmatch(name):
        raise ModelError(f"{name!r} cannot be a model's name: 1 to 128 of the characters A-Z a-z 0-9 . _ : / and -.")
    return name, source.strip()


def _scripted_card(*, thinks: bool) -> ModelCard:
    return ModelCard(
        name="scripted",
        path=Path(),
        format="scripted",
        tokenizer_json=tokenizer_json(),
        chat_template=THINKING_TEMPLATE if thinks else CHAT_TEMPLATE,
        bos_token="",
        eos_token=CONTROL_TOKENS[0],
        add_bos=False,
        eos_token_ids=(EOS_ID,),
        context_tokens=65_536,
    )


def _options(text: str) -> dict[str, float]:
    options = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name not in OPTIONS:
            raise ModelError(f"The scripted engine has no option {name!r}; it has {', '.join(OPTIONS)}.")
        try:
            options[name] = float(value)
        except ValueError:
            raise ModelError(f"{pair!r} is not an option of the scripted engine; write name=number.") from None
    return options
