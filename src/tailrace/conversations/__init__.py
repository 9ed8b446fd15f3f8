"""Conversations, without the database: items in a tree, the turns that requests add, and the file formats for import
and export. Pure functions: no clock, no files, no network. This module exports what authors of formats need
(docs/extending.md)."""

from __future__ import annotations

from tailrace.conversations.drafts import Draft, Json, as_shape, call_of, clean, draft_of, seconds
from tailrace.conversations.formats import ConversationFormat
from tailrace.conversations.items import Conversation, Item, chained

__all__ = [
    "Conversation",
    "ConversationFormat",
    "Draft",
    "Item",
    "Json",
    "as_shape",
    "call_of",
    "chained",
    "clean",
    "draft_of",
    "seconds",
]
