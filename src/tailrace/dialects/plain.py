"""Bare text in, bare text out: the bots of Ray Serve's tutorial, and the FastAPI article's endpoint.

- `POST /?prompt=…`: chunks of text as they come (Ray Serve's Textbot and Batchbot);
- `GET` and `POST /query-stream/?query=…`: the same, labelled `text/event-stream` as in the article, although nothing in
  it is an event. Browsers' EventSource cannot read it; `/v1/streams` is for that. With POST the fields may stand in a
  form or in a JSON body, which is the article's first idea for more.

A bare body has no place for an error, so one that cannot be completed is cut off without its terminating chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailrace.dialects.fields import SamplingFields, sampling_of
from tailrace.dialects.native import encode_error
from tailrace.dialects.queries import read_count
from tailrace.dialects.wire import (
    Encoder,
    Generate,
    GenerateCall,
    Operation,
    ParsedRequest,
    ServerFacts,
    StreamFacts,
    Wire,
    failure_of,
)
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import End, Event, GenerateRequest, Message, Sampling

__all__ = ["WIRE", "bare_request", "bare_sampling", "encode_error"]

_HOW = set(SamplingFields.__struct_fields__) - {"max_tokens", "max_completion_tokens", "stop"}  # tokens are chosen


def bare_sampling(server: ServerFacts, fields: SamplingFields) -> Sampling:
    """What is asked for. With no more than a length and stop strings an answer is greedy, as the tutorial's model call
    is, with a small repetition penalty where the engine has one: small models end in a loop without. Raises:
    RequestError."""
    sampling = sampling_of(fields)
    if any(getattr(fields, name) is not None for name in _HOW):
        return sampling
    penalty = 1.1 if "repetition_penalty" in server.parameters else 1.0
    return replace(sampling, temperature=0.0, repetition_penalty=penalty)


def bare_request(server: ServerFacts, prompt: str, sampling: Sampling) -> GenerateRequest:
    """A prompt without anything around it: put into `--prompt-template` if there is one, else one turn of a chat where
    the model can chat, else taken as it stands. The answer is all that the model writes: these wires have no place for
    reasoning. Raises: RequestError if it is empty."""
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    if server.prompt_template:
        return GenerateRequest(prompts=(server.prompt_template.replace("{prompt}", prompt),), sampling=sampling)
    if server.can_chat:
        return GenerateRequest(messages=(Message("user", prompt),), sampling=sampling, split_reasoning=False)
    return GenerateRequest(prompts=(prompt,), sampling=sampling)


def parse_tutorial(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    return _parse(request, "prompt", TEXT)


def parse_article(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    if "query" not in request.query:
        where = "in the address or, with POST, in a form or in JSON sent as application/json"
        raise RequestError(f"Give the prompt as query: {where}.", param="query")
    return _parse(request, "query", LABELLED)


def _parse(request: ParsedRequest, name: str, view: _View) -> GenerateCall:
    for field in SamplingFields.__struct_fields__:
        if field in request.query and field != "max_tokens":
            raise UnsupportedParameter(f"{field} cannot be given here; use /v1/streams for it.", param=field)
    sampling = bare_sampling(request.server, SamplingFields(max_tokens=read_count(request.query, "max_tokens")))
    return GenerateCall(bare_request(request.server, request.query[name], sampling), view, stream=True)


@dataclass(frozen=True, slots=True)
class _View:
    media_type: str
    heartbeat = b""  # everything in the body is text
    farewell = b""

    def open(self, facts: StreamFacts) -> Encoder:
        return _PlainEncoder()


TEXT = _View("text/plain; charset=utf-8")
LABELLED = _View("text/event-stream; charset=utf-8")


class _PlainEncoder:
    __slots__ = ()

    def encode(self, seq: int, event: Event) -> bytes:
        if isinstance(event, End):
            if event.status != "done":
                raise failure_of(event)
            return b""
        return event.text.encode()

    def whole(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.encode(seq, event) for seq, event in enumerate(events, 1))


_ARTICLES_FIELDS = ("query!", "max_tokens")
_ARTICLE = "Answer a query with bare text, as FastAPI's StreamingResponse does in the article."

WIRE = Wire(
    name="plain",
    title="Bare text: the chatbots of Ray Serve's tutorial, the FastAPI article",
    operations=(
        Operation(
            "POST",
            "/",
            Generate(parse_tutorial),
            "Answer a prompt with bare text.",
            query=("prompt!", "max_tokens"),
            only_with="prompt",
        ),
        *(
            operation
            for path in ("/query-stream/", "/query-stream")
            for operation in (
                Operation("GET", path, Generate(parse_article), _ARTICLE, query=_ARTICLES_FIELDS),
                Operation(
                    "POST",
                    path,
                    Generate(parse_article),
                    _ARTICLE,
                    query=_ARTICLES_FIELDS,
                    query_in_body=True,
                    example={"query": "Why do rivers bend?", "max_tokens": 64},
                ),
            )
        ),
    ),
    encode_error=encode_error,
)
