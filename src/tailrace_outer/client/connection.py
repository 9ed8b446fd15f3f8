"""A client for chats: uses tailrace's native wire, which can resume after a lost connection, and OpenAI's wire for
other servers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from httpx_sse import EventSource, ServerSentEvent, SSEError

from tailrace.wording import printable_text
from tailrace_outer.client.certificates import NOT_TRUSTED, is_not_trusted, trusted_certificates

__all__ = ["AnswerFailed", "Client", "NoServer", "ServerRefused", "Turn", "connect"]

Turn = dict[str, Any]  # Any: texts, and the parts of a message with images
"""A message of a chat: `role` and `content`."""

_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 10.0
_SILENCE_S = 60.0  # of tailrace, which sends a heartbeat every --heartbeat-s
_FOREIGN_SILENCE_S = 600.0  # of other servers, which may be silent during a long prefill
_RESUME_WITHIN_S = 60.0  # the server's default linger time
_BACK_OFF_S = (0.2, 2.0)  # first and longest
_CANCEL_S = 3.0
_RETRY_STATUSES = frozenset({429, 502, 503, 504})
_TERMINAL = frozenset({"done", "cancelled", "error", "interrupted"})
_RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete"})
_ERROR_LENGTH = 500
_WITH_PROGRESS = {"return_progress": True}

Json = dict[str, Any]  # Any: what JSON can be


class AnswerFailed(Exception):
    """An answer failed. The text is a message for people."""


class NoServer(AnswerFailed):
    """No server listens at the address."""


class ServerRefused(AnswerFailed):
    """The server refused the request."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Client:
    """A connection to a server."""

    http: httpx.AsyncClient
    root: str  # base URL of tailrace's routes, without a trailing slash
    base: str  # base URL of OpenAI's routes
    is_tailrace: bool
    models: list[str]
    on_wait: Callable[[str], None] = field(default=lambda reason: None)  # called with the reason of a pause
    on_reasoning: Callable[[str], None] = field(default=lambda piece: None)  # told what the model thinks
    on_progress: Callable[[Json], None] = field(default=lambda progress: None)  # told how much of the prompt is read

    def answer(self, model: str, messages: list[Turn], sampling: Mapping[str, float]) -> AsyncGenerator[str, None]:
        """Yield the pieces of an answer.

        Cancellation: cancels the stream on the server. Raises: AnswerFailed.
        """
        body = {"model": model, "messages": messages, **sampling}
        return self._resumable(body | _WITH_PROGRESS) if self.is_tailrace else self._foreign_answer(body)

    def follow(self, stream_id: str, choice: int = 0) -> AsyncGenerator[str, None]:
        """Yield the pieces of one of tailrace's streams, from its beginning to its end. Raises: AnswerFailed."""
        return self._resumable(None, stream_id, choice)

    async def respond(self, body: Json) -> AsyncGenerator[Json, None]:
        """Yield the events of a response of tailrace, on OpenAI's wire. After a lost connection, it continues after the
        last received event.

        Cancellation: cancels the response. Raises: AnswerFailed, also if the response fails.
        """
        key, response_id, num_seen = secrets.token_urlsafe(16), "", 0
        retries = _Retries()
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_TIMEOUT_S)
        path = f"{self.base}/responses"
        try:
            while True:
                if response_id:
                    after = {"stream": "true", "starting_after": str(num_seen - 1)}
                    asked = self._stream("GET", f"{path}/{response_id}", params=after, timeout=timeout)
                else:
                    whole = {**body, "stream": True, "background": True}
                    headers = {"idempotency-key": key}
                    asked = self._stream("POST", path, json=whole, headers=headers, timeout=timeout)
                try:
                    async with asked as response:
                        async for sent in _events(response):
                            event = _json(sent.data)
                            if event.get("type") in ("keepalive", "error"):
                                continue
                            retries.reset()
                            num_seen = int(event["sequence_number"]) + 1
                            whole = event.get("response") or {}
                            response_id = str(whole.get("id") or response_id)
                            if event["type"] == "response.failed":
                                raise AnswerFailed(_error_in(whole) or "the answer failed")
                            yield event
                            if event["type"] in _RESPONSE_ENDS:
                                return
                    reason = "the server has closed the connection"
                except httpx.TransportError:
                    reason = "the connection was lost"
                except ServerRefused as error:
                    if not response_id or error.status not in _RETRY_STATUSES:
                        raise
                    reason = str(error)
                self.on_wait(reason)
                await retries.wait(reason)
        except (asyncio.CancelledError, GeneratorExit):
            if response_id:
                with contextlib.suppress(httpx.HTTPError):
                    await asyncio.shield(self.http.post(f"{path}/{response_id}/cancel", timeout=_CANCEL_S))
            raise

    def require_tailrace(self) -> None:
        """Raises: AnswerFailed."""
        if not self.is_tailrace:
            raise AnswerFailed(f"the server at {self.root} is not tailrace")

    async def get(self, path: str) -> Json:
        """Send a GET request to tailrace; returns the JSON object. Raises: AnswerFailed."""
        return await self._ask("GET", path)

    async def post(self, path: str, body: Json) -> Json:
        """Send a POST request to tailrace; returns the JSON object. Raises: AnswerFailed."""
        return await self._ask("POST", path, body)

    async def delete(self, path: str) -> Json:
        """Send a DELETE request to tailrace; returns the JSON object. Raises: AnswerFailed."""
        return await self._ask("DELETE", path)

    async def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Raises: AnswerFailed."""
        try:
            response = await self.http.request(method, self.root + path, json=body, timeout=_REQUEST_TIMEOUT_S)
        except httpx.HTTPError:
            raise AnswerFailed("the connection was lost") from None
        if response.status_code >= 300:
            raise _refusal(response.status_code, response.content)
        return _json(response.text)

    async def _resumable(self, body: Json | None, stream_id: str = "", choice: int = 0) -> AsyncGenerator[str, None]:
        """Begin a stream, or follow one. After a lost connection, it continues after the last received event. The
        idempotency key makes the first request repeatable."""
        key, last_id, reported = secrets.token_urlsafe(16), "", ""
        retries = _Retries()
        try:
            while True:
                try:
                    async with self._request(body, key, stream_id, last_id) as response:
                        stream_id = response.headers.get("x-stream-id", stream_id)
                        if response.status_code == 204:
                            return
                        async for event in _events(response):
                            retries.reset()
                            reported = ""
                            if event.event in _TERMINAL:
                                _check_end(event)
                                return
                            if event.event == "progress":
                                self.on_progress(_json(event.data))
                                continue
                            if event.event == "released":
                                continue  # the stream goes on elsewhere, or later: the response ends here
                            last_id = event.id
                            fields = _json(event.data)
                            if fields.get("choice", 0) != choice:
                                continue
                            if event.event == "reasoning":
                                self.on_reasoning(str(fields.get("text", "")))
                            else:
                                yield str(fields.get("text", ""))
                    reason = "the server has closed the connection"
                except httpx.TransportError:
                    reason = "the connection was lost"
                except ServerRefused as error:
                    if not stream_id or error.status not in _RETRY_STATUSES:
                        raise
                    reason = str(error)
                if reason != reported:
                    self.on_wait(reason)
                    reported = reason
                await retries.wait(reason)
        except (asyncio.CancelledError, GeneratorExit):
            if body is not None and stream_id:
                await asyncio.shield(self._stop(stream_id))
            raise

    def _request(
        self, body: Json | None, key: str, stream_id: str, last_id: str
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_TIMEOUT_S)
        if stream_id:
            headers = {"last-event-id": last_id} if last_id else {}
            url = f"{self.root}/v1/streams/{stream_id}/events"
            return self._stream("GET", url, headers=headers, timeout=timeout, params={"return_progress": "true"})
        headers = {"accept": "text/event-stream", "idempotency-key": key}
        return self._stream("POST", f"{self.root}/v1/streams", json=body, headers=headers, timeout=timeout)

    async def _stop(self, stream_id: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await self.http.post(f"{self.root}/v1/streams/{stream_id}/cancel", timeout=_CANCEL_S)

    async def _foreign_answer(self, body: Json) -> AsyncGenerator[str, None]:
        timeout = httpx.Timeout(_FOREIGN_SILENCE_S, connect=_CONNECT_TIMEOUT_S)
        request = {**body, "stream": True}
        has_ended = False
        try:
            async with self._stream("POST", f"{self.base}/chat/completions", json=request, timeout=timeout) as response:
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    yield _content_of(_json((await response.aread()).decode("utf-8", "replace")), "message")
                    return
                async for event in _events(response):
                    if event.data.strip() == "[DONE]":
                        return
                    chunk = _json(event.data)
                    if "error" in chunk:
                        raise AnswerFailed(_error_in(chunk) or "the server failed in the middle of its answer")
                    has_ended = has_ended or _has_ended(chunk)
                    if thought := _content_of(chunk, "delta", "reasoning_content"):
                        self.on_reasoning(thought)
                    if piece := _content_of(chunk, "delta"):
                        yield piece
        except httpx.ConnectError:
            raise NoServer(f"there is no server at {self.root}") from None
        except httpx.ReadTimeout:
            raise AnswerFailed("the server has been silent for too long") from None
        except httpx.TransportError:
            if not has_ended:
                raise AnswerFailed("the connection was lost, and this server cannot resume an answer") from None
        else:
            if not has_ended:
                raise AnswerFailed("the server has broken off its answer")

    @contextlib.asynccontextmanager
    async def _stream(self, method: str, url: str, **request: Any) -> AsyncIterator[httpx.Response]:
        # Any: as httpx takes it
        async with self.http.stream(method, url, **request) as response:
            if response.status_code >= 300:
                raise _refusal(response.status_code, await response.aread())
            yield response


class _Retries:
    """The backoff and the time limit of retries."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._until_s = 0.0
        self._pause_s = _BACK_OFF_S[0]

    async def wait(self, reason: str) -> None:
        """Pause before the next attempt. Raises: AnswerFailed after the time limit."""
        now_s = time.monotonic()
        self._until_s = self._until_s or now_s + _RESUME_WITHIN_S
        if now_s + self._pause_s > self._until_s:
            raise AnswerFailed(f"{reason}, and the answer could not be resumed within {_RESUME_WITHIN_S:g} s")
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _BACK_OFF_S[1])


@contextlib.asynccontextmanager
async def connect(url: str, key: str = "") -> AsyncIterator[Client]:
    """Connect to a server, and read its kind and its models.

    Raises: ValueError for an invalid address or key; NoServer, AnswerFailed.
    """
    root = _checked(url)
    base = root if root.endswith("/v1") else f"{root}/v1"
    if not key.isascii() or not key.isprintable():
        raise ValueError("A key may contain only printable ASCII characters.")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    is_remote = not _is_on_this_machine(root)  # others may be behind a proxy
    async with httpx.AsyncClient(headers=headers, verify=trusted_certificates(), trust_env=is_remote) as http:
        try:
            response = await http.get(
                f"{base}/models", timeout=httpx.Timeout(_REQUEST_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
            )
        except httpx.ConnectError as error:
            if is_not_trusted(error):
                raise AnswerFailed(f"the server at {root} {NOT_TRUSTED}") from None
            raise NoServer(f"there is no server at {root}") from None
        except httpx.TimeoutException:
            raise AnswerFailed(f"the server at {root} does not answer in time") from None
        except httpx.HTTPError:
            raise AnswerFailed(f"the server at {root} does not answer as HTTP servers do") from None
        if response.status_code in (404, 405, 501):  # a server with a single model may have no list
            yield Client(http, root.removesuffix("/v1"), base, False, [])
            return
        if response.status_code >= 300:
            raise _refusal(response.status_code, response.content)
        listed = _json(response.text).get("data")
        models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
        is_tailrace = any(model.get("owned_by") == "tailrace" for model in models)
        names = [str(model["id"]) for model in models if "id" in model]
        yield Client(http, root.removesuffix("/v1"), base, is_tailrace, names)


def _checked(url: str) -> str:
    """Check a server's address. Raises: ValueError."""
    url = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(url)
        host = httpx.URL(url).host.encode("idna")  # fails if the name cannot be looked up
        is_one = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        is_one = False
    if not is_one or parts.query or parts.fragment or not url.isprintable():
        raise ValueError("An address should look like http://host:port or https://host/v1.")
    if "@" in parts.netloc:
        raise ValueError("The address must not contain a key. Use --key or TAILRACE_KEY.")
    return url.rstrip("/")


def _is_on_this_machine(root: str) -> bool:
    host = urlsplit(root).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def _events(response: httpx.Response) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of an answer. Raises: AnswerFailed if it is not an event stream."""
    try:
        async for event in EventSource(response).aiter_sse():
            yield event
    except SSEError:
        raise AnswerFailed("the server has sent no stream of events") from None


def _json(text: str) -> Json:
    """Raises: AnswerFailed."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise AnswerFailed("the server has sent what cannot be read")
    return found


def _check_end(event: ServerSentEvent) -> None:
    """Raises: AnswerFailed unless the answer is complete."""
    if event.event != "done":
        raise AnswerFailed(_error_in(_json(event.data)) or f"the answer was {event.event}")


def _content_of(chunk: Json, part: str, name: str = "content") -> str:
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get(part) if isinstance(choice, dict) else None
    content = message.get(name) if isinstance(message, dict) else None
    return content if isinstance(content, str) else ""


def _has_ended(chunk: Json) -> bool:
    choices = chunk.get("choices")
    return isinstance(choices, list) and any(isinstance(one, dict) and one.get("finish_reason") for one in choices)


def _error_in(body: Json) -> str:
    """Return the error message of a body in one of the common formats, or ""."""
    error = body.get("error", body)
    message = error.get("message", error.get("detail", "")) if isinstance(error, dict) else error
    return printable_text(message)[:_ERROR_LENGTH] if isinstance(message, str) else ""


def _refusal(status: int, body: bytes) -> ServerRefused:
    try:
        message = _error_in(_json(body[: 2**16].decode("utf-8", "replace")))
    except AnswerFailed:
        message = ""
    return ServerRefused(message or f"the server answers with status {status}", status)
