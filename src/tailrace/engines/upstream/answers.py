"""One answer of an upstream server over HTTP: asked for until it begins, and followed to its end."""

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

from tailrace.engines.upstream.wires import Ask, Heard, Trouble, reader, short

__all__ = ["Patience", "follow", "new_client"]

_EVENT_BYTES = 2**20
_ERROR_BYTES = 64 * 2**10
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_REFUSALS = frozenset({400, 413, 422})
_USAGE_S = 2.0  # for the counts, once the answer has ended
_CONNECT_S = 5.0
_BACK_OFF_S = (0.2, 5.0)  # first, and longest


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds."""

    retry_s: float = 30.0  # for a server that is not there or has no room, until an answer has begun
    first_s: float = 240.0  # for the first event of an answer, or another sign of life
    idle_s: float = 60.0  # for the next one


def new_client(key: str, *, max_connections: int) -> httpx.AsyncClient:
    """Raises: ValueError for a key that no header can hold."""
    headers = {"accept": "text/event-stream", "accept-encoding": "identity", "content-type": "application/json"}
    if key:
        key.encode("ascii")
        headers["authorization"] = f"Bearer {key}"
    return httpx.AsyncClient(
        headers=headers,
        follow_redirects=False,  # the key would go along
        limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
    )


async def follow(client: httpx.AsyncClient, ask: Ask, patience: Patience, say: Callable[[Heard], None]) -> None:
    """Ask, and pass on what is heard; it ends with one that has a finish_reason. Before the first text, whatever may
    pass is waited for and tried again.

    Raises: Trouble.
    """
    has_said = False

    def hear(heard: Heard) -> None:
        nonlocal has_said
        has_said = has_said or bool(heard.text)
        say(heard)

    until_s = time.monotonic() + patience.retry_s
    back_off_s, longest_s = _BACK_OFF_S
    while True:
        try:
            await _try(client, ask, patience, hear)
            return
        except Trouble as trouble:
            wait_s = back_off_s * random.uniform(0.5, 1.0)
            if trouble.retry_after_s is not None:
                wait_s = max(trouble.retry_after_s, wait_s)
            if has_said or not trouble.is_passing or time.monotonic() + wait_s > until_s:
                raise
        await asyncio.sleep(wait_s)
        back_off_s = min(longest_s, 2 * back_off_s)


async def _try(client: httpx.AsyncClient, ask: Ask, patience: Patience, hear: Callable[[Heard], None]) -> None:
    timeout = httpx.Timeout(patience.first_s, connect=_CONNECT_S, pool=None)
    try:
        async with client.stream("POST", ask.url, content=ask.body, timeout=timeout) as answer:
            await _check(answer)
            async with contextlib.aclosing(_events(answer)) as events:
                await _hear(events, ask, patience, hear)
    except httpx.ConnectTimeout:
        raise Trouble("cannot be reached in time", is_passing=True) from None
    except httpx.ReadTimeout:  # what is slow to begin would not begin sooner if asked again
        raise Trouble(f"has not begun to answer within {patience.first_s:g} s", is_passing=True) from None
    except httpx.ConnectError as error:
        is_certificate = isinstance(_cause(error), ssl.SSLCertVerificationError)
        reason = "shows a certificate that is not valid" if is_certificate else "cannot be reached"
        raise Trouble(reason, is_passing=not is_certificate) from None
    except httpx.TransportError:
        raise Trouble("broke the connection", is_passing=True) from None
    except httpx.HTTPError as error:
        raise Trouble(f"does not talk as HTTP does ({type(error).__name__})") from None


def _cause(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


async def _check(answer: httpx.Response) -> None:
    """Raises: Trouble for all that is no stream of events."""
    status = answer.status_code
    if 300 <= status < 400:
        raise Trouble("is somewhere else, and redirects are not followed")
    if status != 200:
        said = await _error_of(answer)
        raise Trouble(
            f"answers with status {status} and {said}",
            is_passing=status in _PASSING,
            is_refusal=status in _REFUSALS,
            retry_after_s=_retry_after_s(answer),
        )
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "text/event-stream":
        raise Trouble(f"sends {_word(kind)} instead of a stream of events")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise Trouble("compresses its answer, which it was not asked to do")


def _word(kind: str) -> str:
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
        return short(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "names no reason"


def _retry_after_s(answer: httpx.Response) -> float | None:
    said = answer.headers.get("retry-after", "")
    if said.isascii() and said.isdigit():
        return float(said[:9])
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


async def _hear(events: AsyncIterator[bytes], ask: Ask, patience: Patience, hear: Callable[[Heard], None]) -> None:
    """Follow the events to the end of the answer. Raises: Trouble."""
    read = reader(ask).read
    loop = asyncio.get_running_loop()
    silence_s = patience.first_s  # until it has begun, since it may stand in a queue there
    ended: Heard | None = None
    usage: tuple[int, int] | None = None
    try:
        async with asyncio.timeout(silence_s) as clock:
            async for event in events:
                heard = read(event) if event else Heard()
                usage = heard.usage or usage
                if ended is None:
                    silence_s = patience.idle_s if event else silence_s
                    clock.reschedule(loop.time() + silence_s)
                    if heard.finish_reason is not None:
                        ended = heard
                        clock.reschedule(loop.time() + _USAGE_S)  # for all that may still come
                    elif heard.text or heard.usage:
                        hear(heard)
                if heard.is_over or (ended is not None and usage is not None):
                    break
    except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if ended is None:  # else only the counts are missing
            if isinstance(error, (TimeoutError, httpx.ReadTimeout)):
                raise Trouble(f"was silent for {silence_s:g} s", is_passing=True) from None
            if isinstance(error, httpx.HTTPError):
                raise Trouble("broke the connection", is_passing=True) from None
            raise Trouble("sends events that cannot be read") from None
    if ended is None:
        raise Trouble("broke off its answer", is_passing=True)
    hear(Heard(ended.text, ended.finish_reason, usage))
    with contextlib.suppress(TimeoutError, httpx.HTTPError, Trouble):
        async with asyncio.timeout(_USAGE_S):  # a connection that was read to its end can be used again
            while await anext(events, None) is not None:
                pass


async def _events(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The `data` of each event, and nothing (b"") for whatever else is a sign of life. What is cut off in the middle of
    a line is none. Raises: Trouble."""
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
            raise Trouble("sends a line without end")
    if lines:
        yield b"\n".join(lines)
