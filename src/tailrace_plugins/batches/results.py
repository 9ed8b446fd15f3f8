"""The results of rows: written together, at the end of a turn of the event loop, each exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from tailrace.dialects import encode_error
from tailrace.errors import StorageError, TailraceError
from tailrace.server import InnerAnswer, LocalNotes
from tailrace_plugins.batches.errors import anthropic_error
from tailrace_plugins.batches.files import Files, new_id, piece_key
from tailrace_plugins.batches.records import RowBatch
from tailrace_plugins.batches.rows import Outcome

__all__ = ["ERRORS", "RESULTS", "RESULT_NAMES", "Results", "result_file_id", "result_of", "result_prefix", "unrun_line"]

RESULTS, ERRORS = b"o/", b"e/"
RESULT_NAMES = {RESULTS: "output", ERRORS: "error"}
_RETRY_S = 1.0
_LETTERS: dict[Outcome, bytes] = {"succeeded": b"s", "errored": b"e", "expired": b"x", "canceled": b"c"}
_OUTCOMES = {letter: outcome for outcome, letter in _LETTERS.items()}
_MESSAGES: dict[Outcome, tuple[str, str]] = {
    "expired": ("batch_expired", "The completion window ended before this row was run."),
    "canceled": ("batch_cancelled", "The batch was cancelled before this row was run."),
}

_read_json = msgspec.json.Decoder(msgspec.Raw).decode


def result_prefix(kind: bytes, batch: RowBatch) -> bytes:
    return b"%b%b/" % (kind, batch.batch_id.encode())


def result_file_id(kind: bytes, batch: RowBatch) -> str:
    """Return the id of a file of results. It is always the same for a batch, so that the file is made once."""
    return f"file-{batch.batch_id.removeprefix('batch_')}-{RESULT_NAMES[kind]}"


class Results:
    """Keeps the results of rows. `done` of a batch are the numbers of its rows that have one."""

    def __init__(self, notes: LocalNotes, files: Files) -> None:
        self._notes = notes
        self._files = files
        self._waiting: dict[bytes, bytes] = {}
        self._kept: asyncio.Future[None] | None = None

    async def load(self, batch: RowBatch) -> tuple[set[int], Counter[str]]:
        """Return the rows of a batch that have a result, and how many have each outcome. Raises: StorageError."""
        done: set[int] = set()
        counts: Counter[str] = Counter()
        num_bytes = 0
        for kind in (RESULTS, ERRORS):
            prefix = result_prefix(kind, batch)
            sizes = await self._files.sizes(prefix)
            for key in sizes:
                done.add(int(key[len(prefix) : -1], 16))
                counts[_OUTCOMES[key[-1:]]] += 1
            if not self._files.has(result_file_id(kind, batch)):
                num_bytes += sum(sizes.values())
        self._files.used[batch.owner] += num_bytes
        return done, counts

    async def keep(self, batch: RowBatch, number: int, outcome: Outcome, line: bytes) -> None:
        """Return when a result is kept. It waits while the journal cannot be written."""
        kind = ERRORS if batch.input_file_id and outcome != "succeeded" else RESULTS
        self._waiting[piece_key(result_prefix(kind, batch), number) + _LETTERS[outcome]] = line
        self._files.used[batch.owner] += len(line)
        if self._kept is None:
            loop = asyncio.get_running_loop()
            self._kept = loop.create_future()
            loop.call_soon(self._flush)
        await asyncio.shield(self._kept)

    async def wait_kept(self) -> None:
        """Return when all results are kept."""
        if self._kept is not None:
            await asyncio.shield(self._kept)

    def _flush(self) -> None:
        assert self._kept is not None
        try:
            self._notes.add_all(self._waiting.items())
        except StorageError:
            asyncio.get_running_loop().call_later(_RETRY_S, self._flush)
            return
        self._waiting.clear()
        self._kept.set_result(None)
        self._kept = None


def result_of(batch: RowBatch, custom_id: str, answer: InnerAnswer | TailraceError) -> tuple[Outcome, bytes]:
    """Return the outcome and the line of a row that has an answer."""
    if isinstance(answer, InnerAnswer) and not _is_json(answer.body):
        answer = TailraceError("The answer to this row is not JSON.")
    if isinstance(answer, TailraceError):
        encode = anthropic_error if not batch.input_file_id else encode_error
        status, body = encode(answer)
        answer = InnerAnswer(status, {}, body)
    outcome: Outcome = "succeeded" if answer.status < 400 else "errored"
    body = msgspec.Raw(answer.body)
    if not batch.input_file_id:
        name = "message" if outcome == "succeeded" else "error"
        return outcome, _line({"custom_id": custom_id, "result": {"type": outcome, name: body}})
    request_id = answer.headers.get("x-request-id", "")
    response = {"status_code": answer.status, "request_id": request_id, "body": body}
    return outcome, _line(_openai_line(custom_id, response, None))


def _is_json(body: bytes) -> bool:
    try:
        _read_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def unrun_line(batch: RowBatch, custom_id: str, outcome: Outcome) -> bytes:
    """Return the line of a row that was not run."""
    if not batch.input_file_id:
        return _line({"custom_id": custom_id, "result": {"type": outcome}})
    code, message = _MESSAGES[outcome]
    return _line(_openai_line(custom_id, None, {"code": code, "message": message}))


def _openai_line(custom_id: str, response: object, error: object) -> dict[str, object]:
    return {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"
