"""`/v1/messages/batches`, as on Anthropic's API."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tailrace.dialects import read_count
from tailrace.errors import RequestError
from tailrace.server import Sender, Server, read_query, require_plain_utf8
from tailrace_plugins.batches.batch_files import PIECE_BYTES, FileWriter
from tailrace_plugins.batches.batch_keys import RESULTS, result_prefix
from tailrace_plugins.batches.batch_run import RowLimits
from tailrace_plugins.batches.batches import RowBatches, new_batch_id
from tailrace_plugins.batches.route_parts import json_answer, owner_with
from tailrace_plugins.batches.stored_batches import RowBatch

__all__ = ["AnthropicRoutes", "BatchRequest", "write_rows"]

_ENDPOINT = "/v1/messages"
_ROOT = _ENDPOINT + "/batches"
_WINDOW_S = 86_400
_SHARE = 8  # of the memory for bodies, as other large bodies have
_DEFAULT_PAGE, _MAX_PAGE = 20, 1_000
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)

Json = dict[str, Any]  # Any: JSON


class BatchRequest(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class MessageBatchBody(msgspec.Struct):
    requests: list[BatchRequest]


_decode = msgspec.json.Decoder(MessageBatchBody).decode


class AnthropicRoutes:
    def __init__(self, server: Server, batches: RowBatches, limits: RowLimits, *, file_bytes: int) -> None:
        self._server = server
        self._batches = batches
        self._limits = limits
        self._file_bytes = file_bytes

    def table(self) -> list[Route]:
        return [
            Route(_ROOT, self._create, methods=["POST"]),
            Route(_ROOT, self._list, methods=["GET"]),
            Route(_ROOT + "/{batch_id}", self._show, methods=["GET"]),
            Route(_ROOT + "/{batch_id}", self._delete, methods=["DELETE"]),
            Route(_ROOT + "/{batch_id}/cancel", self._cancel, methods=["POST"]),
            Route(_ROOT + "/{batch_id}/results", self._results, methods=["GET"]),
        ]

    async def _create(self, request: Request) -> Response:
        owner = owner_with("generate", request)
        require_plain_utf8(request.headers)
        await self._batches.check_number(owner)
        settings = self._server.settings
        most_bytes = max(settings.body_bytes, min(self._file_bytes, settings.pending_body_bytes // _SHARE))
        with self._server.bodies.reader(request.scope, most_bytes=most_bytes) as reader:
            rows = _read(await reader.read(request.headers, request.receive))
            self._check(rows)
            batch_id = new_batch_id(has_file=False)
            writer = FileWriter(self._batches.files, owner, batch_id)
            try:
                await write_rows(rows, writer)
            except BaseException:
                await writer.undo()
                raise
            now_s = int(time.time())
            batch = RowBatch(
                batch_id=batch_id,
                sender=Sender.of(request.scope),
                endpoint=_ENDPOINT,
                created_s=now_s,
                order=time.time_ns(),
                expires_s=now_s + _WINDOW_S,
                window="24h",
                rows=writer.prefix,
                num_rows_bytes=writer.num_bytes,
                status="in_progress",
                num_rows=len(rows),
            )
            # If this fails, the batch may be kept: then its rows are needed. Otherwise the sweep erases them.
            batch = await self._batches.create(batch, upload_key=writer.upload_key)
        return self._answer(request, batch)

    def _check(self, rows: list[BatchRequest]) -> None:
        """Raises: RequestError."""
        most = self._limits.most_rows
        if not 1 <= len(rows) <= most:
            raise RequestError(f"requests must have from 1 to {most} items.", param="requests")
        seen: set[str] = set()
        for index, row in enumerate(rows):
            name = f"requests[{index}]"
            if not _CUSTOM_ID.fullmatch(row.custom_id):
                text = f"{name}.custom_id must have 1 to 64 letters, digits, _ or -."
                raise RequestError(text, param=f"{name}.custom_id")
            if row.custom_id in seen:
                text = f"{name}.custom_id is also that of an earlier request."
                raise RequestError(text, param=f"{name}.custom_id")
            seen.add(row.custom_id)
            if not bytes(row.params).startswith(b"{"):
                raise RequestError(f"{name}.params must be an object.", param=f"{name}.params")
            if len(bytes(row.params)) > self._server.settings.body_bytes:
                raise RequestError(f"{name}.params is longer than --body-bytes.", param=f"{name}.params")

    async def _list(self, request: Request) -> Response:
        owner, query = owner_with("read", request), read_query(request.scope["query_string"])
        found = await self._batches.of(owner, has_file=False)
        ids = [batch.batch_id for batch in found]
        limit = min(read_count(query, "limit") or _DEFAULT_PAGE, _MAX_PAGE)
        begin, end = 0, len(found)
        if "after_id" in query:
            begin = _index_of(ids, query, "after_id") + 1
        if "before_id" in query:
            end = _index_of(ids, query, "before_id")
            page, has_more = found[max(begin, end - limit) : end], end - limit > begin
        else:
            page, has_more = found[begin : begin + limit], begin + limit < end
        items = [self._json(request, batch) for batch in page]
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return json_answer({"data": items, "has_more": has_more, "first_id": first, "last_id": last})

    async def _show(self, request: Request) -> Response:
        return self._answer(request, await self._batch(request, "read"))

    async def _cancel(self, request: Request) -> Response:
        return self._answer(request, await self._batches.cancel(await self._batch(request, "generate")))

    async def _delete(self, request: Request) -> Response:
        batch = await self._batch(request, "generate")
        if not batch.has_ended:
            raise RequestError("The batch has not ended. Cancel it first.", param="batch_id")
        await self._batches.delete(batch)
        return json_answer({"id": batch.batch_id, "type": "message_batch_deleted"})

    async def _results(self, request: Request) -> Response:
        batch = await self._batch(request, "read")
        if not batch.has_ended:
            raise RequestError("The batch has not ended, so it has no results yet.", param="batch_id")
        content = self._batches.files.content(result_prefix(RESULTS, batch), batch.num_result_bytes)
        return StreamingResponse(content, media_type="application/x-jsonl")

    async def _batch(self, request: Request, action: str) -> RowBatch:
        batch_id = str(request.path_params["batch_id"])
        return await self._batches.find(owner_with(action, request), batch_id, has_file=False)

    def _answer(self, request: Request, batch: RowBatch) -> Response:
        return json_answer(self._json(request, batch))

    def _json(self, request: Request, batch: RowBatch) -> Json:
        shown = {name: batch.counts.get(name, 0) for name in ("succeeded", "errored", "canceled", "expired")}
        path = f"{self._server.settings.root_path}{_ROOT}/{batch.batch_id}/results"
        ended_s = batch.times.get(batch.status) if batch.has_ended else None
        status = "canceling" if batch.status == "cancelling" else "in_progress"
        return {
            "id": batch.batch_id,
            "type": "message_batch",
            "processing_status": "ended" if batch.has_ended else status,
            "request_counts": {"processing": batch.num_rows - sum(shown.values()), **shown},
            "created_at": _time(batch.created_s),
            "expires_at": _time(batch.expires_s),
            "ended_at": _time(ended_s),
            "cancel_initiated_at": _time(batch.times.get("cancelling")),
            "archived_at": None,
            "results_url": f"{request.url.scheme}://{request.headers['host']}{path}" if batch.has_ended else None,
        }


def _read(body: bytes) -> list[BatchRequest]:
    """Raises: RequestError."""
    try:
        return _decode(body).requests
    except msgspec.ValidationError:
        text = "requests must be a list of objects with custom_id, which is text, and params."
        raise RequestError(text, param="requests") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("The body is not valid JSON in UTF-8.") from None


async def write_rows(rows: list[BatchRequest], writer: FileWriter) -> None:
    """Keep requests as the lines of a file. Raises: SpaceFull, StorageError."""
    for row in rows:
        fields = {"custom_id": row.custom_id, "method": "POST", "url": _ENDPOINT, "body": _on_one_line(row.params)}
        line = msgspec.json.encode(fields) + b"\n"
        for begin in range(0, len(line), PIECE_BYTES):
            writer.add(line[begin : begin + PIECE_BYTES])
            await writer.keep_pieces()
    await writer.flush()


def _on_one_line(params: msgspec.Raw) -> msgspec.Raw:
    """Return JSON without line ends. Inside texts there are none."""
    return msgspec.Raw(bytes(params).replace(b"\n", b" ").replace(b"\r", b" "))


def _index_of(ids: list[str], query: dict[str, str], name: str) -> int:
    if query[name] not in ids:
        raise RequestError(f"There is no batch with the id in {name}.", param=name)
    return ids.index(query[name])


def _time(seconds: int | None) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds is not None else None
