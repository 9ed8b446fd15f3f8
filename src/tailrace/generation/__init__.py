"""Generation: from a request to the events of its stream.

Rule: a request is refused before its stream exists; later failures are events of the stream. There is one
path: text becomes ids, waits in the queue, runs as sequences on the engine, becomes text again, and goes into a log.
Answers without streaming take the same path.
"""

from __future__ import annotations

from tailrace.generation.generator import Generator
from tailrace.generation.limits import Limits
from tailrace.generation.observers import Meter, Observer, Observers, Times
from tailrace.generation.prompts import PromptEncoder, images_of, without_images
from tailrace.generation.run import Run

__all__ = [
    "Generator",
    "Limits",
    "Meter",
    "Observer",
    "Observers",
    "PromptEncoder",
    "Run",
    "Times",
    "images_of",
    "without_images",
]
