"""What one request may ask for, and how long it may wait."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask. Tokens count prompt ids or new ids."""

    default_max_tokens: int = 1024
    max_n: int = 8
    max_choices: int = 64  # prompts times n
    queue_s: float = 60.0
    linger_s: float = 60.0
    recover_s: float = 120.0  # how long streams wait for an engine that is gone
