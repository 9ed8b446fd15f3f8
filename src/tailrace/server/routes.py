"""The routes: which path speaks which dialect, and what it does."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace import __version__
from tailrace.dialects import Call, Dialect, Encoder, StreamFacts, native, openai, plain, tgi
from tailrace.dialects.wire import JsonBody, read_json, to_json
from tailrace.errors import RequestError, SeqOutOfRange, UnknownModel, UnsupportedMediaType
from tailrace.generation import Generator, Run
from tailrace.server.answers import JsonAnswer, StreamAnswer, WholeAnswer
from tailrace.server.edge import BodyReader
from tailrace.server.settings import Settings
from tailrace.streams import StreamLog, event_id, parse_cursor

__all__ = ["Routes"]

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_Handler = Callable[[Request], Awaitable[ASGIApp]]


class Routes:
    """All handlers, over one generator."""

    def __init__(self, generator: Generator, settings: Settings, *, started_s: int) -> None:
        self._generator = generator
        self._settings = settings
        self._started_s = started_s
        self._bodies = BodyReader(settings)
        self._keys_in_use: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def table(self) -> list[Route]:
        stream = "/v1/streams/{stream_id}"
        return [
            _route("POST", "/v1/streams", self.create_stream),
            _route("GET", stream + "/events", self.follow_stream),
            _route("POST", stream + "/cancel", self.cancel_stream),
            _route("GET", stream, self.show_stream),
            _route("DELETE", stream, self.delete_stream),
            _route("POST", "/v1/chat/completions", self.chat),
            _route("POST", "/v1/completions", self.complete),
            _route("GET", "/v1/models", self.list_models),
            _route("GET", "/v1/models/{name:path}", self.show_model),
            _route("POST", "/", self.root),
            _route("GET", "/", self.welcome),
            _route("POST", "/generate", self.generate),
            _route("POST", "/generate_stream", self.generate_stream),
            _route("GET", "/info", self.show_info),
            _route("GET", "/health", self.health),
        ]

    # tailrace's own wire

    async def create_stream(self, request: Request) -> ASGIApp:
        wants_events = "text/event-stream" in request.headers.get("accept", "")
        cursor = request.headers.get("last-event-id")
        if cursor is not None:  # a client that repeats its POST to resume must never generate again
            stream_id, after = parse_cursor(cursor)
            return self._follow(request, self._log(stream_id), after)
        body = await self._json(request)
        log = await self._recall_or_create(request, body)
        if wants_events:
            return self._follow(request, log, 0)
        return JsonAnswer(to_json(self._state(log)), 201, {**_names(log), "location": f"/v1/streams/{log.stream_id}"})

    async def _recall_or_create(self, request: Request, body: JsonBody) -> StreamLog:
        key = request.headers.get("idempotency-key")
        if key is None:
            return (await self._generator.create(native.parse(body).request)).log
        if not _IDEMPOTENCY_KEY.fullmatch(key):
            raise RequestError("An Idempotency-Key has 1 to 255 printable characters.", param="idempotency-key")
        store = self._generator.store
        fingerprint = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).digest()
        async with self._keys_in_use.setdefault(key, asyncio.Lock()):  # twins wait here for the first of them
            log = store.recall(key, fingerprint)
            if log is None:
                log = (await self._generator.create(native.parse(body).request)).log
                store.remember(key, fingerprint, log)
            return log

    async def follow_stream(self, request: Request) -> ASGIApp:
        log = self._log(request.path_params["stream_id"])
        cursor = request.headers.get("last-event-id") or request.query_params.get("after")
        after = parse_cursor(cursor, log.stream_id)[1] if cursor else 0
        return self._follow(request, log, after)

    def _follow(self, request: Request, log: StreamLog, after: int) -> ASGIApp:
        if log.end is not None and after >= log.last_seq:
            return Response(status_code=204, headers=_names(log))  # what makes an EventSource stop
        if after > log.last_seq:
            raise SeqOutOfRange("This stream has not come that far.", param="last-event-id")
        view = native.NativeView()
        path = f"/v1/streams/{log.stream_id}"
        headers = {**_names(log), "location": path + "/events", "content-location": path}
        return self._stream(log, view.open(self._facts(log)), after, view.media_type, headers)

    async def show_stream(self, request: Request) -> ASGIApp:
        log = self._log(request.path_params["stream_id"])
        return JsonAnswer(to_json(self._state(log, with_text=True)), headers=_names(log))

    async def cancel_stream(self, request: Request) -> ASGIApp:
        log = self._log(request.path_params["stream_id"])
        _run(log).cancel()
        return JsonAnswer(to_json(self._state(log, with_text=True)), headers=_names(log))

    async def delete_stream(self, request: Request) -> ASGIApp:
        log = self._log(request.path_params["stream_id"])
        _run(log).cancel()
        self._generator.store.delete(log)
        return Response(status_code=204)

    def _state(self, log: StreamLog, *, with_text: bool = False) -> JsonBody:
        run = _run(log)
        path = f"/v1/streams/{log.stream_id}"
        state: JsonBody = {
            "id": log.stream_id,
            "status": run.status,
            "model": run.model,
            "created": int(log.created_s),
            "last_event_id": event_id(log.stream_id, log.last_seq),
            "events_url": path + "/events",
            "cancel_url": path + "/cancel",
            "expires_in_s": self._generator.store.expires_s(log),
        }
        if with_text:
            state["text"] = log.text()
            if run.num_choices > 1:
                state["choices"] = [log.text(choice) for choice in range(run.num_choices)]
        if log.end is not None:
            state |= native.end_fields(log.end)
        return state

    # OpenAI

    async def chat(self, request: Request) -> ASGIApp:
        return await self._answer(openai.parse_chat(await self._json(request)), openai)

    async def complete(self, request: Request) -> ASGIApp:
        return await self._answer(openai.parse_completion(await self._json(request)), openai)

    async def list_models(self, request: Request) -> ASGIApp:
        return JsonAnswer(openai.encode_models([self._generator.model], self._started_s))

    async def show_model(self, request: Request) -> ASGIApp:
        if request.path_params["name"] != self._generator.model:
            raise UnknownModel("There is no such model here.", param="model")
        return JsonAnswer(to_json(openai.encode_model(self._generator.model, self._started_s)))

    # text-generation-inference, and the Ray tutorial where it asks with a query

    async def root(self, request: Request) -> ASGIApp:
        if "prompt" in request.query_params:
            call = plain.parse(
                plain.read_query(request.scope["query_string"]),
                has_template=self._generator.chat is not None,
                repetition_penalty=1.1 if "repetition_penalty" in self._generator.parameters else 1.0,
            )
            return await self._answer(call, plain)
        return await self._answer(tgi.parse(await self._json(request), stream=None, full_text_by_default=True), tgi)

    async def generate(self, request: Request) -> ASGIApp:
        return await self._answer(tgi.parse(await self._json(request), stream=False), tgi)

    async def generate_stream(self, request: Request) -> ASGIApp:
        return await self._answer(tgi.parse(await self._json(request), stream=True), tgi)

    async def show_info(self, request: Request) -> ASGIApp:
        return JsonAnswer(
            tgi.encode_info(
                model=self._generator.model,
                max_requests=self._settings.max_concurrent_requests,
                max_total_tokens=self._generator.limit_tokens(1),
                version=__version__,
            )
        )

    async def health(self, request: Request) -> ASGIApp:
        if self._generator.is_ready:
            return Response(status_code=200)
        return JsonAnswer(to_json({"error": "unhealthy", "error_type": "healthcheck"}), 503, {"retry-after": "1"})

    async def welcome(self, request: Request) -> ASGIApp:
        return PlainTextResponse(
            f"tailrace {__version__} runs {self._generator.model}. POST /?prompt=… streams text.\n"
        )

    # What they share

    async def _json(self, request: Request) -> JsonBody:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            # Also what keeps a form on a foreign page from posting here.
            raise UnsupportedMediaType("Send the body as Content-Type: application/json.", param="content-type")
        return read_json(await self._bodies.read(request.headers, request.receive))

    async def _answer(self, call: Call, dialect: Dialect) -> ASGIApp:
        run = await self._generator.create(call.request)
        headers = _names(run.log)
        if call.ignored:
            headers["x-tailrace-ignored"] = ", ".join(call.ignored)
        encoder = call.view.open(self._facts(run.log))
        if call.stream:
            return self._stream(run.log, encoder, 0, call.view.media_type, headers)
        return WholeAnswer(run.log, encoder, dialect, headers)

    def _stream(
        self, log: StreamLog, encoder: Encoder, after: int, media_type: str, headers: dict[str, str]
    ) -> ASGIApp:
        return StreamAnswer(
            log, encoder, after=after, media_type=media_type, headers=headers, heartbeat_s=self._settings.heartbeat_s
        )

    def _log(self, stream_id: str) -> StreamLog:
        return self._generator.store.get(stream_id)

    def _facts(self, log: StreamLog) -> StreamFacts:
        run = _run(log)
        return StreamFacts(
            stream_id=log.stream_id,
            model=run.model,
            created_s=int(log.created_s),
            seed=run.seed,
            num_prompt_tokens=run.num_prompt_tokens,
            prompt_text=run.prompt_text,
            vocabulary=self._generator.tokenizer,
        )


def _run(log: StreamLog) -> Run:
    assert isinstance(log.producer, Run)
    return log.producer


def _names(log: StreamLog) -> dict[str, str]:
    return {"x-stream-id": log.stream_id}


class _Endpoint:
    """A handler as an ASGI application; what it raises is the edge's to answer.

    Not a function: Starlette would wrap that in two more calls, which stay on the stack for as long as a stream runs.
    """

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive))
        await answer(scope, receive, send)


def _route(method: str, path: str, handler: _Handler) -> Route:
    return Route(path, _Endpoint(handler), methods=[method])
