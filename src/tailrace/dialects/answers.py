"""What the answers of several wires have in common: views, refusals, health, and tokens with their logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.wire import HEARTBEAT, SSE, Operation, ParsedRequest, Reply, ServerFacts, Show, TokenVocabulary
from tailrace.errors import UnsupportedOperation
from tailrace.text.tool_calls import ToolCallReader
from tailrace.types import TextDelta, TopLogprobs

__all__ = [
    "EventStreamView",
    "ToolsView",
    "finite",
    "logprobs_json",
    "no_embeddings",
    "readiness",
    "refused",
    "show_live",
    "tokens_of",
]

_LEAST = -9999.0


class EventStreamView:
    """Server-sent events, a comment now and then where nothing else is sent, and no word for who is to come back."""

    __slots__ = ()

    media_type = SSE
    heartbeat = HEARTBEAT
    farewell = b""


@dataclass(frozen=True, slots=True)
class ToolsView(EventStreamView):
    """The same, where the model may call tools, or is forced to call one."""

    reads_tools: bool = False
    forced_tool: bool = False
    single_call: bool = False

    def reader(self) -> ToolCallReader | None:
        """What finds the calls in a choice's text, where there may be any."""
        return ToolCallReader(forced=self.forced_tool, single=self.single_call) if self.reads_tools else None


def refused(message: str) -> Show:
    """An operation that the API has, and this server has not."""

    def refuse(request: ParsedRequest) -> Reply:
        raise UnsupportedOperation(message)

    return Show(refuse)


def no_embeddings(path: str) -> Operation:
    refusal = refused("This server generates text only; it has no embeddings.")
    return Operation("POST", path, refusal, "Refused: this server generates text only.")


def show_live(request: ParsedRequest) -> Reply:
    is_live = request.server.is_live
    return Reply(to_json({"live": is_live}), 200 if is_live else 503)


def readiness(server: ServerFacts, fields: JsonBody) -> Reply:
    """Whether requests are taken, in the words of a wire; the status says it, too."""
    return Reply(to_json(fields)) if server.is_ready else Reply(to_json(fields), 503, retry_after_s=1.0)


def logprobs_json(vocabulary: TokenVocabulary, delta: TextDelta) -> list[JsonBody]:
    """The tokens of an event as OpenAI writes them, each with its alternatives, of which there may be none."""
    return [
        _token_json(vocabulary, token_id, logprob)
        | {"top_logprobs": [_token_json(vocabulary, *alternative) for alternative in top]}
        for token_id, logprob, top in tokens_of(delta)
    ]


def tokens_of(delta: TextDelta) -> Iterator[tuple[int, float, TopLogprobs]]:
    """The tokens of an event that have a logprob: id, logprob, and the likeliest in its place, where asked for."""
    return zip(delta.token_ids, delta.logprobs, chain(delta.top_logprobs, repeat(())), strict=False)


def finite(logprob: float) -> float:
    """A number that JSON has, and that clients can compare."""
    return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST


def _token_json(vocabulary: TokenVocabulary, token_id: int, logprob: float) -> JsonBody:
    pieces = vocabulary.pieces
    # Models may have more rows than their tokenizer has tokens.
    piece = pieces[token_id] if token_id < len(pieces) else b""
    return {"token": vocabulary.token_text(token_id), "logprob": finite(logprob), "bytes": list(piece)}
