"""The routes of conversations in the OpenAPI document."""

from __future__ import annotations

from tailrace.api.openapi import RouteRow, described

__all__ = ["PATHS"]

_CHAT = "/v1/conversations/{conversation_id}"
_MESSAGE = {"type": "message", "role": "user", "content": "Tell me a story about dogs."}
_ROUTES = (
    RouteRow(
        "get", "/v1/conversations", "list_conversations", "Lists conversations, the last changed first.",
        query=("limit", "after", "search"),
    ),
    RouteRow("post", "/v1/conversations", "create_conversation", "Creates a conversation.", {
        "title": "Dogs", "items": [_MESSAGE], "metadata": {"topic": "dogs"},
    }),
    RouteRow("get", "/v1/conversations/export", "export_conversations", "All conversations as a file.", query=(
        "format",
    )),
    RouteRow("get", _CHAT + "/export", "export_conversation", "A conversation as a file.", query=("format",)),
    RouteRow("post", "/v1/conversations/import", "import_conversations", "Imports a file of conversations.", {
        "conversations": [{"from": "human", "value": "Why do rivers bend?"}, {"from": "gpt", "value": "They erode."}],
    }),
    RouteRow("get", _CHAT, "show_conversation", "Shows a conversation without its items."),
    RouteRow("post", _CHAT, "change_conversation", "Changes title, metadata or the current branch.", {
        "title": "Dogs and cats",
    }),
    RouteRow("delete", _CHAT, "delete_conversation", "Deletes a conversation and its items."),
    RouteRow("get", _CHAT + "/tree", "show_tree", "The items of all branches."),
    RouteRow("get", _CHAT + "/items", "list_items", "The items of the current branch, the last first.", query=(
        "limit", "after", "order",
    )),
    RouteRow("post", _CHAT + "/items", "add_items", "Adds items; with another parent_id they are a new branch.", {
        "items": [_MESSAGE],
    }),
    RouteRow("post", _CHAT + "/images", "add_image", "Adds an image; the body is its file. Items name it by its id."),
    RouteRow("get", _CHAT + "/images/{image_id}", "show_image", "The file of an image."),
    RouteRow("get", _CHAT + "/items/{item_id}", "show_item", "Shows an item."),
    RouteRow("delete", _CHAT + "/items/{item_id}", "delete_item", "Deletes an item; later items move up."),
)  # fmt: skip
PATHS = described(_ROUTES)
