"""Text processing, which is the same for all engines. Engines see only token ids.

Everything here is pure: no event loop, no files, no clock except for chat templates. `Tokenizer`,
`ChatTemplate` and `ChatEncoder` belong to a model and are shared by threads; `Detokenizer`, `StopMatcher`,
`ReasoningSplitter` and `ToolCallReader` belong to one sequence.
"""

from __future__ import annotations

from tailrace.text.calls import UNKNOWN, CallFormat, ToolCallReader
from tailrace.text.chat import ChatEncoder, ChatFacts
from tailrace.text.detokenizer import Detokenizer
from tailrace.text.reasoning import ReasoningSplitter
from tailrace.text.stops import StopMatcher
from tailrace.text.templates import ChatTemplate, TemplateError, Turn
from tailrace.text.tokenizer import Tokenizer, utf8_bytes

__all__ = [
    "UNKNOWN",
    "CallFormat",
    "ChatEncoder",
    "ChatFacts",
    "ChatTemplate",
    "Detokenizer",
    "ReasoningSplitter",
    "StopMatcher",
    "TemplateError",
    "Tokenizer",
    "ToolCallReader",
    "Turn",
    "utf8_bytes",
]
