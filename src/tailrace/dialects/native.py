"""tailrace's own wire: `/v1/streams`, server-sent events that resume.

Each event is one `id:` line, one `data:` line of JSON and, where it is no text, an `event:` line: `reasoning`, or how
the stream ended. The rules of emission are chosen so that every known client reads the same: LF only, no block without
data, `retry:` inside the first event, nothing beyond ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

from tailrace.conversations.items import Branch, messages_of
from tailrace.dialects.answers import EventStreamView, ToolsView, readiness, show_live
from tailrace.dialects.bodies import JsonBody, quote, read_fields, refuse, to_json
from tailrace.dialects.conversations import ConversationField, chat_in, open_branch, place_of
from tailrace.dialects.fields import (
    Messages,
    SamplingFields,
    TemplateValues,
    read_messages,
    sampling_of,
    template_values,
)
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
    StreamFacts,
    View,
    Wire,
    deltas_by_choice,
    pick_named,
    usage_json,
)
from tailrace.errors import RequestError, TailraceError, UnsupportedParameter
from tailrace.streams import event_id, parse_cursor
from tailrace.types import End, Event, GenerateRequest, Message, TextDelta

__all__ = [
    "RETRY_MS",
    "WIRE",
    "NativeEncoder",
    "NativeView",
    "encode_error",
    "end_fields",
    "event_json",
    "parse",
    "parse_body",
]

RETRY_MS = 1000


class NativeBody(SamplingFields, kw_only=True):
    """The body of `POST /v1/streams`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    instructions: str | None = None
    conversation: ConversationField = None
    logprobs: bool | None = None
    reasoning: Literal["auto", "text"] = "auto"
    chat_template_kwargs: TemplateValues | None = None
    on_disconnect: Literal["cancel", "detach"] = "detach"
    linger_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    continuity: Literal["any", "exact"] = "any"


# Known from OpenAI's API, and not to be ignored quietly. The values beside them ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "top_logprobs": (0,),
}


def parse(request: ParsedRequest) -> GenerateCall | Following:
    """A new stream; or the one of a Last-Event-ID, since a client that repeats its POST to resume must never generate
    again. Raises: RequestError."""
    cursor = request.headers.get("last-event-id")
    if cursor is not None:
        return Following(*parse_cursor(cursor), NativeView())
    streams = "text/event-stream" in request.headers.get("accept", "")
    return GenerateCall(
        parse_body(request.body, request.branch), NativeView(), stream=streams, at_once=True, status=201
    )


def parse_body(body: JsonBody, branch: Branch | None = None) -> GenerateRequest:
    """A request that goes on from the branch of its conversation, where it names one.

    Raises: RequestError; unknown fields are refused, since a typing mistake here has no other witness.
    """
    refuse(body, _REFUSED)
    known = {name: value for name, value in body.items() if name not in _REFUSED}
    fields, _ = read_fields(known, NativeBody, strict=True)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    if fields.conversation is not None and branch is None:
        raise UnsupportedParameter("Conversations are taken by POST /v1/streams, and not here.", param="conversation")
    if fields.messages is None and (branch is not None or fields.instructions is not None):
        raise RequestError("conversation and instructions go with messages.", param="messages")
    before: tuple[Message, ...] = ()
    if branch is not None:
        branch = open_branch(branch, is_asked=bool(fields.messages))
        before = messages_of(branch.items)
    messages = read_messages(fields.messages, before) if fields.messages is not None else ()
    generate = GenerateRequest(
        model=fields.model,
        prompts=(fields.prompt,) if fields.prompt is not None else (),
        messages=messages,
        template_values=template_values(fields.chat_template_kwargs),
        split_reasoning=fields.reasoning == "auto",
        sampling=replace(sampling_of(fields), logprobs=bool(fields.logprobs)),
        on_disconnect=fields.on_disconnect,
        linger_s=fields.linger_s,
        exact=fields.continuity == "exact",
    )
    if branch is not None:
        is_continued = messages[-1].role == "assistant" and not messages[-1].tool_calls
        generate = chat_in(branch, replace(generate, continue_final=is_continued), len(before), ToolsView())
    if fields.instructions:
        generate = replace(generate, messages=(Message("system", fields.instructions), *generate.messages))
    return generate


def parse_following(request: ParsedRequest) -> Following:
    """The header wins: an EventSource that reconnects keeps the address that it was made with."""
    stream_id = request.path["stream_id"]
    cursor = request.headers.get("last-event-id") or request.query.get("after")
    after = parse_cursor(cursor, stream_id)[1] if cursor else 0
    return Following(stream_id, after, NativeView())


def show_ready(request: ParsedRequest) -> Reply:
    server = request.server
    replay = server.replay or "not certified"
    return readiness(server, {"ready": server.is_ready, "state": server.state, "replay": replay})


def list_running(request: ParsedRequest) -> Reply:
    states = [_state(facts, num_events) for facts, num_events in request.running()]
    return Reply(to_json({"object": "list", "data": states}))


def find(request: ParsedRequest) -> tuple[str, View]:
    return request.path["stream_id"], NativeView()


def find_to_delete(request: ParsedRequest) -> tuple[str, View]:
    return request.path["stream_id"], _NothingView()


_FAREWELL = f": this server leaves; the rest is to be had from the next one\nretry: {RETRY_MS}\n\n".encode()


@dataclass(frozen=True, slots=True)
class NativeView(EventStreamView):
    farewell = _FAREWELL

    def open(self, facts: StreamFacts) -> Encoder:
        return NativeEncoder(facts)


class _NothingView(NativeView):
    """Of a stream that is no more."""

    def open(self, facts: StreamFacts) -> Encoder:
        return _NothingEncoder(facts)


class NativeEncoder:
    """Events as they stand on the wire. Keeps nothing between events, so that it may start anywhere.

    The id is an event's last line: @microsoft/fetch-event-source takes an event for seen as soon as it has read that,
    and would lose what is cut off behind it.
    """

    __slots__ = ("_facts", "_id")

    def __init__(self, facts: StreamFacts) -> None:
        self._facts = facts
        self._id = f"id: {facts.stream_id}-"

    def encode(self, seq: int, event: Event) -> bytes:
        if type(event) is End:
            return f"event: {event.status}\ndata: {event_json(event)}\n{self._id}{seq}\n\n".encode("ascii")
        retry = f"retry: {RETRY_MS}\n" if seq == 1 else ""
        kind = "event: reasoning\n" if type(event) is TextDelta and event.reasoning else ""
        return f"{retry}{kind}data: {event_json(event)}\n{self._id}{seq}\n\n".encode("ascii")

    def whole(self, events: Sequence[Event]) -> bytes:
        """The stream's state, its text so far, and the reasoning before it, if there is any."""
        facts = self._facts
        choices = deltas_by_choice(events, facts.num_choices)
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


class _NothingEncoder(NativeEncoder):
    def whole(self, events: Sequence[Event]) -> bytes:
        return b""


def _state(facts: StreamFacts, num_events: int) -> JsonBody:
    """What there is to say of a stream besides its text."""
    path = f"/v1/streams/{facts.stream_id}"
    state: JsonBody = {
        "id": facts.stream_id,
        "status": facts.status,
        "model": facts.model,
        "created": facts.created_s,
        "last_event_id": event_id(facts.stream_id, num_events),
        "events_url": path + "/events",
        "cancel_url": path + "/cancel",
    }
    return state if facts.num_ahead is None else state | {"num_ahead": facts.num_ahead}


def event_json(event: Event, *, reasoning_name: str = "text") -> str:
    """An event as one line of JSON: `{"text", "token_ids"}` and what else there is, or how the stream ended. Reasoning
    has a name of its own where nothing beside the JSON tells the two apart."""
    if type(event) is End:
        return to_json(end_fields(event)).decode()
    assert type(event) is TextDelta
    token_ids = event.token_ids
    ids = token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids))
    extra = ""
    if event.finish_reason is not None or event.choice or event.logprobs:
        extra = _extra_json(event)
    if event.reasoning:
        return f'{{"{reasoning_name}":{quote(event.reasoning)},"token_ids":[{ids}]{extra}}}'
    return f'{{"text":{quote(event.text)},"token_ids":[{ids}]{extra}}}'


def _extra_json(event: TextDelta) -> str:
    fields: JsonBody = {}
    if event.choice:
        fields["choice"] = event.choice
    if event.logprobs:
        fields["logprobs"] = event.logprobs
    if event.finish_reason is not None:
        fields["finish_reason"] = event.finish_reason
        if event.stop is not None:
            fields["stop"] = event.stop
    return "," + to_json(fields)[1:-1].decode()


def end_fields(end: End) -> JsonBody:
    """The terminal event as JSON fields; also part of a stream's state."""
    fields: JsonBody = {"status": end.status, "usage": usage_json(end)}
    if end.failure is not None:
        fields["error"] = {"code": end.failure.code, "message": end.failure.message}
    if end.continuity is not None:
        fields["continuity"] = end.continuity
    return fields


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error": {"message", "type", "code", "param"}}`, as on OpenAI's routes."""
    kind = "invalid_request_error" if error.status < 429 or error.status == 431 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    body = {"message": error.message, "type": kind, "code": error.code, "param": error.param}
    return error.status, to_json({"error": body})


_STREAM = "/v1/streams/{stream_id}"

WIRE = Wire(
    name="native",
    title="tailrace: streams that resume",
    operations=(
        Operation(
            "POST",
            "/v1/streams",
            Generate(parse, conversation=place_of),
            "Begin a stream; answered with its events where the client accepts text/event-stream.",
            body=NativeBody,
            example={"messages": [{"role": "user", "content": "Tell me a story about dogs."}], "max_tokens": 64},
        ),
        Operation("GET", "/v1/streams", Show(list_running), "The caller's streams that run, the oldest first."),
        Operation(
            "GET",
            _STREAM + "/events",
            Follow(parse_following),
            "The events of a stream, from behind Last-Event-ID or `after` on.",
            query=("after",),
        ),
        Operation("GET", _STREAM, OnStream(find), "The state of a stream and its text so far."),
        Operation("POST", _STREAM + "/cancel", OnStream(find, "cancel"), "Stop a stream, everywhere and at once."),
        Operation("GET", "/livez", Show(show_live), "Whether tokens move; where they do not, a restart is due."),
        Operation("GET", "/readyz", Show(show_ready), "Whether requests are taken, and if not, why."),
        Operation("DELETE", _STREAM, OnStream(find_to_delete, "delete"), "Stop a stream and forget it."),
    ),
    encode_error=encode_error,
    pick=pick_named,
    refused=_REFUSED,
)
