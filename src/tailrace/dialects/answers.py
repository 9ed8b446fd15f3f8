"""Parts of answers that several wires share: views, refusals, health, and tokens with their logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.facts import ServerFacts, TokenVocabulary
from tailrace.dialects.wire import HEARTBEAT, SSE, ParsedRequest, Reply, Show
from tailrace.errors import UnsupportedOperation
from tailrace.text.calls import ToolCallReader
from tailrace.types import CallReading, TextDelta, TopLogprobs

__all__ = [
    "EventStreamView",
    "ToolsView",
    "finite",
    "logprobs_json",
    "readiness",
    "show_live",
    "tokens_of",
    "unsupported",
]

_MIN_LOGPROB = -9999.0


class EventStreamView:
    """Server-sent events, with a comment as heartbeat."""

    __slots__ = ()

    media_type = SSE
    heartbeat = HEARTBEAT


@dataclass(frozen=True, slots=True)
class ToolsView(EventStreamView):
    """Server-sent events of a model that may call tools, or must call one. Without `calls` there are none."""

    calls: CallReading | None = None
    custom_tools: frozenset[str] = frozenset()  # names of the tools whose call is a text

    def reader(self) -> ToolCallReader | None:
        """Return a reader of the tool calls in a choice; None without tools."""
        return None if self.calls is None else ToolCallReader(self.calls)


def unsupported(message: str) -> Show:
    """Return an operation of the API that this server does not support."""

    def refuse(request: ParsedRequest) -> Reply:
        raise UnsupportedOperation(message)

    return Show(refuse)


def show_live(request: ParsedRequest) -> Reply:
    is_live = request.server.generator.is_live
    return Reply(to_json({"live": is_live}), 200 if is_live else 503)


def readiness(server: ServerFacts, fields: JsonBody) -> Reply:
    """Answer with these fields; the status says whether requests are accepted."""
    return Reply(to_json(fields)) if server.generator.is_ready else Reply(to_json(fields), 503, retry_after_s=1.0)


def logprobs_json(vocabulary: TokenVocabulary, delta: TextDelta) -> list[JsonBody]:
    """Return the tokens of an event in OpenAI's format, each with its alternatives, if there are any."""
    return [
        _token_json(vocabulary, token_id, logprob)
        | {"top_logprobs": [_token_json(vocabulary, *alternative) for alternative in top]}
        for token_id, logprob, top in tokens_of(delta)
    ]


def tokens_of(delta: TextDelta) -> Iterator[tuple[int, float, TopLogprobs]]:
    """Yield the tokens of an event that have a logprob: id, logprob and, if requested, the likeliest alternatives."""
    return zip(delta.token_ids, delta.logprobs, chain(delta.top_logprobs, repeat(())), strict=False)


def finite(logprob: float) -> float:
    """Return a logprob as a number that JSON can represent."""
    return max(logprob, _MIN_LOGPROB) if math.isfinite(logprob) else _MIN_LOGPROB


def _token_json(vocabulary: TokenVocabulary, token_id: int, logprob: float) -> JsonBody:
    pieces = vocabulary.pieces
    # Models may have more rows than their tokenizer has tokens.
    piece = pieces[token_id] if token_id < len(pieces) else b""
    return {"token": vocabulary.token_text(token_id), "logprob": finite(logprob), "bytes": list(piece)}
