"""What several packages use: the types of requests and events, and the ids of streams and events.

What every token or every request makes is a msgspec struct: a struct is created in a sixth of the time of a frozen
dataclass (0.08 instead of 0.5 microseconds), and a copy of one in far less. With `gc=False`, the garbage
collector does not visit the millions of events in logs. At full speed, these visits took a third of the server's time.

Each process of an engine imports this module: what takes long to import is imported where it is used.
"""

from __future__ import annotations

import os
import re
import sys
import typing
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

from tailrace.errors import ForeignCursor, SeqOutOfRange

if TYPE_CHECKING:  # `typing` has the default of a type variable from Python 3.13 on
    from typing_extensions import TypeVar

__all__ = [
    "ANONYMOUS",
    "IMAGE_MARK",
    "NO_LIMIT",
    "SHAPING",
    "Allowance",
    "Arrival",
    "Attachment",
    "CallReading",
    "Claim",
    "ContentT",
    "Continuity",
    "End",
    "Event",
    "Failure",
    "FinishReason",
    "GenerateRequest",
    "Grammar",
    "Image",
    "Infill",
    "KeptFields",
    "KeptImage",
    "Message",
    "Payload",
    "Pooling",
    "Prompt",
    "PromptLogprob",
    "PromptProgress",
    "ReasoningFormat",
    "Record",
    "Released",
    "Sampling",
    "Segment",
    "Spent",
    "Status",
    "Task",
    "TemplateValue",
    "TextDelta",
    "TextSegment",
    "ToolCall",
    "TopLogprobs",
    "Usage",
    "VectorForm",
    "VectorRequest",
    "Vectors",
    "event_id",
    "ids_of",
    "is_stream_id",
    "kind_of",
    "means_any_model",
    "new_stream_id",
    "num_tokens_of",
    "parse_cursor",
    "with_ids",
]

ANONYMOUS = "anonymous"  # the owner of all streams before the first key is created
_ANY_MODEL = ("tgi", "dummy", "default")
_SEQ = re.compile(r"(?:0|[1-9][0-9]{0,14})", re.ASCII)
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{1,64})-(0|[1-9][0-9]{0,14})", re.ASCII)
_STREAM_ID = re.compile(r"[A-Za-z0-9_-]{22}", re.ASCII)

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled", "error"]
Status: TypeAlias = Literal["done", "error", "cancelled", "interrupted"]
# How a stream continued after its engine was lost. "replayed": it ran again, and all tokens of its log were generated
# again. "continued": a token differed, so generation continued after the tokens of the log.
Continuity: TypeAlias = Literal["replayed", "continued"]
Pooling: TypeAlias = Literal["mean", "first", "last"]  # which tokens an embedding is made of
Task: TypeAlias = Literal["generate", "embed", "rank"]  # what a model does: text, vectors of texts, scores of pairs
TemplateValue: TypeAlias = bool | int | float | str | None  # a variable of a chat template


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the model requests. The arguments are JSON."""

    call_id: str
    name: str
    arguments: str


# Stands for an image in the content of a message. It is random, so no text of a client contains it; nothing keeps it.
IMAGE_MARK = f"\ufdd0image {os.urandom(8).hex()}\ufdd1"


class KeptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image in the database, which has each image of an owner once."""

    digest: str  # SHA-256 of its bytes, in hexadecimal
    media_type: str
    num_bytes: int


@dataclass(frozen=True)
class Image:
    """An image in a message: as the client sent it, then as the model gets it, with how its prompt is written."""

    content: bytes
    param: str = "messages"  # the field of the request
    media_type: str = ""  # "": not checked yet
    placeholder: str = ""  # the control token that stands for an image in the chat template
    expansion: str = ""  # what stands for this image in the prompt
    url: str = ""  # from where it is fetched; then it has no content yet
    kept: KeptImage | None = None  # in the database; then it has no content until it is read from there

    @cached_property
    def digest(self) -> str:
        import hashlib

        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. Its content has an `IMAGE_MARK` for each of its images."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # the call that a message of role `tool` answers
    reasoning: str = ""  # of an assistant's message: the model's reasoning before the content
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer must match.

    A request has a JSON schema, a regular expression, a context-free grammar (`cfg`, see `engines.grammars.lark`), a
    structural tag (`tags`), or tools whose calls are the answer (`calls`, see `schemas.calls`). An engine gets them in
    the form that it supports: a JSON schema in plain form, a regular expression, a grammar in `lark`, or the parts of
    an answer (`parts`). `free` is no grammar: the answer is only checked at its end.
    """

    kind: Literal["json_schema", "regex", "cfg", "tags", "calls", "lark", "parts", "free"]
    source: str
    param: str = field(default="grammar", compare=False)  # the field of the request
    asked: str = ""  # what to check at the end, as `schemas.answers` reads it; "": the grammar keeps everything
    left_open: tuple[str, ...] = ()  # paths in the request: what the grammar does not keep

    @property
    def is_free(self) -> bool:
        return self.kind == "free"


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are sampled, and when a sequence ends. The defaults are plain sampling at temperature 1."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    seed: int | None = None  # None: the server picks one
    max_tokens: int | None = None  # None: the server's default
    max_reasoning_tokens: int | None = None  # then the reasoning is ended. None: the server's default
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # leave the matched stop string, or the text of the stop token, in the text
    include_special: bool = False  # show the text of control tokens
    single_call: bool = False  # end after the first tool call
    ignore_eos: bool = False
    logprobs: bool = False  # of the chosen tokens
    top_logprobs: int = 0  # number of most likely tokens to return at each position
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and the numbers to add to their logits
    min_tokens: int = 0  # no end before so many, also not by a stop string
    stop_token_ids: tuple[int, ...] = ()  # end the answer, besides the model's own, and are not shown
    allowed_token_ids: tuple[int, ...] = ()  # no others are chosen; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that never follow each other
    prompt_logprobs: int | None = None  # of the prompt's tokens, with so many most likely ones. None: not wanted
    grammar: Grammar | None = None
    n: int = 1


class Attachment(msgspec.Struct, frozen=True, tag="attachment", omit_defaults=True):
    """Bytes in a prompt, such as an image. The prompt has only their digest."""

    digest: str  # SHA-256 of the bytes, in hexadecimal
    media_type: str
    num_tokens: int  # that the model reads for it
    token_ids: tuple[int, ...] = ()  # that stand for it in the prompt, if its engine has such

    @classmethod
    def of(cls, content: bytes, media_type: str, num_tokens: int) -> Attachment:
        import hashlib

        return cls(hashlib.sha256(content).hexdigest(), media_type, num_tokens)


class TextSegment(msgspec.Struct, frozen=True, tag="text"):
    """Text for an engine that passes it on to a server with a tokenizer of its own."""

    text: str
    num_tokens: int  # estimated
    is_chat: bool = False  # the text is JSON: messages and tools, for that server's chat template
    after: str = ""  # of an infill: the text behind the answer


class Infill(msgspec.Struct, frozen=True):
    """A prompt whose answer belongs between two texts, as in an editor."""

    before: str
    after: str
    files: tuple[tuple[str, str], ...] = ()  # other files for context: name and text; the last ones matter most


# A part of a prompt: token ids, or what is not token ids here. Most prompts have one segment, of token ids.
Segment: TypeAlias = tuple[int, ...] | TextSegment | Attachment


def num_tokens_of(segments: Iterable[Segment]) -> int:
    return sum(len(one) if isinstance(one, tuple) else one.num_tokens for one in segments)


def ids_of(segments: tuple[Segment, ...]) -> tuple[int, ...]:
    """Return the token ids of all segments that are token ids. The others are left out."""
    if len(segments) == 1 and isinstance(segments[0], tuple):
        return segments[0]
    return tuple(token_id for one in segments if isinstance(one, tuple) for token_id in one)


def with_ids(segments: tuple[Segment, ...], token_ids: tuple[int, ...]) -> tuple[Segment, ...]:
    """Return the segments with token ids behind them."""
    if segments and isinstance(segments[-1], tuple):
        return (*segments[:-1], segments[-1] + token_ids)
    return (*segments, token_ids)


def kind_of(segment: Segment) -> str:
    """Return what `Capabilities.takes` of an engine has for such segments."""
    if isinstance(segment, Attachment):
        return segment.media_type
    return "token_ids" if isinstance(segment, tuple) else "text"


NO_LIMIT = 2**31 - 1  # as `max_tokens`, which is not larger: an answer may fill the room that the prompt leaves

# Parameters that only shape the probabilities of tokens: an engine without one of them gives another sample.
SHAPING = frozenset(
    {"frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "temperature", "top_k", "top_p",
     "typical_p"}
)  # fmt: skip


class KeptFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that its stream's record keeps as they are. Both structs have them from here.

    `caller` is held responsible if the request crashes the engine: the key, or the client's address ("" within a
    process). It contains nothing that a client can choose.
    """

    memo: bytes = b""  # data that the wire keeps with the stream, JSON
    turn: bytes = b""  # an encoded `Turn`: what to keep in the conversation
    keep: bool = False  # keep the stream in the database, for longer than the retention
    exact: bool = False  # after a lost engine, end the stream if a token differs
    caller: str = ""
    owner: str = ANONYMOUS  # only the owner can follow, stop or delete the stream
    key_id: str = ""  # of the key that the request came with
    wire: str = ""
    trace: str = ""  # its header `traceparent`, if that is valid
    is_background: bool = False  # it runs only where no other request could
    topics: tuple[str, ...] = ()  # what the answer belongs to on its wire, such as a chat; `LogStore.newest` finds it

    def kept(self) -> dict[str, Any]:  # Any: of each field's type
        """Return these fields by their names."""
        return {name: getattr(self, name) for name in KeptFields.__struct_fields__}


class GenerateRequest(KeptFields, frozen=True):
    """A client's request, the same for all wires. Either `prompts` or `messages` are given.

    Each prompt is text, an infill or segments, and gets `sampling.n` answers: choice number `i * n + j` is answer j to
    prompt i. `tools` are functions as JSON schemas in OpenAI's form, for the chat template. `template_values` are the
    template's other variables, such as `enable_thinking`.
    `on_disconnect` says what happens when the last reader disconnects. A detached stream without a reader for
    `linger_s` is cancelled, too.
    """

    model: str | None = None  # as the client names it; when the stream begins, one of the generator's names, or None
    prompts: tuple[str | Infill | tuple[Segment, ...], ...] = ()
    images: tuple[Image, ...] = ()  # of a single prompt, each with an `IMAGE_MARK` in its text
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    calls: CallReading | None = None  # how calls of these tools are read from the answer
    template_values: Mapping[str, TemplateValue] = {}
    continue_final: bool = False  # the last message is the beginning of the answer
    split_reasoning: bool = True  # for chats; if false, reasoning stays in the text
    sampling: Sampling = Sampling()
    bad_words: tuple[str, ...] = ()  # texts that the answer must not have, for `sampling.bad_words`
    may_shorten: bool = True  # reduce max_tokens to the room that the prompt leaves; otherwise refuse the request
    may_loosen: bool = True  # leave open what the engine's grammar does not keep; otherwise refuse the request
    truncate: int | None = None  # use only this many tokens at the end of the prompt
    on_disconnect: Literal["cancel", "detach"] = "cancel"
    linger_s: float | None = None  # None: the server's default


class VectorForm(msgspec.Struct, frozen=True, array_like=True):
    """The form of an embedding."""

    is_normalized: bool = True  # of length 1
    num_dimensions: int = 0  # the first ones of the model's; 0: all


class VectorRequest(KeptFields, frozen=True):
    """A client's request for embeddings, or for the scores of pairs, the same for all wires. Nothing of it is kept.

    With a `query`, each input is a document, and what is asked is how well it fits the query.
    """

    model: str | None = None
    inputs: tuple[str | tuple[int, ...], ...] = ()  # texts or token ids
    query: str | None = None
    form: VectorForm = VectorForm()
    # Which side of an input that is too long is left out; "": refuse it. "fit" is as "end", but named in the answer,
    # and refused with --strict.
    truncate: Literal["", "start", "end", "fit"] = ""

    @property
    def task(self) -> Task:
        return "embed" if self.query is None else "rank"


class Vectors(NamedTuple):
    """What a model makes of the inputs of a `VectorRequest`, in their order."""

    vectors: tuple[bytes, ...]  # float32, little-endian: embeddings, or one score each
    num_tokens: tuple[int, ...]  # of each input, with the model's own
    waited_s: float  # from the request to the engine
    total_s: float

    def numbers(self, index: int) -> array[float]:
        """Return one vector as numbers."""
        found = array("f", self.vectors[index])
        if sys.byteorder == "big":
            found.byteswap()
        return found


@dataclass(frozen=True, slots=True)
class Arrival:
    """The sender and the model of a request, before it is accepted or refused."""

    model: str
    wire: str
    owner: str = ANONYMOUS
    key_id: str = ""
    trace: str = ""  # as `KeptFields.trace`


class Allowance(NamedTuple):
    """The largest number of tokens that a request may use; None is no limit."""

    answer_tokens: int | None = None  # of each answer
    all_tokens: int | None = None  # of all prompts and answers


class CallReading(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tool calls are read from an answer. It is stored with a stream.

    `format` is a name of `text.calls.FORMATS`. `forced`: the whole answer is one call as JSON without markers.
    `single`: everything after the first call is dropped. `tools` has the parameters of each tool, in order, and whether
    each of them is text.
    """

    format: str = "hermes"
    forced: bool = False
    single: bool = False
    tools: dict[str, dict[str, bool]] = {}


class ReasoningFormat(NamedTuple):
    """How a model marks the reasoning before its answer."""

    opens: tuple[str, ...]  # any of these begins it
    closes: tuple[str, ...]  # any of these ends it
    # Where the generated text begins: before an opening marker, which may follow; after an opening marker at the end of
    # the prompt; or inside reasoning that the prompt has begun.
    begins: Literal["before", "opened", "inside"] = "before"
    # Markers without meaning between the parts of an answer. A model that has them may reason again after text.
    drops: tuple[str, ...] = ()
    then: str = "\n\n"  # what a model writes between the end of its reasoning and its answer


class Prompt(NamedTuple):
    """One prompt of a request: its text as the client knows it, and what the engine reads."""

    text: str
    segments: tuple[Segment, ...]
    reasoning: ReasoningFormat | None = None  # None: reasoning is not separated from the text
    calls: CallReading | None = None  # None: the answer has no tool calls. The tools have no parameters here

    @property
    def num_tokens(self) -> int:
        return num_tokens_of(self.segments)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of those segments that are token ids."""
        return ids_of(self.segments)


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """An Idempotency-Key and the fingerprint of its request."""

    key: str
    fingerprint: bytes


class Record(KeptFields, frozen=True):
    """The request of a stream: enough to show the stream on any wire, and to run it again. Written before a client gets
    the stream's id. It has prompts, attachments and a caller only while the stream runs."""

    stream_id: str
    created_s: float  # since the epoch
    model: str = ""
    prompts: tuple[Prompt, ...] = ()
    sampling: Sampling = Sampling()  # seed and max_tokens are set
    num_prompt_tokens: int = 0
    num_choices: int = 1
    linger_s: float = 0.0  # how long it runs without a reader before it is cancelled
    claim: Claim | None = None
    attachments: dict[str, bytes] = {}  # of the prompts, by digest; only while the stream runs
    images: tuple[KeptImage, ...] = ()  # of the messages, in order, if the database has them; also after the end
    is_chat: bool = False
    ended_calls: CallReading | None = None  # `calls` of an ended stream, whose prompts are gone

    @property
    def calls(self) -> CallReading | None:
        """How tool calls are read from the answers."""
        return self.prompts[0].calls if self.prompts else self.ended_calls

    @property
    def seed(self) -> int:
        return self.sampling.seed or 0

    @property
    def most_tokens(self) -> int:
        """The most tokens that the stream can use, prompts and answers together."""
        return self.num_prompt_tokens + self.num_choices * (self.sampling.max_tokens or 0)

    def finished(self) -> Record:
        """Return the record of the ended stream, without prompts, attachments and caller."""
        return msgspec.structs.replace(self, prompts=(), attachments={}, caller="", ended_calls=self.calls)


class PromptProgress(NamedTuple):
    """How much of its prompts the engine has read for a stream that has no token yet. It is not an event: it has no
    number, and it is not kept."""

    num_tokens: int  # of all prompts
    num_read_tokens: int  # includes the cached ones
    num_cached_tokens: int  # found in a prefix cache
    spent_s: float  # since the start in the engine


class Usage(NamedTuple):
    """Exact token counts, summed over choices."""

    num_prompt_tokens: int
    num_completion_tokens: int


class Failure(NamedTuple):
    """Why a stream ended as `error` or `interrupted`, or was released; `code` is stable, `message` is for people."""

    code: str
    message: str


TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]  # ids and logprobs of the most likely tokens, in this order


class PromptLogprob(NamedTuple):
    """How likely a token of a prompt is after those before it."""

    logprob: float
    rank: int  # among all tokens; 1 is the most likely
    top: TopLogprobs  # as many as the request wants


class TextDelta(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """The output of one engine step for one choice of a stream: text or reasoning, never both. Text may come later than
    its tokens: incomplete characters, and possible beginnings of stop strings and reasoning markers, are held back."""

    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None  # on the last delta of a choice, and only there
    stop: str | None = None  # the stop string that ended the choice
    top_logprobs: tuple[TopLogprobs, ...] = ()  # for each token, if requested
    reasoning: str = ""  # the model's reasoning before its answer; not part of `text`
    is_alone: bool = False  # as in the engine's `Delta`; a replay repeats it
    # If requested, on the first event of a choice: for each token of its prompt but the first.
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class Spent(NamedTuple):
    """The duration of an answer and of its parts."""

    total_s: float  # from the request to the end
    prompt_s: float  # from the start in the engine to the first token
    answer_s: float  # from the first token to the end


class End(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """The one terminal event of a stream."""

    status: Status
    usage: Usage
    failure: Failure | None = None
    spent: Spent | None = None  # only of complete answers
    continuity: Continuity | None = None  # set if the stream's engine or server was lost
    num_reasoning_tokens: int = 0  # included in the completion tokens
    # Included in the prompt tokens: those found in a prefix cache. None: the engine does not say.
    num_cached_tokens: int | None = None
    # Where the answers do not conform to the schema of the request, checked at the end. None: it was not checked, since
    # there is no schema or the grammar keeps all of it.
    schema_mismatches: tuple[str, ...] | None = None


class Payload(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """Bytes that an app has sent: an item of its stream, as JSON, or a piece of a recorded answer. Only the wire of the
    app reads them."""

    data: bytes


if TYPE_CHECKING:
    ContentT = TypeVar("ContentT", bound=TextDelta | Payload, default=TextDelta)
else:
    ContentT = typing.TypeVar("ContentT", bound=TextDelta | Payload)  # msgspec reads the bound

Event: TypeAlias = ContentT | End
"""An event of a model's stream; `Event[Payload]` is one of an app's. A stream never has both."""


@dataclass(frozen=True, slots=True)
class Released:
    """A reader gets no more events here, although its stream has not ended. It can follow the stream again after
    `last_seq`, the last event that it got; 0 if it got none."""

    status: ClassVar[Literal["released"]] = "released"
    stream_id: str
    last_seq: int
    failure: Failure  # the reason


def means_any_model(name: str) -> bool:
    """Return whether clients send this name if any model is right."""
    return name in _ANY_MODEL


def new_stream_id() -> str:
    """Return 128 random bits as text. Nobody can guess the id of another client's stream. It never begins with `-`,
    which commands such as `tailrace logs ID` would take for an option."""
    import secrets

    while (stream_id := secrets.token_urlsafe(16)).startswith("-"):
        pass
    return stream_id


def is_stream_id(text: str) -> bool:
    """Return whether the text has the form of a stream id."""
    return _STREAM_ID.fullmatch(text) is not None


def event_id(stream_id: str, seq: int) -> str:
    """Return the event id for the wire. It names stream and position, so a Last-Event-ID alone is enough to resume."""
    return f"{stream_id}-{seq}"


def parse_cursor(cursor: str, stream_id: str | None = None) -> tuple[str, int]:
    """Parse an event id or, if `stream_id` is given, a plain number. Returns the stream id and the last `seq` seen.

    Raises: SeqOutOfRange if it is neither, ForeignCursor if it names another stream than `stream_id`.
    """
    if stream_id is not None and _SEQ.fullmatch(cursor):
        return stream_id, int(cursor)
    match = _EVENT_ID.fullmatch(cursor)
    if match is None:
        raise SeqOutOfRange("This is not an event id of this server.", param="last-event-id")
    if stream_id is not None and match[1] != stream_id:
        raise ForeignCursor("This event id belongs to another stream.", param="last-event-id")
    return match[1], int(match[2])
