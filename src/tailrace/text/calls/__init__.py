"""Tool calls in the text of a model: the formats in which families write them, and a reader that separates them from
the text."""

from __future__ import annotations

from tailrace.text.calls.call_formats import FORMATS, UNKNOWN, CallFormat
from tailrace.text.calls.call_reader import CallPart, ToolCallReader, WholeCall, WholeCallReader
from tailrace.text.calls.parameters import parameters_of

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
