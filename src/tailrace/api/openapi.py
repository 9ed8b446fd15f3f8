"""`/openapi.json`: the HTTP routes of all wires, made from their tables of operations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any, NamedTuple

import msgspec

from tailrace import __version__
from tailrace.dialects import Wire, native
from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.wire import SSE, Follow, Generate, OnStream, Operation, Show
from tailrace.errors import RequestError
from tailrace.http.wires import served_wires

__all__ = ["document", "routes_page"]

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


class _OfRecords(NamedTuple):
    """A route over the database."""

    method: str
    path: str
    name: str
    summary: str
    example: JsonBody | None = None  # of its body
    query: tuple[str, ...] = ()


_TALK = "/v1/conversations/{conversation_id}"
_MESSAGE = {"type": "message", "role": "user", "content": "Tell me a story about dogs."}
_RECORDS = (
    _OfRecords("get", "/v1/admin/keys", "list_keys", "Lists keys.", query=("owner",)),
    _OfRecords("post", "/v1/admin/keys", "create_key", "Makes a key. The answer alone has its token.", {
        "owner": "alice", "name": "laptop", "expires_in_s": 86_400, "scopes": ["generate", "read"],
    }),
    _OfRecords("get", "/v1/admin/keys/{key_id}", "show_key", "Shows a key."),
    _OfRecords("delete", "/v1/admin/keys/{key_id}", "revoke_key", "Revokes a key, and ends what was begun with it."),
    _OfRecords("post", "/v1/admin/keys/{key_id}/rotate", "rotate_key", "Gives a key a new secret.", {"grace_s": 3600}),
    _OfRecords(
        "post", "/v1/tickets", "issue_ticket", "Gives leave to follow one stream for a short while, in ?ticket=.",
        {"stream_id": "gvwLjBV1_uZRlZgD76TSZw"},
    ),
    _OfRecords("get", "/v1/session", "show_session", "Says who is signed in."),
    _OfRecords("post", "/v1/session", "begin_session", "Signs a browser in with the key of the request."),
    _OfRecords("delete", "/v1/session", "end_session", "Signs a browser out."),
    _OfRecords(
        "get", "/v1/conversations", "list_conversations", "Lists conversations, the last changed first.",
        query=("limit", "after", "search"),
    ),
    _OfRecords("post", "/v1/conversations", "create_conversation", "Begins a conversation.", {
        "title": "Dogs", "items": [_MESSAGE], "metadata": {"topic": "dogs"},
    }),
    _OfRecords("put", "/v1/admin/keys/{key_id}/quota", "limit_key",
               "Sets what a key may use. What is not named has no limit.", {
        "tokens_per_minute": 20_000, "streams_at_once": 4,
    }),
    _OfRecords("delete", "/v1/admin/owners/{owner}", "forget_owner", "Deletes what there is of an owner."),
    _OfRecords("get", "/v1/admin/owners/{owner}/quota", "show_owner", "Shows what an owner may use."),
    _OfRecords("put", "/v1/admin/owners/{owner}/quota", "limit_owner", "Sets what an owner may use.", {
        "tokens_per_month": 5_000_000,
    }),
    _OfRecords("get", "/v1/usage", "usage", "Sums of requests and tokens.", query=(
        "by", "since", "until", "owner", "key", "format",
    )),
    _OfRecords("get", "/v1/conversations/export", "export_conversations", "All conversations as a file.", query=(
        "format",
    )),
    _OfRecords("get", _TALK + "/export", "export_conversation", "A conversation as a file.", query=("format",)),
    _OfRecords("post", "/v1/conversations/import", "import_conversations", "Takes in a file of conversations.", {
        "conversations": [{"from": "human", "value": "Why do rivers bend?"}, {"from": "gpt", "value": "They erode."}],
    }),
    _OfRecords("get", _TALK, "show_conversation", "Shows a conversation without its items."),
    _OfRecords("post", _TALK, "change_conversation", "Changes title, metadata or the current branch.", {
        "title": "Dogs and cats",
    }),
    _OfRecords("delete", _TALK, "delete_conversation", "Forgets a conversation and its items."),
    _OfRecords("get", _TALK + "/tree", "show_tree", "The items of all branches."),
    _OfRecords("get", _TALK + "/items", "list_items", "The items of the current branch, the last first.", query=(
        "limit", "after", "order",
    )),
    _OfRecords("post", _TALK + "/items", "add_items", "Adds items; behind another parent_id they are a new branch.", {
        "items": [_MESSAGE],
    }),
    _OfRecords("get", _TALK + "/items/{item_id}", "show_item", "Shows an item."),
    _OfRecords("delete", _TALK + "/items/{item_id}", "delete_item", "Deletes an item; what followed it moves up."),
)  # fmt: skip


@cache
def document() -> bytes:
    """The whole document, in OpenAPI 3.1."""
    entries = [(wire, operation) for wire in served_wires() for operation in wire.operations]
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
    for row in _RECORDS:
        paths.setdefault(row.path, {})[row.method] = _operation_of_records(row)
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
            "tags": [{"name": wire.name, "description": wire.title} for wire in served_wires()],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"apiKey": []}],  # a key, where there are keys
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


def _operation_of_records(row: _OfRecords) -> JsonBody:
    content: JsonBody = {"application/json": {"schema": {}}}
    described: JsonBody = {
        "summary": row.summary,
        "operationId": row.name,
        "parameters": [_parameter(name, "path") for name in re.findall(r"\{([a-z_]+)", row.path)]
        + [_parameter(name, "query") for name in row.query],
        "responses": {
            status: {"description": text, "content": content, "headers": _ERROR_HEADERS}
            for status, text in (
                ("200", "What was asked for."),
                ("201", "What was made."),
                ("4XX", "A refusal, and why."),
                ("503", "The database is away."),
            )
        },
    }
    if row.example is not None:
        content = {"schema": {"type": "object"}, "example": row.example}
        described["requestBody"] = {"content": {"application/json": content}}
    return described


def _parameter(name: str, place: str) -> JsonBody:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


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
    """Two wires on one path, told apart by the query or a header."""
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
    """`/docs`: the document as one page of HTML, in which every text is escaped."""
    info = document["info"]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(info['title'])}: routes</title>",
        '<link rel="icon" href="/page/icon.svg"><link rel="stylesheet" href="/page/docs.css"></head><body>',
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])}</p>",
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. To chat: <a href="/">the page</a>.</p>',
    ]
    for tag in [*document["tags"], {"name": "", "description": "About the server"}]:
        operations = list(_listed(document, tag["name"]))
        if operations:
            parts += [f"<h2>{escape(tag['description'])}</h2><dl>", *operations, "</dl>"]
    return "\n".join([*parts, "</body></html>", ""]).encode()


def _listed(document: JsonBody, tag: str) -> Iterator[str]:
    """Those of one tag; with an empty one, those that have none."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation.get("tags", [""]):
                yield f"<dt><code>{method.upper()} {escape(path)}</code></dt>"
                yield f"<dd><p>{escape(operation['summary'])}</p>{_details(operation)}</dd>"


def _details(operation: JsonBody) -> str:
    query = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
    told = f"<p>Query: {', '.join(f'<code>{escape(name)}</code>' for name in query)}</p>" if query else ""
    example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    if example is not None:
        shown = escape(json.dumps(example, indent=2, ensure_ascii=False), quote=False)
        told += f"<details><summary>An example of a body</summary><pre>{shown}</pre></details>"
    return told
