"""Turns the name that a user types into files on disk and one card that says all the server must know.

It loads no weights. `resolve` is the one entry: it finds or fetches, then reads the card. The room prints nothing; what
it does is told to a `Progress`. Whatever goes wrong is a `ModelError` whose message says what happened and what to do.
"""

from __future__ import annotations

from tailrace.models.card import ModelCard
from tailrace.models.catalogue import CATALOGUE, CatalogueEntry
from tailrace.models.places import models_path
from tailrace.models.progress import NoProgress, Progress
from tailrace.models.resolve import read_card, resolve

__all__ = ["CATALOGUE", "CatalogueEntry", "ModelCard", "NoProgress", "Progress", "models_path", "read_card", "resolve"]
