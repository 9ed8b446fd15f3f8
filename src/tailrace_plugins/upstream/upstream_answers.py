"""Gets one answer of an upstream server over HTTP: retries until it begins, then reads it to its end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx
import msgspec

from tailrace_plugins.upstream.upstream_decoders import (
    AnswerEvent,
    InfillDecoder,
    OpenAIDecoder,
    TgiDecoder,
    UpstreamError,
    short_reason,
)
from tailrace_plugins.upstream.upstream_requests import UpstreamRequest

__all__ = ["Timeouts", "follow", "new_client"]

_EVENT_BYTES = 2**20
_ERROR_BYTES = 64 * 2**10
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_BAD_REQUEST = frozenset({400, 413, 422})
_USAGE_S = 2.0  # wait for the token counts after the end of the answer
_CONNECT_S = 5.0
_DECODERS: dict[str, type[OpenAIDecoder] | type[TgiDecoder] | type[InfillDecoder]] = {
    "openai": OpenAIDecoder,
    "tgi": TgiDecoder,
    "infill": InfillDecoder,
}
_BACK_OFF_S = (0.2, 5.0)  # first and longest


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts, in seconds."""

    retry_s: float = 30.0  # total time of retries before an answer begins
    first_s: float = 240.0  # for the first byte of an answer
    idle_s: float = 60.0  # for each next event


def new_client(key: str, *, max_connections: int) -> httpx.AsyncClient:
    """Make an HTTP client. Raises: ValueError if the key has characters that a header cannot contain."""
    headers = {"accept": "text/event-stream", "accept-encoding": "identity", "content-type": "application/json"}
    if key:
        key.encode("ascii")
        headers["authorization"] = f"Bearer {key}"
    return httpx.AsyncClient(
        headers=headers,
        follow_redirects=False,  # a redirect would send the key to another server
        limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
    )


async def follow(
    client: httpx.AsyncClient, request: UpstreamRequest, timeouts: Timeouts, on_event: Callable[[AnswerEvent], None]
) -> None:
    """Send a request and pass on its events; the last event has a finish_reason. Temporary failures before the first
    text are retried with a backoff.

    Raises: UpstreamError.
    """
    has_text = False

    def pass_on(event: AnswerEvent) -> None:
        nonlocal has_text
        has_text = has_text or bool(event.text)
        on_event(event)

    until_s = time.monotonic() + timeouts.retry_s
    back_off_s, longest_s = _BACK_OFF_S
    while True:
        try:
            await _try(client, request, timeouts, pass_on)
            return
        except UpstreamError as error:
            wait_s = back_off_s * random.uniform(0.5, 1.0)
            if error.retry_after_s is not None:
                wait_s = max(error.retry_after_s, wait_s)
            if has_text or not error.is_temporary or time.monotonic() + wait_s > until_s:
                raise
        await asyncio.sleep(wait_s)
        back_off_s = min(longest_s, 2 * back_off_s)


async def _try(
    client: httpx.AsyncClient, request: UpstreamRequest, timeouts: Timeouts, on_event: Callable[[AnswerEvent], None]
) -> None:
    timeout = httpx.Timeout(timeouts.first_s, connect=_CONNECT_S, pool=None)
    try:
        async with client.stream("POST", request.url, content=request.body, timeout=timeout) as answer:
            await _check(answer)
            async with contextlib.aclosing(_events(answer)) as events:
                await _read_events(events, request, timeouts, on_event)
    except httpx.ConnectTimeout:
        raise UpstreamError("did not accept a connection in time", is_temporary=True) from None
    except httpx.ReadTimeout:  # not retried: a slow server would not be faster
        raise UpstreamError(f"did not begin to answer within {timeouts.first_s:g} s", is_temporary=True) from None
    except httpx.ConnectError as error:
        is_certificate = isinstance(_cause(error), ssl.SSLCertVerificationError)
        reason = "has an invalid certificate" if is_certificate else "cannot be reached"
        raise UpstreamError(reason, is_temporary=not is_certificate) from None
    except httpx.TransportError:
        raise UpstreamError("broke the connection", is_temporary=True) from None
    except httpx.HTTPError as error:
        raise UpstreamError(f"sent an invalid HTTP answer ({type(error).__name__})") from None


def _cause(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


async def _check(answer: httpx.Response) -> None:
    """Check that an answer is an event stream. Raises: UpstreamError."""
    status = answer.status_code
    if 300 <= status < 400:
        raise UpstreamError("answers with a redirect, which is not followed")
    if status != 200:
        reason = await _error_of(answer)
        raise UpstreamError(
            f"answers with status {status} and {reason}",
            is_temporary=status in _TEMPORARY,
            is_refusal=status in _BAD_REQUEST,
            retry_after_s=_retry_after_s(answer),
        )
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "text/event-stream":
        raise UpstreamError(f"sends {_shown(kind)} instead of a stream of events")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise UpstreamError("compresses its answer, which the request did not allow")


def _shown(kind: str) -> str:
    return kind if kind and len(kind) < 60 and kind.isprintable() else "something"


async def _error_of(answer: httpx.Response) -> str:
    body = b""
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_USAGE_S):
            async for piece in answer.aiter_raw():
                body += piece
                if len(body) > _ERROR_BYTES:
                    break
    try:
        return short_reason(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "names no reason"


def _retry_after_s(answer: httpx.Response) -> float | None:
    value = answer.headers.get("retry-after", "")
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


async def _read_events(
    events: AsyncIterator[bytes], request: UpstreamRequest, timeouts: Timeouts, on_event: Callable[[AnswerEvent], None]
) -> None:
    """Read the events to the end of the answer. Raises: UpstreamError."""
    decode = _DECODERS[request.form]().decode
    loop = asyncio.get_running_loop()
    silence_s = timeouts.first_s  # before the first text, the request may be queued there, or a long prompt is read
    ended: AnswerEvent | None = None
    usage: tuple[int, int] | None = None
    num_cached: int | None = None
    try:
        async with asyncio.timeout(silence_s) as clock:
            async for encoded in events:
                event = decode(encoded) if encoded else AnswerEvent()
                usage = event.usage or usage
                num_cached = num_cached if event.num_cached_tokens is None else event.num_cached_tokens
                if ended is None:
                    if encoded and event.num_read is None:
                        silence_s = timeouts.idle_s
                    clock.reschedule(loop.time() + silence_s)
                    if event.finish_reason is not None:
                        ended = event
                        clock.reschedule(loop.time() + _USAGE_S)  # for the remaining events
                    elif event.text or event.usage or event.num_read:
                        on_event(event)
                if event.is_over or (ended is not None and usage is not None):
                    break
    except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if ended is None:  # otherwise only the counts are missing
            if isinstance(error, (TimeoutError, httpx.ReadTimeout)):
                raise UpstreamError(f"was silent for {silence_s:g} s", is_temporary=True) from None
            if isinstance(error, httpx.HTTPError):
                raise UpstreamError("broke the connection", is_temporary=True) from None
            raise UpstreamError("sends events that cannot be decoded") from None
    if ended is None:
        raise UpstreamError("ended its answer too early", is_temporary=True)
    on_event(AnswerEvent(ended.text, ended.finish_reason, usage, num_cached))
    with contextlib.suppress(TimeoutError, httpx.HTTPError, UpstreamError):
        async with asyncio.timeout(_USAGE_S):  # reading to the end lets the connection be reused
            while await anext(events, None) is not None:
                pass


async def _events(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the `data` of each event, and b"" for each other sign of life. Drops an event that ends within a line.
    Raises: UpstreamError."""
    rest = b""
    lines: list[bytes] = []
    async for piece in answer.aiter_raw():
        yield b""
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line.strip(b"\r") and lines:
                yield b"\n".join(lines)
                lines.clear()
        if len(rest) + sum(map(len, lines)) > _EVENT_BYTES:
            raise UpstreamError("sends an event that is too long")
    if lines:
        yield b"\n".join(lines)
