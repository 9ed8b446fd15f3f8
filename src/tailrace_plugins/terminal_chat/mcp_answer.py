"""An answer for which the server calls tools of MCP servers. What has to be approved is asked at the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.cli.commands import printable_text, until_interrupted
from tailrace.client import AnswerFailed, Client
from tailrace_plugins.terminal_chat.screen import Screen

__all__ = ["Tools"]

Json = dict[str, Any]  # Any: JSON

_SHOWN = 200  # characters of arguments and results
_MOST_REFUSED = 5  # times in a row that the model may ask for calls and get none


async def _allow_nothing(call: str) -> bool:
    return False


@dataclass(slots=True)
class Tools:
    """The MCP servers that are used, by their labels. `note` shows a line about a call; `allow` asks whether a call may
    be made."""

    labels: list[str]
    note: Callable[[str], None]
    allow: Callable[[str], Awaitable[bool]] = _allow_nothing
    response_id: str = ""  # of the last answer, which the next one follows
    _asked: list[Json] = field(default_factory=list)

    async def answer(
        self,
        client: Client,
        body: Json,
        items: Sequence[Json],
        new_screen: Callable[[], Screen],
        on_piece: Callable[[str], None],
    ) -> bool:
        """Show an answer to some items, with all the calls that it needs. Returns whether it is complete.

        Raises: AnswerFailed.
        """
        given = list(items)
        # Without approval, only what reads is called.
        tools = [
            {"type": "mcp", "server_label": label, "require_approval": {"never": {"read_only": True}}}
            for label in self.labels
        ]
        num_refused = 0
        while True:
            self._asked = []
            request = {**body, "input": given, "tools": tools}
            if self.response_id:
                request["previous_response_id"] = self.response_id
            with contextlib.closing(_Pieces(new_screen)) as pieces:
                showing = asyncio.ensure_future(self._show(client, request, pieces, on_piece))
                if not await until_interrupted(showing):
                    self.response_id = ""
                    return False
            if not self._asked:
                return True
            given = [
                {
                    "type": "mcp_approval_response",
                    "approval_request_id": call["id"],
                    "approve": await self.allow(_whole(call)),
                }
                for call in self._asked
            ]
            num_refused = 0 if any(one["approve"] for one in given) else num_refused + 1
            if num_refused == _MOST_REFUSED:
                self.response_id = ""
                raise AnswerFailed("the model asks again and again for calls that are not allowed")

    async def _show(self, client: Client, request: Json, pieces: _Pieces, on_piece: Callable[[str], None]) -> None:
        async with contextlib.aclosing(client.respond(request)) as events:
            async for event in events:
                match event["type"]:
                    case "response.output_text.delta":
                        on_piece(event["delta"])
                        pieces.screen.show(event["delta"])
                    case "response.reasoning_text.delta":
                        pieces.screen.think(event["delta"])
                    case "response.output_item.done":
                        self._end_item(event["item"], pieces)
                    case "response.completed" | "response.incomplete":
                        self.response_id = event["response"]["id"]

    def _end_item(self, item: Json, pieces: _Pieces) -> None:
        if item["type"] == "mcp_approval_request":
            self._asked.append(item)
        elif item["type"] == "mcp_call":
            pieces.close()
            self.note(f"{_shown(item)}: {_cut(_result(item))}")


class _Pieces:
    """The screen of the text between two calls."""

    def __init__(self, new_screen: Callable[[], Screen]) -> None:
        self._new_screen = new_screen
        self._screen: Screen | None = None

    @property
    def screen(self) -> Screen:
        if self._screen is None:
            self._screen = self._new_screen()
        return self._screen

    def close(self) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None


def _shown(call: Mapping[str, Any]) -> str:
    return printable_text(f"{call['server_label']}: {call['name']} {_cut(str(call['arguments']))}")


def _whole(call: Mapping[str, Any]) -> str:
    """Return all that is approved, in ASCII: other characters may be invisible, or change the order of the text."""
    try:
        arguments = json.dumps(json.loads(call["arguments"]))
    except (ValueError, RecursionError):
        arguments = json.dumps(call["arguments"])
    label, name = (json.dumps(call[field])[1:-1] for field in ("server_label", "name"))
    return f"{label}: {name} {arguments}"


def _result(call: Mapping[str, Any]) -> str:
    if call.get("error") is None:
        return str(call.get("output") or "")
    error = call["error"]
    content = error.get("content")
    texts = [str(part.get("text", "")) for part in content] if isinstance(content, list) else [error.get("message", "")]
    return f"failed: {' '.join(map(str, texts))}"


def _cut(text: str) -> str:
    line = " ".join(printable_text(text).split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} …"
