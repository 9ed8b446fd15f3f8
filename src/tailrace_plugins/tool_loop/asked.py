"""What a request asks for: its MCP tools, the approvals that it gives, and the rest, for the model's wire."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from tailrace.dialects import JsonBody, Other, read_fields
from tailrace.errors import RequestError
from tailrace_plugins.tool_loop.journal import LOOP_ID
from tailrace_plugins.tool_loop.loop_rows import Called, DescribedTool, Planned, call_item, output_item
from tailrace_plugins.tool_loop.mcp_errors import ApprovalConflict, UnknownApproval
from tailrace_plugins.tool_loop.servers_file import LABEL

__all__ = ["McpTool", "ToolRequest", "loop_id_of", "names_mcp"]

_SECRETS = ("authorization", "headers")
_RESPONSE = "resp_"
_MOST_SERVERS = 16  # of a request
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,8192}")
_OWN_HEADERS = re.compile(  # those of the connection and of the protocol
    "host|content-.*|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|accept|accept-encoding"
    "|last-event-id|proxy-.*|mcp-.*",
    re.IGNORECASE,
)
_APPROVAL = re.compile(r"mcpr_([0-9a-f]{32})_[0-9a-z_]{1,20}")


class ToolFilter(msgspec.Struct):
    read_only: bool | None = None
    tool_names: list[str] | None = None

    def fits(self, tool: DescribedTool) -> bool:
        return (self.read_only is None or self.read_only is tool.is_read_only) and (
            self.tool_names is None or tool.name in self.tool_names
        )


class ApprovalFilters(msgspec.Struct):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpTool(msgspec.Struct, tag="mcp"):
    server_label: str
    server_url: str | None = None
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilters | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    connector_id: str | None = None
    tunnel_id: str | None = None
    server_description: str | None = None

    def allows(self, tool: DescribedTool) -> bool:
        allowed = self.allowed_tools
        if isinstance(allowed, list):
            return tool.name in allowed
        return allowed is None or allowed.fits(tool)

    def needs_approval(self, tool: DescribedTool) -> bool:
        """Return whether a call needs the user's approval, as it does if the request does not say anything."""
        rule = self.require_approval
        if not isinstance(rule, ApprovalFilters):
            return rule != "never"
        if rule.always is not None and rule.always.fits(tool):
            return True
        if rule.never is not None:
            return not rule.never.fits(tool)
        return rule.always is None

    @property
    def all_headers(self) -> dict[str, str]:
        bearer = {"authorization": f"Bearer {self.authorization}"} if self.authorization is not None else {}
        return {**(self.headers or {}), **bearer}


class ApprovalResponseItem(msgspec.Struct, tag="mcp_approval_response"):
    approval_request_id: str
    approve: bool
    reason: str | None = None


class ApprovalRequestItem(msgspec.Struct, tag="mcp_approval_request"):
    id: str
    server_label: str
    name: str
    arguments: str = "{}"


class McpCallItem(msgspec.Struct, tag="mcp_call"):
    id: str
    server_label: str
    name: str
    arguments: str = "{}"
    approval_request_id: str | None = None
    output: str | None = None
    error: JsonBody | str | None = None


class McpListItem(msgspec.Struct, tag="mcp_list_tools"):
    server_label: str


class ChosenMcp(msgspec.Struct, tag="mcp"):
    server_label: str
    name: str | None = None


class AllowedMcpTools(msgspec.Struct, tag="allowed_tools"):
    tools: list[ChosenMcp | Other]
    mode: Literal["auto", "required"] = "auto"


_InputItem: TypeAlias = ApprovalResponseItem | ApprovalRequestItem | McpCallItem | McpListItem | Other


class _Body(msgspec.Struct):
    tools: list[McpTool | Other] | None = None
    tool_choice: str | ChosenMcp | AllowedMcpTools | Other | None = None
    input: str | list[_InputItem] | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None


class ToolRequest:
    """A request with MCP tools, as it was read."""

    def __init__(self, body: JsonBody) -> None:
        given_fields = {name: body[name] for name in _Body.__struct_fields__ if name in body}
        self.fields, _ = read_fields(given_fields | {name: _own(body.get(name)) for name in ("tools", "input")}, _Body)
        self._body = body
        given = self.fields.tools or []
        self.tools = [tool for tool in given if isinstance(tool, McpTool)]
        self.own_tools: list[JsonBody] = [
            raw for tool, raw in zip(given, body.get("tools") or (), strict=True) if isinstance(tool, Other)
        ]
        self._check_labels()
        self.previous = self.fields.previous_response_id
        self.digest = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).digest()

    def _check_labels(self) -> None:
        """Raises: RequestError."""
        given = [one for one in self.own_tools if isinstance(one, dict)]  # what is none, the wire refuses
        own = [one.get("name") for one in given if one.get("type") == "namespace"]
        if len(self.tools) > _MOST_SERVERS:
            raise RequestError(f"tools: a request has at most {_MOST_SERVERS} MCP servers.", param="tools")
        seen: set[str] = set()
        for index, tool in enumerate(self.fields.tools or ()):
            if not isinstance(tool, McpTool):
                continue
            where = f"tools[{index}].server_label"
            if not LABEL.fullmatch(tool.server_label):
                raise RequestError(f"{where} has 1 to 64 letters, digits, _ and -, with a letter first.", param=where)
            if tool.server_label in seen or tool.server_label in own:
                raise RequestError(f"{where}: another tool has the same label.", param=where)
            seen.add(tool.server_label)
            if tool.connector_id is not None or tool.tunnel_id is not None:
                where = f"tools[{index}]"
                raise RequestError(f"{where}: this server has no connectors and no tunnels.", param=where)
            for name, value in tool.all_headers.items():
                if not _HEADER.fullmatch(name) or not _HEADER_VALUE.fullmatch(value) or _OWN_HEADERS.fullmatch(name):
                    where = f"tools[{index}].headers"
                    raise RequestError(f"{where}: this header cannot be set.", param=where)

    @property
    def approving(self) -> set[str]:
        """The ids of the responses whose calls the input approves or refuses."""
        items = self.fields.input if isinstance(self.fields.input, list) else []
        ids = (_APPROVAL.fullmatch(one.approval_request_id) for one in items if isinstance(one, ApprovalResponseItem))
        return {f"mcp_{found[1]}" for found in ids if found is not None}

    @property
    def inner_body(self) -> JsonBody:
        """The fields of the request that its turns have, too."""
        return {name: value for name, value in self._body.items() if name not in (*_Body.__struct_fields__, "metadata")}

    @property
    def echo(self) -> JsonBody:
        """The fields of the request that the response repeats."""
        given = zip(self.fields.tools or (), self._body.get("tools") or (), strict=True)
        return {
            "tools": [_shown(raw) if isinstance(tool, McpTool) else raw for tool, raw in given],
            "tool_choice": self._body.get("tool_choice") or "auto",
            "previous_response_id": self.previous,
            "max_tool_calls": self.fields.max_tool_calls,
            "metadata": self._body.get("metadata") or {},
            "store": self.fields.store is not False,
        }

    def choice(self, tools: dict[str, list[DescribedTool]]) -> object:
        """Return the choice of tools as the model's wire takes it. Raises: RequestError."""
        choice = self.fields.tool_choice
        if isinstance(choice, ChosenMcp):
            functions = _functions(choice, tools, "tool_choice")
            return functions[0] if choice.name is not None else {
                "type": "allowed_tools", "mode": "required", "tools": functions,
            }  # fmt: skip
        if isinstance(choice, AllowedMcpTools):
            allowed: list[JsonBody] = []
            for index, (one, raw) in enumerate(zip(choice.tools, self._body["tool_choice"]["tools"], strict=True)):
                allowed += (
                    _functions(one, tools, f"tool_choice.tools[{index}]") if isinstance(one, ChosenMcp) else [raw]
                )
            return {"type": "allowed_tools", "mode": choice.mode, "tools": allowed}
        return self._body.get("tool_choice")

    def read_input(
        self, find: Callable[[str], tuple[Planned, DescribedTool] | None], tools: dict[str, list[DescribedTool]]
    ) -> tuple[list[JsonBody], list[Planned], set[str]]:
        """Return the items for the model, the calls that the user has approved just now, and the labels whose lists of
        tools the client has. `find` returns the call of an approval request of this owner, and its tool as it was.

        Raises: RequestError, UnknownApproval, ApprovalConflict.
        """
        given = self.fields.input
        if not isinstance(given, list):
            said: list[JsonBody] = [] if given is None else [{"type": "message", "role": "user", "content": given}]
            return said, [], set()
        said, decided = [], list[Planned]()
        done = {one.approval_request_id for one in given if isinstance(one, McpCallItem)}
        shown = {one.id for one in given if isinstance(one, ApprovalRequestItem)}
        decided_ids: set[str] = set()
        for index, (one, raw) in enumerate(zip(given, self._body["input"], strict=True)):
            match one:
                case ApprovalResponseItem(approval_id) if approval_id not in done and approval_id not in decided_ids:
                    decided_ids.add(approval_id)
                    where = f"input[{index}].approval_request_id"
                    call = _approved(approval_id, find, tools, where)
                    if approval_id in shown:
                        call = msgspec.structs.replace(call, call_id=_call_id(approval_id), is_again=False)
                    if one.approve:
                        decided.append(call)
                        continue
                    if call.is_again:
                        said.append(call_item(call.call_id, call.label, call.name, call.arguments))
                    said.append(output_item(call.call_id, _refusal(one.reason)))
                case ApprovalRequestItem():
                    said.append(call_item(_call_id(one.id), one.server_label, one.name, one.arguments))
                case McpCallItem():
                    call_id = _call_id(one.approval_request_id or one.id)
                    if one.approval_request_id not in shown:
                        said.append(call_item(call_id, one.server_label, one.name, one.arguments))
                    said.append(output_item(call_id, _result(one)))
                case Other():
                    said.append(raw)
        listed = {one.server_label for one in given if isinstance(one, McpListItem)}
        return said, decided, listed


def names_mcp(body: JsonBody) -> bool:
    """Return whether a request has MCP tools, or follows a response that had some."""
    tools = body.get("tools")
    return loop_id_of(body.get("previous_response_id")) is not None or (
        isinstance(tools, list) and any(isinstance(one, dict) and one.get("type") == "mcp" for one in tools)
    )


def loop_id_of(response_id: object) -> str | None:
    """Return the id of a response with MCP tools; None for another id."""
    if not isinstance(response_id, str):
        return None
    loop_id = response_id.removeprefix(_RESPONSE)
    return loop_id if LOOP_ID.fullmatch(loop_id) else None


def _own(entries: object) -> object:
    """Return tools or items with placeholders for those of the wire, which reads them itself."""
    if not isinstance(entries, list):
        return entries
    return [
        one if isinstance(one, dict) and str(one.get("type")).startswith("mcp") else {"type": "of the wire"}
        for one in entries
    ]


def _approved(
    approval_id: str,
    find: Callable[[str], tuple[Planned, DescribedTool] | None],
    tools: dict[str, list[DescribedTool]],
    where: str,
) -> Planned:
    found = find(approval_id) if _APPROVAL.fullmatch(approval_id) else None
    if found is None:
        raise UnknownApproval("There is no such approval request.", param=where)
    call, asked_for = found
    if call.label not in tools:
        raise RequestError(f"{where}: the tools of this request have no MCP server with its label.", param=where)
    now = next((one for one in tools[call.label] if one.name == call.name), None)
    if now is None or not now.is_same(asked_for):
        raise ApprovalConflict("The tool has changed since its approval was asked for. Ask again.", param=where)
    return msgspec.structs.replace(call, approval_id=approval_id)


def _functions(chosen: ChosenMcp, tools: dict[str, list[DescribedTool]], where: str) -> list[JsonBody]:
    names = [one.name for one in tools.get(chosen.server_label, ()) if chosen.name in (None, one.name)]
    if not names:
        raise RequestError(f"{where}: there is no such MCP tool in this request.", param=where)
    return [{"type": "function", "namespace": chosen.server_label, "name": name} for name in names]


def _shown(tool: JsonBody) -> JsonBody:
    """Return a tool without what is secret. The path and the query of a URL may be, too."""
    shown = {name: value for name, value in tool.items() if name not in _SECRETS}
    if isinstance(url := shown.get("server_url"), str):
        parts = urlsplit(url)  # `check_url` has read it before
        shown["server_url"] = f"{parts.scheme}://{parts.hostname}/<redacted>"
    return shown


def _call_id(item_id: str) -> str:
    return f"call_{item_id}"


def _refusal(reason: str | None) -> str:
    return f"The user did not allow this call: {reason}" if reason else "The user did not allow this call."


def _result(item: McpCallItem) -> str:
    if item.error is None:
        return item.output or ""
    error = item.error if isinstance(item.error, dict) else {"message": item.error}
    return Called(item_id=item.id, error=error).text
