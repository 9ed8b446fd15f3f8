"""The events of a response with MCP tools: those of the model's turns, one after the other, with those of the calls
between them. They depend only on what is kept, so every reader sees the same events, also after a crash."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tailrace.dialects import JsonBody
from tailrace_plugins.tool_loop.inner_events import FINAL
from tailrace_plugins.tool_loop.loop_rows import Begun, Called, DescribedTool, Planned

__all__ = ["ModelTurn", "OutEvent", "Output"]

_UNSENT = ("response.created", "response.in_progress", "response.queued", "keepalive", "error", *FINAL)


class ModelTurn:
    """What a turn of the model has become: its last response, its calls, and what is added to the input of the next."""

    def __init__(self, name: str) -> None:
        self.name = name  # unique among all turns
        self.final: JsonBody | None = None
        self.calls: list[Planned] = []
        self.asked: list[Planned] = []  # calls that wait for an approval
        self.has_own_calls = False  # of functions that the client runs
        self.said: list[JsonBody] = []
        self.indexes: dict[int, int] = {}  # of the turn's items, by their index in the turn
        self.held: set[int] = set()  # indexes in the turn of calls that wait for an approval

    @property
    def is_complete(self) -> bool:
        return self.final is not None and self.final.get("status") == "completed"


class OutEvent(NamedTuple):
    """An event as its reader gets it. `body` is JSON."""

    kind: str
    body: bytes

    @property
    def sse(self) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (self.kind.encode(), self.body)


class Output:
    """Writes the events of a response into `events`."""

    def __init__(self, begun: Begun) -> None:
        self.events: list[OutEvent] = []
        self.items: list[JsonBody] = []
        self._begun = begun
        self._tools = {label: {tool.name: tool for tool in tools} for label, tools in begun.tools.items()}
        self.last: JsonBody = {}  # the response object at the end
        self._usage: JsonBody = {}
        self._base = _skeleton(begun)

    # The response

    def open(self) -> None:
        for kind in ("response.created", "response.in_progress"):
            self._emit(kind, {"response": self.response("in_progress")})
        for label in self._begun.listed:
            self._list_tools(label, self._begun.tools[label])

    def response(self, status: str, error: JsonBody | None = None) -> JsonBody:
        """Return the response object with a status."""
        begun = self._begun
        own: JsonBody = {
            "id": f"resp_{begun.loop_id}",
            "created_at": begun.created_s,
            "status": status,
            "background": begun.is_background,
            "error": error,
            "output": list(self.items),
            "usage": self._usage or None,
        }
        if status != "incomplete":
            own["incomplete_details"] = None
        if status != "completed":
            own["completed_at"] = None
        return {**self._base, **begun.echo, **own}

    def close(self, status: str, error: JsonBody | None = None) -> None:
        """End the response: completed, incomplete, failed or cancelled."""
        for index, item in enumerate(self.items):
            if item.get("status") == "in_progress":
                item["status"] = "incomplete"
                self._emit("response.output_item.done", {"output_index": index, "item": item})
        kind = {"cancelled": "incomplete"}.get(status, status)
        self.last = self.response(status, error)
        self._emit(f"response.{kind}", {"response": self.last})
        if error is not None:
            self._emit("error", {**error, "param": None})

    def _emit(self, kind: str, fields: JsonBody) -> None:
        body = msgspec.json.encode({"type": kind, "sequence_number": len(self.events), **fields})
        self.events.append(OutEvent(kind, body))

    # Items

    def _add(self, item: JsonBody) -> int:
        self.items.append(item)
        self._emit("response.output_item.added", {"output_index": len(self.items) - 1, "item": item})
        return len(self.items) - 1

    def _list_tools(self, label: str, tools: Iterable[DescribedTool]) -> None:
        item_id = f"mcpl_{self._begun.loop_id}_{label}"
        item: JsonBody = {"id": item_id, "type": "mcp_list_tools", "server_label": label, "tools": [], "error": None}
        index = self._add(item)
        self._emit("response.mcp_list_tools.in_progress", {"item_id": item_id, "output_index": index})
        item["tools"] = [
            {
                "name": tool.name,
                "description": tool.description,
                "input_schema": tool.schema,
                "annotations": tool.annotations,
            }
            for tool in tools
        ]
        self._emit("response.mcp_list_tools.completed", {"item_id": item_id, "output_index": index})
        self._emit("response.output_item.done", {"output_index": index, "item": item})

    def begin_call(self, call: Planned) -> None:
        """Add a call whose arguments are known."""
        index = self._add_call(call, "")
        position = {"item_id": call.item_id, "output_index": index}
        self._emit("response.mcp_call_arguments.delta", {**position, "delta": call.arguments})
        self.items[index]["arguments"] = call.arguments
        self._emit("response.mcp_call_arguments.done", {**position, "arguments": call.arguments})

    def _add_call(self, call: Planned, arguments: str) -> int:
        item: JsonBody = {
            "id": call.item_id,
            "type": "mcp_call",
            "server_label": call.label,
            "name": call.name,
            "arguments": arguments,
            "approval_request_id": call.approval_id,
            "status": "in_progress",
            "output": None,
            "error": None,
        }
        index = self._add(item)
        self._emit("response.mcp_call.in_progress", {"item_id": call.item_id, "output_index": index})
        return index

    def end_call(self, result: Called) -> None:
        index = next(number for number, one in enumerate(self.items) if one["id"] == result.item_id)
        item = self.items[index]
        item["output"], item["error"] = result.output, result.error
        item["status"] = "completed" if result.error is None else "failed"
        self._emit(f"response.mcp_call.{item['status']}", {"item_id": result.item_id, "output_index": index})
        self._emit("response.output_item.done", {"output_index": index, "item": item})

    def ask(self, call: Planned) -> None:
        """Add a request to approve a call."""
        item: JsonBody = {
            "id": call.asked_id,
            "type": "mcp_approval_request",
            "server_label": call.label,
            "name": call.name,
            "arguments": call.arguments,
        }
        index = self._add(item)
        self._emit("response.output_item.done", {"output_index": index, "item": item})

    # Events of the model's turns

    def feed(self, turn: ModelTurn, event: JsonBody) -> None:
        """Add an event of a turn."""
        kind = event["type"]
        if kind in FINAL:
            turn.final = event["response"]
            self._base.update(turn.final)
            self._usage = _sum(self._usage, turn.final.get("usage") or {})
        if kind in _UNSENT:
            return
        index = event.get("output_index", 0)
        if kind == "response.output_item.added":
            self._add_of_turn(turn, index, event["item"])
        elif kind == "response.output_item.done":
            self._end_of_turn(turn, index, event["item"])
        elif index not in turn.held:
            self._pass(turn, index, event)

    def _add_of_turn(self, turn: ModelTurn, index: int, item: JsonBody) -> None:
        tool = self._tool_of(item)
        if tool is None:
            turn.indexes[index] = self._add(copy.deepcopy(item))
        elif tool.needs_approval:
            turn.held.add(index)
        else:
            turn.indexes[index] = self._add_call(_planned(turn, index, item), "")

    def _end_of_turn(self, turn: ModelTurn, index: int, item: JsonBody) -> None:
        turn.said += _as_input(item)
        if self._tool_of(item) is None:
            turn.has_own_calls |= item["type"] in ("function_call", "custom_tool_call")
            shown = turn.indexes[index]
            self.items[shown] = copy.deepcopy(item)
            self._emit("response.output_item.done", {"output_index": shown, "item": item})
        elif item["status"] != "completed":
            return  # it was cut off, and is not called: `close` ends it
        elif index in turn.held:
            call = _planned(turn, index, item)
            turn.asked.append(call)
            self.ask(call)
        else:
            turn.calls.append(_planned(turn, index, item))
            self.items[turn.indexes[index]]["arguments"] = item["arguments"]

    def _pass(self, turn: ModelTurn, index: int, event: JsonBody) -> None:
        shown = turn.indexes[index]
        kind, fields = (
            event["type"],
            {name: one for name, one in event.items() if name not in ("type", "sequence_number")},
        )
        if "output_index" in fields:
            fields["output_index"] = shown
        if self.items[shown]["type"] == "mcp_call":
            fields["item_id"] = self.items[shown]["id"]
            fields.pop("name", None)
            kind = kind.replace("function_call_arguments", "mcp_call_arguments")
        self._emit(kind, fields)

    def _tool_of(self, item: JsonBody) -> DescribedTool | None:
        if item["type"] != "function_call":
            return None
        return self._tools.get(item.get("namespace") or "", {}).get(item["name"])


def _planned(turn: ModelTurn, index: int, item: JsonBody) -> Planned:
    """Return the call of an MCP tool that a model has written as a function's."""
    return Planned(
        unique_id=f"{turn.name}_{index}",
        call_id=item["call_id"],
        label=item["namespace"],
        name=item["name"],
        arguments=item["arguments"],
    )


def _as_input(item: JsonBody) -> list[JsonBody]:
    """Return an item of a turn as the next turn takes it; none for one that was cut off."""
    match item["type"]:
        case "message":
            text = "".join(part.get("text", "") for part in item["content"])
            return [{"type": "message", "role": "assistant", "content": text}]
        case "reasoning":
            return [{"type": "reasoning", "summary": [], "content": item["content"]}]
        case _ if item["status"] == "completed":
            return [{name: one for name, one in item.items() if name not in ("id", "status")}]
    return []


def _sum(first: JsonBody, second: JsonBody) -> JsonBody:
    """Return the sums of two objects of numbers."""
    summed = dict(first)
    for name, value in second.items():
        if isinstance(value, dict):
            summed[name] = _sum(summed.get(name) or {}, value)
        elif isinstance(value, int | float):
            summed[name] = summed.get(name, 0) + value
    return summed


def _skeleton(begun: Begun) -> JsonBody:
    """Return what a response has from its turns, before the first one has said it."""
    body = begun.body
    return {
        "object": "response",
        "completed_at": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": body.get("model") or "default",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
    }
