"""Batches in a simulation: the code that serves, over the table in Redis; and a client that has its rows run.

A row generates without a wire: its body has the number of the row, and its answer has token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from tests.simulation.laws import Ledger
from tests.simulation.servers import MODEL, Message, Server
from tests.simulation.simulated_time import Process, Simulation, Violation

from tailrace import server as served
from tailrace.errors import TailraceError
from tailrace.server import InnerAnswer, Sender, StreamLog, Table
from tailrace.streams import Reader
from tailrace.types import ANONYMOUS, Claim, End, GenerateRequest, Released, Sampling
from tailrace_outer.scripted.scripted_engine import scripted_token
from tailrace_plugins.batches.batch_errors import UnknownBatch
from tailrace_plugins.batches.batch_files import Files, FileWriter, new_id
from tailrace_plugins.batches.batch_run import RowLimits
from tailrace_plugins.batches.batches import RowBatches, new_batch_id
from tailrace_plugins.batches.row_runner import RowRunner
from tailrace_plugins.batches.stored_batches import RowBatch

__all__ = ["BatchClient", "open_batches"]

_PATH = "/v1/completions"
_NUM_TOKENS = 6
_WINDOW_S = 86_400


class _Rows(served.Server):
    """What rows need of a server: it answers them, and drops their streams."""

    def __init__(self, server: Server) -> None:
        self.store = server.store
        self._server = server

    @property
    def model_names(self) -> frozenset[str]:
        return frozenset({MODEL})

    async def ask(
        self, sender: Sender, path: str, body: bytes, *, headers: Mapping[str, str], logs: list[StreamLog]
    ) -> InnerAnswer:
        number = msgspec.json.decode(body)["number"]
        request = GenerateRequest(
            model=MODEL,
            prompts=((_prompt(number),),),
            sampling=Sampling(temperature=0.0, max_tokens=_NUM_TOKENS, seed=number),
            on_disconnect="detach",
            linger_s=20.0,
            is_background=True,
        )
        try:
            log = await self._server.recall_or_create(request, Claim(headers["idempotency-key"], b"row"))
        except TailraceError as error:
            return self.error_answer(path, error)
        logs.append(log)
        ids: list[int] = []
        with Reader(log) as reader:
            while True:
                match await reader.next():
                    case list() as deltas:
                        ids += [token_id for event in deltas for token_id in event.token_ids]
                    case End(status="done"):
                        return InnerAnswer(200, {}, msgspec.json.encode(ids))
                    case End() as end:
                        return InnerAnswer(503, {"retry-after": "1"}, msgspec.json.encode(end.status))
                    case Released():
                        logs.pop()  # it goes on elsewhere
                        return InnerAnswer(503, {"retry-after": "1"}, b"{}")

    def error_answer(self, path: str, error: TailraceError) -> InnerAnswer:
        return InnerAnswer(error.status, {"retry-after": "1"}, b"{}")


def _prompt(number: int) -> tuple[int, ...]:
    return tuple(b"row %d" % number)


async def open_batches(server: Server, table: Table, group: asyncio.TaskGroup) -> RowBatches:
    """Raises: StorageError."""
    files = Files(table, most_bytes=2**24)
    runner = RowRunner(_Rows(server), at_once=3, has_room=files.has_room)
    batches = RowBatches(files, runner, group, RowLimits(1_000, row_bytes=1_000))
    await batches.start()
    return batches


class BatchClient:
    """Has a batch of rows run, asks whether it has ended, and reads the results."""

    def __init__(
        self,
        simulation: Simulation,
        process: Process,
        ledger: Ledger,
        servers: Callable[[], Sequence[Server]],
        num_rows: int,
    ) -> None:
        self.stream_id = "a batch"
        self.doing = "nothing"
        self._simulation = simulation
        self._process = process
        self._ledger = ledger
        self._servers = servers
        self._num_rows = num_rows

    async def run(self) -> None:
        batch_id: str | None = None
        while batch_id is None:
            self.doing = "creating a batch"
            batch_id = await self._ask(self._create)
        while True:
            self.doing = f"waiting for {batch_id}"
            answer = await self._ask(lambda batches: _status(batches, batch_id or ""))
            if answer == "unknown":
                if not self._ledger.may_lose:
                    raise Violation(f"law 9: {batch_id} is unknown")
                break
            if answer not in (None, "validating", "in_progress", "finalizing"):
                self._check(batch_id, msgspec.json.decode(answer or ""))
                break
            await asyncio.sleep(self._simulation.random.uniform(0.2, 2.0))
        self.doing = "nothing any more"

    async def _ask(self, work: Callable[[RowBatches], Any]) -> str | None:  # Any: a coroutine
        while not (servers := self._servers()):
            await asyncio.sleep(0.05)
        answer = self._simulation.random.choice(servers).ask_batches(self._process, work)
        message: Message = None
        with suppress(TimeoutError):
            async with asyncio.timeout(20.0):
                message = await answer.take()
        answer.cut()
        if isinstance(message, str):
            return message
        await asyncio.sleep(self._simulation.random.uniform(0.1, 1.0))
        return None

    async def _create(self, batches: RowBatches) -> str:
        writer = FileWriter(batches.files, ANONYMOUS, new_id("file-"))
        for number in range(self._num_rows):
            row = {"custom_id": f"{number}", "method": "POST", "url": _PATH, "body": {"number": number}}
            writer.add(msgspec.json.encode(row) + b"\n")
        file = await writer.close(filename="rows", purpose="batch", expires_s=None)
        batch = RowBatch(
            batch_id=new_batch_id(has_file=True),
            sender=Sender(ANONYMOUS),
            endpoint=_PATH,
            created_s=file.created_s,
            order=file.order,
            expires_s=file.created_s + _WINDOW_S,
            window="24h",
            input_file_id=file.file_id,
            rows=file.pieces,
            num_rows_bytes=file.num_bytes,
        )
        return (await batches.create(batch)).batch_id

    def _check(self, batch_id: str, lines: list[Any]) -> None:  # Any: JSON
        """Each row has one result, which is the right one."""
        if self._ledger.may_lose:
            return
        numbers = [int(line["custom_id"]) for line in lines]
        if numbers != list(range(self._num_rows)):
            raise Violation(f"law 9: {batch_id} has results of the rows {numbers}, of {self._num_rows}")
        for number, line in zip(numbers, lines, strict=True):
            expected = [scripted_token(_prompt(number), number, at) for at in range(_NUM_TOKENS)]
            if line["response"]["body"] != expected:
                raise Violation(f"law 9: row {number} of {batch_id} has the result {line}")


async def _status(batches: RowBatches, batch_id: str) -> str:
    """Return the status of a batch, or, when it has ended, its results as JSON."""
    try:
        batch = await batches.find(ANONYMOUS, batch_id, has_file=True)
    except UnknownBatch:
        return "unknown"
    if not batch.has_ended:
        return batch.status
    lines: list[bytes] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            file = await batches.files.find(ANONYMOUS, file_id)
            lines += [line async for _, line in batches.files.lines(file.pieces, file.num_bytes) if line is not None]
    return f"[{b','.join(lines).decode()}]"
