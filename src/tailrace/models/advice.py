"""Which well-known models fit a machine, and how fast one stream could be."""

from __future__ import annotations

from tailrace.models.catalogue import CATALOGUE, CatalogueEntry, HubModel, hub_models

__all__ = ["fits", "known_models", "models_to_try", "tokens_per_s"]

# Engines keep some types of weights in more bits than the file has. Keys and values of some thousand tokens, and the
# process itself, take the rest. A rule for a choice; doctor measures.
_SHARE_OF_FILE = 1.25
_BESIDE_BYTES = 500_000_000
_QUICK_READ_BYTES = 3_000_000_000  # that a token reads: some tokens a second on a laptop
_SMALL_BYTES = 3_000_000_000  # to fetch: minutes


def known_models() -> list[CatalogueEntry | HubModel]:
    """Return all models that have a name, those in packages first."""
    return [*CATALOGUE.values(), *hub_models().values()]


def fits(model: CatalogueEntry | HubModel, memory_bytes: int) -> bool:
    """Return whether a model is likely to fit this much free memory, with some thousand tokens."""
    return _SHARE_OF_FILE * model.num_bytes + _BESIDE_BYTES <= memory_bytes


def tokens_per_s(model: CatalogueEntry | HubModel, read_bytes_per_s: float) -> float:
    """Return the most tokens a second that reading the weights allows one stream."""
    return read_bytes_per_s / (model.num_bytes * model.read_share)


def models_to_try(memory_bytes: int) -> list[HubModel]:
    """Return at most two models that write text and fit this much free memory: one that is fetched soon, and the
    largest one that a processor runs at some tokens a second."""
    able = [
        model
        for model in hub_models().values()
        if fits(model, memory_bytes)
        and model.num_bytes * model.read_share <= _QUICK_READ_BYTES
        and {"tools", "reasoning"} <= set(model.can)
    ]
    soon = [model for model in able if model.num_bytes <= _SMALL_BYTES]
    largest = [max(models, key=lambda model: model.num_bytes) for models in (soon, able) if models]
    return list(dict.fromkeys(largest))
