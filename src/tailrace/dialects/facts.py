"""What wires know of streams, models and servers. A wire gets these facts; it never asks the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tailrace.types import GenerateRequest, Message, PromptProgress, Record

__all__ = ["ServerFacts", "StreamFacts", "TokenVocabulary", "capabilities_of"]


class TokenVocabulary(Protocol):
    """Tokens, for encoders."""

    special_ids: frozenset[int]
    pieces: list[bytes]  # the bytes of each token id

    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream without its events, for encoders."""

    record: Record  # its request; has prompts only if the stream ran when the encoder was made
    vocabulary: TokenVocabulary
    status: str = "running"  # current status: queued, running, or the status of its end
    num_ahead: int | None = None  # while it is queued: requests that have their turn before it
    progress: PromptProgress | None = None  # before its first event, if this server writes it
    expires_in_s: float | None = None
    root_path: str = ""  # in front of the server's paths, for clients behind a proxy

    @property
    def created_s(self) -> int:
        """Whole seconds since the epoch."""
        return int(self.record.created_s)


class ServerFacts(Protocol):
    """A model and its server, for operations."""

    @property
    def model(self) -> str: ...
    @property
    def parent(self) -> str:
        """The model without the adapter that `model` names; "" if it names none."""

    @property
    def version(self) -> str: ...
    @property
    def started_s(self) -> int: ...
    @property
    def is_live(self) -> bool:
        """Whether the server makes progress. If not, a restart may help."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def state(self) -> str:
        """ready; unloaded, if the next request loads the model; loading; or why not: draining, engine, journal."""

    @property
    def replay(self) -> str | None:
        """The result of `tailrace certify`, if it was run: exact, or "not exact: N of M"."""

    @property
    def shared_store(self) -> Mapping[str, int]:
        """What is unusual about the store that servers share: clock_offset_s, servers_other_models. Usually empty."""

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the `Sampling` fields that the engine supports."""

    @property
    def reports_progress(self) -> bool:
        """Whether the engine says how much of a prompt it has read."""

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""

    @property
    def context_tokens(self) -> int: ...
    @property
    def default_max_tokens(self) -> int:
        """The length of an answer whose request has no limit."""

    @property
    def max_total_tokens(self) -> int:
        """The largest sum of prompt and answer."""

    @property
    def max_requests(self) -> int: ...
    @property
    def max_prompts(self) -> int:
        """The largest number of prompts in one request."""

    @property
    def tool_format(self) -> str:
        """The format in which the model writes tool calls, a name of `text.calls.FORMATS` or "any"; "" if its chat
        template takes no tools, or teaches a format that is not known."""

    @property
    def describes_tools(self) -> bool:
        """Whether the chat template describes tools to the model."""

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning in chats is separated from the text."""

    @property
    def takes_reasoning(self) -> bool:
        """Whether the chat template uses the reasoning of earlier answers."""

    @property
    def template_values(self) -> frozenset[str]:
        """Names of the values that the chat template uses."""

    @property
    def prompt_template(self) -> str:
        """The setting `--prompt-template`, with `{prompt}` in it; may be empty."""

    def tokenize(self, text: str) -> list[tuple[int, int, int]]:
        """Return ids, each with the start and end of its characters."""

    def tokenize_chat(self, messages: tuple[Message, ...]) -> tuple[str, list[tuple[int, int, int]]]:
        """Return the text that the chat template makes of messages, and its ids as in `tokenize`.
        Raises: RequestError."""

    def count_tokens(self, request: GenerateRequest) -> int:
        """Return the number of tokens of a request's prompts. May take long. Raises: RequestError."""


def capabilities_of(server: ServerFacts) -> list[str]:
    """Return what the model can do, in Ollama's words: completion, tools, thinking."""
    has = {"completion": True, "tools": bool(server.tool_format), "thinking": server.splits_reasoning}
    return [name for name, is_there in has.items() if is_there]
