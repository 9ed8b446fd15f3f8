"""From what the user typed to the card of a model that is on disk."""

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
    """Find the model, or fetch it when it is not on this machine yet, and read its card. Blocks for as long as that
    takes; to be called before the event loop runs, or in a thread.

    *Cancellation:* KeyboardInterrupt leaves no half file that could be taken for whole.
    *Raises:* ModelError for everything that can go wrong.
    """
    wanted = parse_source(source)
    if isinstance(wanted, Path):
        name = wanted.stem if wanted.suffix == ".gguf" else wanted.name
        return read_card(wanted, name)
    if isinstance(wanted, CatalogueEntry):
        return read_card(fetch(wanted, progress), wanted.name)
    return read_card(fetch_from_hub(wanted, progress), wanted.repo)


def read_card(path: Path, name: str) -> ModelCard:
    """Raises: ModelError for what is not a model, is damaged, or is of a kind that no engine runs."""
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
