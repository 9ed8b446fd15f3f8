"""The routes: every wire's operations, done one way.

What an operation asks for is parsed by its dialect; beginning, following, cancelling and answering are here, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace import __version__
from tailrace.dialects import WIRES, Asked, Call, Encoder, StreamFacts, Wire
from tailrace.dialects.bodies import printable, read_json, require_plain_utf8
from tailrace.dialects.queries import read_query
from tailrace.dialects.wire import (
    CumulativeEncoder,
    Follow,
    Following,
    Generate,
    OnStream,
    Operation,
    Reply,
    Show,
    View,
    in_the_wires_words,
)
from tailrace.errors import (
    Forbidden,
    IdempotencyConflict,
    QueueFull,
    RequestError,
    SeqOutOfRange,
    UnknownModel,
    UnsupportedParameter,
)
from tailrace.generation import Generator
from tailrace.server.answers import JsonAnswer, StreamAnswer, WholeAnswer, is_meant
from tailrace.server.bodies import BodyBudget, BodyReader
from tailrace.server.caller import caller_of
from tailrace.server.facts import Facts, facts_of
from tailrace.server.metrics import Metrics
from tailrace.server.models import NO_SUCH_MODEL, Models, Served
from tailrace.server.openapi import document
from tailrace.server.pages import Pages, wants_page
from tailrace.server.settings import Settings
from tailrace.streams import Claim, StreamLog
from tailrace.types import GenerateRequest

__all__ = ["Routes"]

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_LINGER = re.compile(r"[0-9]{1,5}", re.ASCII)
_SLOW_AT_ONCE = 2  # operations beside the event loop; more wait
_SLOW_WAITING = 32

Handler = Callable[[Request], Awaitable[ASGIApp]]


class Routes:
    """All operations of all wires, over all models."""

    def __init__(
        self,
        models: Models,
        settings: Settings,
        metrics: Metrics,
        bodies: BodyBudget,
        *,
        started_s: int,
    ) -> None:
        self._models = models
        self._store = models.first.generator.store
        self._settings = settings
        self._facts = tuple(Facts(served, models, started_s=started_s) for served in models)
        self._bodies = bodies
        self._keys_in_use: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._metrics = metrics
        self._pages = Pages()
        self._slow = asyncio.Semaphore(_SLOW_AT_ONCE)
        self._num_slow = 0

    def table(self) -> list[Route]:
        """A route for each method and path. Where wires share one, the query says which is meant."""

        def door(entry: tuple[Wire, Operation]) -> tuple[str, str]:
            return entry[1].path, entry[1].method

        entries = sorted(((wire, operation) for wire in WIRES for operation in wire.operations), key=door)
        routes = [
            route(method, path, self._handler(list(sharing))) for (path, method), sharing in groupby(entries, key=door)
        ]
        routes += [
            route("GET", "/", self.welcome),
            route("GET", "/metrics", self.show_metrics),
            route("GET", "/openapi.json", self.show_openapi),
            route("GET", "/docs", self._pages.show_docs),
            *self._pages.table(),
        ]
        return sorted(routes, key=lambda one: ":path}" in one.path)  # those that swallow whole paths come last

    async def welcome(self, request: Request) -> ASGIApp:
        if wants_page(request):
            return await self._pages.index(request)
        return PlainTextResponse(
            f"tailrace {__version__} runs {', '.join(facts.model for facts in self._facts)}. "
            "POST /?prompt=… streams text; /openapi.json says what else there is.\n",
            headers={"vary": "accept"},
        )

    async def show_metrics(self, request: Request) -> ASGIApp:
        return self._metrics.answer()

    async def show_openapi(self, request: Request) -> ASGIApp:
        return JsonAnswer(document())

    def _handler(self, sharing: Sequence[tuple[Wire, Operation]]) -> Handler:
        by_query = sorted(sharing, key=lambda entry: entry[1].only_with is None)

        async def handle(request: Request) -> ASGIApp:
            for wire, operation in by_query:
                if is_meant(operation, request.query_params):
                    return await self._perform(wire, operation, request)
            raise RequestError("This path needs a query.")

        return handle

    async def _perform(self, wire: Wire, operation: Operation, request: Request) -> ASGIApp:
        with self._bodies.reader(caller_of(request.scope)) as reader:
            asked = await self._asked(wire, operation, request, reader)
            known = [name.rstrip("!") for name in operation.query]
            naming = self._naming([printable(name) for name in asked.query if name not in known])
            answer = await self._act(wire, operation, request, asked)
        return _Named(answer, naming) if naming else answer

    async def _act(self, wire: Wire, operation: Operation, request: Request, asked: Asked) -> ASGIApp:
        match operation.act:
            case Generate(parse):
                return await self._generate(wire, request, asked, parse)
            case Follow(parse_following):
                return self._follow(parse_following(asked))
            case OnStream(find, verb):
                return self._on_stream(*find(asked), verb)
            case Show(render, is_slow):
                if not is_slow:
                    return self._reply(render(asked))
                return await self._show_slowly(render, asked)

    async def _show_slowly(self, render: Callable[[Asked], Reply], asked: Asked) -> ASGIApp:
        if self._num_slow >= _SLOW_WAITING:
            raise QueueFull("Too many requests of this kind are waiting.", retry_after_s=1.0)
        self._num_slow += 1
        try:
            async with self._slow:
                return self._reply(await asyncio.to_thread(render, asked))
        finally:
            self._num_slow -= 1

    async def _asked(self, wire: Wire, operation: Operation, request: Request, reader: BodyReader) -> Asked:
        """Raises: RequestError. What names a model is about that one, and the rest about all."""
        first, *others = self._facts
        query = read_query(request.scope["query_string"])
        if operation.query_in_body:
            query = await reader.with_fields(query, request.headers, request.receive)
        asked = Asked(
            server=first,
            body=await _json(operation, request, reader) if operation.body is not None else {},
            query=query,
            path=request.path_params,
            headers=request.headers,
            others=tuple(others),
        )
        meant = wire.pick(asked) if others else first
        if meant is None:
            raise UnknownModel(NO_SUCH_MODEL, param="model")
        return asked if meant is first else replace(asked, server=meant, others=())

    def _reply(self, reply: Reply) -> Response:
        headers = self._naming(reply.ignored)
        if reply.retry_after_s is not None:
            headers["retry-after"] = f"{reply.retry_after_s:.0f}"
        return Response(reply.body, reply.status, headers, reply.media_type)

    # Streams

    async def _generate(
        self, wire: Wire, request: Request, asked: Asked, parse: Callable[[Asked], Call | Following | Reply]
    ) -> ASGIApp:
        served = self._models[asked.server.model]
        with self._metrics.asking(served.name), served.asking():
            if not served.is_loaded and _would_begin(wire, request, asked):
                await self._models.load(served)
            return await self._begin(wire, request, asked, parse(asked), served)

    async def _begin(
        self, wire: Wire, request: Request, asked: Asked, call: Call | Following | Reply, served: Served
    ) -> ASGIApp:
        if isinstance(call, Reply):
            return self._reply(call)
        if isinstance(call, Following):
            return self._follow(call)
        naming = self._naming(call.ignored)
        if request.method in ("GET", "HEAD") and _is_from_elsewhere(request):
            raise Forbidden("Other pages may not make this server generate.", param="sec-fetch-site")
        if request.method == "HEAD":
            return Response(headers={"content-type": call.view.media_type})
        wanted = replace(_with_headers(call.request, request), caller=caller_of(request.scope))
        try:
            log = await self._recall_or_create(request, asked, wanted, served.generator)
        except UnsupportedParameter as error:
            raise in_the_wires_words(error, wire, asked) from None
        headers = _names(log) | naming
        facts = facts_of(served.generator, log)
        if not facts.prompts:  # an Idempotency-Key found it again, after its end
            prompts = await served.generator.encode(call.request)
            texts, ids = tuple(prompt.text for prompt in prompts), tuple(prompt.ids for prompt in prompts)
            facts = replace(facts, prompts=texts, prompt_ids=ids)
        encoder = call.view.open(facts)
        if call.stream:
            return self._stream(log, encoder, 0, call.view, headers)
        if call.at_once:
            return JsonAnswer(encoder.whole(log.events), call.status, headers | {"location": _path(log)})
        return WholeAnswer(log, encoder, wire, headers)

    def _naming(self, ignored: Sequence[str]) -> dict[str, str]:
        """The header that names fields without effect. Raises: UnsupportedParameter, where we are strict."""
        if ignored and self._settings.strict:
            raise UnsupportedParameter(f"{ignored[0]} has no effect here, and --strict refuses it.", param=ignored[0])
        return {"x-tailrace-ignored": ", ".join(ignored)} if ignored else {}

    async def _recall_or_create(
        self, request: Request, asked: Asked, wanted: GenerateRequest, generator: Generator
    ) -> StreamLog:
        key = request.headers.get("idempotency-key")
        if key is None:
            return (await generator.create(wanted)).log
        if not _IDEMPOTENCY_KEY.fullmatch(key):
            raise RequestError("An Idempotency-Key has 1 to 255 printable characters.", param="idempotency-key")
        content = [request.url.path, dict(asked.query), asked.body]
        claim = Claim(key, hashlib.sha256(msgspec.json.encode(content, order="deterministic")).digest())
        async with self._keys_in_use.setdefault(key, asyncio.Lock()):  # twins wait here for the first of them
            log = self._store.recall(claim) or (await generator.create(wanted, claim)).log
            if log.record.model != generator.model:
                raise IdempotencyConflict("This Idempotency-Key is of another model's.", param="idempotency-key")
            return log

    def _follow(self, following: Following) -> ASGIApp:
        log = self._store.get(following.stream_id)
        if following.after > log.last_seq:
            raise SeqOutOfRange("This stream has not come that far.", param="last-event-id")
        if log.end is not None and following.after == log.last_seq:
            return Response(status_code=204, headers=_names(log))  # what makes an EventSource stop
        encoder = following.view.open(self._facts_of(log))
        if following.replay:
            assert isinstance(encoder, CumulativeEncoder)
            encoder.skip(log.events[: following.after])
        return self._stream(log, encoder, following.after, following.view, _names(log))

    def _on_stream(self, stream_id: str, view: View, verb: str) -> ASGIApp:
        log = self._store.get(stream_id)
        if verb != "show":
            self._store.cancel(log)
        body = view.open(self._facts_of(log)).whole(log.events)
        if verb == "delete":
            self._store.delete(log)
        return JsonAnswer(body, 200, _names(log)) if body else Response(status_code=204, headers=_names(log))

    def _facts_of(self, log: StreamLog) -> StreamFacts:
        return facts_of(self._models.of(log).generator, log)

    def _stream(self, log: StreamLog, encoder: Encoder, after: int, view: View, headers: dict[str, str]) -> ASGIApp:
        return StreamAnswer(
            log,
            encoder,
            view,
            after=after,
            headers={**headers, "location": _path(log) + "/events", "content-location": _path(log)}.items(),
            heartbeat_s=self._settings.heartbeat_s,
        )


async def _json(operation: Operation, request: Request, reader: BodyReader) -> dict[str, object]:
    operation.check(request.headers)
    require_plain_utf8(request.headers)
    body = read_json(await reader.read(request.headers, request.receive))
    model = body.get("model")
    if isinstance(model, str) and _is_own_address(model, request.headers.get("host", "")):
        body["model"] = "default"  # Hugging Face's client puts there where it sends a request, if it knows no name
    return body


def _is_own_address(text: str, host: str) -> bool:
    """Whether it is a URL of this server, as the client knows it."""
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    port = {"http": ":80", "https": ":443"}.get(url.scheme)
    if port is None:
        return False
    return url.netloc.rpartition("@")[2].lower().removesuffix(port) == host.lower().removesuffix(port)


class _Named:
    """An answer, with one header more."""

    def __init__(self, answer: ASGIApp, headers: Mapping[str, str]) -> None:
        self._answer = answer
        self._headers = Headers(headers).raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        await self._answer(scope, receive, send_named)


def _is_from_elsewhere(request: Request) -> bool:
    """Whether a page of another origin had a browser ask, which sends no Origin with a GET. What tells is a header of
    the browser's own; to plain HTTP on other hosts it sends none, and the page's address may tell instead."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("none", "same-origin")
    referer = request.headers.get("referer")
    try:
        return referer is not None and urlsplit(referer).netloc != request.headers.get("host")
    except ValueError:  # an address that no page has
        return True


def _would_begin(wire: Wire, request: Request, asked: Asked) -> bool:
    """Whether a request is worth loading a model for: it names one, and may generate."""
    if request.method == "HEAD" or wire.pick(asked) is None:
        return False
    return request.method != "GET" or not _is_from_elsewhere(request)


def _with_headers(wanted: GenerateRequest, request: Request) -> GenerateRequest:
    """The request, with what its client asked in headers, whatever the wire: whether another answer will do when the
    engine is lost, and how long the stream runs on with nobody reading. With an Idempotency-Key that is as long as on
    `/v1/streams`, since whoever sends one means to come back. Raises: RequestError."""
    continuity = request.headers.get("x-tailrace-continuity", "any")
    if continuity not in ("any", "exact"):
        raise RequestError("X-Tailrace-Continuity is any or exact.", param="x-tailrace-continuity")
    if continuity == "exact":
        wanted = replace(wanted, exact=True)
    given = request.headers.get("x-tailrace-linger")
    if given is None:
        return replace(wanted, on_disconnect="detach") if "idempotency-key" in request.headers else wanted
    if not _LINGER.fullmatch(given) or int(given) > 86_400:
        raise RequestError("X-Tailrace-Linger is a number of seconds, at most 86400.", param="x-tailrace-linger")
    return replace(wanted, on_disconnect="detach", linger_s=float(given))


def _names(log: StreamLog) -> dict[str, str]:
    return {"x-stream-id": log.stream_id}


def _path(log: StreamLog) -> str:
    """Where any stream can be looked at, whatever wire began it."""
    return f"/v1/streams/{log.stream_id}"


class _Endpoint:
    """A handler as an ASGI application; what it raises is the edge's to answer.

    Not a function: Starlette would wrap that in two more calls, which stay on the stack for as long as a stream runs.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive))
        await answer(scope, receive, send)


def route(method: str, path: str, handler: Handler) -> Route:
    """A route whose handler gives back the ASGI application that answers."""
    return Route(path, _Endpoint(handler), methods=[method])
