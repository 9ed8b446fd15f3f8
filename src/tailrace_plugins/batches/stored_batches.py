"""What is kept of files and batches."""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

import msgspec

from tailrace.server import Sender

__all__ = ["LineError", "OpenStatus", "RowBatch", "Status", "StoredFile"]

OpenStatus: TypeAlias = Literal["validating", "in_progress", "finalizing", "cancelling"]
Status: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"
]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Its pieces are rows whose keys begin with `pieces`, in the order of their keys."""

    file_id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int  # since the epoch, like all times here
    order: int  # in which files were created: ns since the epoch
    pieces: bytes
    expires_s: int | None = None


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a file of rows."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class RowBatch(msgspec.Struct, kw_only=True):
    """A batch, as it was last kept. `counts` has the rows by their outcome."""

    batch_id: str
    sender: Sender
    endpoint: str
    created_s: int
    order: int  # in which batches were created: ns since the epoch
    expires_s: int
    window: str
    input_file_id: str = ""  # "": Anthropic's batches have no file; their rows are kept below `rows`
    rows: bytes = b""  # the keys of the pieces with its rows begin so
    num_rows_bytes: int = 0
    models: list[str] = []  # that a server needs to run it, of those of the server that took it
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None  # how long its results are kept
    status: Status = "validating"
    times: dict[str, int] = {}  # when it entered each status
    num_rows: int = 0
    counts: dict[str, int] = {}
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_result_bytes: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    def enter(self, status: Status) -> None:
        self.status, self.times = status, {**self.times, status: int(time.time())}

    @property
    def owner(self) -> str:
        return self.sender.owner
