"""`/docs`: all routes as one page of HTML, made from the OpenAPI document. It loads one style sheet, which is ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

__all__ = ["routes_page"]

Document = dict[str, Any]  # Any: of JSON


def routes_page(document: Document) -> bytes:
    """The page. Every text of the document is escaped."""
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
        operations = list(_operations(document, tag["name"]))
        if operations:
            parts += [f"<h2>{escape(tag['description'])}</h2><dl>", *operations, "</dl>"]
    return "\n".join([*parts, "</body></html>", ""]).encode()


def _operations(document: Document, tag: str) -> Iterator[str]:
    """Those of one tag; with an empty one, those that have none."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation.get("tags", [""]):
                yield f"<dt><code>{method.upper()} {escape(path)}</code></dt>"
                yield f"<dd><p>{escape(operation['summary'])}</p>{_details(operation)}</dd>"


def _details(operation: Document) -> str:
    query = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
    told = f"<p>Query: {', '.join(f'<code>{escape(name)}</code>' for name in query)}</p>" if query else ""
    example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    if example is not None:
        shown = escape(json.dumps(example, indent=2, ensure_ascii=False), quote=False)
        told += f"<details><summary>An example of a body</summary><pre>{shown}</pre></details>"
    return told
