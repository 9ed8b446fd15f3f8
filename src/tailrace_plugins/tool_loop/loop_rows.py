"""What is kept of a response with MCP tools: how it began, and the steps that followed."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from tailrace.dialects import JsonBody
from tailrace.server import Sender

__all__ = [
    "Begun",
    "Called",
    "Calling",
    "DescribedTool",
    "Ended",
    "Needs",
    "Planned",
    "Step",
    "TurnEnded",
    "call_item",
    "output_item",
]


class DescribedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, as its server described it when the response began. It is called only as such."""

    name: str
    description: str = ""
    schema: JsonBody = {}
    annotations: JsonBody | None = None
    needs_approval: bool = True

    @property
    def is_read_only(self) -> bool:
        return bool(self.annotations and self.annotations.get("readOnlyHint"))

    @property
    def may_repeat(self) -> bool:
        """Whether a second call does no harm, as the tool says itself."""
        return self.is_read_only or bool(self.annotations and self.annotations.get("idempotentHint"))

    def is_same(self, other: DescribedTool) -> bool:
        """Return whether the other one describes the same tool, so that an approval of one is one of the other."""
        return msgspec.structs.replace(self, needs_approval=other.needs_approval) == other


class Called(msgspec.Struct, tag=4, kw_only=True):
    """What came of a call, or why it was not made. `is_unknown`: it went out, and nobody knows what it did."""

    item_id: str
    output: str | None = None
    error: JsonBody | None = None
    is_unknown: bool = False

    @property
    def text(self) -> str:
        """The result as the model gets it."""
        if self.error is None:
            return self.output or ""
        content = self.error.get("content")
        if isinstance(content, list):
            return "Error: " + "".join(part.get("text", "") for part in content if isinstance(part, dict))
        return f"Error: {self.error.get('message', '')}"


class Planned(msgspec.Struct, frozen=True, kw_only=True, rename={"unique_id": "place"}):  # as it is stored
    """A call of a tool. `unique_id` is unique among the calls of all responses."""

    unique_id: str
    call_id: str
    label: str
    name: str
    arguments: str
    approval_id: str | None = None  # the approval that allows it
    after: str = ""  # the response that has used this approval before, and ended without the call
    is_again: bool = False  # the model did not ask for it: what came of the first call is not known
    known: Called | None = None  # what came of it in an earlier response

    @property
    def item_id(self) -> str:
        return f"mcp_{self.unique_id}"

    @property
    def asked_id(self) -> str:
        """The id of a request to approve it."""
        return f"mcpr_{self.unique_id}"


class Begun(msgspec.Struct, kw_only=True):
    """A response. `said` has the items of its input as the model's wire takes them; `body` has the other fields."""

    loop_id: str
    sender: Sender
    created_s: int
    body: JsonBody
    echo: JsonBody
    said: list[JsonBody]
    previous: str | None  # a response without MCP tools, which `said` follows
    choice: Any  # Any: the tool_choice of the first turn, as clients write it
    own_tools: list[JsonBody]
    tools: dict[str, list[DescribedTool]]
    listed: list[str]  # the servers whose tools are listed in the output
    urls: dict[str, str]  # of the servers that the request itself named
    with_secrets: list[str]  # of them, those whose requests have headers of the client, which are not kept
    decided: list[Planned]
    most_calls: int
    is_background: bool
    is_stored: bool
    headers: dict[str, str]
    linger_s: float = 0.0  # how long it goes on without a reader
    claim: str = ""  # the key of the note that has its Idempotency-Key
    is_on_socket: bool = False  # a WebSocket began it: its client finds it there, also if it is not to be stored

    def tool(self, label: str, name: str) -> DescribedTool | None:
        """Return a tool as its server described it at the beginning; None if the request does not have it."""
        return next((one for one in self.tools.get(label, ()) if one.name == name), None)


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a server needs to go on with a response."""

    owner: str
    labels: list[str] = []  # of the servers that the operator has named
    urls: list[str] = []  # of those that the request has named
    models: list[str] = []


class TurnEnded(msgspec.Struct, tag=2):
    events: bytes  # of the model's turn, as JSON, compressed


class Calling(msgspec.Struct, tag=3):
    """A call goes out now."""

    item_id: str


class Ended(msgspec.Struct, tag=5):
    """The response has ended: as its last turn did, as cancelled, or with an error."""

    status: str = ""
    error: JsonBody | None = None


Step: TypeAlias = TurnEnded | Calling | Called | Ended


def call_item(call_id: str, label: str, name: str, arguments: str) -> JsonBody:
    """Return a call as an item of the model's input."""
    return {"type": "function_call", "call_id": call_id, "namespace": label, "name": name, "arguments": arguments}


def output_item(call_id: str, text: str) -> JsonBody:
    """Return what came of a call as an item of the model's input."""
    return {"type": "function_call_output", "call_id": call_id, "output": text}
