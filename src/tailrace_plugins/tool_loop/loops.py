"""All responses with MCP tools of a server: those that run, and those that are kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial

from msgspec.structs import replace
from starlette.requests import Request

from tailrace.dialects import JsonBody
from tailrace.errors import Forbidden, RequestError, StorageError
from tailrace.server import Sender, Server, principal_of
from tailrace_plugins.tool_loop.asked import McpTool, ToolRequest, loop_id_of
from tailrace_plugins.tool_loop.connections import McpConnection, McpConnections
from tailrace_plugins.tool_loop.errors import ApprovalConflict, LoopsFull, ServerUnreachable, UnknownLoop
from tailrace_plugins.tool_loop.guarded_http import check_url
from tailrace_plugins.tool_loop.journal import Journal, new_loop_id
from tailrace_plugins.tool_loop.loop import CallLimits, Connect, Loop
from tailrace_plugins.tool_loop.records import Begun, Planned, ToolFacts
from tailrace_plugins.tool_loop.servers_file import McpServer

__all__ = ["KEPT_OF_OWNER", "RUNNING_OF_OWNER", "Loops"]

logger = logging.getLogger("tailrace.mcp")

_KEPT_S = 24 * 3600
KEPT_OF_OWNER = 128
_RUNNING = 64
RUNNING_OF_OWNER = 16
_SWEEP_S = 60.0
_CLOSE_S = 5.0
_MOST_LINGER_S = 3600.0
_LEFT_S = 1.0  # how long a response goes on without a reader


class Loops:
    """Begins, finds and ends responses. `specs` are the servers that the operator has named, `hosts` those whose URLs
    clients may name."""

    def __init__(
        self,
        server: Server,
        journal: Journal,
        specs: Mapping[str, McpServer],
        hosts: frozenset[str],
        limits: CallLimits,
        most_calls: int,
        group: asyncio.TaskGroup,
    ) -> None:
        self._server = server
        self._journal = journal
        self._specs = specs
        self._hosts = hosts
        self._limits = limits
        self._most_calls = most_calls
        self._group = group
        self._connections = McpConnections()
        self._live: dict[str, Loop] = {}
        self._listing = Counter[str]()  # requests whose tools are listed, by their owners
        self._beginning = asyncio.Lock()
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Continue the responses of an earlier process. Raises: StorageError."""
        for owner, loop_id in self._journal.unfinished():
            found = self._journal.load(owner, loop_id)
            if found is not None:
                begun, steps = found
                self._run(Loop(begun, self._journal, self._server, self._connect(begun, {}), self._limits, steps))
        self._tasks = [self._group.create_task(self._sweep()), self._group.create_task(self._connections.sweep())]

    def drain(self) -> None:
        """Readers that leave from now on end no response."""
        self._is_closing = True

    async def close(self) -> None:
        """Leave everything to the next process, but let calls that are out come back for a short time."""
        self.drain()
        out = [loop.task for loop in self._live.values() if loop.task is not None and loop.hold()]
        if out:
            await asyncio.wait(out, timeout=_CLOSE_S)
        of_loops = [task for loop in self._live.values() for task in (loop.task, loop.leaving)]
        tasks = [*self._tasks, *(task for task in of_loops if task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._connections.close()

    # What clients ask for

    def labels(self, owner: str, key_id: str) -> list[str]:
        """Return the labels of the operator's servers that a key may use."""
        return [label for label, spec in self._specs.items() if spec.may_use(owner, key_id)]

    async def begin(self, request: Request, body: JsonBody) -> Loop:
        """Begin a response, or find that of the request's Idempotency-Key.

        Raises: RequestError, Forbidden, ServerUnreachable, UnknownLoop, LoopsFull, StorageError.
        """
        asked, sender = ToolRequest(body), Sender.of(request.scope)
        claim = request.headers.get("idempotency-key", "")
        if (known := await self._claimed(sender.owner, claim, asked.digest)) is not None:
            return known
        self._check_room(sender.owner)
        self._listing[sender.owner] += 1
        try:
            tools = {tool.server_label: await self._tools_of(request, sender.owner, tool) for tool in asked.tools}
        finally:
            self._listing[sender.owner] -= 1
            self._listing += Counter()  # without zeros
        async with self._beginning:  # of two requests with one key or one approval, the second finds the first one's
            known = await self._claimed(sender.owner, claim, asked.digest)
            return known if known is not None else await self._new(request, body, asked, tools, sender, claim)

    async def _new(
        self,
        request: Request,
        body: JsonBody,
        asked: ToolRequest,
        tools: dict[str, list[ToolFacts]],
        sender: Sender,
        claim: str,
    ) -> Loop:
        """Begin a response. Raises: as `begin`."""
        previous_id = loop_id_of(asked.previous)
        previous = await self.shown(sender.owner, previous_id) if previous_id is not None else None
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
            most_calls=min(asked.fields.max_tool_calls or self._most_calls, self._most_calls),
            is_background=bool(asked.fields.background),
            is_stored=asked.fields.store is not False,
            headers={name: one for name, one in request.headers.items() if name == "x-tailrace-priority"},
            linger_s=_linger_of(request),
            claim=claim,
        )
        self._check_room(sender.owner)
        self._make_room(sender.owner)
        self._journal.begin(begun, asked.digest)
        loop = Loop(begun, self._journal, self._server, self._connect(begun, headers), self._limits)
        self._run(loop)
        return loop

    async def find(self, owner: str, loop_id: str) -> Loop:
        """Return a response of an owner. One that has ended is read from the journal. Raises: UnknownLoop,
        StorageError."""
        loop = self._live.get(loop_id)
        if loop is not None and loop.begun.sender.owner == owner:
            return loop
        found = self._journal.load(owner, loop_id) if loop is None else None
        if found is None:
            raise UnknownLoop("There is no such response.", param="response_id")
        begun, steps = found
        loop = Loop(begun, self._journal, self._server, self._connect(begun, {}), self._limits, steps)
        if not loop.is_over:
            raise UnknownLoop("There is no such response.", param="response_id")
        await loop.run()
        return loop

    async def shown(self, owner: str, loop_id: str) -> Loop:
        """Return a response that its client may read, as `find`. One that it did not let us store is kept only for
        its Idempotency-Key and its approvals."""
        loop = await self.find(owner, loop_id)
        if loop.has_ended and not (loop.begun.is_stored or loop.asked):
            raise UnknownLoop("There is no such response.", param="response_id")
        return loop

    async def cancel(self, loop: Loop) -> None:
        """End a response as cancelled, if it runs. Raises: StorageError."""
        try:
            await loop.cancel()
        finally:
            self._gone(loop)
        await loop.drop_streams()

    async def delete(self, loop: Loop) -> None:
        """Cancel a response if it runs, and forget it. Raises: StorageError."""
        await self.cancel(loop)
        self._journal.delete(loop.begun)

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete all responses of an owner. Raises: StorageError."""
        for loop in [loop for loop in self._live.values() if loop.begun.sender.owner == owner]:
            await self.cancel(loop)
        loop_ids = self._journal.of(owner)
        for loop_id in loop_ids:
            self._journal.delete_id(owner, loop_id)
        return {"tool_loops": len(loop_ids)}

    # Parts of a request

    async def _claimed(self, owner: str, claim: str, digest: bytes) -> Loop | None:
        """Return the response that has begun with an Idempotency-Key.

        Raises: ApprovalConflict if its request was another one, or it cannot be read.
        """
        known = self._journal.claimed(owner, claim) if claim else None
        if known is None:
            return None
        if known[1] != digest:
            raise ApprovalConflict("This Idempotency-Key was used with another request.", param="idempotency-key")
        try:
            return await self.find(owner, known[0])
        except UnknownLoop:
            text = "The response of this Idempotency-Key cannot be read any more."
            raise ApprovalConflict(text, param="idempotency-key") from None

    async def _tools_of(self, request: Request, owner: str, tool: McpTool) -> list[ToolFacts]:
        """Return the tools of an MCP server that a request may have. Raises: RequestError, ServerUnreachable."""
        spec = self._allowed(request, tool)
        connect = partial(self._connection, spec, tool.server_label, tool.server_url, tool.all_headers, owner)
        async with connect() as connection:
            is_old = connection.is_used
            try:
                found = await connection.tools()
            except ServerUnreachable:
                if not is_old:
                    raise
                async with connect() as fresh:  # the server may have left meanwhile
                    found = await fresh.tools()
        return [
            replace(one, needs_approval=tool.needs_approval(one))
            for one in found
            if tool.allows(one) and (spec is None or spec.tools is None or one.name in spec.tools)
        ]

    def _allowed(self, request: Request, tool: McpTool) -> McpServer | None:
        """Return the operator's server with this label; None if the request names a URL. Raises: Forbidden."""
        principal = principal_of(request.scope)
        if tool.server_url is not None:
            check_url(tool.server_url, self._hosts, "tools")
            return None
        spec = self._specs.get(tool.server_label)
        if spec is None or not spec.may_use(principal.owner, principal.key_id):
            raise Forbidden("This key may use no MCP server with this label.", param="tools")
        return spec

    async def _calls_in(
        self, owner: str, asked: ToolRequest, previous: Loop | None
    ) -> dict[str, tuple[Planned, ToolFacts]]:
        """Return the calls that wait for the approvals in the input, by the ids of their approval requests. Most are
        of the previous response."""
        calls: dict[str, tuple[Planned, ToolFacts]] = {}
        for loop_id in asked.approving:
            with contextlib.suppress(UnknownLoop):
                loop = previous
                if loop is None or loop.begun.loop_id != loop_id:
                    loop = await self.find(owner, loop_id)
                for call in loop.asked if loop.has_ended else ():
                    tool = loop.begun.tool(call.label, call.name)
                    assert tool is not None
                    calls[call.asked_id] = (call, tool)
        return calls

    async def _unused(self, owner: str, call: Planned) -> Planned:
        """Return an approved call for a response, with its result if another response has called already.

        Raises: ApprovalConflict if another one is about to.
        """
        used_by = self._journal.used_by(owner, call)
        if used_by is None:
            return call
        try:
            loop = await self.find(owner, used_by)
        except UnknownLoop:
            raise ApprovalConflict("This approval was used by a response that is deleted.", param="input") from None
        if not loop.has_ended:
            raise ApprovalConflict("A response that runs uses this approval.", param="input")
        known = loop.results.get(call.place)
        return replace(call, known=known) if known is not None else call

    def _check_room(self, owner: str) -> None:
        num_own = sum(loop.begun.sender.owner == owner for loop in self._live.values()) + self._listing[owner]
        if len(self._live) + self._listing.total() >= _RUNNING or num_own >= RUNNING_OF_OWNER:
            raise LoopsFull("Too many responses with MCP tools run. Wait for one to end.", retry_after_s=5.0)

    def _make_room(self, owner: str) -> None:
        """Delete the oldest responses of an owner that has too many. Raises: StorageError."""
        kept = self._journal.of(owner)
        for loop_id in kept[: max(0, len(kept) + 1 - KEPT_OF_OWNER)]:
            if loop_id not in self._live:
                self._journal.delete_id(owner, loop_id)

    # Running

    def _connect(self, begun: Begun, headers: Mapping[str, Mapping[str, str]]) -> Connect:
        sender = begun.sender

        def connect(label: str, tool: str) -> contextlib.AbstractAsyncContextManager[McpConnection]:
            """Raises: RequestError if the tool may not be used, or not any more."""
            self._server.principal_of(sender)
            url, spec = begun.urls.get(label), self._specs.get(label)
            if url is not None:
                check_url(url, self._hosts, "tools")
                if label in begun.with_secrets and label not in headers:
                    text = "The headers for its server were not kept when this server started again."
                    raise ServerUnreachable(text, param="tools")
            elif spec is None or not spec.may_use(sender.owner, sender.key_id):
                raise Forbidden("This key may not use its server any more.", param="tools")
            elif spec.tools is not None and tool not in spec.tools:
                raise Forbidden("Its server does not offer it any more.", param="tools")
            return self._connection(spec, label, url, headers.get(label, {}), sender.owner)

        return connect

    @contextlib.asynccontextmanager
    async def _connection(
        self, spec: McpServer | None, label: str, url: str | None, headers: Mapping[str, str], owner: str
    ) -> AsyncIterator[McpConnection]:
        if url is not None:
            async with self._connections.of_url(label, url, headers) as connection:
                yield connection
        else:
            assert spec is not None
            async with self._connections.of_spec(spec, owner) as connection:
                yield connection

    def _run(self, loop: Loop) -> None:
        self._live[loop.begun.loop_id] = loop
        loop.on_left = self._left
        loop.task = self._group.create_task(_safely(partial(self._ended, loop)))

    async def _ended(self, loop: Loop) -> None:
        await loop.run()
        if loop.refusal is not None or not (loop.begun.is_stored or loop.asked or loop.begun.claim):
            with contextlib.suppress(StorageError):
                self._journal.delete(loop.begun)
        self._gone(loop)

    def _gone(self, loop: Loop) -> None:
        self._live.pop(loop.begun.loop_id, None)
        if loop.leaving is not None:
            loop.leaving.cancel()

    def _left(self, loop: Loop) -> None:
        """The last reader has left."""
        if not self._is_closing:
            loop.leaving = self._group.create_task(_safely(partial(self._cancel_unread, loop)))

    async def _cancel_unread(self, loop: Loop) -> None:
        await asyncio.sleep(max(_LEFT_S, loop.begun.linger_s))
        loop.leaving = None
        if not self._is_closing and not loop.num_readers and not loop.has_ended:
            await self.cancel(loop)

    async def _sweep(self) -> None:
        """Delete responses that are kept for too long. Never returns."""
        while True:
            try:
                for begun in self._journal.older_than(time.time() - _KEPT_S):
                    if begun.loop_id not in self._live:
                        self._journal.delete(begun)
            except StorageError as error:
                logger.warning("Expired responses are not deleted: %s", error.message)
            except Exception:  # a defect must not end the server
                logger.exception("Expired responses are not deleted.")
            await asyncio.sleep(_SWEEP_S)


async def _safely(work: Callable[[], Awaitable[None]]) -> None:
    """A defect must end only this work."""
    try:
        await work()
    except Exception:
        logger.exception("A response with MCP tools failed.")


def _linger_of(request: Request) -> float:
    """Raises: RequestError."""
    if request.scope.get("server", ()) is None:  # this server asks itself, such as for a batch, and gives up for good
        return 0.0
    given = request.headers.get("x-tailrace-linger", "0")
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", given, re.ASCII):
        raise RequestError("X-Tailrace-Linger should be a number of seconds.", param="x-tailrace-linger")
    return min(float(given), _MOST_LINGER_S)
