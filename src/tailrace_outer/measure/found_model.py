"""The model that a command measures."""

from __future__ import annotations

from tailrace.assembly.service import engine_spec
from tailrace.assembly.source import Source, find_source
from tailrace.cli.pull import terminal_progress
from tailrace.engines import EngineSpec
from tailrace.errors import ModelError
from tailrace.models.directories import prepared_path
from tailrace.settings import Settings

__all__ = ["found_model"]


def found_model(model: str, settings: Settings) -> tuple[Source, EngineSpec]:
    """Find a model that writes text, or download it. Returns it with the spec for a worker. Call this before the event
    loop runs, so that Ctrl-C stops a download at once. Raises: ModelError."""
    source = find_source(model, terminal_progress(), settings)
    if source.card.task != "generate":
        raise ModelError(f"{source.card.name} writes no text, which is what this command measures.")
    return source, engine_spec(source, settings, cache_path=prepared_path())
