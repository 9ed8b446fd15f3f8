"""A client of servers, for authors of commands. The code is in the outer layer, `tailrace_outer.client`."""

from __future__ import annotations

from tailrace_outer.client.certificates import NOT_TRUSTED, is_not_trusted, trusted_certificates
from tailrace_outer.client.connection import AnswerFailed, Client, NoServer, ServerRefused, Turn, connect

__all__ = [
    "NOT_TRUSTED",
    "AnswerFailed",
    "Client",
    "NoServer",
    "ServerRefused",
    "Turn",
    "connect",
    "is_not_trusted",
    "trusted_certificates",
]
