"""Read request bodies, with limits on size, time and memory.

The bodies of all requests that are not answered yet share one budget. While half of it is free, a body may be as large
as the settings allow. After that the limit per body shrinks with the free part, so that a few large bodies cannot block
small ones. In the same way the bodies of one caller share a quarter of the budget, so that one caller cannot block
others. A caller on loopback may use the whole budget, since it may be a proxy for many clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from tailrace.access.principal import caller_of, principal_of
from tailrace.dialects.images import len_without_images
from tailrace.dialects.queries import read_fields_of_body
from tailrace.errors import AdmissionError, BodyTimeout, BodyTooLarge, RequestError
from tailrace.settings import Settings
from tailrace.transport.addresses import is_loopback

__all__ = ["SMALL_BYTES", "BodyBudget", "BodyReader"]

SMALL_BYTES = 2**16  # the largest body of a key that may not generate, and of requests for keys and tickets
_RETRY_S = 1.0
_DISCARD_BYTES = 32 * 2**20  # of a refused body are read, so that the client can read the error
_DISCARD_S = 0.5


class BodyBudget:
    """The memory budget of all pending bodies of a server."""

    def __init__(self, settings: Settings) -> None:
        self.use(settings)
        self._num_bytes = 0
        self._by_caller: Counter[str] = Counter()  # bytes

    def use(self, settings: Settings) -> None:
        """Use other settings from now on. A body that is being read keeps its timeout and its largest size."""
        self._settings = settings
        self._limit_bytes = max(settings.pending_body_bytes, settings.body_bytes)
        self._share_bytes = max(self._limit_bytes // 4, settings.body_bytes)  # of one caller
        # One such body must fit into half of a share, so that others of this caller fit beside it.
        self._image_bytes = max(settings.body_bytes, min(settings.image_body_bytes, self._share_bytes // 2))

    def reader(
        self, scope: Scope, *, is_small: bool = False, has_images: bool = False, most_bytes: int | None = None
    ) -> BodyReader:
        """Return a reader for one request. Keep it open as a context manager while the body is in memory.

        A body may have as many bytes as the settings allow, more with `has_images`, or `most_bytes`; `SMALL_BYTES` if
        `is_small`, or if the request's key may not generate.
        """
        limit_bytes = self._settings.body_bytes if most_bytes is None else most_bytes
        if has_images:
            limit_bytes = self._image_bytes
        if is_small or not principal_of(scope).has("generate"):
            limit_bytes = min(limit_bytes, SMALL_BYTES)
        return BodyReader(self, self._settings, caller_of(scope), limit_bytes)

    def largest(self, *, has_images: bool) -> int:
        """Return the bytes of the largest body of a request for an answer."""
        return self._image_bytes if has_images else self._settings.body_bytes

    def check_text(self, num_bytes: int, num_image_bytes: int) -> None:
        """Check a body when it is known how many bytes its images have. They are base64 in it. Raises: BodyTooLarge."""
        if num_bytes - 4 * num_image_bytes // 3 > self._settings.body_bytes:
            raise BodyTooLarge(
                f"Without its images, the request body is larger than {self._settings.body_bytes} bytes."
            )

    def check_images(self, text: bytes) -> None:
        """Check a body, or its beginning: of one that is larger than others may be, the part above that must look like
        images. Raises: BodyTooLarge."""
        most_bytes = self._settings.body_bytes
        if len(text) > most_bytes:
            self.check_text(len_without_images(text), 0)

    def take(self, caller: str, num_bytes: int, own_bytes: int) -> None:
        """Reserve memory for a body that has `own_bytes` already. Raises: AdmissionError if it would be too large
        now."""
        wanted_bytes = own_bytes + num_bytes
        fits = self._fits(wanted_bytes, self._num_bytes - own_bytes, self._limit_bytes)
        if fits and not is_loopback(caller):
            fits = self._fits(wanted_bytes, self._by_caller[caller] - own_bytes, self._share_bytes)
        if not fits:
            raise AdmissionError("Too many request bodies are being read. Try later.", retry_after_s=_RETRY_S)
        self._num_bytes += num_bytes
        self._by_caller[caller] += num_bytes

    def _fits(self, wanted_bytes: int, other_bytes: int, limit_bytes: int) -> bool:
        """Return whether a body of this size fits beside the others that share its limit. One with images fits while
        any other would, whatever its size."""
        free_bytes, usual_bytes = limit_bytes - other_bytes, self._settings.body_bytes
        is_crowded = min(wanted_bytes, usual_bytes) * limit_bytes > 2 * usual_bytes * free_bytes
        return not is_crowded and wanted_bytes <= free_bytes

    def give_back(self, caller: str, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._by_caller[caller] -= num_bytes
        if not self._by_caller[caller]:
            del self._by_caller[caller]


class BodyReader:
    """Reads one request's body. A context manager: leaving it returns the memory to the budget."""

    __slots__ = ("_budget", "_caller", "_limit_bytes", "_num_bytes", "_settings")

    def __init__(self, budget: BodyBudget, settings: Settings, caller: str, limit_bytes: int) -> None:
        self._budget = budget
        self._caller = caller
        self._settings = settings
        self._limit_bytes = limit_bytes
        self._num_bytes = 0

    def __enter__(self) -> BodyReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.give_back(self._caller, self._num_bytes)
        self._num_bytes = 0

    async def with_fields(self, query: dict[str, str], headers: Headers, receive: Receive) -> dict[str, str]:
        """Return the fields of the query and of the body. Raises: RequestError, and as `read`."""
        fields = read_fields_of_body(headers.get("content-type", ""), await self.read(headers, receive))
        if fields.keys() & query.keys():
            raise RequestError("A field is in the query and in the body. Give it once.")
        return query | fields

    async def read_json(self, headers: Headers, receive: Receive) -> bytes:
        """As `read`, for JSON: of a body that is larger than others may be, the part above that must look like images.
        `check_text` says whether they are any."""
        text = await self.read(headers, receive, check=self._budget.check_images)
        self._budget.check_images(text)
        return text

    def check_text(self, num_image_bytes: int) -> None:
        """Check the body that was read, as `BodyBudget.check_text`. Raises: BodyTooLarge."""
        self._budget.check_text(self._num_bytes, num_image_bytes)

    async def read(self, headers: Headers, receive: Receive, *, check: Callable[[bytes], None] | None = None) -> bytes:
        """Read the whole body. `check` gets its beginning, a few times.

        Raises: what `check` raises; BodyTooLarge; BodyTimeout; AdmissionError if the budget is used up; ConnectionError
        if the client disconnected.
        """
        await self._check_declared(headers, receive)
        chunks: list[bytes] = []
        check_bytes = 2 * self._settings.body_bytes
        deadline_s = time.monotonic() + self._settings.body_s
        has_more = True
        while has_more:
            chunk, has_more = await self._receive(receive, self._num_bytes, deadline_s)
            try:
                self._budget.take(self._caller, len(chunk), self._num_bytes)
            except AdmissionError:
                chunks.clear()
                self.__exit__(None, None, None)
                await _discard(receive)
                raise
            self._num_bytes += len(chunk)
            chunks.append(chunk)
            if check is not None and self._num_bytes > check_bytes:
                check_bytes = 2 * self._num_bytes
                chunks = [b"".join(chunks)]
                try:
                    check(chunks[0])
                except BodyTooLarge:
                    await _discard(receive)
                    raise
        return b"".join(chunks)

    async def pieces(self, headers: Headers, receive: Receive) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, for a caller that keeps none of it in memory. All of it may take longer than
        other bodies, but be no slower than the largest of them.

        Raises: as `read`.
        """
        await self._check_declared(headers, receive)
        began_s, num_bytes, has_more = time.monotonic(), 0, True
        while has_more:
            allowed_s = self._settings.body_s * max(1.0, num_bytes / self._settings.body_bytes)
            chunk, has_more = await self._receive(receive, num_bytes, began_s + allowed_s)
            num_bytes += len(chunk)
            yield chunk

    async def _check_declared(self, headers: Headers, receive: Receive) -> None:
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > self._limit_bytes:
            await _discard(receive)
            raise self._too_large()

    async def _receive(self, receive: Receive, num_bytes: int, deadline_s: float) -> tuple[bytes, bool]:
        """Return what follows the first `num_bytes`, and whether there is more. Raises: as `read`."""
        try:
            async with asyncio.timeout(min(self._settings.body_gap_s, deadline_s - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout("The request body did not arrive in time.") from None
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        chunk = message.get("body", b"")
        if num_bytes + len(chunk) > self._limit_bytes:
            await _discard(receive)
            raise self._too_large()
        return chunk, bool(message.get("more_body"))

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {self._limit_bytes} bytes.")


async def _discard(receive: Receive) -> None:
    """Read and drop some more of the body. Otherwise a client that writes before it reads would see a connection
    reset."""
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
