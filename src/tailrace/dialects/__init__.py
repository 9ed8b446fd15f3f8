"""Dialects: each wire translates between its bytes and tailrace's types.

Rule: no await, no clock, no state shared between streams. A wire is a table of operations (`wire.py`):
`parse` turns a request into a `GenerateCall`, the call's `View` opens an encoder for one stream, and the encoder turns
events into bytes. The tests' golden files have the exact bytes. The server serves the wires in `WIRES`, and those of
other packages under the entry point `tailrace.wires`. This module exports what their authors need (docs/extending.md).
"""

from __future__ import annotations

from tailrace.dialects import anthropic, cumulative, native, ollama, openai, plain, responses, tgi, triton
from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.facts import ServerFacts, StreamFacts, TokenVocabulary
from tailrace.dialects.native import encode_error
from tailrace.dialects.shapes import read_fields
from tailrace.dialects.wire import (
    SSE,
    Encoder,
    Follow,
    Following,
    Generate,
    GenerateCall,
    OnStream,
    Operation,
    ParsedRequest,
    Reply,
    Show,
    View,
    Wire,
    failure_of,
    finished_end,
)

__all__ = [
    "SSE",
    "WIRES",
    "WIRES_GROUP",
    "Encoder",
    "Follow",
    "Following",
    "Generate",
    "GenerateCall",
    "JsonBody",
    "OnStream",
    "Operation",
    "ParsedRequest",
    "Reply",
    "ServerFacts",
    "Show",
    "StreamFacts",
    "TokenVocabulary",
    "View",
    "Wire",
    "encode_error",
    "failure_of",
    "finished_end",
    "read_fields",
    "to_json",
]

WIRES_GROUP = "tailrace.wires"  # of entry points

# The first one, tailrace's own, answers errors on paths of no wire.
WIRES: tuple[Wire, ...] = (
    native.WIRE,
    openai.WIRE,
    responses.WIRE,
    plain.WIRE,
    cumulative.WIRE,
    tgi.WIRE,
    anthropic.WIRE,
    ollama.WIRE,
    triton.WIRE,
)
