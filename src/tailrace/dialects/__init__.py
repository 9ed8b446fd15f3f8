"""Dialects: each wire translates between its bytes and tailrace's types.

Rule: no await, no clock, no state shared between streams. A wire is a table of operations (`wire.py`):
`parse` turns a request into a `GenerateCall`, the call's `View` opens an encoder for one stream, and the encoder turns
events into bytes. The tests' golden files have the exact bytes. The server serves the wires in `WIRES`, and those of
plugins under the entry point `tailrace.wires`. This module exports what their authors need (docs/extending.md).
"""

from __future__ import annotations

from tailrace.dialects import native, openai
from tailrace.dialects.answers import (
    EventStreamView,
    ToolsView,
    finite,
    logprobs_json,
    readiness,
    show_live,
    unsupported,
)
from tailrace.dialects.bare import BareTextView, bare_request, bare_sampling
from tailrace.dialects.bodies import (
    JsonBody,
    printable,
    quote,
    read_json,
    require_json,
    require_json_or_curl,
    time_of,
    to_json,
)
from tailrace.dialects.embeddings import Dimensions, Inputs, read_inputs, vectors_json
from tailrace.dialects.facts import ServerFacts, StreamFacts, TokenVocabulary, capabilities_of
from tailrace.dialects.fields import (
    MAX_STOPS,
    AnswerTokens,
    CommonFields,
    Fraction,
    LogitBias,
    ReasoningTokens,
    RepetitionPenalty,
    SamplingFields,
    Temperature,
    TemplateValues,
    TopK,
    logit_biases,
    sampling_of,
    seed_of,
    stops,
)
from tailrace.dialects.grammar_fields import grammar_of_regex, grammar_of_schema, unwrapped_schema
from tailrace.dialects.images import image_of_base64, image_of_url
from tailrace.dialects.messages import (
    MAX_MESSAGES,
    ChatMessage,
    FunctionCall,
    Messages,
    ReasoningDetail,
    ToolCallBody,
    read_messages,
    with_images,
)
from tailrace.dialects.native import RETRY_MS, encode_error
from tailrace.dialects.parts import ImagePart, TextPart, eyes_of, first_asked, omit, text_of
from tailrace.dialects.queries import read_count
from tailrace.dialects.reasoning_fields import Effort, effort_values, reasoning_budget, switch_values, unread_reasoning
from tailrace.dialects.rerank import parse_ranking, ranked
from tailrace.dialects.shapes import Other, ignored, note, read_fields, read_known, refused, without_unused
from tailrace.dialects.tools import ChosenTools, Offer, Tool, ToolChoice, choose_tools, left_out, read_tools
from tailrace.dialects.wire import (
    SSE,
    CumulativeEncoder,
    Encoder,
    Follow,
    Following,
    Generate,
    GenerateCall,
    MakeVectors,
    OnStream,
    Operation,
    ParsedRequest,
    Reply,
    Show,
    SocketChat,
    VectorCall,
    View,
    Wire,
    conformity_json,
    deltas_by_choice,
    failure_of,
    find_model,
    finished_end,
    named_model,
)
from tailrace.text.calls import CallPart, ToolCallReader, WholeCall, WholeCallReader
from tailrace.types import event_id, parse_cursor

__all__ = [
    "MAX_MESSAGES",
    "MAX_STOPS",
    "RETRY_MS",
    "SSE",
    "WIRES",
    "WIRES_GROUP",
    "AnswerTokens",
    "BareTextView",
    "CallPart",
    "ChatMessage",
    "ChosenTools",
    "CommonFields",
    "CumulativeEncoder",
    "Dimensions",
    "Effort",
    "Encoder",
    "EventStreamView",
    "Follow",
    "Following",
    "Fraction",
    "FunctionCall",
    "Generate",
    "GenerateCall",
    "ImagePart",
    "Inputs",
    "JsonBody",
    "LogitBias",
    "MakeVectors",
    "Messages",
    "Offer",
    "OnStream",
    "Operation",
    "Other",
    "ParsedRequest",
    "ReasoningDetail",
    "ReasoningTokens",
    "RepetitionPenalty",
    "Reply",
    "SamplingFields",
    "ServerFacts",
    "Show",
    "SocketChat",
    "StreamFacts",
    "Temperature",
    "TemplateValues",
    "TextPart",
    "TokenVocabulary",
    "Tool",
    "ToolCallBody",
    "ToolCallReader",
    "ToolChoice",
    "ToolsView",
    "TopK",
    "VectorCall",
    "View",
    "WholeCall",
    "WholeCallReader",
    "Wire",
    "bare_request",
    "bare_sampling",
    "capabilities_of",
    "choose_tools",
    "conformity_json",
    "deltas_by_choice",
    "effort_values",
    "encode_error",
    "event_id",
    "eyes_of",
    "failure_of",
    "find_model",
    "finished_end",
    "finite",
    "first_asked",
    "grammar_of_regex",
    "grammar_of_schema",
    "ignored",
    "image_of_base64",
    "image_of_url",
    "left_out",
    "logit_biases",
    "logprobs_json",
    "named_model",
    "note",
    "omit",
    "parse_cursor",
    "parse_ranking",
    "printable",
    "quote",
    "ranked",
    "read_count",
    "read_fields",
    "read_inputs",
    "read_json",
    "read_known",
    "read_messages",
    "read_tools",
    "readiness",
    "reasoning_budget",
    "refused",
    "require_json",
    "require_json_or_curl",
    "sampling_of",
    "seed_of",
    "show_live",
    "stops",
    "switch_values",
    "text_of",
    "time_of",
    "to_json",
    "unread_reasoning",
    "unsupported",
    "unwrapped_schema",
    "vectors_json",
    "with_images",
    "without_unused",
]

WIRES_GROUP = "tailrace.wires"  # of entry points

# The first one, tailrace's own, answers errors on paths of no wire.
WIRES: tuple[Wire, ...] = (native.WIRE, openai.WIRE)
