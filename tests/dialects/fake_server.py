"""Runs operations with a fake server that has only facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tailrace.conversations.items import Branch, Item
from tailrace.dialects import GenerateCall, ParsedRequest, StreamFacts, View, openai
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.conversations import branch_point_of
from tailrace.dialects.native import parse as parse_native
from tailrace.dialects.wire import Following, Reply
from tailrace.errors import RequestError, UnknownStream
from tailrace.models import ModelCard
from tailrace.text import ChatFacts, Tokenizer
from tailrace.types import Event, GenerateRequest, Message, Pooling, Sampling, Task
from tailrace_outer.responses import responses_wire
from tailrace_outer.scripted.scripted_engine import tokenizer_json
from tailrace_outer.scripted.scripted_models import find_scripted
from tailrace_plugins.articles import plain_text
from tailrace_plugins.tgi import tgi_wire as tgi

__all__ = [
    "BOS",
    "EVERYTHING",
    "FakeServer",
    "chat",
    "completion",
    "generate",
    "native",
    "parsed",
    "prompt_of",
    "tutorial",
    "view_of",
    "vocabulary",
]

BOS = 7  # begins prompts
EVERYTHING = frozenset(Sampling.__struct_fields__)


@lru_cache(maxsize=1)
def vocabulary() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json())


@dataclass(frozen=True)
class FakeServer:
    """The facts of a server that can do everything. Its tokens are the scripted engine's."""

    model: str = "scripted"
    parent: str = ""
    card: ModelCard = field(default_factory=lambda: find_scripted("scripted").card)
    version: str = "1.2"
    started_s: int = 1_700_000_000
    is_live: bool = True
    is_ready: bool = True
    sees: bool = False
    state: str = "ready"
    replay: str | None = None
    shared_store: Mapping[str, int] = field(default_factory=dict)
    parameters: frozenset[str] = EVERYTHING
    reports_progress: bool = True
    can_chat: bool = True
    can_infill: bool = True
    default_max_tokens: int = 1024
    recommended_sampling: Mapping[str, float] = field(default_factory=dict)
    max_total_tokens: int = 4096
    max_requests: int = 128
    max_prompts: int = 64
    task: Task = "generate"
    num_dimensions: int = 0
    pooling: Pooling = "mean"
    max_inputs: int = 2048
    tool_format: str = "hermes"
    describes_tools: bool = False
    prompt_template: str = ""
    splits_reasoning: bool = True
    takes_reasoning: bool = True
    template_values: frozenset[str] = frozenset({"enable_thinking", "reasoning_effort"})

    @property
    def chat(self) -> ChatFacts:
        return ChatFacts(
            self.can_chat,
            self.tool_format,
            self.describes_tools,
            self.splits_reasoning,
            self.takes_reasoning,
            self.template_values,
        )

    @property
    def generator(self) -> FakeServer:
        return self

    @property
    def prompts(self) -> FakeServer:
        return self

    def limit_tokens(self) -> int:
        return self.max_total_tokens

    def past(self, stream_id: str) -> tuple[StreamFacts, list[Event]]:
        raise UnknownStream("There is no such stream.")

    def tokenize(self, text: str, *, bos: bool = True) -> list[tuple[int, int, int]]:
        found = vocabulary().offsets(text)
        return [(BOS, 0, 0), *found] if bos else found

    def detokenize(self, token_ids: Sequence[int]) -> str:
        if not all(token_id < vocabulary().vocab_size for token_id in token_ids):
            raise RequestError("The prompt has a token id that the model does not have.", param="prompt")
        return b"".join(vocabulary().pieces[token_id] for token_id in token_ids).decode()

    def tokenize_chat(self, messages: tuple[Message, ...]) -> tuple[str, list[tuple[int, int, int]]]:
        text = "".join(f"<|{message.role}|>{message.content}\n" for message in messages) + "<|assistant|>"
        return text, self.tokenize(text, bos=False)

    def count_tokens(self, request: GenerateRequest) -> int:
        return len(self.tokenize_chat(request.messages)[1])


def parsed(
    body: JsonBody | None = None,
    *,
    query: Mapping[str, str] | None = None,
    path: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    server: FakeServer | None = None,
    items: tuple[Item, ...] = (),
) -> ParsedRequest:
    """Return a parsed request. The conversation that the body names has these items."""
    what = ParsedRequest(server or FakeServer(), body or {}, query or {}, path or {}, headers or {})
    if (point := branch_point_of(what)) is not None:
        what = replace(what, branch=Branch(conversation_id=point.id, items=items))
    stream_id = responses_wire.past(what)
    if stream_id is None:
        return what
    try:
        return replace(what, past=(server or FakeServer()).past(stream_id))
    except UnknownStream:
        return what


def native(body: JsonBody) -> GenerateCall:
    """POST /v1/streams."""
    call = parse_native(parsed(body))
    assert isinstance(call, GenerateCall)
    return call


def chat(body: JsonBody, *, server: FakeServer | None = None) -> GenerateCall:
    """POST /v1/chat/completions."""
    return openai.parse_chat(parsed(body, server=server))


def completion(body: JsonBody) -> GenerateCall:
    """POST /v1/completions."""
    return openai.parse_completion(parsed(body))


def generate(body: JsonBody, *, server: FakeServer | None = None) -> GenerateCall:
    """POST /generate_stream."""
    return tgi.parse_stream(parsed(body, server=server))


def tutorial(query: Mapping[str, str], *, server: FakeServer | None = None) -> GenerateCall:
    """POST /?prompt=…"""
    return plain_text.parse_tutorial(parsed(query=query, server=server))


def view_of(call: GenerateCall | Following | Reply) -> View:
    """Return the view of a call that generates."""
    assert isinstance(call, GenerateCall)
    return call.view


def prompt_of(request: GenerateRequest) -> str:
    """Return the prompt of a request that has exactly one."""
    (prompt,) = request.prompts
    assert isinstance(prompt, str)
    return prompt
