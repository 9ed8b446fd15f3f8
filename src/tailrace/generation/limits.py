"""Limits of requests for one model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests."""

    default_max_tokens: int = 1024
    max_reasoning_tokens: int | None = None  # of requests without a limit of their own
    max_n: int = 8
    max_choices: int = 64  # prompts times n
    queue_s: float = 60.0
    linger_s: float = 60.0
    recover_s: float = 120.0  # how long streams wait for the next engine
    max_inputs: int = 2048  # of a request for vectors, as on OpenAI's API
    max_input_tokens: int = 300_000  # of all its inputs, as there
    image_bytes: int = 256 * 2**20  # of the images of all streams
    fetch_images: str = ""  # hosts from which images are fetched
