"""The vocabulary that crosses rooms: what a client asked, and what a stream says.

Requests are frozen dataclasses. What is built for every token is a msgspec struct instead: it takes a sixth of the time
to make (0.08 against 0.5 microseconds), and with `gc=False` the garbage collector does not visit the millions that the
logs hold (with collected objects, a third of the server's time at full speed went there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

__all__ = [
    "ANONYMOUS",
    "Allowance",
    "Arrival",
    "Continuity",
    "End",
    "Event",
    "Failure",
    "FinishReason",
    "GenerateRequest",
    "Grammar",
    "Message",
    "Prompt",
    "ReasoningFormat",
    "Sampling",
    "Spent",
    "Status",
    "TemplateValue",
    "TextDelta",
    "ToolCall",
    "TopLogprobs",
    "Usage",
    "means_any_model",
]

ANONYMOUS = "anonymous"  # the owner of all streams where there are no keys
_ANY_MODEL = ("tgi", "dummy", "default")

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled", "error"]
Status: TypeAlias = Literal["done", "error", "cancelled", "interrupted"]
# Of a stream whose engine was lost on the way. "replayed": it ran again and every token that was there came out again,
# so that it went on as if nothing had been. "continued": another one came out, and it went on behind those delivered.
Continuity: TypeAlias = Literal["replayed", "continued"]
TemplateValue: TypeAlias = bool | int | float | str | None  # of what a chat template asks for by name


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asked to be called, with its arguments as JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat, as a chat template sees it."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # what a message of role `tool` answers
    reasoning: str = ""  # of an assistant's: what the model thought before the content


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: a JSON schema, or a regular expression for all of it."""

    kind: Literal["json_schema", "regex"]
    source: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when a sequence ends. The defaults change nothing: plain sampling at temperature 1."""

    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    seed: int | None = None  # None: the server picks one
    max_tokens: int | None = None  # None: the server's default
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # leave the matched stop string in the text
    single_call: bool = False  # end behind the first call of a tool
    ignore_eos: bool = False
    logprobs: bool = False  # of the chosen tokens
    top_logprobs: int = 0  # of so many likeliest tokens at each place
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids and what is added to their logits
    grammar: Grammar | None = None
    n: int = 1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a client asked, whatever the wire. Either `prompts` or `messages` are given.

    Each prompt is text or token ids, and is answered `sampling.n` times: choice number `i * n + j` is the j-th answer
    to prompt i. `tools` are functions as JSON schemas, in OpenAI's form, for the chat template to show to the model;
    `template_values` are what else it asks for by name (`enable_thinking`, say).
    `on_disconnect` says what the last reader's leaving means; a detached stream that nobody reads for `linger_s` is
    cancelled all the same.
    `caller` says who is held responsible if the request kills the engine: the client's address, as the server room
    knows it ("" inside of a process). Nothing that a client can write goes into it. `owner` says whose the stream is.
    """

    model: str | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template_values: Mapping[str, TemplateValue] = field(default_factory=dict)
    continue_final: bool = False  # the last message is the beginning of the answer
    split_reasoning: bool = True  # of a chat; without it the text is as the model wrote it
    sampling: Sampling = field(default_factory=Sampling)
    truncate: int | None = None  # keep only the last so many prompt tokens
    on_disconnect: Literal["cancel", "detach"] = "cancel"
    linger_s: float | None = None  # None: the server's default
    memo: bytes = b""  # what the wire wants to see again with the stream, JSON
    turn: bytes = b""  # what a conversation keeps of it: a `Turn`, encoded
    keep: bool = False  # the stream longer than others, in the database
    exact: bool = False  # rather end than go on with another token than would have come
    caller: str = ""
    owner: str = ANONYMOUS
    key_id: str = ""  # of the key that the request came with
    wire: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The sender and the model of a request for a generation, before it is accepted or refused."""

    model: str
    wire: str
    owner: str = ANONYMOUS
    key_id: str = ""


class Allowance(NamedTuple):
    """The most tokens that a request may take; None is no limit."""

    answer_tokens: int | None = None  # of each answer
    all_tokens: int | None = None  # of all prompts and answers


class ReasoningFormat(NamedTuple):
    """How a model marks the reasoning that stands before its answer."""

    opens: tuple[str, ...]  # any of these begins it
    closes: tuple[str, ...]  # any of these ends it
    # Where the model goes on behind the prompt: before a marker that may come, behind one that ends the prompt, or in
    # the midst of reasoning that is continued.
    begins: Literal["before", "opened", "inside"] = "before"


class Prompt(NamedTuple):
    """One prompt of a request: its text as the client knows it, "" where ids were given, and its ids."""

    text: str
    ids: tuple[int, ...]
    reasoning: ReasoningFormat | None = None  # how it is told from the answers' text; None: it is a part of that


class Usage(NamedTuple):
    """Exact token counts, summed over choices."""

    num_prompt_tokens: int
    num_completion_tokens: int


class Failure(NamedTuple):
    """Why a stream ended in `error` or `interrupted`; `code` is stable, `message` is for people."""

    code: str
    message: str


TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]  # ids and logprobs of the likeliest tokens, likeliest first


class TextDelta(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """What one engine step added to one choice of a stream. Text may lag behind its tokens: half a character and what
    could yet become a stop string or a marker of reasoning are held back. It adds text or reasoning, never both."""

    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None  # on the last delta of a choice, and only there
    stop: str | None = None  # the stop string that ended the choice
    top_logprobs: tuple[TopLogprobs, ...] = ()  # for each token, where asked for
    reasoning: str = ""  # what the model thinks before its answer; no part of the text


class Spent(NamedTuple):
    """Where the seconds of an answer went."""

    total_s: float  # from the request on
    prompt_s: float  # from the engine's taking it to the first token
    answer_s: float  # from there to the end


class End(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """The one terminal event of a stream."""

    status: Status
    usage: Usage
    failure: Failure | None = None
    spent: Spent | None = None  # of an answer that is complete
    continuity: Continuity | None = None  # of one that outlived its engine or its server
    num_reasoning_tokens: int = 0  # of the answers' tokens


Event: TypeAlias = TextDelta | End


def means_any_model(name: str) -> bool:
    """Whether it is what clients send as a model's name that do not care."""
    return name in _ANY_MODEL
