"""Finds or downloads the model that a user has named, and reads its card."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import ModelError
from tailrace.models._directory_card import EXPORT_FILES
from tailrace.models.card import ModelCard
from tailrace.models.catalogue import CatalogueEntry, HubModel, parse_source
from tailrace.models.fetch import fetch
from tailrace.models.hub import fetch_from_hub
from tailrace.models.progress import Progress
from tailrace.models.shards import gguf_choices, model_stem, some_of

__all__ = ["read_card", "resolve"]


def resolve(source: str, progress: Progress) -> ModelCard:
    """Find the model, or download it, and read its card. Blocks; call this before the event loop runs, or in a thread.

    *Cancellation:* KeyboardInterrupt leaves no partial file under the model's name.
    *Raises:* ModelError for every failure.
    """
    wanted = parse_source(source)
    if isinstance(wanted, Path):
        found = _gguf_in(wanted)
        return read_card(found or wanted, model_stem(wanted) if wanted.suffix == ".gguf" else wanted.name)
    if isinstance(wanted, CatalogueEntry):
        return read_card(fetch(wanted, progress), wanted.name)
    if isinstance(wanted, HubModel):
        return read_card(fetch_from_hub(wanted.source, progress), wanted.name)
    return read_card(fetch_from_hub(wanted, progress), wanted.repo)


def _gguf_in(directory: Path) -> Path | None:
    """Return the GGUF model of a directory; None if it has none, or a model of another kind. Raises: ModelError if
    there are several."""
    try:
        names = [file.name for file in directory.iterdir()] if directory.is_dir() else []
    except OSError:
        return None  # reading the card says why
    if any(name in EXPORT_FILES or name.endswith(".safetensors") for name in names):
        return None
    choices = gguf_choices(names)
    if len(choices) > 1:
        raise ModelError(f"{directory} contains {len(choices)} GGUF models. Name one of them: {some_of(choices)}.")
    return directory / choices[0] if choices else None


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
