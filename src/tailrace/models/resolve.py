"""Finds or downloads the model that a user has named, and reads its card."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import ModelError
from tailrace.models.card import ModelCard
from tailrace.models.catalogue import CatalogueEntry, parse_source
from tailrace.models.fetch import fetch
from tailrace.models.hub import fetch_from_hub
from tailrace.models.progress import Progress

__all__ = ["read_card", "resolve"]


def resolve(source: str, progress: Progress) -> ModelCard:
    """Find the model, or download it, and read its card. Blocks; call this before the event loop runs, or in a thread.

    *Cancellation:* KeyboardInterrupt leaves no partial file under the model's name.
    *Raises:* ModelError for every failure.
    """
    wanted = parse_source(source)
    if isinstance(wanted, Path):
        name = wanted.stem if wanted.suffix == ".gguf" else wanted.name
        return read_card(wanted, name)
    if isinstance(wanted, CatalogueEntry):
        return read_card(fetch(wanted, progress), wanted.name)
    return read_card(fetch_from_hub(wanted, progress), wanted.repo)


def read_card(path: Path, name: str) -> ModelCard:
    """Read the card of a model. Raises: ModelError if it is not a model, damaged, or not supported by any engine."""
    from tailrace.models import _directory_card, _gguf_card

    if path.is_dir():
        return _directory_card.read(path, name)
    if not path.exists():
        raise ModelError(f"There is no file or directory {path}. Check the path.")
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path} is neither a .gguf file nor a directory. Give the GGUF file itself (its name must end in .gguf), "
            "or the directory of a Hugging Face model or an OpenVINO export."
        )
    return _gguf_card.read(path, name)
