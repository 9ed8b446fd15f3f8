"""The routes: the operations of all wires.

Dialects parse the requests. Starting, following, cancelling and answering are the same for all wires, and are here.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.access.principal import arrival_of, owner_of, principal_of, sent_by, trace_of
from tailrace.api.fitting import cut_inputs, fitted, fitted_inputs, left_open, overflow_answer, shortened
from tailrace.api.request_headers import (
    ignored_header,
    is_cross_origin,
    is_own_address,
    may_generate,
    with_headers,
    with_priority,
)
from tailrace.api.stream_facts import facts_of, running_streams
from tailrace.assembly.models import Models
from tailrace.assembly.served import NamedModel
from tailrace.dialects import Encoder, ParsedRequest, Wire
from tailrace.dialects.bodies import JsonBody, printable, require_plain_utf8
from tailrace.dialects.queries import read_query
from tailrace.dialects.shapes import path_of
from tailrace.dialects.wire import (
    CumulativeEncoder,
    Follow,
    Following,
    Generate,
    GenerateCall,
    MakeVectors,
    OnStream,
    Operation,
    Reply,
    Show,
    View,
    name_on_wire,
    with_wire_names,
)
from tailrace.errors import (
    ClaimTaken,
    ContextLengthExceeded,
    Forbidden,
    IdempotencyConflict,
    QueueFull,
    RequestError,
    UnknownStream,
    UnsupportedParameter,
)
from tailrace.generation import Generator, images_of, without_images
from tailrace.http.asgi_answers import JsonAnswer, WholeAnswer, WithHeaders, unless_left
from tailrace.http.body_budget import BodyBudget, BodyReader
from tailrace.http.stream_actions import StreamActions
from tailrace.http.wires import ServedWires, is_meant
from tailrace.images.turns import OwnerTurns
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.server import Take
from tailrace.settings import Settings
from tailrace.streams import StreamLog
from tailrace.types import Claim, GenerateRequest, Sampling, Task

__all__ = ["Routes", "route"]

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_SLOW_AT_ONCE = 3  # operations in threads; more wait
_SLOW_OF_OWNER = 2
_SLOW_WAITING = 32
_INLINE_BYTES = 65_536  # of vectors, written as JSON in a few milliseconds

Handler = Callable[[Request], Awaitable[ASGIApp]]


class Routes:
    """All operations of all wires."""

    def __init__(
        self,
        wires: ServedWires,
        models: Models,
        streams: StreamActions,
        settings: Settings,
        bodies: BodyBudget,
        conversations: ConversationKeeper | None = None,
        takes: Mapping[tuple[str, str], Take] | None = None,
    ) -> None:
        self._takes = takes or {}
        self._wires = wires
        self._models = models
        self._conversations = conversations
        self._store = models.first.generator.store
        self._streams = streams
        self._settings = settings
        self._bodies = bodies
        self._keys_in_use: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._conversations_in_use: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._slow = OwnerTurns(_SLOW_AT_ONCE, _SLOW_OF_OWNER)
        self._num_slow = 0

    def table(self) -> list[Route]:
        """Return a route for each method and path. Wires that share one are distinguished by the query or a header."""

        def route_key(entry: tuple[Wire, Operation]) -> tuple[str, str]:
            return entry[1].path, entry[1].method

        entries = [(wire, operation) for wire in self._wires.all for operation in wire.operations]
        entries.sort(key=route_key)
        routes = [
            route(method, path, self._handler(list(shared)))
            for (path, method), shared in groupby(entries, key=route_key)
        ]
        return sorted(routes, key=lambda one: ":path}" in one.path)  # those that match any path come last

    def _handler(self, shared: Sequence[tuple[Wire, Operation]]) -> Handler:
        candidates = sorted(shared, key=lambda entry: not entry[1].is_conditional)
        headers = {one.only_with_header for _, one in shared if one.only_with_header is not None}
        vary = {"vary": ", ".join(sorted(headers))} if headers else {}
        return partial(self._answer, candidates, vary)

    async def _answer(
        self, candidates: Sequence[tuple[Wire, Operation]], vary: dict[str, str], request: Request
    ) -> ASGIApp:
        """Run the operation that the request means, of those that share the path."""
        matching = (entry for entry in candidates if is_meant(entry[1], request.query_params, request.headers))
        wire, operation = next(matching, (None, None))
        if wire is None or operation is None:
            wanted = sorted({one.only_with for _, one in candidates if one.only_with is not None})
            raise RequestError(f"This path needs one of these query parameters: {', '.join(wanted)}.")
        principal = principal_of(request.scope)
        principal.require(_action_of(operation))
        principal.require_within("wire", wire.name)
        has_images = operation.has_images and self._models.read_images
        with self._bodies.reader(request.scope, has_images=has_images) as reader:
            parsed, meant = await self._parse(wire, operation, request, reader)
            known = [name.rstrip("!") for name in operation.query]
            unknown = [printable(name) for name in parsed.query if name not in known]
            headers = ignored_header(unknown, is_strict=self._settings.strict) | vary
            take = self._takes.get((operation.method, operation.path))
            if take is not None and (taken := await take(request, parsed.body)) is not None:
                return WithHeaders(taken, headers) if headers else taken
            match operation.act:
                case Generate(parse) as act:
                    act = replace(act, parse=partial(_parsed, parse, reader))
                    answer = await self._generate(wire, act, request, parsed, meant)
                case MakeVectors() as act:
                    answer = await self._make_vectors(wire, act, request, parsed, meant)
                case Follow(parse, topic, has_ended):
                    found = parse(await self._with_newest(wire, request, parsed, topic, has_ended=has_ended))
                    if isinstance(found, Reply):
                        answer = self._reply(found)
                    else:
                        answer = await self._follow(request.scope, found)
                case OnStream(find, verb, topic):
                    stream_id, view = find(await self._with_newest(wire, request, parsed, topic))
                    opened = partial(self._open, view)
                    answer = await self._streams.act(request.scope, stream_id, verb, opened)
                case Show(render, is_slow):
                    answer = self._reply(
                        await self._show_slowly(owner_of(request.scope), render, parsed) if is_slow else render(parsed)
                    )
        return WithHeaders(answer, headers) if headers else answer

    async def _show_slowly(self, owner: str, render: Callable[[ParsedRequest], Reply], parsed: ParsedRequest) -> Reply:
        if self._num_slow >= _SLOW_WAITING:
            raise QueueFull("Too many requests of this kind are waiting.", retry_after_s=1.0)
        self._num_slow += 1
        try:
            async with self._slow.turn(owner):
                return await asyncio.to_thread(render, parsed)
        finally:
            self._num_slow -= 1

    async def _parse(
        self, wire: Wire, operation: Operation, request: Request, reader: BodyReader
    ) -> tuple[ParsedRequest, NamedModel | None]:
        """Return the parsed request, and the model that it names. If a server of one model has no such model, this is
        None, and what needs a model refuses the request. Raises: RequestError."""
        query = read_query(request.scope["query_string"])
        if operation.query_in_body:
            query = await reader.with_fields(query, request.headers, request.receive)
        body: JsonBody = {}
        if operation.body is not None:
            operation.check(request.headers)
            require_plain_utf8(request.headers)
            body = operation.read(await reader.read_json(request.headers, request.receive), request.headers)
            model = body.get("model")
            if isinstance(model, str) and is_own_address(model, request.headers.get("host", "")):
                body["model"] = "default"  # Hugging Face's client sends the server's URL if it has no model name
        first, *others = sorted(self._models.names, key=lambda one: one.task != _task_of(operation))
        running = partial(running_streams, self._models, owner_of(request.scope))
        parsed = ParsedRequest(first, body, query, request.path_params, request.headers, tuple(others), running=running)
        meant = wire.find_model(parsed)
        if meant is None and others:
            raise self._models.unknown()
        assert meant is None or isinstance(meant, NamedModel)  # a wire picks one of the given servers
        model = (meant or first).model
        principal_of(request.scope).require_within("model", model)
        parsed = replace(parsed, attributed=partial(_attributed, reader, request.scope, wire.name, model))
        return parsed if meant in (None, first) else replace(parsed, server=meant, others=()), meant

    def _reply(self, reply: Reply) -> Response:
        headers = ignored_header(reply.ignored, is_strict=self._settings.strict)
        if reply.retry_after_s is not None:
            headers["retry-after"] = f"{reply.retry_after_s:.0f}"
        return Response(reply.body, reply.status, headers, reply.media_type)

    async def _make_vectors(
        self, wire: Wire, act: MakeVectors, request: Request, parsed: ParsedRequest, meant: NamedModel | None
    ) -> ASGIApp:
        named = meant or self._models.names[0]
        served = named.served
        with served.arriving(arrival_of(request.scope, wire=wire.name, model=named.model)):
            if meant is None:
                raise self._models.unknown()
            served.generator.check_task(act.task)
            call = act.parse(parsed)
            if isinstance(call, Reply):
                return self._reply(call)
            ignored_header(call.ignored, is_strict=self._settings.strict)
            if not served.is_loaded:
                await self._models.load(served)
            wanted = with_priority(fitted_inputs(call.request, is_strict=self._settings.strict), request)
            try:
                run = await served.embedder.begin(sent_by(request.scope, wanted, wire=wire.name, model=named.model))
            except RequestError as error:
                raise with_wire_names(error, wire, parsed) from None
        vectors = await unless_left(request.receive, run.result())
        is_long = sum(map(len, vectors.vectors)) > _INLINE_BYTES
        body = await asyncio.to_thread(call.view.encode, vectors) if is_long else call.view.encode(vectors)
        notes = [*call.ignored, *cut_inputs(wanted, run, name_on_wire("input", wire, parsed))]
        return JsonAnswer(body, headers=ignored_header(notes, is_strict=False))

    # Streams

    async def _generate(
        self, wire: Wire, act: Generate, request: Request, parsed: ParsedRequest, meant: NamedModel | None
    ) -> ASGIApp:
        owner = owner_of(request.scope)
        if act.past is not None:
            parsed = await self._with_past(owner, parsed, act.past(parsed))
        place = act.conversation(parsed) if act.conversation is not None else None
        if place is None:
            return await self._begin(wire, act, request, parsed, meant)
        if self._conversations is None:
            raise UnsupportedParameter("This server keeps no conversations.", param="conversation")
        lock = self._conversations_in_use.setdefault((owner, place.id), asyncio.Lock())
        async with lock:  # of several requests at once, the later ones see the answer of the first one in progress
            branch = await self._conversations.branch(owner, place)
            return await self._begin(wire, act, request, replace(parsed, branch=branch), meant)

    async def _begin(
        self, wire: Wire, act: Generate, request: Request, parsed: ParsedRequest, meant: NamedModel | None
    ) -> ASGIApp:
        """Begin a stream, and return its answer."""
        named = meant or self._models.names[0]
        served = named.served
        with served.arriving(arrival_of(request.scope, wire=wire.name, model=named.model)):
            if meant is not None and not served.is_loaded and may_generate(request):
                await self._models.load(served)
            call = act.parse(parsed)
            if isinstance(call, Reply):
                return self._reply(call)
            if isinstance(call, Following):
                return await self._follow(request.scope, call)
            ignored = ignored_header(call.ignored, is_strict=self._settings.strict)
            if request.method in ("GET", "HEAD") and is_cross_origin(request):
                raise Forbidden("Pages of other origins cannot start a generation.", param="sec-fetch-site")
            if request.method == "HEAD":
                return Response(headers={"content-type": call.view.media_type})
            generation = sent_by(request.scope, with_headers(call.request, request), wire=wire.name, model=named.model)
            generation, left_out = fitted(generation, served.generator, is_strict=self._settings.strict)
            notes = [*call.ignored, *(name_on_wire(name, wire, parsed) for name in left_out)]
            try:
                if meant is None:
                    raise self._models.unknown()
                if "idempotency-key" in request.headers:
                    log = await self._recall_or_create(request, parsed, generation, served.generator)
                else:
                    log = await self._create(parsed, generation, served.generator)
            except RequestError as error:
                renamed = with_wire_names(error, wire, parsed)
                if call.stream and call.overflows_in_stream and isinstance(renamed, ContextLengthExceeded):
                    return overflow_answer(call, named, renamed, ignored)
                raise renamed from None
            notes += shortened(call.request, log.record, name_on_wire("max_tokens", wire, parsed))
            notes += left_open(log.record)
            ignored = ignored_header(notes, is_strict=False)
            if notes:
                served.generator.observers.on_ignored(log.record, _known_fields(notes, wire))
            facts = facts_of(served, log)
            if not log.record.prompts:  # an Idempotency-Key found an ended stream
                prompts = await served.generator.prompts.encode(without_images(call.request))
                facts = replace(facts, record=msgspec.structs.replace(log.record, prompts=prompts))
            encoder, headers = call.view.open(facts), self._streams.headers_of(log) | ignored
            if call.stream:
                return self._streams.follow(log, encoder, call.view, headers=headers.items())
            if call.at_once:
                headers["location"] = self._streams.path_of(log)
                return JsonAnswer(encoder.whole(log.events), call.status, headers)
            return WholeAnswer(log, encoder, wire, headers)

    async def _with_past(self, owner: str, parsed: ParsedRequest, stream_id: str | None) -> ParsedRequest:
        """Raises: StreamError, StorageError. The dialect refuses unknown streams."""
        if stream_id is None:
            return parsed
        try:
            log = await self._streams.find(owner, stream_id)
        except UnknownStream:
            return parsed
        return replace(parsed, past=(facts_of(self._models.of(log), log), log.events))

    async def _with_newest(
        self,
        wire: Wire,
        request: Request,
        parsed: ParsedRequest,
        topic: Callable[[ParsedRequest], str] | None,
        *,
        has_ended: bool = False,
    ) -> ParsedRequest:
        """Raises: StorageError."""
        if topic is None:
            return parsed
        log = await self._store.newest(owner_of(request.scope), wire.name, topic(parsed), has_ended=has_ended)
        return parsed if log is None else replace(parsed, newest=facts_of(self._models.of(log), log))

    async def _recall_or_create(
        self, request: Request, parsed: ParsedRequest, generation: GenerateRequest, generator: Generator
    ) -> StreamLog:
        key = request.headers["idempotency-key"]
        if not _IDEMPOTENCY_KEY.fullmatch(key):
            raise RequestError("Idempotency-Key must have 1 to 255 printable characters.", param="idempotency-key")
        content = [request.url.path, dict(parsed.query), parsed.body]
        claim = Claim(key, hashlib.sha256(msgspec.json.encode(content, order="deterministic")).digest())
        lock = self._keys_in_use.setdefault((generation.owner, key), asyncio.Lock())
        async with lock:  # concurrent requests with the same key wait for the first
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

    async def _follow(self, scope: Scope, following: Following) -> ASGIApp:
        log = await self._streams.find(owner_of(scope), following.stream_id, following.after)
        observers = self._models.of(log).generator.observers
        observers.on_followed(log.record, following.after)
        encoder = self._open(following.view, log)
        if following.replay:
            assert isinstance(encoder, CumulativeEncoder)
            encoder.skip(log.events[: following.after])
        answer = self._streams.follow(log, encoder, following.view, following.after)
        return _Read(answer, partial(observers.on_read, log.record, following.after), trace_of(scope))

    def _open(self, view: View, log: StreamLog) -> Encoder:
        return view.open(facts_of(self._models.of(log), log))


def _parsed(
    parse: Callable[[ParsedRequest], GenerateCall | Following | Reply], reader: BodyReader, parsed: ParsedRequest
) -> GenerateCall | Following | Reply:
    """Raises: RequestError; BodyTooLarge for too much text beside the images."""
    call = parse(parsed)
    if isinstance(call, GenerateCall):
        reader.check_text(_num_image_bytes(call.request))
    return call


def _known_fields(notes: Sequence[str], wire: Wire) -> list[str]:
    """Return the fields that notes are about, for observers: clients cannot make any number of names."""
    known = {*wire.unused, *wire.names.values(), *Sampling.__struct_fields__}
    return [path if (path := path_of(note)) in known else "other" for note in notes]


def _num_image_bytes(request: GenerateRequest) -> int:
    return sum(len(image.content) for image in images_of(request))


def _attributed(reader: BodyReader, scope: Scope, wire: str, model: str, request: GenerateRequest) -> GenerateRequest:
    """Return a request that does not run with its sender. Raises: BodyTooLarge for too much text beside the images;
    Forbidden for images without the scope `generate`: the engine has to look at them."""
    if images_of(request):
        principal_of(scope).require("generate")
    reader.check_text(_num_image_bytes(request))
    return sent_by(scope, request, wire=wire, model=model)


def _action_of(operation: Operation) -> str:
    """Return the scope that a key needs for an operation."""
    match operation.act:
        case Generate() | MakeVectors():
            return "generate"
        case OnStream(_, verb):
            return "read" if verb == "show" else "generate"
        case Follow() | Show():
            return "read"


def _task_of(operation: Operation) -> Task:
    return operation.act.task if isinstance(operation.act, MakeVectors) else "generate"


class _Read:
    """The answer to a client that follows a stream: an ASGI application. `on_end` gets the seconds that it took."""

    def __init__(self, answer: ASGIApp, on_end: Callable[[float, str], None], trace: str) -> None:
        self._answer = answer
        self._on_end = on_end
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun_s = time.monotonic()
        try:
            await self._answer(scope, receive, send)
        finally:
            self._on_end(time.monotonic() - begun_s, self._trace)


class _Endpoint:
    """A handler as an ASGI application. The edge answers its exceptions.

    It is a class because Starlette wraps functions in two more calls, which stay on the stack while a stream runs.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive))
        await answer(scope, receive, send)


def route(method: str, path: str, handler: Handler) -> Route:
    """Return a route. Its handler returns the ASGI application that answers."""
    return Route(path, _Endpoint(handler), methods=[method])
