"""`/openapi.json`: all HTTP routes, made from the wires' tables of operations and from tables here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import msgspec

from tailrace import __version__
from tailrace.dialects import Wire, native
from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.wire import SSE, Follow, Generate, MakeVectors, OnStream, Operation, Show
from tailrace.errors import RequestError
from tailrace.http.wires import ServedWires
from tailrace.server import Opened

__all__ = ["RouteRow", "described", "document", "routes_page"]

_SCHEMAS = "#/components/schemas/{name}"
_ERROR_HEADERS = {
    "X-Request-Id": {
        "schema": {"type": "string"},
        "description": "Identifies this request, also in the server's log of errors.",
    }
}
_LINGER: JsonBody = {
    "name": "X-Tailrace-Linger",
    "in": "header",
    "description": "Seconds for which the stream continues without a reader.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,5}$"},
}
_PRIORITY: JsonBody = {
    "name": "X-Tailrace-Priority",
    "in": "header",
    "description": "background: the request runs only where no other one could.",
    "schema": {"type": "string", "enum": ["live", "background"]},
}
_KEY: JsonBody = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same key with the same request returns the same stream.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}

_OTHER_ROUTES = {  # routes without a wire: operation id, summary, media types
    "/": ("welcome", "The chat page for browsers, a line of text for others.", ("text/html", "text/plain")),
    "/admin": ("admin", "The page of an operator.", ("text/html",)),
    "/docs": ("docs", "All routes, as a page.", ("text/html",)),
    "/metrics": ("metrics", "Metrics for Prometheus.", ("text/plain",)),
    "/openapi.json": ("openapi", "This document.", ("application/json",)),
}


class RouteRow(NamedTuple):
    """A route that uses the database."""

    method: str
    path: str
    name: str
    summary: str
    example: JsonBody | None = None  # of the body
    query: tuple[str, ...] = ()


def described(rows: Iterable[RouteRow]) -> dict[str, JsonBody]:
    """Return the paths of routes of extensions, most of which use the database."""
    paths: dict[str, JsonBody] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method] = _database_operation(row)
    return paths


def document(wires: ServedWires, root_path: str = "", extensions: Sequence[Opened] = ()) -> bytes:
    """Return the document, in OpenAPI 3.1. `root_path` is the path of the server at its proxy."""
    entries = [(wire, operation) for wire in wires.all for operation in wire.operations]
    bodies = list(dict.fromkeys(operation.body for _, operation in entries if operation.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    by_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, JsonBody] = {}
    for wire, operation in entries:
        methods = paths.setdefault(operation.path.replace(":path}", "}"), {})
        shown = _operation(wire, operation, by_body)
        shared = methods.get(operation.method.lower())
        methods[operation.method.lower()] = shown if shared is None else _merged(shared, shown)
    for path, (name, summary, kinds) in _OTHER_ROUTES.items():
        content = {kind: {"schema": {} if "json" in kind else {"type": "string"}} for kind in kinds}
        answer = {"description": summary, "content": content, "headers": _ERROR_HEADERS}
        paths.setdefault(path, {})["get"] = {"summary": summary, "operationId": name, "responses": {"200": answer}}
    for extension in extensions:
        paths |= extension.paths or {}
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "tailrace",
                "version": __version__,
                "description": "Streams a local language model over the APIs of many clients. Every streamed answer "
                "has an X-Stream-Id, with which it can be followed over other APIs, too.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "tags": [
                *({"name": wire.name, "description": wire.title} for wire in wires.all if wire.operations),
                *(extension.tag for extension in extensions if extension.tag is not None),
            ],
            **({"servers": [{"url": root_path}]} if root_path else {}),
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"apiKey": []}],  # a key is needed if keys exist
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


def _database_operation(row: RouteRow) -> JsonBody:
    content: JsonBody = {"application/json": {"schema": {}}}
    described: JsonBody = {
        "summary": row.summary,
        "operationId": row.name,
        "parameters": [_parameter(name, "path") for name in re.findall(r"\{([a-z_]+)", row.path)]
        + [_parameter(name, "query") for name in row.query],
        "responses": {
            status: {"description": text, "content": content, "headers": _ERROR_HEADERS}
            for status, text in (
                ("200", "Success."),
                ("201", "Created."),
                ("4XX", "Refused, with the reason."),
                ("503", "The database is not available."),
            )
        },
    }
    if row.example is not None:
        content = {"schema": {"type": "object"}, "example": row.example}
        described["requestBody"] = {"content": {"application/json": content}}
    return described


def _parameter(name: str, location: str) -> JsonBody:
    return {"name": name, "in": location, "required": location == "path", "schema": {"type": "string"}}


def _parameters(operation: Operation) -> list[JsonBody]:
    parameters = [_parameter(name, "path") for name in re.findall(r"\{([a-z_]+)", operation.path)]
    for name in operation.query:
        required = name.endswith("!") and not operation.query_in_body
        parameters.append({"name": name.rstrip("!"), "in": "query", "required": required, "schema": {"type": "string"}})
    if operation.only_with_header is not None:
        parameters.append(
            {"name": operation.only_with_header, "in": "header", "required": True, "schema": {"type": "string"}}
        )
    if isinstance(operation.act, Generate):
        parameters += [_LINGER, _PRIORITY, _KEY]
    return parameters


def _responses(wire: Wire, operation: Operation) -> JsonBody:
    def content(kinds: JsonBody, text: str) -> JsonBody:
        return {"description": text, "content": kinds, "headers": _ERROR_HEADERS}

    any_json: JsonBody = {"schema": {}}
    stream = {SSE.partition(";")[0]: any_json, "text/plain": {"schema": {"type": "string"}}}
    lines = {"application/x-ndjson": any_json}
    kinds: JsonBody
    match operation.act:
        case Generate():
            kinds = {"application/json": any_json, **stream, **lines}
        case Follow():
            kinds = stream
        case OnStream() | MakeVectors():
            kinds = {"application/json": any_json}
        case Show():
            kinds = {"application/json": any_json, "text/plain": {"schema": {"type": "string"}}, **lines}
    _, error = wire.encode_error(RequestError("…"))
    shape = {"type": "object", "required": sorted(msgspec.json.decode(error))}
    refusal = {"application/json": {"schema": shape}}
    responses = {"200": content(kinds, "Success."), "4XX": content(refusal, "Refused, with the reason.")}
    responses["503"] = content(refusal, "Not available now. Retry-After says when to try again.")
    responses["504"] = content(refusal, "The engine made no progress.")
    if isinstance(operation.act, MakeVectors):
        responses["500"] = content(refusal, "The engine failed.")
    if isinstance(operation.act, Generate):
        responses["201"] = content({"application/json": any_json}, "The stream was created.") | {"links": _links()}
        responses["200"]["links"] = _links()
        responses["500"] = content(refusal, "The engine failed.")
    if isinstance(operation.act, Follow | OnStream | Generate):
        responses["204"] = {"description": "The stream has no more events."}
    return responses


def _name(wire: Wire, operation: Operation) -> str:
    path = operation.path if operation.path == "/" else re.sub("/$", "/slash", operation.path)
    return re.sub("[^a-z0-9]+", "_", f"{wire.name} {operation.method} {path}".lower()).strip("_")


def _links() -> JsonBody:
    """Return links to the operations on any stream."""
    wire = native.WIRE
    return {
        _name(wire, operation): {
            "operationId": _name(wire, operation),
            "parameters": {"stream_id": "$response.header.X-Stream-Id"},
        }
        for operation in wire.operations
        if "{stream_id}" in operation.path
    }


def _merged(one: JsonBody, other: JsonBody) -> JsonBody:
    """Merge the operations of two wires on one path, which the query or a header distinguishes."""
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


def routes_page(document: JsonBody) -> bytes:
    """Return the document as an HTML page for `/docs`. All texts are escaped."""
    info = document["info"]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(info['title'])}: routes</title>",
        '<link rel="icon" href="page/icon.svg"><link rel="stylesheet" href="page/docs.css"></head><body>',
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])}</p>",
        '<p>For programs: <a href="openapi.json">/openapi.json</a>. To chat: <a href="./">the page</a>.</p>',
    ]
    for tag in [*document["tags"], {"name": "", "description": "About the server"}]:
        operations = list(_listed(document, tag["name"]))
        if operations:
            parts += [f"<h2>{escape(tag['description'])}</h2><dl>", *operations, "</dl>"]
    return "\n".join([*parts, "</body></html>", ""]).encode()


def _listed(document: JsonBody, tag: str) -> Iterator[str]:
    """Yield the operations with a tag; for an empty tag, those without any."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation.get("tags", [""]):
                yield f"<dt><code>{method.upper()} {escape(path)}</code></dt>"
                yield f"<dd><p>{escape(operation['summary'])}</p>{_details(operation)}</dd>"


def _details(operation: JsonBody) -> str:
    query = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
    details = f"<p>Query: {', '.join(f'<code>{escape(name)}</code>' for name in query)}</p>" if query else ""
    example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    if example is not None:
        shown = escape(json.dumps(example, indent=2, ensure_ascii=False), quote=False)
        details += f"<details><summary>An example of a body</summary><pre>{shown}</pre></details>"
    return details
