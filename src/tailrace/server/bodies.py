"""The bodies of requests, read within limits of size, time and memory.

All bodies whose requests have not begun to be answered share one budget. As long as half of it is free, a body may be
as large as the settings allow. Then the limit for each body shrinks with what is free, so that a few large bodies
cannot keep small ones out.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from starlette.datastructures import Headers
from starlette.types import Receive

from tailrace.dialects.queries import read_fields_of_body
from tailrace.errors import AdmissionError, BodyTimeout, BodyTooLarge, RequestError
from tailrace.server.settings import Settings

__all__ = ["BodyBudget", "BodyReader"]

_RETRY_S = 1.0
_DISCARD_BYTES = 32 * 2**20  # of a body that is refused, so that its sender gets to read why
_DISCARD_S = 0.5


class BodyBudget:
    """The memory that all pending bodies of a server may take together."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limit_bytes = max(settings.pending_body_bytes, settings.body_bytes)
        self._num_bytes = 0

    def reader(self) -> BodyReader:
        """For one request. Use it as a context manager, for as long as what was read is kept."""
        return BodyReader(self, self._settings)

    def take(self, num_bytes: int, own_bytes: int) -> None:
        """Add to a body that has `own_bytes` already. Raises: AdmissionError if it would be too large just now."""
        free_bytes = self._limit_bytes - (self._num_bytes - own_bytes)  # for this body
        wanted_bytes = own_bytes + num_bytes
        is_crowded = wanted_bytes * self._limit_bytes > 2 * self._settings.body_bytes * free_bytes
        if is_crowded or wanted_bytes > free_bytes:
            raise AdmissionError("Too many request bodies are being read.", retry_after_s=_RETRY_S)
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


class BodyReader:
    """Reads one request's body. Its place in the budget is free again when the context is left."""

    __slots__ = ("_budget", "_num_bytes", "_settings")

    def __init__(self, budget: BodyBudget, settings: Settings) -> None:
        self._budget = budget
        self._settings = settings
        self._num_bytes = 0

    def __enter__(self) -> BodyReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.give_back(self._num_bytes)
        self._num_bytes = 0

    async def with_fields(self, query: dict[str, str], headers: Headers, receive: Receive) -> dict[str, str]:
        """The fields of the address, and those of the body. Raises: RequestError, and as `read`."""
        fields = read_fields_of_body(headers.get("content-type", ""), await self.read(headers, receive))
        if fields.keys() & query.keys():
            raise RequestError("A field is given twice.")
        return query | fields

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body.

        Raises: BodyTooLarge; BodyTimeout; AdmissionError if the budget is used up; ConnectionError if the client left.
        """
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > self._settings.body_bytes:
            await _discard(receive)
            raise self._too_large()
        chunks: list[bytes] = []
        deadline_s = time.monotonic() + self._settings.body_s
        while True:
            try:
                async with asyncio.timeout(min(self._settings.body_gap_s, deadline_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeout("The body of the request did not arrive in time.") from None
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            chunk = message.get("body", b"")
            if self._num_bytes + len(chunk) > self._settings.body_bytes:
                await _discard(receive)
                raise self._too_large()
            try:
                self._budget.take(len(chunk), self._num_bytes)
            except AdmissionError:
                chunks.clear()
                self.__exit__(None, None, None)
                await _discard(receive)
                raise
            self._num_bytes += len(chunk)
            chunks.append(chunk)
            if not message.get("more_body"):
                return b"".join(chunks)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body is larger than {self._settings.body_bytes} bytes.")


async def _discard(receive: Receive) -> None:
    """Take in some more, so that a client that writes before it reads does not see a reset connection."""
    num_bytes = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while num_bytes < _DISCARD_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
    except TimeoutError:
        return
