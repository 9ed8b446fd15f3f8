"""Bare text: the bots of Ray Serve's tutorial, and the endpoint of the FastAPI article.

- `POST /?prompt=…`: chunks of text (Ray Serve's Textbot and Batchbot);
- `GET` and `POST /query-stream/?query=…`: the same with the type `text/event-stream`, as in the article, although it
  has no events. Browsers' EventSource cannot read it; use `/v1/streams` for that. With POST the fields may be in a form
  or in a JSON body.

Bare text cannot have an error. So an incomplete answer is cut off without the terminating chunk.
"""

from __future__ import annotations

from tailrace.dialects import (
    BareTextView,
    Generate,
    GenerateCall,
    Operation,
    ParsedRequest,
    SamplingFields,
    Wire,
    bare_request,
    bare_sampling,
    encode_error,
    read_count,
)
from tailrace.errors import RequestError

__all__ = ["WIRE"]


def parse_tutorial(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    return _parse(request, "prompt", TEXT)


def parse_article(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    if "query" not in request.query:
        where = "in the URL or, with POST, in a form or in JSON sent as application/json"
        raise RequestError(f"Send the prompt as query: {where}.", param="query")
    return _parse(request, "query", LABELLED)


def _parse(request: ParsedRequest, name: str, view: BareTextView) -> GenerateCall:
    sampling = bare_sampling(request.server, SamplingFields(max_tokens=read_count(request.query, "max_tokens")))
    return GenerateCall(bare_request(request.server, request.query[name], sampling), view, stream=True)


TEXT = BareTextView()
LABELLED = BareTextView("text/event-stream; charset=utf-8")

_ARTICLES_FIELDS = ("query!", "max_tokens")
_ARTICLE = "Answer a query with bare text, as in the FastAPI article."

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
