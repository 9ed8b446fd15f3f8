"""Turns of the model: each is a request that the server sends to itself, in the name of the client.

It has an idempotency key. So after the death of the server the same turn finds its stream, wherever that is by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from tailrace.dialects import JsonBody
from tailrace.errors import StreamError, TailraceError
from tailrace.server import InnerStream, Server, StreamLog
from tailrace_plugins.tool_loop.inner_events import FINAL, read_events
from tailrace_plugins.tool_loop.loop_rows import Begun, DescribedTool

__all__ = ["IGNORED", "LoopModel", "body_of_turn"]

logger = logging.getLogger("tailrace.mcp")

_PATH = "/v1/responses"
_CONVERSATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LINGER_S = 600  # how long the stream of a turn goes on while its server starts again
_RETRY_S = 1.0
_FOR_NOW = (408, 429, 503, 507)  # with Retry-After
_MOST_RETRIES = 20
_MOST_STOPS = 3
IGNORED = "x-tailrace-ignored"


class LoopModel:
    """The model of one response. `can_refuse`: whether a client waits for its beginning, which tries again itself."""

    def __init__(self, begun: Begun, server: Server, can_refuse: Callable[[], bool]) -> None:
        self.headers: Mapping[str, str] = {}  # for the answer to the client
        self.refusal: TailraceError | None = None  # why the last turn did not begin
        self._begun = begun
        self._server = server
        self._can_refuse = can_refuse
        self._logs: list[StreamLog] = []

    async def events(self, number: int, body: JsonBody, num_seen: int) -> AsyncIterator[JsonBody]:
        """Ask the model, and yield the events of its answer once, after the first ones, however often the connection to
        its stream ends. If it is refused, there is no final event."""
        encoded = msgspec.json.encode(body)
        for attempt in range(_MOST_RETRIES + 1):
            try:
                async with self._begin(number, encoded, self._logs) as answer:
                    if answer.status >= 400:
                        self.refusal = _refusal(answer, b"".join([part async for part in answer.parts]))
                    else:
                        async for event in self._read(answer, num_seen):
                            num_seen = event["sequence_number"] + 1
                            yield event
                            if event["type"] in FINAL:
                                return
                        self.refusal = None
            except TailraceError as error:
                self.refusal = error
            if not self._may_retry(attempt):
                return
            await asyncio.sleep(self._wait_s())

    async def found(
        self, number: int, body: JsonBody, num_seen: int, *, stops: bool = False
    ) -> AsyncIterator[JsonBody]:
        """Yield the events of an answer that has begun, at any server, after the first ones. There are none if it has
        not begun, or cannot be found now. `stops` cancels it first: it may be at a server that has just died."""
        encoded = msgspec.json.encode(body)
        for _ in range(_MOST_STOPS if stops else 1):
            logs: list[StreamLog] = []
            try:
                async with self._begin(number, encoded, logs, found_only=True) as answer:
                    if answer.status < 400:
                        if stops:
                            self._logs += (log for log in logs if log not in self._logs)
                            await self._server.stop(logs[-1])
                        async for event in self._read(answer, num_seen):
                            num_seen = event["sequence_number"] + 1
                            yield event
                            if event["type"] in FINAL:
                                return
                    elif answer.status not in _FOR_NOW:
                        return
            except TailraceError as error:
                logger.debug("A turn of the model is not found: %s", error.message)

    def _begin(
        self, number: int, encoded: bytes, logs: list[StreamLog], *, found_only: bool = False
    ) -> AbstractAsyncContextManager[InnerStream]:
        headers = {
            **self._begun.headers,
            "idempotency-key": f"{self._begun.loop_id}-{number}",
            "x-tailrace-linger": str(_LINGER_S),
        }
        sender = self._begun.sender
        return self._server.begin(sender, _PATH, encoded, headers=headers, logs=logs, found_only=found_only)

    async def _read(self, answer: InnerStream, num_seen: int) -> AsyncIterator[JsonBody]:
        self.headers = {name: one for name, one in answer.headers.items() if name == IGNORED}
        async for event in read_events(answer.parts):
            if event["type"] not in ("keepalive", "error") and event["sequence_number"] >= num_seen:
                yield event

    def _may_retry(self, attempt: int) -> bool:
        """Return whether the same may succeed later."""
        if attempt == _MOST_RETRIES:
            return False
        if self.refusal is None:
            return True
        return self.refusal.status in _FOR_NOW and not self._can_refuse()

    def _wait_s(self) -> float:
        given = self.refusal.retry_after_s if self.refusal is not None else None
        return _RETRY_S if given is None else given

    @property
    def failure(self) -> JsonBody:
        """The error of a response whose turn did not come to its end."""
        if self.refusal is not None:
            return {"code": self.refusal.code, "message": self.refusal.message}
        return {"code": "internal_error", "message": "The model did not end its answer."}

    async def add_to_conversation(self, items: Sequence[JsonBody]) -> None:
        """Add items to the conversation of the response, if it has one."""
        given = self._begun.body.get("conversation")
        conversation_id = given.get("id") if isinstance(given, dict) else given
        if not isinstance(conversation_id, str) or not _CONVERSATION.fullmatch(conversation_id):
            return  # none, or one that no turn has checked: it may not lead to another path
        path, body = f"/v1/conversations/{conversation_id}/items", msgspec.json.encode({"items": items})
        try:
            answer = await self._server.ask(self._begun.sender, path, body, headers={}, logs=[])
        except TailraceError as error:
            logger.warning("Results of MCP tools are not in their conversation: %s", error.message)
        else:
            if answer.status >= 400:
                logger.warning("Results of MCP tools are not in their conversation: status %d.", answer.status)

    async def end_streams(self, *, are_kept: bool) -> None:
        """Cancel the streams of the turns if they run, and delete them unless they are kept. Raises: StorageError."""
        while self._logs:
            log = self._logs.pop()
            if are_kept:
                with contextlib.suppress(StreamError):  # it has expired
                    await self._server.stop(log)
            else:
                await self._server.drop(log)


def _refusal(answer: InnerStream, content: bytes) -> TailraceError:
    """Return the error that an answer of the model's wire has."""
    given: JsonBody = msgspec.json.decode(content)["error"]
    retry_after = answer.headers.get("retry-after", "")
    error = TailraceError(
        given.pop("message", ""),
        param=given.pop("param", None),
        retry_after_s=float(retry_after) if retry_after.isdigit() else None,
    )
    error.status, error.code = answer.status, given.pop("code", None) or "internal_error"
    given.pop("type", None)  # the wire knows it
    error.cut_fields = given
    return error


def body_of_turn(begun: Begun, number: int, said: Sequence[JsonBody], *, may_call: bool) -> JsonBody:
    """Return the request of a turn. `said` has all items so far, or in a conversation those that it does not have."""
    choice = begun.choice
    if not may_call:
        choice = "none"
    elif number and (choice == "required" or (isinstance(choice, dict) and choice.get("mode") != "auto")):
        choice = "auto"  # a choice that forces a call is for the first turn
    body = dict(begun.body)
    body |= {
        "input": said,
        "tools": [*begun.own_tools, *map(_namespace, begun.tools.items())],
        "stream": True,
        "store": False,
    }
    if choice is not None:
        body["tool_choice"] = choice
    if begun.previous is not None:
        body["previous_response_id"] = begun.previous
    if number and isinstance(body.get("conversation"), dict):
        body["conversation"] = body["conversation"]["id"]  # the turn before is its newest one
    return body


def _namespace(tools: tuple[str, list[DescribedTool]]) -> JsonBody:
    """Return the tools of an MCP server as the model's wire takes them."""
    label, described = tools
    functions = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.schema}
        for tool in described
    ]
    return {"type": "namespace", "name": label, "tools": functions}
