"""A client of servers: tailrace's, whose answers it resumes, and others with OpenAI's wire.

Rule: it uses servers only over HTTP, and imports no server code.
"""

from __future__ import annotations

from tailrace.client.connection import AnswerFailed, Client, NoServer, ServerRefused, Turn, connect

__all__ = ["AnswerFailed", "Client", "NoServer", "ServerRefused", "Turn", "connect"]
