"""The Durable Streams protocol in `/openapi.json`: its operations at `/v1/durable/{path}`."""

from __future__ import annotations

from tailrace.dialects import JsonBody
from tailrace_plugins.durable_streams.durable_requests import ROOT

__all__ = ["DURABLE_TAG", "durable_paths"]

DURABLE_TAG: JsonBody = {"name": "durable", "description": "The Durable Streams protocol"}

_WHOLE_NUMBER = "^(0|[1-9][0-9]{0,8})$"
_PATH: JsonBody = {
    "name": "path",
    "in": "path",
    "required": True,
    "description": "Any path, with slashes. streams/{id}, without more slashes, is the read-only stream of a model.",
    "schema": {"type": "string"},
}
_EXAMPLE = {"user": "Why do rivers bend?"}


def durable_paths() -> dict[str, JsonBody]:
    """Return the operations by path and method."""
    any_content: JsonBody = {"*/*": {}}
    body: JsonBody = {
        "description": "Content of any type. A JSON list is several messages.",
        "content": {"application/json": {"schema": {}, "example": _EXAMPLE}},
    }
    closed = _header("Stream-Closed", "true: nothing can be appended later.", "^true$")
    creation = [
        closed,
        _header("Stream-TTL", "Seconds after the last use until the stream is deleted.", _WHOLE_NUMBER),
        _header("Stream-Expires-At", "The time (RFC 3339) at which the stream is deleted.", ".+"),
        _header("Stream-Forked-From", "The path of the stream that this one continues.", ".+"),
        _header("Stream-Fork-Offset", "Where the fork begins. Default: the end of that stream.", ".+"),
        _header(
            "Stream-Fork-Sub-Offset", "How much of the append behind this offset belongs to the fork.", _WHOLE_NUMBER
        ),
    ]
    append = [
        closed,
        _header("Stream-Seq", "Must be greater than the last one, compared as text.", "^[ -~]{1,256}$"),
        _header("Producer-Id", "With epoch and seq: a repeated append is kept once.", "^[ -~]{1,256}$"),
        _header("Producer-Epoch", "A greater one locks out the producer's earlier self.", _WHOLE_NUMBER),
        _header("Producer-Seq", "The number of this append, from 0.", _WHOLE_NUMBER),
    ]
    known = _header("If-None-Match", "The ETag of a page that the client has.", ".+")
    reading = [
        _query("offset", "Where to begin: -1 is the beginning, now is the end. Default: -1.", {"type": "string"}),
        _query("live", "Wait for new data. Needs an offset.", {"type": "string", "enum": ["long-poll", "sse"]}),
        _query("cursor", "Stream-Cursor of the last answer.", {"type": "string"}),
        known,
    ]
    return {
        ROOT + "{path}": {
            "put": _operation("create", "Creates a stream, with the body as its first append.", creation, {
                "201": {"description": "Created."}, "200": {"description": "It exists with the same settings."},
            }, body),
            "post": _operation("append", "Appends the body.", append, {
                "204": {"description": "Appended, or kept before."},
                "200": {"description": "Appended for a producer."},
            }, body),
            "get": _operation("read", "Returns a page from an offset on, or waits for it.", reading, {
                "200": {"description": "A page, in the content type of the stream, or server-sent events.",
                        "content": any_content},
                "204": {"description": "No new data within --durable-poll-s."},
                "304": {"description": "Not changed."},
            }),
            "head": _operation("show", "Shows content type, end and lifetime in headers.", [], {
                "200": {"description": "It exists.", "content": any_content},
            }),
            "delete": _operation("delete", "Deletes a stream.", [], {"204": {"description": "Deleted."}}),
        }
    }  # fmt: skip


def _operation(
    name: str, summary: str, parameters: list[JsonBody], responses: JsonBody, body: JsonBody | None = None
) -> JsonBody:
    refusal: JsonBody = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    described: JsonBody = {
        "tags": [DURABLE_TAG["name"]],
        "operationId": f"durable_{name}",
        "summary": summary,
        "parameters": [_PATH, *parameters],
        "responses": {
            **responses,
            "4XX": {"description": "Refused, with the reason.", "content": refusal},
            "503": {"description": "The journal or Redis does not answer.", "content": refusal},
            "507": {"description": "--durable-bytes or the disk is full.", "content": refusal},
        },
    }
    return described if body is None else described | {"requestBody": body}


def _header(name: str, text: str, pattern: str) -> JsonBody:
    return {"name": name, "in": "header", "description": text, "schema": {"type": "string", "pattern": pattern}}


def _query(name: str, text: str, schema: JsonBody) -> JsonBody:
    return {"name": name, "in": "query", "description": text, "schema": schema}
