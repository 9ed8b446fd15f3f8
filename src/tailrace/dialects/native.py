"""tailrace's own wire: `/v1/streams`, server-sent events that resume.

Each event has an `id:` line, a `data:` line of JSON and, except for text, an `event:` line: `reasoning`, or the status
of the end. All known clients read these events in the same way: LF only, no block without data, `retry:` inside the
first event, only ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from tailrace.conversations.items import Branch, messages_of
from tailrace.dialects.answers import EventStreamView, ToolsView, finite, readiness, show_live
from tailrace.dialects.bodies import JsonBody, quote, to_json
from tailrace.dialects.conversations import (
    ConversationField,
    branch_point_of,
    in_conversation,
    open_branch,
    recalled,
    within_limits,
)
from tailrace.dialects.facts import ServerFacts, StreamFacts
from tailrace.dialects.fields import (
    ReasoningTokens,
    TemplateValues,
    TokenFields,
    TopLogprobs,
    bad_words,
    sampling_of,
    template_values,
)
from tailrace.dialects.messages import Messages, read_messages
from tailrace.dialects.parts import eyes_of
from tailrace.dialects.queries import read_switch
from tailrace.dialects.shapes import read_fields, refused, require_nothing_left_out, without_unused
from tailrace.dialects.wire import (
    Encoder,
    Follow,
    Following,
    Generate,
    GenerateCall,
    OnStream,
    Operation,
    ParsedRequest,
    Reply,
    Show,
    View,
    Wire,
    conformity_json,
    deltas_by_choice,
    failure_of,
    named_model,
    progress_json,
    shows_progress,
    usage_json,
)
from tailrace.errors import RequestError, TailraceError, UnsupportedParameter
from tailrace.types import (
    End,
    Event,
    GenerateRequest,
    Message,
    PromptProgress,
    Released,
    TextDelta,
    event_id,
    parse_cursor,
)

__all__ = [
    "RETRY_MS",
    "WIRE",
    "NativeEncoder",
    "NativeView",
    "cut_json",
    "encode_error",
    "end_fields",
    "event_json",
    "parse",
    "parse_body",
]

RETRY_MS = 1000


class NativeBody(TokenFields, kw_only=True):
    """The body of `POST /v1/streams`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    instructions: str | None = None
    conversation: ConversationField = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning: Literal["auto", "text"] = "auto"
    max_reasoning_tokens: ReasoningTokens | None = None
    chat_template_kwargs: TemplateValues | None = None
    on_disconnect: Literal["cancel", "detach"] = "detach"
    linger_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    continuity: Literal["any", "exact"] = "any"
    return_progress: bool | None = None


# Fields of OpenAI's API that are not supported here.
_UNUSED = {
    "best_of": refused(1),
    "functions": refused([]),
    "response_format": refused({"type": "text"}),
    "tools": refused([]),
}


def parse(request: ParsedRequest) -> GenerateCall | Following:
    """Begin a stream; or follow the stream of a Last-Event-ID, because some clients repeat their POST to resume.
    Raises: RequestError."""
    cursor = request.headers.get("last-event-id")
    if cursor is not None:
        return Following(*parse_cursor(cursor), NativeView())
    streams = "text/event-stream" in request.headers.get("accept", "")
    generate, notes = parse_body(request.body, request.server, request.branch), list[str]()
    view = NativeView(
        shows_progress(request.server, notes, wanted=request.body.get("return_progress"), is_streamed=streams)
    )
    return GenerateCall(generate, view, stream=streams, ignored=tuple(notes), at_once=True, status=201)


def parse_body(body: JsonBody, server: ServerFacts, branch: Branch | None = None) -> GenerateRequest:
    """Parse a body. `branch` is that of its conversation, if it names one.

    Raises: RequestError, also for unknown fields, so that typing errors are noticed.
    """
    fields, _ = read_fields(without_unused(body, _UNUSED)[0], NativeBody, strict=True)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    if fields.conversation is not None and branch is None:
        raise UnsupportedParameter("conversation works only with POST /v1/streams.", param="conversation")
    if fields.messages is None and (branch is not None or fields.instructions is not None):
        raise RequestError("conversation and instructions need messages.", param="messages")
    before: tuple[Message, ...] = ()
    images = eyes_of(server)
    if branch is not None:
        branch = open_branch(branch, has_input=bool(fields.messages))
        before = recalled(messages_of(branch.items), images)
    notes: list[str] = []
    messages: tuple[Message, ...] = ()
    if fields.messages is not None:
        messages = within_limits(read_messages(fields.messages, notes, before, images=images), len(before))
    require_nothing_left_out(notes)
    generate = GenerateRequest(
        model=fields.model,
        prompts=(fields.prompt,) if fields.prompt is not None else (),
        messages=messages,
        template_values=template_values(fields.chat_template_kwargs),
        split_reasoning=fields.reasoning == "auto",
        bad_words=bad_words(fields),
        sampling=replace(
            sampling_of(fields, server.recommended_sampling),
            logprobs=bool(fields.logprobs or fields.top_logprobs),
            top_logprobs=fields.top_logprobs or 0,
            max_reasoning_tokens=None if fields.max_reasoning_tokens == -1 else fields.max_reasoning_tokens,
        ),
        on_disconnect=fields.on_disconnect,
        linger_s=fields.linger_s,
        exact=fields.continuity == "exact",
    )
    if branch is not None:
        is_continued = messages[-1].role == "assistant" and not messages[-1].tool_calls
        generate = in_conversation(branch, replace(generate, continue_final=is_continued), len(before), ToolsView())
    if fields.instructions:
        generate = replace(generate, messages=(Message("system", fields.instructions), *generate.messages))
    return generate


def parse_following(request: ParsedRequest) -> Following:
    """Last-Event-ID is used before `after`, because a reconnecting EventSource repeats its URL."""
    stream_id = request.path["stream_id"]
    cursor = request.headers.get("last-event-id") or request.query.get("after")
    after = parse_cursor(cursor, stream_id)[1] if cursor else 0
    return Following(stream_id, after, NativeView(read_switch(request.query, "return_progress")))


def show_ready(request: ParsedRequest) -> Reply:
    server = request.server
    replay = server.replay or "not certified"
    fields = {"ready": server.generator.is_ready, "state": server.state, "replay": replay, **server.shared_store}
    return readiness(server, fields)


def list_running(request: ParsedRequest) -> Reply:
    states = [_state(facts, num_events) for facts, num_events in request.running()]
    return Reply(to_json({"object": "list", "data": states}))


def find(request: ParsedRequest) -> tuple[str, View]:
    return request.path["stream_id"], NativeView()


def find_to_delete(request: ParsedRequest) -> tuple[str, View]:
    return request.path["stream_id"], _EmptyView()


@dataclass(frozen=True, slots=True)
class NativeView(EventStreamView):
    shows_progress: bool = False

    def open(self, facts: StreamFacts) -> Encoder:
        return NativeEncoder(facts, shows_progress=self.shows_progress)


class _EmptyView(NativeView):
    """The view of a deleted stream."""

    def open(self, facts: StreamFacts) -> Encoder:
        return _EmptyEncoder(facts)


class NativeEncoder(Encoder):
    """Encodes events. It has no state, so it can start at any event.

    The id is the last line of an event: @microsoft/fetch-event-source resumes after an event as soon as it has read the
    id, and would lose lines after it if the connection breaks.
    """

    __slots__ = ("_facts", "_id", "shows_progress")

    def __init__(self, facts: StreamFacts, *, shows_progress: bool = False) -> None:
        self.shows_progress = shows_progress
        self._facts = facts
        self._id = f"id: {facts.record.stream_id}-"

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if (
            type(event) is TextDelta
            and len(event.token_ids) == 1
            and seq > 1
            and not (event.finish_reason or event.choice or event.logprobs or event.reasoning or event.prompt_logprobs)
        ):  # nearly all events; what follows would take a third longer
            data = f'{{"text":{quote(event.text)},"token_ids":[{event.token_ids[0]}]}}'
            return f"data: {data}\n{self._id}{seq}\n\n".encode("ascii")
        if not isinstance(event, TextDelta):
            return f"event: {event.status}\ndata: {event_json(event)}\n{self._id}{seq}\n\n".encode("ascii")
        retry = f"retry: {RETRY_MS}\n" if seq == 1 else ""
        kind = "event: reasoning\n" if event.reasoning else ""
        return f"{retry}{kind}data: {event_json(event)}\n{self._id}{seq}\n\n".encode("ascii")

    def progress(self, progress: PromptProgress) -> bytes:
        """Without an id: the position of the reader stays the same."""
        return b"event: progress\ndata: " + to_json(progress_json(progress)) + b"\n\n"

    def whole(self, events: Sequence[Event]) -> bytes:
        """Return the state of the stream, its text so far, and its reasoning, if there is any."""
        facts = self._facts
        choices = deltas_by_choice(events, facts.record.num_choices)
        texts = ["".join(delta.text for delta in deltas) for deltas in choices]
        reasonings = ["".join(delta.reasoning for delta in deltas) for deltas in choices]
        state = _state(facts, len(events)) | {"expires_in_s": facts.expires_in_s, "text": texts[0]}
        if len(texts) > 1:
            state["choices"] = texts
        if any(reasonings):
            state["reasoning"] = reasonings[0]
            if len(texts) > 1:
                state["choices_reasoning"] = reasonings
        if events and isinstance(events[-1], End):
            state |= end_fields(events[-1])
        return to_json(state)


class _EmptyEncoder(NativeEncoder):
    def whole(self, events: Sequence[Event]) -> bytes:
        return b""


def _state(facts: StreamFacts, num_events: int) -> JsonBody:
    """Return the state of a stream without its text."""
    path = f"{facts.root_path}/v1/streams/{facts.record.stream_id}"
    state: JsonBody = {
        "id": facts.record.stream_id,
        "status": facts.status,
        "model": facts.record.model,
        "created": facts.created_s,
        "last_event_id": event_id(facts.record.stream_id, num_events),
        "events_url": path + "/events",
        "cancel_url": path + "/cancel",
    }
    if facts.num_ahead is not None:
        state["num_ahead"] = facts.num_ahead
    if facts.progress is not None:
        state["prompt_progress"] = progress_json(facts.progress)
    return state


def event_json(event: Event | Released, *, reasoning_name: str = "text") -> str:
    """Return an event as a line of JSON: `{"text", "token_ids"}` and more, or the end. With `reasoning_name`, reasoning
    has another name than text, for wires that show the kind of an event only in the JSON."""
    if not isinstance(event, TextDelta):
        return to_json(end_fields(event)).decode()
    token_ids = event.token_ids
    ids = token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids))
    extra = ""
    if event.finish_reason is not None or event.choice or event.logprobs or event.prompt_logprobs:
        extra = _extra_json(event)
    if event.reasoning:
        return f'{{"{reasoning_name}":{quote(event.reasoning)},"token_ids":[{ids}]{extra}}}'
    return f'{{"text":{quote(event.text)},"token_ids":[{ids}]{extra}}}'


def _extra_json(event: TextDelta) -> str:
    fields: JsonBody = {}
    if event.choice:
        fields["choice"] = event.choice
    if event.logprobs:
        fields["logprobs"] = [finite(one) for one in event.logprobs]
    if event.top_logprobs:
        fields["top_logprobs"] = [_top_json(top) for top in event.top_logprobs]
    if event.prompt_logprobs:
        fields["prompt_logprobs"] = [
            {"logprob": finite(one.logprob), "rank": one.rank, "top_logprobs": _top_json(one.top)}
            for one in event.prompt_logprobs
        ]
    if event.finish_reason is not None:
        fields["finish_reason"] = event.finish_reason
        if event.stop is not None:
            fields["stop"] = event.stop
    return "," + to_json(fields)[1:-1].decode()


def _top_json(top: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return ids and logprobs, the likeliest first."""
    return [(token_id, finite(logprob)) for token_id, logprob in top]


def end_fields(end: End | Released) -> JsonBody:
    """Return the terminal event as JSON fields, for events and for the state of a stream; or why it was released."""
    fields: JsonBody = {"status": end.status}
    if isinstance(end, End):
        fields["usage"] = usage_json(end)
    if end.failure is not None:
        fields["error"] = cut_json(end)
    if isinstance(end, End) and end.continuity is not None:
        fields["continuity"] = end.continuity
    return fields | (conformity_json(end) if isinstance(end, End) else {})


def cut_json(ending: End | Released) -> JsonBody:
    """Return why a stream was cut off, as in the events of this wire and of apps' streams."""
    error = failure_of(ending)
    return {"code": error.code, "message": error.message, **error.cut_fields}


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error": {"message", "type", "code", "param"}}`, as on OpenAI's routes."""
    kind = "invalid_request_error" if error.status < 429 or error.status == 431 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    body = {"message": error.message, "type": kind, "code": error.code, "param": error.param, **error.cut_fields}
    return error.status, to_json({"error": body})


_STREAM = "/v1/streams/{stream_id}"

WIRE = Wire(
    name="native",
    title="tailrace: streams that resume",
    operations=(
        Operation(
            "POST",
            "/v1/streams",
            Generate(parse, conversation=branch_point_of),
            "Begin a stream. With Accept: text/event-stream the answer has its events.",
            body=NativeBody,
            has_images=True,
            example={"messages": [{"role": "user", "content": "Tell me a story about dogs."}], "max_tokens": 64},
        ),
        Operation("GET", "/v1/streams", Show(list_running), "List the caller's running streams, the oldest first."),
        Operation(
            "GET",
            _STREAM + "/events",
            Follow(parse_following),
            "The events of a stream after Last-Event-ID or `after`.",
            query=("after", "return_progress"),
        ),
        Operation("GET", _STREAM, OnStream(find), "The state of a stream and its text so far."),
        Operation("POST", _STREAM + "/cancel", OnStream(find, "cancel"), "Cancel a stream."),
        Operation("GET", "/livez", Show(show_live), "Whether the server makes progress; otherwise restart it."),
        Operation("GET", "/readyz", Show(show_ready), "Whether requests are accepted, and if not, why."),
        Operation("DELETE", _STREAM, OnStream(find_to_delete, "delete"), "Cancel and delete a stream."),
    ),
    encode_error=encode_error,
    find_model=named_model,
    unused=_UNUSED,
    names={"prompt": "messages"},
)
