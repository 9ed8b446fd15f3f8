"""The entry point of the routes of conversations."""

from __future__ import annotations

from tailrace.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION = Extension("conversations", "tailrace_outer.conversations.opening:open_conversations")
