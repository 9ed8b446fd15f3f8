"""`/openapi.json`: the HTTP routes of all wires, made from their tables of operations."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from tailrace import __version__
from tailrace.dialects import WIRES, Wire
from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.wire import SSE, Follow, Generate, OnStream, Operation, Show
from tailrace.errors import RequestError

__all__ = ["document"]

_SCHEMAS = "#/components/schemas/{name}"
_ERROR_HEADERS = {
    "X-Request-Id": {
        "schema": {"type": "string"},
        "description": "Names this request; the log has it where the server failed.",
    }
}
_LINGER: JsonBody = {
    "name": "X-Tailrace-Linger",
    "in": "header",
    "description": "Seconds that the stream runs on with nobody reading, instead of ending with its reader.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,5}$"},
}
_KEY: JsonBody = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same key with the same request gives the same stream again.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}

_ELSEWHERE = {  # what is no wire's: the name of its operation, what it is, and as what it comes
    "/": ("welcome", "A page to chat on, for browsers; a line of text for others.", ("text/html", "text/plain")),
    "/docs": ("docs", "All routes, as a page to read.", ("text/html",)),
    "/metrics": ("metrics", "What Prometheus may know.", ("text/plain",)),
    "/openapi.json": ("openapi", "This document.", ("application/json",)),
}


@cache
def document() -> bytes:
    """The whole document, in OpenAPI 3.1."""
    entries = [(wire, operation) for wire in WIRES for operation in wire.operations]
    bodies = list(dict.fromkeys(operation.body for _, operation in entries if operation.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    by_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, JsonBody] = {}
    for wire, operation in entries:
        methods = paths.setdefault(operation.path.replace(":path}", "}"), {})
        described = _operation(wire, operation, by_body)
        shared = methods.get(operation.method.lower())
        methods[operation.method.lower()] = described if shared is None else _merged(shared, described)
    for path, (name, summary, kinds) in _ELSEWHERE.items():
        content = {kind: {"schema": {} if "json" in kind else {"type": "string"}} for kind in kinds}
        answer = {"description": summary, "content": content, "headers": _ERROR_HEADERS}
        paths.setdefault(path, {})["get"] = {"summary": summary, "operationId": name, "responses": {"200": answer}}
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "tailrace",
                "version": __version__,
                "description": "Streams a local language model over every wire that its clients speak. Every answer "
                "that is a stream has an X-Stream-Id, with which any other wire can follow it.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "tags": [{"name": wire.name, "description": wire.title} for wire in WIRES],
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _operation(wire: Wire, operation: Operation, by_body: dict[Any, JsonBody]) -> JsonBody:  # Any: msgspec classes
    described: JsonBody = {
        "tags": [wire.name],
        "summary": operation.summary,
        "operationId": _name(wire, operation),
        "parameters": _parameters(operation),
        "responses": _responses(wire, operation),
    }
    if operation.body is not None:
        content: JsonBody = {"schema": by_body[operation.body]}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    if operation.query_in_body:
        names = [name.rstrip("!") for name in operation.query]
        fields = {"schema": {"type": "object", "properties": {key: {} for key in names}}, "example": operation.example}
        kinds = ("application/json", "application/x-www-form-urlencoded")
        described["requestBody"] = {"required": False, "content": dict.fromkeys(kinds, fields)}
    return described


def _parameters(operation: Operation) -> list[JsonBody]:
    parameters: list[JsonBody] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{([a-z_]+)", operation.path)
    ]
    for name in operation.query:
        required = name.endswith("!") and not operation.query_in_body
        parameters.append({"name": name.rstrip("!"), "in": "query", "required": required, "schema": {"type": "string"}})
    if isinstance(operation.act, Generate):
        parameters += [_LINGER, _KEY]
    return parameters


def _responses(wire: Wire, operation: Operation) -> JsonBody:
    def content(kinds: JsonBody, text: str) -> JsonBody:
        return {"description": text, "content": kinds, "headers": _ERROR_HEADERS}

    anything: JsonBody = {"schema": {}}
    stream = {SSE.partition(";")[0]: anything, "text/plain": {"schema": {"type": "string"}}}
    lines = {"application/x-ndjson": anything}
    kinds: JsonBody
    match operation.act:
        case Generate():
            kinds = {"application/json": anything, **stream, **lines}
        case Follow():
            kinds = stream
        case OnStream():
            kinds = {"application/json": anything}
        case Show():
            kinds = {"application/json": anything, "text/plain": {"schema": {"type": "string"}}}
    _, error = wire.encode_error(RequestError("…"))
    shape = {"type": "object", "required": sorted(msgspec.json.decode(error))}
    refusal = {"application/json": {"schema": shape}}
    responses = {"200": content(kinds, "What was asked for."), "4XX": content(refusal, "A refusal, and why.")}
    responses["503"] = content(refusal, "Not now; Retry-After says when.")
    responses["504"] = content(refusal, "The engine made no progress.")
    if isinstance(operation.act, Generate):
        responses["201"] = content({"application/json": anything}, "The stream has begun.") | {"links": _links()}
        responses["200"]["links"] = _links()
        responses["500"] = content(refusal, "The engine failed.")
    if isinstance(operation.act, Follow | OnStream | Generate):
        responses["204"] = {"description": "There is nothing more to come."}
    return responses


def _name(wire: Wire, operation: Operation) -> str:
    path = operation.path if operation.path == "/" else re.sub("/$", "/slash", operation.path)
    return re.sub("[^a-z0-9]+", "_", f"{wire.name} {operation.method} {path}".lower()).strip("_")


def _links() -> JsonBody:
    """What can be done with any stream, whatever wire began it."""
    native = WIRES[0]
    return {
        _name(native, operation): {
            "operationId": _name(native, operation),
            "parameters": {"stream_id": "$response.header.X-Stream-Id"},
        }
        for operation in native.operations
        if "{stream_id}" in operation.path
    }


def _merged(one: JsonBody, other: JsonBody) -> JsonBody:
    """Two wires on one path, told apart by the query."""
    names = {parameter["name"] for parameter in one["parameters"]}
    added = [parameter for parameter in other["parameters"] if parameter["name"] not in names]
    merged = one | {
        "tags": one["tags"] + [tag for tag in other["tags"] if tag not in one["tags"]],
        "summary": f"{one['summary']} {other['summary']}",
        "parameters": [parameter | {"required": parameter["in"] == "path"} for parameter in one["parameters"] + added],
    }
    body = one.get("requestBody") or other.get("requestBody")
    if body is not None:
        merged["requestBody"] = body | {"required": False}
    for status, response in other["responses"].items():
        known = merged["responses"].setdefault(status, response)
        if "content" in known and known != response:
            either: JsonBody = {kind: {"schema": {}} for kind in {**known["content"], **response.get("content", {})}}
            merged["responses"][status] = known | {"content": either}
    return merged
