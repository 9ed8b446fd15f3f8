"""`/v1/files` and `/v1/batches`, as on OpenAI's API."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tailrace.dialects import read_count, read_fields, read_json
from tailrace.errors import QueueFull, RequestError
from tailrace.server import Sender, Server, read_query, require_plain_utf8
from tailrace_plugins.batches.batch_files import FileWriter, new_id
from tailrace_plugins.batches.batch_rows import seconds_of
from tailrace_plugins.batches.batches import RowBatches, new_batch_id
from tailrace_plugins.batches.route_parts import json_answer, owner_with
from tailrace_plugins.batches.stored_batches import RowBatch, StoredFile
from tailrace_plugins.batches.upload import read_form

__all__ = ["ENDPOINTS", "OpenAIRoutes"]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_UPLOADS_AT_ONCE = 64
_FORM_BYTES = 16_384  # of a form beside its file
_DEFAULT_PAGE, _MAX_PAGE = 20, 10_000
_KEPT_S = 30 * 86_400  # files of rows, unless they say otherwise
_MOST_WINDOW_S = 30 * 86_400
_LEAST_KEPT_S, _MOST_KEPT_S = 3_600, 2_592_000
_SECONDS = re.compile(r"[0-9]{1,10}", re.ASCII)

Json = dict[str, Any]  # Any: JSON
T = TypeVar("T", StoredFile, RowBatch)


class ExpiresAfter(msgspec.Struct):
    anchor: str
    seconds: Annotated[int, msgspec.Meta(ge=_LEAST_KEPT_S, le=_MOST_KEPT_S)]


class BatchBody(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class OpenAIRoutes:
    def __init__(self, server: Server, batches: RowBatches, *, file_bytes: int) -> None:
        self._server = server
        self._batches = batches
        self._files = batches.files
        self._file_bytes = file_bytes
        self._num_uploads = 0

    def table(self) -> list[Route]:
        return [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._list_files, methods=["GET"]),
            Route("/v1/files/{file_id}", self._show_file, methods=["GET"]),
            Route("/v1/files/{file_id}", self._delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self._content, methods=["GET"]),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list_batches, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self._show_batch, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self._cancel, methods=["POST"]),
        ]

    # Files

    async def _upload(self, request: Request) -> Response:
        owner = owner_with("generate", request)
        await self._files.check_number(owner)
        if self._num_uploads >= _UPLOADS_AT_ONCE:  # each has a piece in memory
            raise QueueFull("Too many files are being uploaded.", retry_after_s=1.0)
        self._num_uploads += 1
        writer = FileWriter(self._files, owner, new_id("file-"))
        try:
            with self._server.bodies.reader(request.scope, most_bytes=self._file_bytes + _FORM_BYTES) as reader:
                pieces = reader.pieces(request.headers, request.receive)
                fields, filename = await read_form(
                    request.headers.get("content-type", ""), pieces, writer.add, writer.keep_pieces
                )
            if fields.get("purpose") != "batch":
                raise RequestError("purpose must be batch: this server has no other use for files.", param="purpose")
            if not writer.has_content:
                raise RequestError("The file is empty.", param="file")
            expires_s = int(time.time()) + _kept_s(fields)
            file = await writer.close(filename=filename, purpose="batch", expires_s=expires_s)
        except BaseException:
            await writer.undo()
            raise
        finally:
            self._num_uploads -= 1
        return json_answer(file_json(file))

    async def _list_files(self, request: Request) -> Response:
        owner, query = owner_with("read", request), read_query(request.scope["query_string"])
        purpose = query.get("purpose")
        found = [file for file in await self._files.of(owner) if purpose in (None, file.purpose)]
        if query.get("order") == "asc":
            found.reverse()
        page, has_more = _page(found, [file.file_id for file in found], query, most=_MAX_PAGE, usual=_MAX_PAGE)
        return json_answer(_list([file_json(file) for file in page], has_more))

    async def _show_file(self, request: Request) -> Response:
        return json_answer(file_json(await self._file(request, "read")))

    async def _delete_file(self, request: Request) -> Response:
        file = await self._file(request, "generate")
        await self._batches.delete_file(file)
        return json_answer({"id": file.file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        file = await self._file(request, "read")
        return StreamingResponse(self._files.content(file.pieces, file.num_bytes), media_type="application/jsonl")

    async def _file(self, request: Request, action: str) -> StoredFile:
        return await self._files.find(owner_with(action, request), str(request.path_params["file_id"]))

    # RowBatches

    async def _create(self, request: Request) -> Response:
        owner = owner_with("generate", request)
        require_plain_utf8(request.headers)
        with self._server.bodies.reader(request.scope) as reader:
            body = read_json(await reader.read_json(request.headers, request.receive))
            fields, _ = read_fields(body, BatchBody)
        if fields.endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
        window_s = seconds_of(fields.completion_window)
        if window_s is None or window_s > _MOST_WINDOW_S:
            raise RequestError("completion_window must be a time such as 24h, at most 30d.", param="completion_window")
        after = fields.output_expires_after
        if after is not None and after.anchor != "created_at":
            raise RequestError("output_expires_after.anchor must be created_at.", param="output_expires_after.anchor")
        _check_metadata(fields.metadata)
        file = await self._files.find(owner, fields.input_file_id)
        if file.purpose != "batch":
            raise RequestError("The purpose of the file must be batch.", param="input_file_id")
        await self._batches.check_number(owner)
        now_s = int(time.time())
        batch = RowBatch(
            batch_id=new_batch_id(has_file=True),
            sender=Sender.of(request.scope),
            endpoint=fields.endpoint,
            created_s=now_s,
            order=time.time_ns(),
            expires_s=now_s + window_s,
            window=fields.completion_window,
            input_file_id=file.file_id,
            rows=file.pieces,
            num_rows_bytes=file.num_bytes,
            metadata=fields.metadata,
            output_expires_s=after.seconds if after is not None else None,
        )
        return json_answer(_batch_json(await self._batches.create(batch)))

    async def _list_batches(self, request: Request) -> Response:
        owner, query = owner_with("read", request), read_query(request.scope["query_string"])
        found = await self._batches.of(owner, has_file=True)
        ids = [batch.batch_id for batch in found]
        page, has_more = _page(found, ids, query, most=100, usual=_DEFAULT_PAGE)
        return json_answer(_list([_batch_json(batch) for batch in page], has_more))

    async def _show_batch(self, request: Request) -> Response:
        return json_answer(_batch_json(await self._batch(request, "read")))

    async def _cancel(self, request: Request) -> Response:
        batch = await self._batch(request, "generate")
        if batch.has_ended:
            raise RequestError("The batch has ended, so it cannot be cancelled.", param="batch_id")
        return json_answer(_batch_json(await self._batches.cancel(batch)))

    async def _batch(self, request: Request, action: str) -> RowBatch:
        batch_id = str(request.path_params["batch_id"])
        return await self._batches.find(owner_with(action, request), batch_id, has_file=True)


def _batch_json(batch: RowBatch) -> Json:
    completed = batch.counts.get("succeeded", 0)
    times = {
        f"{name}_at": batch.times.get(name)
        for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    }
    errors = [msgspec.structs.asdict(error) for error in batch.errors]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_s,
        "expires_at": batch.expires_s,
        **times,
        "request_counts": {
            "total": batch.num_rows,
            "completed": completed,
            "failed": sum(batch.counts.values()) - completed,
        },
        "metadata": batch.metadata,
    }


def file_json(file: StoredFile) -> Json:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _kept_s(fields: dict[str, str]) -> int:
    """Return how long a file is kept. Raises: RequestError."""
    if "expires_after[anchor]" not in fields and "expires_after[seconds]" not in fields:
        return _KEPT_S
    if fields.get("expires_after[anchor]") != "created_at":
        raise RequestError("expires_after.anchor must be created_at.", param="expires_after")
    seconds = fields.get("expires_after[seconds]", "")
    if not _SECONDS.fullmatch(seconds) or not _LEAST_KEPT_S <= int(seconds) <= _MOST_KEPT_S:
        text = f"expires_after.seconds must be from {_LEAST_KEPT_S} to {_MOST_KEPT_S}."
        raise RequestError(text, param="expires_after")
    return int(seconds)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises: RequestError."""
    given = metadata or {}
    if len(given) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in given.items()):
        text = "metadata has at most 16 pairs, of a key with at most 64 characters and a value with at most 512."
        raise RequestError(text, param="metadata")


def _page(
    found: Sequence[T], ids: Sequence[str], query: dict[str, str], *, most: int, usual: int
) -> tuple[Sequence[T], bool]:
    """Return the page that a query asks for, and whether there are more. Raises: RequestError."""
    limit = min(read_count(query, "limit") or usual, most)
    begin = 0
    if "after" in query:
        if query["after"] not in ids:
            raise RequestError("There is nothing with the id in after.", param="after")
        begin = ids.index(query["after"]) + 1
    return found[begin : begin + limit], len(found) > begin + limit


def _list(items: list[Json], has_more: bool) -> Json:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
