"""Generation: from what a client asked to the events of its stream.

The room's law: everything that can be refused is refused before the stream exists, and what happens afterwards is an
event. This is the one path: a request is text, then ids, then a place in the queue, then sequences in the engine, then
text again, then events in a log. One that is answered in a single piece takes the same way.
"""

from __future__ import annotations

from tailrace.generation.generator import Generator, Limits
from tailrace.generation.observers import Meter, Observer, Times
from tailrace.generation.prompts import PromptEncoder
from tailrace.generation.run import Run

__all__ = ["Generator", "Limits", "Meter", "Observer", "PromptEncoder", "Run", "Times"]
