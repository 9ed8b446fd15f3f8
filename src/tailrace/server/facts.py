"""What dialects may know of the server and of a stream, put together from the rooms that know it."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace import __version__
from tailrace.dialects import StreamFacts
from tailrace.engines.certificate import Verdict
from tailrace.errors import UnsupportedParameter
from tailrace.generation import Generator
from tailrace.server.models import Models, Served
from tailrace.streams import StreamLog
from tailrace.types import Event, GenerateRequest, Message

__all__ = ["Facts", "facts_of"]


def facts_of(generator: Generator, log: StreamLog) -> StreamFacts:
    """The facts of a stream, for any dialect's encoder."""
    record = log.record
    return StreamFacts(
        stream_id=log.stream_id,
        model=record.model,
        created_s=int(record.created_s),
        seed=record.seed,
        num_prompt_tokens=record.num_prompt_tokens,
        prompts=tuple(prompt.text for prompt in record.prompts),
        prompt_ids=tuple(prompt.ids for prompt in record.prompts),
        vocabulary=generator.tokenizer,
        num_choices=record.num_choices,
        status=log.status,
        expires_in_s=generator.store.expires_s(log),
        memo=record.memo,
    )


class Facts:
    """The facts of the server and one of its models, as they are now."""

    version = __version__

    def __init__(self, served: Served, models: Models, *, started_s: int) -> None:
        generator = served.generator
        self._served = served
        self._generator = generator
        self._models = models
        self.model = generator.model
        self.started_s = started_s
        self.can_chat = generator.chat is not None
        self.takes_tools = generator.chat is not None and generator.chat.takes_tools
        self.max_prompts = generator.limits.max_choices
        self.context_tokens = generator.context_tokens
        self.max_requests = served.settings.max_concurrent_requests
        self.prompt_template = served.settings.prompt_template

    @property
    def is_live(self) -> bool:
        return self._generator.is_live

    @property
    def is_ready(self) -> bool:
        return self._generator.is_taking

    @property
    def replay(self) -> Verdict | None:
        return self._served.replay

    @property
    def state(self) -> str:
        return self._generator.state

    @property
    def parameters(self) -> frozenset[str]:
        return self._generator.parameters

    @property
    def max_total_tokens(self) -> int:
        return self._generator.limit_tokens()

    def past(self, stream_id: str) -> tuple[StreamFacts, Sequence[Event]]:
        log = self._generator.store.get(stream_id)
        return facts_of(self._models.of(log).generator, log), log.events

    def tokenize(self, text: str) -> list[tuple[int, int, int]]:
        return self._generator.tokenize(text)

    def tokenize_chat(self, messages: tuple[Message, ...]) -> tuple[str, list[tuple[int, int, int]]]:
        if self._generator.chat is None:
            raise UnsupportedParameter("This model has no chat template.", param="messages")
        return self._generator.chat.offsets(messages)

    def count_tokens(self, request: GenerateRequest) -> int:
        return self._generator.count_tokens(request)
