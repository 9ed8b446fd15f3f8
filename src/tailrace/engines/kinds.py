"""The list of engines: what each runs, which packages it needs, and which engine `auto` takes.

Nothing here imports an engine's library: this only looks up whether it is installed. The worker loads it.

Packages add engines: each is a `Kind` under the entry point `tailrace.engines`. The package tailrace has some itself.
An engine of another package runs only if it is named: `auto` never takes it, so that installing a package does not
change which engine runs a model.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from tailrace.engines.devices import device_name, read_device
from tailrace.engines.interface import Engine
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError
from tailrace.packages.requirements import install_command
from tailrace.schemas import PORTABLE, Reach
from tailrace.types import Task
from tailrace.wording import listed

if TYPE_CHECKING:  # each process of an engine imports this module
    from tailrace.models import ModelCard
    from tailrace.packages.plugins import Plugins

__all__ = [
    "ENGINES_GROUP",
    "OPTIONAL_SETTINGS",
    "EngineChoice",
    "FoundModel",
    "Kind",
    "all_kinds",
    "choose",
    "find_kind",
    "load_engine",
    "own_kinds",
]

ENGINES_GROUP = "tailrace.engines"  # of entry points


def _accept_all(card: ModelCard) -> str:
    return ""


def _sees_nothing(card: ModelCard) -> bool:
    return False


def _file_bytes(card: ModelCard, bits: int) -> int:
    return card.weight_bytes


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that an engine has found by its name, such as `openai:URL`."""

    card: ModelCard
    options: dict[str, float] = field(default_factory=dict)  # of the engine
    address: str = ""  # of the model's server, instead of a path
    secret: str = field(default="", repr=False)  # a key for this server


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine. `refuses` returns why the engine cannot run a model of a supported format, or "". `weight_bytes`
    returns an estimate of the weights that a step reads; it gets `EngineSpec.weight_bits`, too. `memory_bytes` returns
    an estimate of the engine's memory without keys and values; by default these are the weights."""

    name: str
    text: str  # a description for people
    formats: tuple[str, ...]  # of model cards
    # Models that the engine finds itself have these words before the colon in their names; `finds` is module:function,
    # which is called with the whole name and returns a `FoundModel`. Raises: ModelError.
    prefixes: tuple[str, ...] = field(default=(), kw_only=True)
    finds: str = field(default="", kw_only=True)
    # For models whose vocabulary is elsewhere: module:function, which is called with the card, how the model marks its
    # reasoning (None: it is not separated) and how it writes tool calls (None: unknown). It returns a
    # `tailrace.text.Tokenizer` and a `ChatEncoder`, or None for one.
    text_of: str = field(default="", kw_only=True)
    cls: str  # module:class, called with the `EngineSpec` in the worker; its module may import the library
    vector_cls: str = ""  # the same, for models that embed or rank; "": the engine runs none
    packages: tuple[str, ...] = ()  # that must be importable
    extra: str = ""  # the pip extra that installs them; "" if tailrace depends on them
    settings: tuple[str, ...] = ()  # the supported ones among the settings that not every engine has
    # Of tailrace's own engines: the rank in the order in which `auto` prefers them. Those of others have none.
    preference: int = 0
    is_for_gpus: bool = False  # slower than the others without a GPU
    is_for_intel: bool = False  # its GPUs are Intel's; those of the others are NVIDIA's, AMD's and Apple's
    exact: bool = False  # the default of --exact
    is_for_one: bool = False  # fastest with one stream, and slower than others with many
    step_tokens: int = 256  # default number of prompt tokens per step; 0: the engine decides
    starts_processes: bool = False  # child processes that do not end when the worker is killed
    reach: Reach = PORTABLE  # what its grammars keep of a JSON schema
    may_be_silent: bool = False  # may give no token for long; has its own timeouts
    devices: tuple[str, ...] = ()  # names in `engines.devices`; empty: it has no choice
    sees: Callable[[ModelCard], bool] = _sees_nothing  # whether it reads images with this model
    refuses: Callable[[ModelCard], str] = _accept_all
    weight_bytes: Callable[[ModelCard, int], int] = _file_bytes
    memory_bytes: Callable[[ModelCard, EngineSpec], int] | None = None
    forms: Callable[[ModelCard, EngineSpec], str] | None = None  # says in what forms it compiles a model, for `doctor`
    # module:function that measures how many operations its kernels do in a second at most, for `tailrace doctor`. It is
    # called with an `EngineSpec`, and with `in_eight_bits`: whether the weights have eight bits or fewer.
    operations_per_s: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(package for package in self.packages if find_spec(package) is None)

    @property
    def remedy(self) -> str:
        """The command that installs the missing packages."""
        return install_command(extra=self.extra, packages=self.packages)

    def class_for(self, task: Task) -> str:
        """Return the class that runs models of a task, as module:class; "" if there is none."""
        return self.cls if task == "generate" else self.vector_cls

    def check(self, settings: Iterable[str]) -> None:
        """Refuse given settings that the engine does not support. Raises: ModelError."""
        for name in settings:
            if name not in self.settings:
                able = [kind.name for kind in all_kinds().values() if name in kind.settings]
                flag = f"--{name.replace('_', '-')}"
                raise ModelError(f"The engine {self.name} does not support {flag}. It is supported by {listed(able)}.")

    def check_device(self, device: str) -> None:
        """`device` is in the common notation. Raises: ModelError if the engine cannot compute there."""
        name = device_name(device)
        if not name or not self.devices or name in self.devices:
            return
        others = [kind.name for kind in own_kinds().values() if name in kind.devices]
        hint = f" {listed(others)} can." if others else ""
        raise ModelError(f"The engine {self.name} computes on {listed(self.devices)}, not on {name}.{hint}")

    def why_not(self, card: ModelCard) -> str:
        """Return why the engine cannot run this model, or "". Does not check whether it is installed."""
        if card.format not in self.formats:
            return f"it runs {listed(_PLURALS[name] for name in self.formats)}, but this is {_FORMATS[card.format]}"
        if card.task != "generate" and not self.vector_cls:
            return "it only generates text, and this model does not"
        return self.refuses(card)


_FORMATS = {
    "gguf": "a GGUF file",
    "openvino": "an OpenVINO export",
    "huggingface": "a Hugging Face directory",
    "scripted": "the scripted model",
    "upstream": "another server",
}

_PLURALS = {
    "gguf": "GGUF files",
    "openvino": "OpenVINO exports",
    "huggingface": "Hugging Face directories",
    "scripted": "its own model",
    "upstream": "other servers",
}

# Settings that not every engine has.
OPTIONAL_SETTINGS = frozenset((
    "adapter", "adapter_scale", "device", "draft", "draft_tokens", "dtype", "exact", "gpu_memory", "gpus",
    "kv_precision", "kv_tokens", "max_step_tokens", "prefix_cache", "prompt_lookup_tokens", "threads", "weights",
))  # fmt: skip


def all_kinds() -> Mapping[str, Kind]:
    """Return the engines of tailrace, in their order of preference, followed by the engines of other packages."""
    return {**own_kinds(), **_plugins().found}


@cache
def own_kinds() -> Mapping[str, Kind]:
    """Return the engines of the package tailrace, in their order of preference."""
    plugins = _plugins()
    own = [plugins.found[name] for name in plugins.ours]
    return {kind.name: kind for kind in sorted(own, key=lambda kind: kind.preference)}


def find_kind(name: str) -> Kind | None:
    """Return the engine of this name, or None. Loads no plugins of other names."""
    return _plugins(name).found.get(name)


@cache
def _plugins(only: str | None = None) -> Plugins[Kind]:
    from tailrace.packages.plugins import (
        load_plugins,  # imports importlib.metadata, which no process of an engine needs
    )

    return load_plugins(ENGINES_GROUP, Kind, taken=(), refuses=_misfit, only=only)


def _misfit(kind: Kind, others: Mapping[str, Kind]) -> str:
    """Return why tailrace cannot use this plugin, or ""."""
    if unknown := sorted(set(kind.formats) - set(_FORMATS)):
        return f"it has unknown formats: {', '.join(unknown)}"
    if unknown := sorted(set(kind.settings) - OPTIONAL_SETTINGS):
        return f"it has unknown settings: {', '.join(unknown)}"
    return "" if kind.cls.count(":") == 1 else f"{kind.cls!r} is not module:class"


class EngineChoice(NamedTuple):
    """The engine for a model, and the reason for this choice."""

    kind: Kind
    why: str


def choose(
    card: ModelCard,
    wanted: str = "auto",
    *,
    for_one: bool = False,
    changed: Mapping[str, object] = MappingProxyType({}),
) -> EngineChoice:
    """Choose the engine for a model. `auto` prefers an engine that reads images, if one can with this model; the engine
    that is fastest with one stream if `for_one`, or if it uses the GPU of a Mac, unless it does not support one of the
    `changed` settings. If one of these is a device, it takes an engine that has it. Raises: ModelError that says what
    to do, if there is none.
    """
    device = read_device(str(changed.get("device", "")))
    if wanted != "auto":
        kind = _named(wanted)
        kind.check_device(device)
        if reason := kind.why_not(card):
            raise ModelError(f"{wanted} cannot run {card.name}: {reason}. {_others(card, kind)}")
        _require(kind)
        return EngineChoice(kind, "as asked")
    able = [kind for kind in _preferred(card, device_name(device)) if not kind.why_not(card)]
    if device and able:
        able = _with_device(able, device_name(device))
    has_eyes = any(kind.sees(card) for kind in able if not kind.missing)
    usual = next((kind for kind in able if not kind.missing), None)
    if has_eyes:
        able.sort(key=lambda kind: not kind.sees(card))
    rivals = {kind.name: _unfit_for_one(kind, card, changed, has_eyes) for kind in able if kind.is_for_one}
    has_mac_gpu = has_metal() and device != "cpu"
    if for_one or has_mac_gpu:
        able.sort(key=lambda kind: rivals.get(kind.name) != "")
    for kind in able:
        if not kind.missing:
            why = [_FORMATS[card.format], *(f"{other.name} is not installed" for other in able[: able.index(kind)])]
            if has_eyes and usual is not None and not usual.sees(card):
                why.append(f"{usual.name} reads no images")
            why += _load_note(kind, able, rivals, for_one=for_one, has_mac_gpu=has_mac_gpu)
            return EngineChoice(kind, "; ".join(why))
    if not able:
        known = [kind for kind in own_kinds().values() if card.format in kind.formats]
        reasons = "; ".join(f"{kind.name}: {kind.why_not(card)}" for kind in known)
        raise ModelError(f"No engine runs {card.name} ({reasons}).{_left_out()}")
    raise ModelError(
        f"{card.name} is {_FORMATS[card.format]}. No engine for it is installed. "
        f"Install one: {able[0].remedy}.{_left_out()}"
    )


def _left_out() -> str:
    """Return which engines cannot be used at all, and why; "" if there are none."""
    plugins = _plugins()
    return "".join(f" {_why_left_out(name)}" for name in plugins.left_out if name not in plugins.found)


def _why_left_out(name: str) -> str:
    return f"The engine {name} cannot be used: {_plugins().left_out[name]}."


def _with_device(kinds: list[Kind], name: str) -> list[Kind]:
    """Return the engines that compute on a device. Raises: ModelError if none does."""
    able = [kind for kind in kinds if name in kind.devices]
    if not able:
        raise ModelError(
            f"No engine for this model computes on {name}: "
            + "; ".join(f"{kind.name} computes on {listed(kind.devices)}" for kind in kinds if kind.devices)
            + "."
        )
    if name == "gpu":
        is_intels = not has_gpu() and not has_metal()
        able = [kind for kind in able if kind.is_for_intel == is_intels] or able
    return able


def _unfit_for_one(kind: Kind, card: ModelCard, changed: Mapping[str, object], has_eyes: bool) -> str:
    """Return why `auto` does not prefer this engine for one stream, or "". `has_eyes`: an engine reads images with this
    model."""
    if has_eyes and not kind.sees(card):
        return f"{kind.name} reads no images"
    if unknown := sorted(OPTIONAL_SETTINGS & changed.keys() - set(kind.settings)):
        return f"{kind.name} does not support --{unknown[0].replace('_', '-')}"
    return f"{kind.name} is slow with --exact" if changed.get("exact") and not kind.exact else ""


def _load_note(
    kind: Kind, able: Iterable[Kind], rivals: Mapping[str, str], *, for_one: bool, has_mac_gpu: bool
) -> list[str]:
    """Return what the expected load, or the GPU of a Mac, has to do with the choice of this engine, if another one
    would do."""
    others = [other for other in able if other is not kind and not other.missing]
    if has_mac_gpu and rivals.get(kind.name) == "" and others:
        return [f"it uses this Mac's GPU, and {others[0].name} does not"]
    if for_one and kind.name in rivals and others:
        return [f"for one stream: --for many takes {others[0].name}"]
    for other in others:
        if other.name in rivals and kind.name not in rivals:
            unfit = rivals[other.name]
            return [unfit] if for_one else [] if unfit else [f"for many streams: --for one takes {other.name}"]
    return []


def load_engine(spec: EngineSpec) -> Engine:
    """Load an engine and its model into this process, which takes seconds and much memory.

    Raises: ModelError if the engine is unknown or its library is missing; the library's exceptions if it cannot load
    the model.
    """
    kind = find_kind(spec.engine) or _named(spec.engine)
    _require(kind)
    engine: Engine = resolve_name(kind.class_for(spec.task))(spec)
    return engine


def _named(name: str) -> Kind:
    kinds = all_kinds()
    if name in kinds:
        return kinds[name]
    if name in _plugins().left_out:
        raise ModelError(_why_left_out(name))
    raise ModelError(f"There is no engine named {name!r}; the engines are {listed(kinds)}.")


def _require(kind: Kind) -> None:
    if kind.missing:
        raise ModelError(f"The engine {kind.name} needs {listed(kind.missing)}: {kind.remedy}.")


def _others(card: ModelCard, but: Kind) -> str:
    able = [kind for kind in _preferred(card) if kind is not but and not kind.why_not(card)]
    if not able:
        return "No other engine runs it either."
    here = next((kind for kind in able if not kind.missing), None)
    return f"--engine auto takes {here.name}." if here else f"{able[0].name} would run it: {able[0].remedy}."


def _preferred(card: ModelCard, device: str = "") -> list[Kind]:
    kinds = list(own_kinds().values())
    if device == "cpu" or not (has_gpu() or device in ("cuda", "rocm")):
        kinds.sort(key=lambda kind: kind.is_for_gpus)
    elif card.format == "huggingface":
        kinds.sort(key=lambda kind: kind.is_for_intel)  # which would leave the GPU idle
    return kinds


def has_gpu() -> bool:
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def has_metal() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"
