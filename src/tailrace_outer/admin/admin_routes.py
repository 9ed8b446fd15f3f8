"""What an operator sees and does: the running streams of all owners, the models, and recent errors.

The routes need the scope `admin`. They show no text of prompts and answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.access.audit import noting
from tailrace.access.principal import principal_of
from tailrace.api.routes import route
from tailrace.assembly.models import Models
from tailrace.assembly.served import Served
from tailrace.dialects.bodies import read_json, require_plain_utf8
from tailrace.dialects.shapes import read_fields
from tailrace.errors import AdmissionError, TailraceError, UnknownStream
from tailrace.generation import Observer, Times
from tailrace.generation.run import Run
from tailrace.http.asgi_answers import JsonAnswer
from tailrace.http.body_budget import BodyBudget
from tailrace.streams import StreamLog
from tailrace.types import Arrival, Record

__all__ = ["AdminRoutes", "RecentErrors"]

_MAX_STREAMS = 1000  # in one answer
_MAX_ERRORS = 200  # that are remembered


class _ModelBody(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class RecentErrors(Observer):
    """Remembers the last streams that ended with an error, and requests that were refused although nothing was wrong
    with them."""

    def __init__(self) -> None:
        self.found: deque[dict[str, Any]] = deque(maxlen=_MAX_ERRORS)  # Any: of JSON

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        if error.status >= 500 or isinstance(error, AdmissionError):
            self._add(arrival.model, arrival.owner, arrival.key_id, error.code, error.message, None)

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        failure = log.end.failure if log.end is not None else None
        if failure is not None:
            self._add(record.model, record.owner, record.key_id, failure.code, failure.message, record.stream_id)

    async def forget(self, owner: str) -> Mapping[str, int]:
        kept = [error for error in self.found if error["owner"] != owner]
        self.found.clear()
        self.found.extend(kept)
        return {}

    def _add(self, model: str, owner: str, key_id: str, code: str, message: str, stream_id: str | None) -> None:
        self.found.append(
            {
                "at": round(time.time(), 3), "model": model, "owner": owner, "key_id": key_id or None,
                "code": code, "message": message, "stream_id": stream_id,
            }
        )  # fmt: skip


class AdminRoutes:
    """The routes. They work on this server only: servers that share streams have their own."""

    def __init__(self, models: Models, bodies: BodyBudget, errors: RecentErrors) -> None:
        self._models = models
        self._bodies = bodies
        self._errors = errors

    def table(self) -> list[Route]:
        return [
            route("GET", "/v1/admin/streams", self._list_streams),
            route("POST", "/v1/admin/streams/{stream_id}/cancel", self._cancel),
            route("GET", "/v1/admin/models", self._list_models),
            route("POST", "/v1/admin/models/load", self._load),
            route("POST", "/v1/admin/models/unload", self._unload),
            route("GET", "/v1/admin/errors", self._list_errors),
        ]

    async def _list_streams(self, request: Request) -> ASGIApp:
        principal_of(request.scope).require("admin")
        runs = sorted(self._live(), key=lambda run: run.record.created_s)
        return _list([_stream_json(run) for run in runs[:_MAX_STREAMS]], num_streams=len(runs))

    async def _cancel(self, request: Request) -> ASGIApp:
        """End a stream of any owner as cancelled. Raises: UnknownStream if it does not run here."""
        principal_of(request.scope).require("admin")
        stream_id = request.path_params["stream_id"]
        run = next((run for run in self._live() if run.record.stream_id == stream_id), None)
        if run is None:
            raise UnknownStream("No such stream runs on this server.")
        with noting("stream.cancel", request.scope, stream=stream_id, of_owner=run.record.owner):
            await self._models.first.generator.store.stop(run.record.owner, stream_id)
        return _one(_stream_json(run))

    async def _list_models(self, request: Request) -> ASGIApp:
        principal_of(request.scope).require("admin")
        return _list([self._model_json(served) for served in self._models])

    async def _load(self, request: Request) -> ASGIApp:
        served = await self._named(request)
        with noting("model.load", request.scope, model=served.model):
            await self._models.load(served, within_s=served.settings.load_s)
        return _one(self._model_json(served))

    async def _unload(self, request: Request) -> ASGIApp:
        """Raises: EngineLost if it is in use."""
        served = await self._named(request)
        with noting("model.unload", request.scope, model=served.model):
            self._models.unload(served)
        return _one(self._model_json(served))

    async def _list_errors(self, request: Request) -> ASGIApp:
        principal_of(request.scope).require("admin")
        return _list(list(reversed(self._errors.found)))

    def _live(self) -> list[Run]:
        return [run for run in self._models.live if run.log.end is None]

    async def _named(self, request: Request) -> Served:
        """Return the model that the body names. Raises: RequestError."""
        principal_of(request.scope).require("admin")
        require_plain_utf8(request.headers)
        with self._bodies.reader(request.scope, is_small=True) as reader:
            body = read_json(await reader.read(request.headers, request.receive))
        found, _ = read_fields(body, _ModelBody, strict=True)
        named = self._models.find(found.model)
        if named is None:
            raise self._models.unknown()
        return named.served

    def _model_json(self, served: Served) -> dict[str, Any]:
        state = served.names[0].state if served.model in self._models.by_name else "leaving"
        generator, gate = served.generator, served.generator.gate
        return {
            "id": served.model, "object": "admin.model", "engine": served.supervisor.spec.engine,
            "state": state, "is_loaded": served.is_loaded, "task": generator.task,
            "adapters": [named.model for named in served.names[1:]],
            "num_running": gate.num_running, "num_waiting": gate.num_waiting, "kv_usage": round(gate.kv_usage, 4),
            "kv_tokens": gate.capacity_tokens, "num_restarts": generator.num_restarts,
            "memory_bytes": served.num_bytes() if served.is_loaded else 0,
        }  # fmt: skip


def _stream_json(run: Run) -> dict[str, Any]:
    record, log, usage = run.record, run.log, run.usage
    return {
        "id": record.stream_id, "object": "admin.stream", "created": round(record.created_s, 3), "model": record.model,
        "wire": record.wire, "owner": record.owner, "key_id": record.key_id or None,
        "status": run.status, "is_suspended": run.is_suspended, "continuity": run.continuity,
        "num_readers": log.num_readers, "last_seq": log.last_seq,
        "prompt_tokens": usage.num_prompt_tokens, "completion_tokens": usage.num_completion_tokens,
    }  # fmt: skip


def _list(rows: list[dict[str, Any]], **more: int) -> JsonAnswer:
    return JsonAnswer(msgspec.json.encode({"object": "list", "data": rows, **more}))


def _one(row: dict[str, Any]) -> JsonAnswer:
    return JsonAnswer(msgspec.json.encode(row))
