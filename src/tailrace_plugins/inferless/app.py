"""An Inferless app as an ASGI app, on Triton's v2 wire.

Divergences, on purpose: 1. `infer` of a streaming app answers with the stream if the client accepts one. 2. A unary app
that is asked for a stream answers with one event. 3. Binary tensors are refused.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tailrace import __version__, serve
from tailrace.dialects import to_json
from tailrace.errors import BodyTooLarge, RequestError, TailraceError, UnknownModel
from tailrace.serve.folders import first_of
from tailrace_plugins.inferless.app_class import InferlessAnswer, InferlessModel
from tailrace_plugins.inferless.inferless_errors import InferFailed, OutputError
from tailrace_plugins.inferless.inferless_wire import InferRequest, read, tensors_of, values_of
from tailrace_plugins.inferless.loading import Loaded, load
from tailrace_plugins.inferless.schema import instance_of
from tailrace_plugins.triton.triton_models import VERSION
from tailrace_plugins.triton.triton_tensors import read_tensors
from tailrace_plugins.triton.triton_wire import check_headers, encode_error

__all__ = ["InferlessApp", "load_app"]

logger = logging.getLogger("tailrace.serve")

_WORKSPACE = re.compile(r"_[0-9a-f]{32}$")  # the suffix that the vendor adds to a model's name
_SSE = "text/event-stream"
_BODY_BYTES = 64 * 2**20
_DISCONNECTED = 499  # never sent: the client is gone


def load_app(
    folder: Path, *, name: str | None = None, concurrency: int = 1, queue_s: float | None = None
) -> InferlessApp:
    """Import an Inferless app and make an ASGI app of it.

    `concurrency` is the number of calls of `infer` that may run at once; apps are written for the vendor's default, 1.
    `queue_s` limits how long a request waits for such a call; the default is one minute.

    Raises: AppError if the folder is not an app; the exceptions of the app's own code.
    """
    if concurrency < 1:
        raise ValueError("concurrency is at least 1.")
    app = InferlessApp(load(Path(folder), name), concurrency, queue_s)
    app.made_from = (str(Path(folder).resolve()), name, concurrency, queue_s)
    return app


def _load_again(folder: str, name: str | None, concurrency: int, queue_s: float | None) -> InferlessApp:
    """Load the app in another process. Changes to its folder, so that the app finds its files."""
    os.chdir(folder)
    return load_app(Path(folder), name=name, concurrency=concurrency, queue_s=queue_s)


class InferlessApp:
    """An ASGI app. Its lifespan calls `initialize` before the first request and `finalize` after the last.

    Its pickle contains only the folder's path, so that unpickling needs the folder.
    """

    made_from: tuple[str, str | None, int, float | None]  # the arguments of `load_app`

    def __init__(self, loaded: Loaded, concurrency: int = 1, queue_s: float | None = None) -> None:
        self.name = loaded.name
        self.notes = loaded.notes
        self.is_streaming = loaded.settings.is_streaming
        self._loaded = loaded
        self._model = InferlessModel(loaded, concurrency, queue_s)
        of_server = [("", self._show_server), ("/health/live", self._show_live), ("/health/ready", self._show_ready)]
        of_model = [("", self._show_model), ("/ready", self._show_ready)]
        verbs = [("/infer", self._infer), ("/generate", self._generate), ("/generate_stream", self._generate_stream)]
        model = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        routes = [Route("/v2" + path, show) for path, show in of_server]
        routes += [Route(base + path, show) for base in model for path, show in of_model]
        routes += [Route(base + path, ask, methods=["POST"]) for base in model for path, ask in verbs]
        self._app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={TailraceError: _refuse, HTTPException: _refuse_http},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def __reduce__(self) -> tuple[object, ...]:
        return _load_again, self.made_from

    def example(self) -> tuple[str, dict[str, object]]:
        """Return a path and a body to try the app with, from the schema's examples."""
        verb = "generate_stream" if self.is_streaming else "generate"
        return f"/v2/models/{self.name}/{verb}", {"parameters": self._loaded.inputs.sample()}

    @property
    def max_ongoing_requests(self) -> int:
        """The number of running and waiting requests at which it answers 429. A hundred may wait."""
        return self._model.max_pending

    def check_health(self) -> None:
        """Raises: RuntimeError with the reason if this process has to be replaced."""
        if self._model.fault:
            raise RuntimeError(f"{self._model.fault}.")

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._model.start()
        try:
            yield
        finally:
            await self._model.stop()

    # State

    async def _show_server(self, request: Request) -> Response:
        return _json({"name": "tailrace", "version": __version__, "extensions": ["generate"]})

    async def _show_live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _show_ready(self, request: Request) -> Response:
        named = {"name": self._named(request)} if "model" in request.path_params else {}
        is_ready = self._model.is_ready
        return _json({**named, "ready": is_ready}, 200 if is_ready else 503)

    async def _show_model(self, request: Request) -> Response:
        body = {"name": self._named(request), "versions": [VERSION], "platform": "tailrace"}
        loaded = self._loaded
        return _json({**body, "inputs": loaded.inputs.tensors(), "outputs": loaded.outputs.tensors()})

    # Inference

    async def _infer(self, request: Request) -> Any:  # Any: what Starlette calls as an ASGI app
        if self.is_streaming:
            if _SSE not in request.headers.get("accept", ""):
                raise RequestError("This app streams: use generate_stream, or accept text/event-stream.")
            return await self._generate_stream(request)
        inference, head = await self._read_request(request)
        result = await self._whole(request, inference)
        if result is None:
            return Response(status_code=_DISCONNECTED)
        tensors = tensors_of(result)
        if inference.outputs:
            tensors = [tensor for tensor in tensors if tensor["name"] in inference.outputs]
            if len(tensors) < len(set(inference.outputs)):
                raise RequestError("The app did not return all requested outputs.", param="outputs")
        return _json({**head, "outputs": tensors})

    async def _generate(self, request: Request) -> Response:
        if self.is_streaming:
            raise RequestError("This app streams: use generate_stream.")
        inference, head = await self._read_request(request, stream=False)
        result = await self._whole(request, inference)
        return Response(status_code=_DISCONNECTED) if result is None else _json({**head, **values_of(result)})

    async def _generate_stream(self, request: Request) -> Any:  # Any: as `_infer`
        inference, head = await self._read_request(request, stream=True)
        return serve.stream(self._events(self._ask(inference), head), wire="triton")

    async def _read_request(
        self, request: Request, *, stream: bool | None = None
    ) -> tuple[InferRequest, dict[str, object]]:
        """Read a request. Returns it, and the first fields of each of its answers. Raises: RequestError."""
        name = self._named(request)
        check_headers(request.headers)
        inference = read(read_tensors(await _body(request), request.headers), self._loaded.inputs)
        if None not in (inference.stream, stream) and inference.stream != stream:
            raise RequestError("stream: use generate_stream for a stream, else generate.", param="stream")
        head: dict[str, object] = {} if inference.request_id is None else {"id": inference.request_id}
        return inference, {**head, "model_name": name, "model_version": VERSION}

    def _named(self, request: Request) -> str:
        """Return the model's name as the request has it. Raises: UnknownModel."""
        name: str = request.path_params["model"]
        if self.name not in (name, _WORKSPACE.sub("", name)):
            raise UnknownModel(f"This server runs {self.name}; there is no such model here.", param="model")
        if request.path_params.get("version", VERSION) != VERSION:
            raise UnknownModel(f"The only version is {VERSION}.", param="version")
        return name

    def _ask(self, inference: InferRequest) -> InferlessAnswer:
        """Begin an answer. Raises: RequestError if the app's request class rejects the inputs."""
        form = self._loaded.request_class
        return self._model.ask(inference.inputs if form is None else instance_of(form, inference.inputs))

    async def _events(self, answer: InferlessAnswer, head: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
        """Encode an answer as events of this wire."""
        try:
            async for values in answer:
                yield {**head, **(values if self.is_streaming else values_of(values))}
        finally:
            await answer.aclose()

    async def _whole(self, request: Request, inference: InferRequest) -> object:
        """Return the result of a unary app, or None if the client disconnects first. Raises: QueueFull, AppFailed."""
        answer = self._ask(inference)
        try:
            given = await first_of(answer, request.receive)
            return given[0] if given else None
        finally:
            await answer.aclose()


async def _body(request: Request) -> bytes:
    """Raises: BodyTooLarge."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_BYTES:
            raise BodyTooLarge(f"The body is larger than {_BODY_BYTES} bytes.")
    return bytes(body)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, TailraceError)
    if isinstance(error, OutputError):
        logger.error("an output cannot be sent: %s", error.message)
    elif error.status == 500 and not isinstance(error, InferFailed):
        logger.error("a request failed", exc_info=error)
    status, body = encode_error(error)
    headers = {} if error.retry_after_s is None else {"retry-after": str(math.ceil(error.retry_after_s))}
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # so that the rest of the body need not be read
    return _JsonAnswer(body, status, headers)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _JsonAnswer(to_json({"error": f"{error.detail}."}), error.status_code, error.headers)


class _JsonAnswer(Response):
    media_type = "application/json"


def _json(body: dict[str, Any], status: int = 200) -> Response:  # Any: what JSON holds
    return _JsonAnswer(to_json(body), status)
