"""Tool calls in the text of a model: the formats in which families write them, and a reader that separates them from
the text."""

from __future__ import annotations

from tailrace.text.calls.formats import FORMATS, UNKNOWN, CallFormat
from tailrace.text.calls.parameters import parameters_of
from tailrace.text.calls.reader import CallPart, ToolCallReader, WholeCall, WholeCallReader

__all__ = [
    "FORMATS",
    "UNKNOWN",
    "CallFormat",
    "CallPart",
    "ToolCallReader",
    "WholeCall",
    "WholeCallReader",
    "parameters_of",
]
