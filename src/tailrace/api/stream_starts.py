"""How a stream begins: of an HTTP request, or of a frame on a WebSocket."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Scope

from tailrace.access.principal import arrival_of, owner_of, principal_of, sent_by
from tailrace.api.fitting import fitted, left_open, shortened
from tailrace.api.request_headers import (
    ignored_header,
    is_background,
    is_cross_origin,
    is_own_address,
    may_generate,
    with_headers,
)
from tailrace.api.stream_facts import facts_of, running_streams
from tailrace.assembly.models import Models
from tailrace.assembly.served import NamedModel
from tailrace.dialects import Encoder, ParsedRequest, StreamFacts, View, Wire
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.shapes import path_of
from tailrace.dialects.wire import (
    CumulativeEncoder,
    Following,
    Generate,
    GenerateCall,
    MakeVectors,
    OnSocket,
    Operation,
    Reply,
    name_on_wire,
    with_wire_names,
)
from tailrace.errors import (
    ClaimTaken,
    ContextLengthExceeded,
    Forbidden,
    IdempotencyConflict,
    RequestError,
    UnknownStream,
    UnsupportedParameter,
)
from tailrace.generation import Generator, images_of, without_images
from tailrace.http.body_budget import BodyReader
from tailrace.http.inner_requests import FOUND_ONLY
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.server import Server
from tailrace.streams import StreamLog
from tailrace.types import Claim, End, Failure, GenerateRequest, Record, Sampling, Task, Usage, new_stream_id

__all__ = ["BegunStream", "OverflownPrompt", "StreamStarts", "claim_of", "num_image_bytes"]

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class BegunStream:
    """A stream has begun, or an Idempotency-Key has found it. `notes` name what has no effect."""

    call: GenerateCall
    log: StreamLog
    facts: StreamFacts
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class OverflownPrompt:
    """A prompt is too long, and the wire says so in the stream, of which nothing is kept."""

    call: GenerateCall
    facts: StreamFacts
    end: End
    notes: Sequence[str]


class StreamStarts:
    """Finds the model of a request, its past and its conversation; begins its stream, or finds the one to follow."""

    def __init__(
        self,
        models: Models,
        server: Server,
        conversations: ConversationKeeper | None = None,
    ) -> None:
        self._models = models
        self._server = server
        self._conversations = conversations
        self._store = models.first.generator.store
        self._keys_in_use: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._conversations_in_use: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def addressed(
        self,
        wire: Wire,
        operation: Operation,
        sender: HTTPConnection,
        body: JsonBody,
        query: Mapping[str, str],
        *,
        reader: BodyReader | None = None,
        socket: OnSocket | None = None,
    ) -> tuple[ParsedRequest, NamedModel | None]:
        """Return a request, and the model that it names. If a server of one model has no such model, this is None, and
        what needs a model refuses the request. `reader` has read the body of an HTTP request. Raises: RequestError,
        Forbidden."""
        model = body.get("model")
        if isinstance(model, str) and is_own_address(model, sender.headers.get("host", "")):
            body["model"] = "default"  # Hugging Face's client sends the server's URL if it has no model name
        first, *others = sorted(self._models.names, key=lambda one: one.task != _task_of(operation))
        running = partial(running_streams, self._models, owner_of(sender.scope))
        parsed = ParsedRequest(
            first, body, query, sender.path_params, sender.headers, tuple(others), running=running, socket=socket
        )
        meant = wire.find_model(parsed)
        if meant is None and others:
            raise self._models.unknown()
        assert meant is None or isinstance(meant, NamedModel)  # a wire picks one of the given servers
        name = (meant or first).model
        principal_of(sender.scope).require_within("model", name)
        parsed = replace(parsed, attributed=partial(_attributed, reader, sender.scope, wire.name, name))
        return parsed if meant in (None, first) else replace(parsed, server=meant, others=()), meant

    async def start(
        self,
        wire: Wire,
        act: Generate,
        sender: HTTPConnection,
        parsed: ParsedRequest,
        meant: NamedModel | None,
        claim: Callable[[], Claim | None],
    ) -> BegunStream | OverflownPrompt | Following | Reply | GenerateCall:
        """Begin a stream. A HEAD request begins none: the call is returned. `claim` returns the idempotency key.

        Raises: TailraceError.
        """
        owner = owner_of(sender.scope)
        if act.past is not None:
            parsed = await self._with_past(owner, parsed, act.past(parsed))
        parsed = await self.with_newest(wire, owner, parsed, act.topic)
        point = act.conversation(parsed) if act.conversation is not None else None
        if point is None:
            return await self._begin(wire, act, sender, parsed, meant, claim)
        if self._conversations is None:
            raise UnsupportedParameter("This server keeps no conversations.", param="conversation")
        lock = self._conversations_in_use.setdefault((owner, point.id), asyncio.Lock())
        async with lock:  # of several requests at once, the later ones see the answer of the first one in progress
            branch = await self._conversations.branch(owner, point)
            return await self._begin(wire, act, sender, replace(parsed, branch=branch), meant, claim)

    async def _begin(
        self,
        wire: Wire,
        act: Generate,
        sender: HTTPConnection,
        parsed: ParsedRequest,
        meant: NamedModel | None,
        claim: Callable[[], Claim | None],
    ) -> BegunStream | OverflownPrompt | Following | Reply | GenerateCall:
        if sender.scope.get(FOUND_ONLY):
            return await self._found(owner_of(sender.scope), act.parse(parsed), claim())
        named = meant or self._models.first.names[0]
        served = named.served
        with served.arriving(arrival_of(sender.scope, wire=wire.name, model=named.model)):
            if meant is not None and not served.is_loaded and may_generate(sender):
                await self._models.load(served, is_background=is_background(sender))
            call = act.parse(parsed)
            if not isinstance(call, GenerateCall):
                return call
            ignored_header(call.ignored, is_strict=self._server.settings.strict)
            if not may_generate(sender) and is_cross_origin(sender):
                raise Forbidden("Pages of other origins cannot start a generation.", param="sec-fetch-site")
            if sender.scope.get("method") == "HEAD":
                return call
            generation = sent_by(sender.scope, with_headers(call.request, sender), wire=wire.name, model=named.model)
            generation, left_out = fitted(generation, served.generator, is_strict=self._server.settings.strict)
            notes = [*call.ignored, *(name_on_wire(name, wire, parsed) for name in left_out)]
            try:
                if meant is None:
                    raise self._models.unknown()
                log = await self._recall_or_create(parsed, generation, served.generator, claim())
            except RequestError as error:
                renamed = with_wire_names(error, wire, parsed)
                if call.stream and call.overflows_in_stream and isinstance(renamed, ContextLengthExceeded):
                    return _overflown(call, named, renamed)
                raise renamed from None
            notes += shortened(call.request, log.record, name_on_wire("max_tokens", wire, parsed))
            notes += left_open(log.record)
            if notes:
                served.generator.observers.on_ignored(log.record, _known_fields(notes, wire))
            facts = facts_of(served, log)
            if not log.record.prompts:  # an Idempotency-Key found an ended stream
                prompts = await served.generator.prompts.encode(without_images(call.request))
                facts = replace(facts, record=msgspec.structs.replace(log.record, prompts=prompts))
            return BegunStream(call, log, facts, notes)

    async def _found(self, owner: str, call: GenerateCall | Following | Reply, claim: Claim | None) -> Following:
        """Return the stream of an idempotency key as its request is answered. Raises: UnknownStream, too."""
        log = await self.recalled(owner, claim) if claim is not None else None
        if log is None or not isinstance(call, GenerateCall):
            raise UnknownStream("No stream has begun with this Idempotency-Key.")
        return Following(log.stream_id, 0, call.view)

    async def recalled(self, owner: str, claim: Claim) -> StreamLog | None:
        """Return the stream of an idempotency key. Raises: IdempotencyConflict, StorageError."""
        async with self._key_in_use(owner, claim):
            return await self._store.recall(owner, claim)

    def _key_in_use(self, owner: str, claim: Claim) -> asyncio.Lock:
        return self._keys_in_use.setdefault((owner, claim.key), asyncio.Lock())

    async def _with_past(self, owner: str, parsed: ParsedRequest, stream_id: str | None) -> ParsedRequest:
        """Raises: StreamError, StorageError. The dialect refuses unknown streams."""
        if stream_id is None:
            return parsed
        try:
            log = await self._server.streams.find(owner, stream_id)
        except UnknownStream:
            return parsed
        return replace(parsed, past=(facts_of(self._models.of(log), log), log.events))

    async def with_newest(
        self,
        wire: Wire,
        owner: str,
        parsed: ParsedRequest,
        topic: Callable[[ParsedRequest], str | None] | None,
        *,
        has_ended: bool = False,
    ) -> ParsedRequest:
        """Raises: StorageError."""
        name = topic(parsed) if topic is not None else None
        if name is None:
            return parsed
        log = await self._store.newest(owner, wire.name, name, has_ended=has_ended)
        return parsed if log is None else replace(parsed, newest=facts_of(self._models.of(log), log))

    async def _recall_or_create(
        self, parsed: ParsedRequest, generation: GenerateRequest, generator: Generator, claim: Claim | None
    ) -> StreamLog:
        if claim is None:
            return await self._create(parsed, generation, generator)
        async with self._key_in_use(
            generation.owner, claim
        ):  # concurrent requests with the same key wait for the first
            log = await self._store.recall(generation.owner, claim)
            while log is None:
                try:
                    log = await self._create(parsed, generation, generator, claim)
                except ClaimTaken:
                    log = await self._store.recall(generation.owner, claim)
            if log.record.model not in generator.names:
                raise IdempotencyConflict("This Idempotency-Key was used with another model.", param="idempotency-key")
            return log

    async def _create(
        self, parsed: ParsedRequest, generation: GenerateRequest, generator: Generator, claim: Claim | None = None
    ) -> StreamLog:
        if parsed.branch is not None:
            parsed.branch.require_free()
        return (await generator.create(generation, claim)).log

    async def follow(self, owner: str, following: Following) -> tuple[StreamLog, Encoder]:
        """Find the stream to follow, and open its encoder. Raises: StreamError, StorageError, and what the wire
        raises."""
        log = await self._server.streams.find(owner, following.stream_id, following.after)
        self._models.observers.on_followed(log.record, following.after)
        encoder = self.open(following.view, log)
        if following.replay:
            assert isinstance(encoder, CumulativeEncoder)
            encoder.skip(log.events[: following.after])
        return log, encoder

    def open(self, view: View, log: StreamLog) -> Encoder:
        return view.open(facts_of(self._models.of(log), log))


def claim_of(key: str, content: object) -> Claim:
    """Return an idempotency key with the digest of its request, which is JSON. Raises: RequestError."""
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        raise RequestError("Idempotency-Key must have 1 to 255 printable characters.", param="idempotency-key")
    return Claim(key, hashlib.sha256(msgspec.json.encode(content, order="deterministic")).digest())


def _overflown(call: GenerateCall, named: NamedModel, error: ContextLengthExceeded) -> OverflownPrompt:
    record = Record(
        new_stream_id(),
        time.time(),
        named.model,
        num_prompt_tokens=error.num_prompt_tokens,
        memo=call.request.memo,
    )
    end = End("error", Usage(error.num_prompt_tokens, 0), Failure(error.code, error.message))
    return OverflownPrompt(call, StreamFacts(record, named.served.generator.prompts.tokenizer), end, call.ignored)


def _known_fields(notes: Sequence[str], wire: Wire) -> list[str]:
    """Return the fields that notes are about, for observers: clients cannot make any number of names."""
    known = {*wire.unused, *wire.names.values(), *Sampling.__struct_fields__}
    return [path if (path := path_of(note)) in known else "other" for note in notes]


def num_image_bytes(request: GenerateRequest) -> int:
    return sum(len(image.content) for image in images_of(request))


def _attributed(
    reader: BodyReader | None, scope: Scope, wire: str, model: str, request: GenerateRequest
) -> GenerateRequest:
    """Return a request that does not run with its sender. Raises: BodyTooLarge for too much text beside the images;
    Forbidden for images without the scope `generate`: the engine has to look at them."""
    if images_of(request):
        principal_of(scope).require("generate")
    if reader is not None:
        reader.check_text(num_image_bytes(request))
    return sent_by(scope, request, wire=wire, model=model)


def _task_of(operation: Operation) -> Task:
    return operation.act.task if isinstance(operation.act, MakeVectors) else "generate"
