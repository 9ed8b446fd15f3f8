"""The list of engines: what each runs, which packages it needs, and which engine `auto` takes.

Nothing here imports an engine's library: this only looks up whether it is installed. The worker loads it.

Other packages add engines: each is a `Kind` under the entry point `tailrace.engines`. Such an engine runs only if it is
named. `auto` never takes it, so that installing a package does not change which engine runs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tailrace.engines.processor import has_eight_bit_products, processor_flags
from tailrace.engines.promise import Engine
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace.plugins import Plugins, load_plugins
from tailrace.requirements import install_command

__all__ = [
    "ENGINES_GROUP",
    "KINDS",
    "OF_SOME",
    "OPENVINO_FOUR_BITS",
    "EngineChoice",
    "Kind",
    "all_kinds",
    "choose",
    "find_kind",
    "load_engine",
    "openvino_least_bits",
]

ENGINES_GROUP = "tailrace.engines"  # of entry points

# What the GGUF loader of OpenVINO GenAI supports, and the tensor types that openvino.weights can convert for it.
_OPENVINO_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OPENVINO_TENSORS = frozenset(
    ("F32", "F16", "BF16", "MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
     "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")
)  # fmt: skip
OPENVINO_FOUR_BITS = frozenset(("Q4_0", "Q4_1", "Q4_K"))  # kept in large files; the other types get eight bits
_OPENVINO_SMALL_BYTES = 400 * 2**20  # of a file; in eight bits, a model of this size takes 0.3 GB more
_OPENVINO_SHARE = 1.2  # of the file's bytes: the library keeps scales in float32
_OPENVINO_BYTES = 17 / 16  # for a weight of eight bits, with its share of a scale
_OF_COMPUTING = ("kv_tokens", "max_step_tokens", "prefix_cache", "threads")


def _accept_all(card: ModelCard) -> str:
    return ""


def _openvino_refuses(card: ModelCard) -> str:
    if card.format != "gguf":
        return ""
    if card.architecture not in _OPENVINO_ARCHITECTURES:
        return f"it runs GGUF files of {_names(_OPENVINO_ARCHITECTURES)}, not of {card.architecture}"
    if card.tokenizer_model not in ("", "gpt2"):
        return "it runs GGUF files with a byte-level BPE tokenizer, not with SentencePiece"
    if unknown := sorted(set(card.tensor_types) - _OPENVINO_TENSORS):
        return f"it does not read {', '.join(unknown)} tensors"
    return ""


def _file_bytes(card: ModelCard) -> int:
    return card.weight_bytes


def openvino_least_bits(file_bytes: int) -> int:
    """Return 4 if the four-bit weights of a GGUF file of this size stay so, or 8 if they get eight.

    Without VNNI, the library computes in float32, and unpacking four bits takes longer than reading eight: with
    SmolLM2-135M, a step of one row takes 1.2 times as long, of 16 rows 1.05 times. A large model keeps its four bits
    nevertheless, because memory is what it lacks.
    """
    is_small = file_bytes <= _OPENVINO_SMALL_BYTES
    return 8 if is_small and not has_eight_bit_products(processor_flags()) else 4


def _openvino_bytes(card: ModelCard) -> int:
    types = set(card.tensor_types) - {"F32", "F16", "BF16"}
    if card.format != "gguf" or not types:
        return card.weight_bytes
    if types <= OPENVINO_FOUR_BITS | {"Q6_K", "Q8_0"} and openvino_least_bits(card.weight_bytes) == 4:
        return round(card.weight_bytes * _OPENVINO_SHARE)
    return round(card.num_parameters * _OPENVINO_BYTES)


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine. `refuses` returns why the engine cannot run a model of a supported format, or "". `weight_bytes`
    returns an estimate of the memory of the model's weights."""

    name: str
    text: str  # a description for people
    formats: tuple[str, ...]  # of model cards
    cls: str  # module:class, called with the `EngineSpec` in the worker; its module may import the library
    packages: tuple[str, ...] = ()  # that must be importable
    extra: str = ""  # the pip extra that installs them; "" if tailrace depends on them
    settings: tuple[str, ...] = ()  # the supported ones among the settings that not every engine has
    exact: bool = False  # the default of --exact
    is_for_one: bool = False  # fastest with one stream, and slower than others with many
    step_tokens: int = 256  # default number of prompt tokens per step; 0: the library decides
    starts_processes: bool = False  # child processes that do not end when the worker is killed
    may_be_silent: bool = False  # may give no token for long; has its own timeouts
    refuses: Callable[[ModelCard], str] = _accept_all
    weight_bytes: Callable[[ModelCard], int] = _file_bytes

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(package for package in self.packages if find_spec(package) is None)

    @property
    def remedy(self) -> str:
        """The command that installs the missing packages."""
        return install_command(extra=self.extra, packages=self.packages)

    def check(self, settings: Iterable[str]) -> None:
        """Refuse given settings that the engine does not support. Raises: ModelError."""
        for name in settings:
            if name not in self.settings:
                able = [kind.name for kind in KINDS.values() if name in kind.settings]
                flag = f"--{name.replace('_', '-')}"
                raise ModelError(f"The engine {self.name} does not support {flag}. It is supported by {_names(able)}.")

    def why_not(self, card: ModelCard) -> str:
        """Return why the engine cannot run this model, or "". Does not check whether it is installed."""
        if card.format not in self.formats:
            return f"it runs {_names(_PLURALS[name] for name in self.formats)}, but this is {_FORMATS[card.format]}"
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

# In the order of preference of `auto`. Without a GPU, vllm comes last.
KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "openvino",
            "CPUs; most streams at once",
            formats=("gguf", "openvino"),
            packages=("openvino", "openvino_genai"),
            cls="tailrace.engines.openvino.engine:OpenVINOEngine",
            settings=(
                *_OF_COMPUTING,
                "adapter",
                "adapter_scale",
                "device",
                "exact",
                "grammar_memory_bytes",
                "kv_precision",
                "prompt_lookup_tokens",
            ),
            exact=True,
            refuses=_openvino_refuses,
            weight_bytes=_openvino_bytes,
        ),
        Kind(
            "llamacpp",
            "any GGUF file; fastest with one stream",
            formats=("gguf",),
            packages=("xllamacpp",),
            cls="tailrace.engines.llamacpp.engine:LlamaCppEngine",
            is_for_one=True,
            settings=(*_OF_COMPUTING, "exact"),  # --exact costs two thirds of the speed
            step_tokens=512,  # llama.cpp's own batch size
        ),
        Kind(
            "vllm",
            "GPUs, and CPUs where its CPU build is installed",
            formats=("huggingface",),
            packages=("vllm",),
            extra="vllm",
            cls="tailrace.engines.vllm.engine:VllmEngine",
            settings=(*_OF_COMPUTING, "adapter", "adapter_scale", "dtype", "gpus"),
            starts_processes=True,
            step_tokens=0,  # vLLM takes 2,048 on a CPU to 16,384 on the largest GPUs
        ),
        Kind(
            "transformers",
            "any causal model of Hugging Face",
            formats=("huggingface",),
            packages=("torch", "transformers"),
            extra="transformers",
            cls="tailrace.engines.transformers.engine:TransformersEngine",
            settings=(*_OF_COMPUTING, "adapter", "adapter_scale", "device", "dtype"),
        ),
        Kind(
            "upstream",
            "a server that already runs",
            formats=("upstream",),
            cls="tailrace.engines.upstream.engine:UpstreamEngine",
            may_be_silent=True,  # the model may reason, or the server may queue the request
        ),
        Kind(
            "scripted",
            "tests, load and demonstrations",
            formats=("scripted",),
            cls="tailrace.engines.scripted.engine:ScriptedEngine",
            settings=("kv_tokens",),
        ),
    )
}


OF_SOME = frozenset(name for kind in KINDS.values() for name in kind.settings)  # settings that not every engine has


def all_kinds() -> Mapping[str, Kind]:
    """Return the built-in engines, followed by the engines of other packages."""
    return {**KINDS, **_plugins().found}


def find_kind(name: str) -> Kind | None:
    """Return the engine of this name, or None. Loads no plugins of other names."""
    return KINDS.get(name) or _plugins(name).found.get(name)


@cache
def _plugins(only: str | None = None) -> Plugins[Kind]:
    return load_plugins(ENGINES_GROUP, Kind, taken=KINDS, refuses=_misfit, only=only)


def _misfit(kind: Kind, others: Mapping[str, Kind]) -> str:
    """Return why tailrace cannot use this plugin, or ""."""
    if unknown := sorted(set(kind.formats) - set(_FORMATS)):
        return f"it has unknown formats: {', '.join(unknown)}"
    if unknown := sorted(set(kind.settings) - OF_SOME):
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
    """Choose the engine for a model. `auto` prefers the engine that is fastest with one stream if `for_one`, unless it
    does not support one of the `changed` settings. Raises: ModelError that says what to do, if there is none.
    """
    if wanted != "auto":
        kind = _named(wanted)
        if reason := kind.why_not(card):
            raise ModelError(f"{wanted} cannot run {card.name}: {reason}. {_others(card, kind)}")
        _require(kind)
        return EngineChoice(kind, "as asked")
    able = [kind for kind in _preferred() if not kind.why_not(card)]
    rivals = {kind.name: _unfit_for_one(kind, changed) for kind in able if kind.is_for_one}
    if for_one:
        able.sort(key=lambda kind: rivals.get(kind.name) != "")
    for kind in able:
        if not kind.missing:
            why = [_FORMATS[card.format], *(f"{other.name} is not installed" for other in able[: able.index(kind)])]
            why += _load_note(kind, able, rivals, for_one=for_one)
            return EngineChoice(kind, "; ".join(why))
    if not able:
        known = [kind for kind in KINDS.values() if card.format in kind.formats]
        reasons = "; ".join(f"{kind.name}: {kind.why_not(card)}" for kind in known)
        raise ModelError(f"No engine runs {card.name} ({reasons}).")
    raise ModelError(
        f"{card.name} is {_FORMATS[card.format]}. No engine for it is installed. Install one: {able[0].remedy}."
    )


def _unfit_for_one(kind: Kind, changed: Mapping[str, object]) -> str:
    """Return why `auto` does not prefer this engine for one stream, or ""."""
    if unknown := sorted(OF_SOME & changed.keys() - set(kind.settings)):
        return f"{kind.name} does not support --{unknown[0].replace('_', '-')}"
    return f"{kind.name} is slow with --exact" if changed.get("exact") and not kind.exact else ""


def _load_note(kind: Kind, able: Iterable[Kind], rivals: Mapping[str, str], *, for_one: bool) -> list[str]:
    """Return what the expected load has to do with the choice of this engine, if another one would do."""
    others = [other for other in able if other is not kind and not other.missing]
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
    module, _, name = kind.cls.partition(":")
    engine: Engine = getattr(import_module(module), name)(spec)
    return engine


def _named(name: str) -> Kind:
    kinds = all_kinds()
    if name in kinds:
        return kinds[name]
    if reason := _plugins().left_out.get(name):
        raise ModelError(f"The engine {name} cannot be used: {reason}.")
    raise ModelError(f"There is no engine named {name!r}; the engines are {_names(kinds)}.")


def _require(kind: Kind) -> None:
    if kind.missing:
        raise ModelError(f"The engine {kind.name} needs {_names(kind.missing)}: {kind.remedy}.")


def _others(card: ModelCard, but: Kind) -> str:
    able = [kind for kind in _preferred() if kind is not but and not kind.why_not(card)]
    if not able:
        return "No other engine runs it either."
    here = next((kind for kind in able if not kind.missing), None)
    return f"--engine auto takes {here.name}." if here else f"{able[0].name} would run it: {able[0].remedy}."


def _preferred() -> list[Kind]:
    kinds = list(KINDS.values())
    if not has_gpu():
        kinds.sort(key=lambda kind: kind.name == "vllm")  # its CPU build is slower on few cores
    return kinds


def has_gpu() -> bool:
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _names(names: Iterable[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last
