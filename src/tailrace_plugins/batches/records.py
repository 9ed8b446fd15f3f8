"""What is kept of files and batches."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tailrace.server import Sender

__all__ = ["LineError", "OpenStatus", "RowBatch", "Status", "StoredFile"]

OpenStatus: TypeAlias = Literal["validating", "in_progress", "finalizing", "cancelling"]
Status: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"
]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Its pieces are notes whose keys begin with `pieces`, in the order of their keys."""

    file_id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int  # since the epoch, like all times here
    pieces: bytes
    expires_s: int | None = None


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a file of rows."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class RowBatch(msgspec.Struct, kw_only=True):
    """A batch, as it was last kept. `counts` has the rows by their outcome, when all have one."""

    batch_id: str
    sender: Sender
    endpoint: str
    created_s: int
    expires_s: int
    window: str
    input_file_id: str = ""  # "": Anthropic's batches have no file; their rows are kept below `rows`
    rows: bytes = b""  # the keys of the notes with its rows begin so
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None  # how long its results are kept
    status: Status = "validating"
    times: dict[str, int] = {}  # when it entered each status
    num_rows: int = 0
    counts: dict[str, int] = {}
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    @property
    def owner(self) -> str:
        return self.sender.owner
