"""What wires know of streams, models and servers. A wire gets these facts; it never asks the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.models import ModelCard
from tailrace.text import ChatFacts
from tailrace.types import GenerateRequest, Message, Pooling, PromptProgress, Record, Task

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


class GeneratorFacts(Protocol):
    """What runs the requests of a model, as operations see it."""

    @property
    def is_live(self) -> bool:
        """Whether the server makes progress. If not, a restart may help."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def sees(self) -> bool:
        """Whether the model reads images."""

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the `Sampling` fields that the engine supports."""

    def limit_tokens(self) -> int:
        """Return the largest sum of prompt and answer."""

    def count_tokens(self, request: GenerateRequest) -> int:
        """Return the number of tokens of a request's prompts. May take long. Raises: RequestError."""


class PromptFacts(Protocol):
    """What encodes the prompts of a model, as operations see it."""

    @property
    def can_infill(self) -> bool:
        """Whether the model can fill a gap between two texts."""

    def tokenize(self, text: str, *, bos: bool = True) -> list[tuple[int, int, int]]:
        """Return ids, each with the start and end of its characters; with `bos` those of a whole prompt. Raises:
        RequestError."""

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with that of special tokens. Raises: RequestError for an id that the model does not
        have."""

    def tokenize_chat(self, messages: tuple[Message, ...]) -> tuple[str, list[tuple[int, int, int]]]:
        """Return the text that the chat template makes of messages, and its ids as in `tokenize`.
        Raises: RequestError."""


class ServerFacts(Protocol):
    """A model and its server, for operations."""

    @property
    def model(self) -> str: ...
    @property
    def parent(self) -> str:
        """The model without the adapter that `model` names; "" if it names none."""

    @property
    def card(self) -> ModelCard:
        """What the model's files say."""

    @property
    def version(self) -> str: ...
    @property
    def started_s(self) -> int: ...
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
    def reports_progress(self) -> bool:
        """Whether the engine says how much of a prompt it has read."""

    @property
    def default_max_tokens(self) -> int:
        """The length of an answer whose request has no limit."""

    @property
    def recommended_sampling(self) -> Mapping[str, float]:
        """The parameters that the model's makers recommend and the engine supports, by their names in `Sampling`."""

    @property
    def task(self) -> Task:
        """What the model does."""

    @property
    def num_dimensions(self) -> int:
        """Of its embeddings; 0 if it makes none."""

    @property
    def pooling(self) -> Pooling:
        """Which of its tokens an embedding is made of."""

    @property
    def max_inputs(self) -> int:
        """The largest number of inputs in one request for vectors."""

    @property
    def max_requests(self) -> int: ...
    @property
    def max_prompts(self) -> int:
        """The largest number of prompts in one request."""

    @property
    def prompt_template(self) -> str:
        """The setting `--prompt-template`, with `{prompt}` in it; may be empty."""

    @property
    def chat(self) -> ChatFacts: ...
    @property
    def generator(self) -> GeneratorFacts: ...
    @property
    def prompts(self) -> PromptFacts: ...


def capabilities_of(server: ServerFacts) -> list[str]:
    """Return what the model can do, in Ollama's words: completion, tools, vision, thinking, insert, embedding; and
    rerank."""
    if server.task != "generate":
        return ["embedding" if server.task == "embed" else "rerank"]
    has = {
        "completion": True,
        "tools": bool(server.chat.call_format),
        "vision": server.generator.sees,
        "thinking": server.chat.splits_reasoning,
        "insert": server.prompts.can_infill,
    }
    return [name for name, is_there in has.items() if is_there]
