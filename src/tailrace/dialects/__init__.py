"""Dialects: each wire translates between its bytes and tailrace's types.

Rule: no await, no clock, no state shared between streams. A wire is a table of operations (`wire.py`):
`parse` turns a request into a `GenerateCall`, the call's `View` opens an encoder for one stream, and the encoder turns
events into bytes. The tests' golden files have the exact bytes. The server serves the wires in `WIRES`, and those of
plugins under the entry point `tailrace.wires`. This module exports what their authors need (docs/extending.md).
"""

from __future__ import annotations

from tailrace.dialects import anthropic, native, ollama, openai, responses, tei, tgi, triton
from tailrace.dialects.answers import EventStreamView
from tailrace.dialects.bare import BareTextView, bare_request, bare_sampling
from tailrace.dialects.bodies import JsonBody, printable, quote, to_json
from tailrace.dialects.facts import ServerFacts, StreamFacts, TokenVocabulary
from tailrace.dialects.fields import SamplingFields, sampling_of
from tailrace.dialects.grammars import grammar_of_schema
from tailrace.dialects.native import RETRY_MS, encode_error
from tailrace.dialects.queries import read_count
from tailrace.dialects.shapes import ignored, read_fields, read_known, refused
from tailrace.dialects.triton import RequestedOutput
from tailrace.dialects.triton import check_headers as check_triton_headers
from tailrace.dialects.triton import encode_error as encode_triton_error
from tailrace.dialects.triton_models import VERSION as TRITON_VERSION
from tailrace.dialects.triton_tensors import TritonTensor, read_tensors
from tailrace.dialects.wire import (
    SSE,
    CumulativeEncoder,
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
    SocketChat,
    View,
    Wire,
    failure_of,
    finished_end,
    named_model,
)
from tailrace.types import event_id, parse_cursor

__all__ = [
    "RETRY_MS",
    "SSE",
    "TRITON_VERSION",
    "WIRES",
    "WIRES_GROUP",
    "BareTextView",
    "CumulativeEncoder",
    "Encoder",
    "EventStreamView",
    "Follow",
    "Following",
    "Generate",
    "GenerateCall",
    "JsonBody",
    "OnStream",
    "Operation",
    "ParsedRequest",
    "Reply",
    "RequestedOutput",
    "SamplingFields",
    "ServerFacts",
    "Show",
    "SocketChat",
    "StreamFacts",
    "TokenVocabulary",
    "TritonTensor",
    "View",
    "Wire",
    "bare_request",
    "bare_sampling",
    "check_triton_headers",
    "encode_error",
    "encode_triton_error",
    "event_id",
    "failure_of",
    "finished_end",
    "grammar_of_schema",
    "ignored",
    "named_model",
    "parse_cursor",
    "printable",
    "quote",
    "read_count",
    "read_fields",
    "read_known",
    "read_tensors",
    "refused",
    "sampling_of",
    "to_json",
]

WIRES_GROUP = "tailrace.wires"  # of entry points

# The first one, tailrace's own, answers errors on paths of no wire.
WIRES: tuple[Wire, ...] = (
    native.WIRE,
    openai.WIRE,
    responses.WIRE,
    tgi.WIRE,
    anthropic.WIRE,
    ollama.WIRE,
    triton.WIRE,
    tei.WIRE,
)
