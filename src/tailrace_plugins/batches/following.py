"""Uploads a file, and follows its batch to its end, also over restarts of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tailrace.cli.commands import printable_text, say, say_error
from tailrace.client import AnswerFailed, Client, ServerRefused, connect

__all__ = ["Followed", "follow"]

_DIGEST = "tailrace_sha256"  # in the metadata of a batch: of its file
_POLL_S = (0.2, 2.0)  # the first pause, and the longest
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_AWAY = (429, 502, 503, 504)
_UPLOAD_S = 600.0
_ANSWER_S = 60.0

Json = dict[str, Any]  # Any: JSON


@dataclass(slots=True)
class Followed:
    """What became of a batch."""

    status: str
    num_rows: int
    num_answers: int
    num_errors: int
    problems: list[str] = field(default_factory=list)  # of the file
    results: Path | None = None
    errors: Path | None = None


async def follow(url: str, key: str, file: Path, output: Path, window: str, *, is_new: bool, cancel: bool) -> Followed:
    """Find or create the batch of a file, wait until it has ended, and write its results.

    A file of results replaces one of an earlier run. If there are none, the earlier file stays.

    Raises: AnswerFailed, ValueError.
    """
    errors = file.with_name(f"{file.name}.errors.jsonl")
    await asyncio.to_thread(_require_three_files, file, output, errors)
    digest = await asyncio.to_thread(_digest_of, file)
    async with connect(url, key) as client:
        batch = None if is_new else await _find(client, digest)
        if batch is None:
            if cancel:
                raise AnswerFailed("The server has no batch of this file that runs.")
            batch = await _create(client, file, digest, window)
        elif cancel and batch["status"] in _OPEN[:2]:
            batch = await _ask(client, "POST", f"/batches/{batch['id']}/cancel")
        if batch["status"] in _OPEN:
            say(f"The server runs the rows as {printable_text(batch['id'])}.")
        batch = await _wait_ended(client, batch)
        counts = batch["request_counts"]
        followed = Followed(batch["status"], counts["total"], counts["completed"], counts["failed"])
        for error in (batch["errors"] or {}).get("data", ()):
            where = f"Line {error['line']}: " if error["line"] else ""
            followed.problems.append(printable_text(f"{where}{error['message']} ({error['code']})"))
        followed.results = await _download(client, batch["output_file_id"], output)
        followed.errors = await _download(client, batch["error_file_id"], errors)
        return followed


def _require_three_files(file: Path, output: Path, errors: Path) -> None:
    """Raises: ValueError."""
    for path in (output, errors):
        if not path.parent.is_dir():
            raise ValueError(f"There is no directory {path.parent}.")
        if path.exists() and path.samefile(file):
            raise ValueError(f"{path} is the file with the rows. Results need another file.")
    if output.resolve() == errors.resolve():
        raise ValueError(f"{output} is the file for the errors. Results need another file.")


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


async def _find(client: Client, digest: str) -> Json | None:
    """Return the newest batch of a file that runs or is completed."""
    after = ""
    while True:
        page = await _ask(client, "GET", f"/batches?limit=100{after}")
        for batch in page["data"]:
            is_of_file = (batch["metadata"] or {}).get(_DIGEST) == digest
            if is_of_file and batch["status"] not in ("failed", "expired", "cancelled"):
                return dict(batch)
        if not page["has_more"]:
            return None
        after = f"&after={page['last_id']}"


async def _create(client: Client, file: Path, digest: str, window: str) -> Json:
    with file.open("rb") as content:
        endpoint = _endpoint_of(content.readline())
        content.seek(0)
        form = {"purpose": "batch"}
        uploaded = await _ask(
            client, "POST", "/files", data=form, files={"file": (file.name, content)}, within_s=_UPLOAD_S
        )
    body = {
        "input_file_id": uploaded["id"],
        "endpoint": endpoint,
        "completion_window": window,
        "metadata": {_DIGEST: digest},
    }
    return await _ask(client, "POST", "/batches", json=body)


def _endpoint_of(line: bytes) -> str:
    """Return the endpoint of a batch: the url of its first row."""
    try:
        url = msgspec.json.decode(line, type=dict[str, msgspec.Raw])["url"]
        return msgspec.json.decode(url, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        raise AnswerFailed("The first line of the file is not a row: a JSON object with url.") from None


async def _wait_ended(client: Client, batch: Json) -> Json:
    """Show the progress of a batch until it has ended."""
    pause_s, is_away = _POLL_S[0], False
    with _bar() as bar:
        task = bar.add_task("rows", total=None)
        while True:
            counts = batch["request_counts"]
            bar.update(task, completed=counts["completed"] + counts["failed"], total=counts["total"] or None)
            if batch["status"] not in _OPEN:
                return batch
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_S[1])
            try:
                batch = await _ask(client, "GET", f"/batches/{batch['id']}")
                is_away = False
            except AnswerFailed as error:
                if isinstance(error, ServerRefused) and error.status not in _AWAY:
                    raise
                if not is_away:
                    say_error("The server does not answer. The batch goes on when it is there again.")
                is_away = True


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


async def _download(client: Client, file_id: str | None, path: Path) -> Path | None:
    """Write a file of results: the whole file or none. Returns its path, if there is such a file.

    Raises: AnswerFailed.
    """
    if file_id is None:
        return None
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as target:
            async with _answering(client, "GET", f"/files/{file_id}/content", {}, _UPLOAD_S) as response:
                async for piece in response.aiter_bytes():
                    target.write(piece)
        os.replace(part, path)
    except OSError as error:
        raise AnswerFailed(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return path


async def _ask(client: Client, method: str, path: str, *, within_s: float = _ANSWER_S, **sent: object) -> Json:
    """Return an answer in JSON. Raises: AnswerFailed."""
    async with _answering(client, method, path, sent, within_s) as response:
        try:
            return dict(msgspec.json.decode(await response.aread()))
        except (msgspec.DecodeError, TypeError, ValueError):
            raise AnswerFailed("The server did not answer with JSON.") from None


@contextlib.asynccontextmanager
async def _answering(
    client: Client, method: str, path: str, sent: Mapping[str, Any], within_s: float
) -> AsyncIterator[httpx.Response]:
    """Send a request. Raises: AnswerFailed if the answer is an error, or does not come."""
    try:
        async with client.http.stream(method, client.base + path, timeout=within_s, **sent) as response:
            if response.status_code >= 300:
                raise ServerRefused(_message_of(await response.aread()), response.status_code)
            yield response
    except httpx.HTTPError:
        raise AnswerFailed("The server does not answer") from None


def _message_of(body: bytes) -> str:
    try:
        return printable_text(str(msgspec.json.decode(body)["error"]["message"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        return "The server refused the request."
