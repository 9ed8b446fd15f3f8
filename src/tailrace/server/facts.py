"""What dialects may know of the server and of a stream, put together from the rooms that know it."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace import __version__
from tailrace.dialects import StreamFacts
from tailrace.errors import UnsupportedParameter
from tailrace.generation import Generator, Run
from tailrace.server.settings import Settings
from tailrace.streams import StreamLog
from tailrace.types import Event, GenerateRequest, Message

__all__ = ["Facts", "facts_of", "run_of"]


def run_of(log: StreamLog) -> Run:
    """The run that writes, or wrote, a log."""
    assert isinstance(log.producer, Run)
    return log.producer


def facts_of(generator: Generator, log: StreamLog) -> StreamFacts:
    """The facts of a stream, for any dialect's encoder."""
    run = run_of(log)
    return StreamFacts(
        stream_id=log.stream_id,
        model=run.model,
        created_s=int(log.created_s),
        seed=run.seed,
        num_prompt_tokens=run.num_prompt_tokens,
        prompts=tuple(prompt.text for prompt in run.prompts),
        prompt_ids=tuple(prompt.ids for prompt in run.prompts),
        vocabulary=generator.tokenizer,
        num_choices=run.num_choices,
        status=run.status,
        expires_in_s=generator.store.expires_s(log),
        memo=log.memo,
    )


class Facts:
    """The facts of the server, as they are now."""

    version = __version__

    def __init__(self, generator: Generator, settings: Settings, *, started_s: int) -> None:
        self._generator = generator
        self._settings = settings
        self.model = generator.model
        self.started_s = started_s
        self.can_chat = generator.chat is not None
        self.takes_tools = generator.chat is not None and generator.chat.takes_tools
        self.max_prompts = generator.limits.max_choices
        self.context_tokens = generator.context_tokens
        self.max_requests = settings.max_concurrent_requests
        self.prompt_template = settings.prompt_template

    @property
    def is_ready(self) -> bool:
        return self._generator.is_ready

    @property
    def parameters(self) -> frozenset[str]:
        return self._generator.parameters

    @property
    def max_total_tokens(self) -> int:
        return self._generator.limit_tokens()

    def past(self, stream_id: str) -> tuple[StreamFacts, Sequence[Event]]:
        log = self._generator.store.get(stream_id)
        return facts_of(self._generator, log), log.events

    def tokenize(self, text: str) -> list[tuple[int, int, int]]:
        return self._generator.tokenize(text)

    def render(self, messages: tuple[Message, ...]) -> str:
        if self._generator.chat is None:
            raise UnsupportedParameter("This model has no chat template.", param="messages")
        return self._generator.chat.render(messages)

    def count_tokens(self, request: GenerateRequest) -> int:
        return self._generator.count_tokens(request)
