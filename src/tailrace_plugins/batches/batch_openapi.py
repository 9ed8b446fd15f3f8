"""Files and batches in `/openapi.json`."""

from __future__ import annotations

import json

from tailrace.dialects import JsonBody

__all__ = ["BATCHES_TAG", "batch_paths"]

BATCHES_TAG: JsonBody = {"name": "batches", "description": "Files and batches, as on OpenAI's and Anthropic's API"}

_OBJECT: JsonBody = {"type": "object"}
_TEXT: JsonBody = {"type": "string"}
_REFUSALS: JsonBody = {
    "4XX": {"description": "Refused, with the reason.", "content": {"application/json": {"schema": _OBJECT}}},
    "503": {"description": "The journal cannot be written.", "content": {"application/json": {"schema": _OBJECT}}},
    "507": {
        "description": "--batch-bytes or the disk is full.",
        "content": {"application/json": {"schema": _OBJECT}},
    },
}
_CHAT: JsonBody = {"messages": [{"role": "user", "content": "Why do rivers bend?"}], "max_tokens": 8}
_ROW: JsonBody = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": _CHAT}
_UPLOAD: JsonBody = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"const": "batch"},
                    "expires_after[anchor]": {"const": "created_at"},
                    "expires_after[seconds]": {"type": "integer"},
                },
            },
            "example": {"file": json.dumps(_ROW), "purpose": "batch"},
        }
    },
}
_BATCH: JsonBody = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": _TEXT,
        "completion_window": _TEXT,
        "metadata": {"type": ["object", "null"], "additionalProperties": _TEXT},
        "output_expires_after": {"type": ["object", "null"]},
    },
}
_MESSAGES: JsonBody = {
    "type": "object",
    "required": ["requests"],
    "properties": {
        "requests": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["custom_id", "params"],
                "properties": {"custom_id": _TEXT, "params": _OBJECT},
            },
        }
    },
}


def batch_paths() -> dict[str, JsonBody]:
    """Return the operations by path and method."""
    file_id, batch_id = _in_path("file_id"), _in_path("batch_id")
    page = [_in_query("limit"), _in_query("after")]
    messages_page = [_in_query("limit"), _in_query("after_id"), _in_query("before_id")]
    return {
        "/v1/files": {
            "post": _operation("upload_file", "Uploads a file of rows.", body=_UPLOAD),
            "get": _operation("list_files", "Lists files.", [*page, _in_query("order"), _in_query("purpose")]),
        },
        "/v1/files/{file_id}": {
            "get": _operation("show_file", "Shows a file.", [file_id]),
            "delete": _operation("delete_file", "Deletes a file.", [file_id]),
        },
        "/v1/files/{file_id}/content": {
            "get": _operation("read_file", "Returns the content of a file.", [file_id], media_type="application/jsonl"),
        },
        "/v1/batches": {
            "post": _operation(
                "create_batch",
                "Runs the rows of a file.",
                body=_json(
                    _BATCH,
                    {
                        "input_file_id": "file-of-rows",
                        "endpoint": "/v1/chat/completions",
                        "completion_window": "24h",
                    },
                ),
            ),
            "get": _operation("list_batches", "Lists batches.", page),
        },
        "/v1/batches/{batch_id}": {"get": _operation("show_batch", "Shows a batch.", [batch_id])},
        "/v1/batches/{batch_id}/cancel": {"post": _operation("cancel_batch", "Cancels a batch.", [batch_id])},
        "/v1/messages/batches": {
            "post": _operation(
                "create_message_batch",
                "Runs requests for messages.",
                body=_json(_MESSAGES, {"requests": [{"custom_id": "a", "params": {"model": "default", **_CHAT}}]}),
            ),
            "get": _operation("list_message_batches", "Lists batches of messages.", messages_page),
        },
        "/v1/messages/batches/{batch_id}": {
            "get": _operation("show_message_batch", "Shows a batch of messages.", [batch_id]),
            "delete": _operation("delete_message_batch", "Deletes a batch of messages that has ended.", [batch_id]),
        },
        "/v1/messages/batches/{batch_id}/cancel": {
            "post": _operation("cancel_message_batch", "Cancels a batch of messages.", [batch_id]),
        },
        "/v1/messages/batches/{batch_id}/results": {
            "get": _operation(
                "read_message_batch",
                "Returns the results of a batch of messages.",
                [batch_id],
                media_type="application/x-jsonl",
            ),
        },
    }


def _operation(
    name: str,
    summary: str,
    parameters: list[JsonBody] | None = None,
    *,
    body: JsonBody | None = None,
    media_type: str = "application/json",
) -> JsonBody:
    schema = _OBJECT if media_type == "application/json" else _TEXT
    described: JsonBody = {
        "tags": [BATCHES_TAG["name"]],
        "operationId": name,
        "summary": summary,
        "parameters": parameters or [],
        "responses": {"200": {"description": "Done.", "content": {media_type: {"schema": schema}}}, **_REFUSALS},
    }
    return described if body is None else described | {"requestBody": body}


def _json(schema: JsonBody, example: JsonBody) -> JsonBody:
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}


def _in_path(name: str) -> JsonBody:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _in_query(name: str) -> JsonBody:
    return {"name": name, "in": "query", "schema": _TEXT}
