"""How responses with MCP tools begin: their tools are listed, and the approvals that they use are looked up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping

from msgspec.structs import replace
from starlette.requests import HTTPConnection

from tailrace.dialects import JsonBody
from tailrace.errors import Forbidden, IdempotencyConflict, RequestError
from tailrace.server import Sender, Server
from tailrace_plugins.tool_loop.asked import ToolRequest, loop_id_of
from tailrace_plugins.tool_loop.asking import Asking
from tailrace_plugins.tool_loop.journal import Journal, new_loop_id
from tailrace_plugins.tool_loop.kept import KeptLoop
from tailrace_plugins.tool_loop.loop import Loop
from tailrace_plugins.tool_loop.loop_rows import Begun, DescribedTool, Needs, Planned
from tailrace_plugins.tool_loop.mcp_errors import ApprovalConflict, LoopsFull, ToolServerMissing, UnknownLoop
from tailrace_plugins.tool_loop.tool_servers import ToolServers

__all__ = ["KEPT_OF_OWNER", "RUNNING_OF_OWNER", "Beginnings"]

KEPT_OF_OWNER = 128
_RUNNING = 64
RUNNING_OF_OWNER = 16

Run = Callable[[KeptLoop, Mapping[str, Mapping[str, str]]], Loop]
"""Runs a response that has begun. The headers of its request are by the labels of its servers."""


class Beginnings:
    """Begins responses. `live` are those of this server, by their ids; `find` and `shown` find any."""

    def __init__(
        self,
        server: Server,
        journal: Journal,
        tool_servers: ToolServers,
        most_calls: int,
        live: Mapping[str, Loop],
        find: Callable[[str, str], Awaitable[Loop]],
        shown: Callable[[str, str], Awaitable[Loop]],
        run: Run,
    ) -> None:
        self._server = server
        self._journal = journal
        self._tool_servers = tool_servers
        self.most_calls = most_calls  # of a response that begins
        self._live = live
        self._find = find
        self._shown = shown
        self._run = run
        self._listing = Counter[str]()  # requests whose tools are listed, by their owners
        self._beginning = asyncio.Lock()
        self.starting = set[str]()  # ids of responses that begin now: nothing else runs them

    def asking(self, request: HTTPConnection, claim: str | None, begun_here: Collection[str] | None = None) -> Asking:
        """Raises: RequestError."""
        return Asking.of(request, claim, self._server.settings.linger_s, begun_here)

    async def begin(self, asking: Asking, body: JsonBody) -> Loop:
        """Begin a response, or find that of the Idempotency-Key.

        Raises: RequestError, Forbidden, ServerUnreachable, UnknownLoop, LoopsFull, StorageError.
        """
        asked, sender, claim = ToolRequest(body), asking.sender, asking.claim
        if (known := await self._claimed(sender.owner, claim, asked.digest)) is not None:
            return known
        self._check_room(sender.owner)
        self._listing[sender.owner] += 1
        try:
            tools = await self._tools_of(sender, asked)
        finally:
            self._listing[sender.owner] -= 1
            self._listing += Counter()  # without zeros
        async with self._beginning:  # of two requests with one key or one approval, the second finds the first one's
            loop: Loop | None = None
            while loop is None:
                loop = await self._claimed(sender.owner, claim, asked.digest)
                if loop is None:
                    loop = await self._new(asking, body, asked, tools)
            return loop

    async def _tools_of(self, sender: Sender, asked: ToolRequest) -> dict[str, list[DescribedTool]]:
        """Return the tools of a request by the labels of their servers. Raises: RequestError, StorageError."""
        tools: dict[str, list[DescribedTool]] = {}
        for tool in asked.tools:
            try:
                tools[tool.server_label] = await self._tool_servers.tools_of(sender.owner, sender.key_id, tool)
            except Forbidden:
                await self._check_lack(sender.owner, asked)
                raise
        return tools

    async def _check_lack(self, owner: str, asked: ToolRequest) -> None:
        """Raises: ToolServerMissing if the request follows a response that needs what only another server has."""
        followed = {loop_id_of(asked.previous), *asked.approving} - {None} if self._journal.is_shared else set()
        for loop_id in followed:
            kept = await self._journal.load(owner, loop_id or "")
            if kept is not None and (lacks := self._tool_servers.lacks(self._needs_of(kept.begun))):
                raise ToolServerMissing.of(lacks)

    async def _new(
        self, asking: Asking, body: JsonBody, asked: ToolRequest, tools: dict[str, list[DescribedTool]]
    ) -> Loop | None:
        """Begin a response. None: another server has just used its key or an approval. Raises: as `begin`."""
        sender, previous_id, previous = asking.sender, loop_id_of(asked.previous), None
        if previous_id is not None:
            find = self._find if previous_id in (asking.begun_here or ()) else self._shown
            previous = await find(sender.owner, previous_id)
        if previous is not None and body.get("conversation") is not None:
            text = "conversation and previous_response_id cannot be used together."
            raise RequestError(text, param="conversation")
        if previous is not None and not previous.has_ended:
            raise UnknownLoop("The previous response has not ended.", param="previous_response_id")
        calls = await self._calls_in(sender.owner, asked, previous)
        said, decided, listed = asked.read_input(calls.get, tools)
        headers = {tool.server_label: tool.all_headers for tool in asked.tools}
        begun = Begun(
            loop_id=new_loop_id(),
            sender=sender,
            created_s=int(time.time()),
            body=asked.inner_body,
            echo=asked.echo,
            said=[*(previous.said if previous is not None else ()), *said],
            previous=previous.begun.previous if previous is not None else asked.previous,
            choice=asked.choice(tools),
            own_tools=asked.own_tools,
            tools=tools,
            listed=[label for label in tools if label not in listed],
            urls={tool.server_label: tool.server_url for tool in asked.tools if tool.server_url is not None},
            with_secrets=[label for label, given in headers.items() if given],
            decided=[await self._unused(sender.owner, call) for call in decided],
            most_calls=min(asked.fields.max_tool_calls or self.most_calls, self.most_calls),
            is_background=bool(asked.fields.background),
            is_stored=asked.fields.store is not False,
            headers=dict(asking.headers),
            linger_s=asking.linger_s,
            claim=asking.claim,
            is_on_socket=asking.begun_here is not None,
        )
        self._check_room(sender.owner)
        await self._make_room(sender.owner)
        self.starting.add(begun.loop_id)
        try:
            kept = await self._journal.begin(begun, asked.digest, self._needs_of(begun))
            return self._run(kept, headers) if kept is not None else None
        finally:
            self.starting.discard(begun.loop_id)

    def _needs_of(self, begun: Begun) -> Needs:
        """Return what a server needs to go on with a response: without a known model, all models of this one."""
        names, model = self._server.model_names, begun.body.get("model")
        return Needs(
            owner=begun.sender.owner,
            labels=[label for label in begun.tools if label not in begun.urls],
            urls=list(begun.urls.values()),
            models=[model] if isinstance(model, str) and model in names else sorted(names),
        )

    # Parts of a request

    async def _claimed(self, owner: str, claim: str, digest: bytes) -> Loop | None:
        """Return the response that has begun with an Idempotency-Key.

        Raises: IdempotencyConflict if its request was another one, or it cannot be read.
        """
        known = await self._journal.claimed(owner, claim) if claim else None
        if known is None:
            return None
        if known[1] != digest:
            raise IdempotencyConflict("This Idempotency-Key was used with another request.", param="idempotency-key")
        try:
            return await self._find(owner, known[0])
        except UnknownLoop:
            text = "The response of this Idempotency-Key cannot be read any more."
            raise IdempotencyConflict(text, param="idempotency-key") from None

    async def _calls_in(
        self, owner: str, asked: ToolRequest, previous: Loop | None
    ) -> dict[str, tuple[Planned, DescribedTool]]:
        """Return the calls that wait for the approvals in the input, by the ids of their approval requests. Most are
        of the previous response."""
        calls: dict[str, tuple[Planned, DescribedTool]] = {}
        for loop_id in asked.approving:
            with contextlib.suppress(UnknownLoop):
                loop = previous
                if loop is None or loop.begun.loop_id != loop_id:
                    loop = await self._find(owner, loop_id)
                for call in loop.asked if loop.has_ended else ():
                    tool = loop.begun.tool(call.label, call.name)
                    assert tool is not None
                    calls[call.asked_id] = (call, tool)
        return calls

    async def _unused(self, owner: str, call: Planned) -> Planned:
        """Return an approved call for a response, with its result if another response has called already.

        Raises: ApprovalConflict if another one is about to.
        """
        used_by = await self._journal.used_by(owner, call)
        if used_by is None:
            return call
        try:
            loop = await self._find(owner, used_by)
        except UnknownLoop:
            raise ApprovalConflict("This approval was used by a response that is deleted.", param="input") from None
        if not loop.has_ended:
            raise ApprovalConflict("A response that runs uses this approval.", param="input")
        known = loop.results.get(call.unique_id)
        return replace(call, known=known) if known is not None else replace(call, after=used_by)

    def _check_room(self, owner: str) -> None:
        running = [loop.begun.sender.owner for loop in self._live.values() if loop.kept.is_ours]
        num_own = running.count(owner) + self._listing[owner]
        if len(running) + self._listing.total() >= _RUNNING or num_own >= RUNNING_OF_OWNER:
            raise LoopsFull("Too many responses with MCP tools run. Wait for one to end.", retry_after_s=5.0)

    async def _make_room(self, owner: str) -> None:
        """Delete the oldest responses of an owner that has too many. Raises: StorageError."""
        kept = await self._journal.of(owner)
        for loop_id in kept[: max(0, len(kept) + 1 - KEPT_OF_OWNER)]:
            if loop_id not in self._live and await self._journal.needs_of(owner, loop_id) is None:
                await self._journal.delete_id(owner, loop_id)
