"""Finds or downloads a model by the name that a user types, and reads its card.

Loads no weights. `resolve.resolve` is the only entry point. It prints nothing: it reports to a `Progress`. Every
failure is a `ModelError` whose message says what happened and what to do.
"""

from __future__ import annotations

from tailrace.models.card import ModelCard, Pooling
from tailrace.models.catalogue import CATALOGUE, CatalogueEntry
from tailrace.models.directories import models_path
from tailrace.models.progress import NoProgress, Progress

__all__ = ["CATALOGUE", "CatalogueEntry", "ModelCard", "NoProgress", "Pooling", "Progress", "models_path"]
