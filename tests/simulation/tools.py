"""Tool loops in a simulation: the code that serves, over the table in Redis; and a client that follows and approves.

The model and the tools are simulated: a turn of the model is a stream, whose end says which tools are called; a call is
counted when it goes out, whatever becomes of its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from tests.simulation.network import RedisHost
from tests.simulation.servers import MODEL, Message, Server
from tests.simulation.simulated_time import Process, Simulation, Violation

from tailrace import server as served
from tailrace.access.principal import Principal
from tailrace.dialects import JsonBody
from tailrace.errors import StorageError, TailraceError, UnknownStream
from tailrace.server import InnerAnswer, InnerStream, Sender, StreamLog, Table, row_key
from tailrace.settings import Settings
from tailrace.streams import Reader
from tailrace.types import ANONYMOUS, Claim, End, GenerateRequest, Released, Sampling
from tailrace_plugins.tool_loop.asked import McpTool
from tailrace_plugins.tool_loop.call_maker import CallLimits
from tailrace_plugins.tool_loop.journal import Journal
from tailrace_plugins.tool_loop.loop_keys import BEGUN
from tailrace_plugins.tool_loop.loop_rows import Begun, Called, DescribedTool, Needs
from tailrace_plugins.tool_loop.loops import Loops
from tailrace_plugins.tool_loop.mcp_connections import McpConnection, McpConnections, unknown_outcome
from tailrace_plugins.tool_loop.mcp_errors import UnknownLoop
from tailrace_plugins.tool_loop.tool_servers import Connect, ToolServers

__all__ = ["ToolClient", "ToolWorld"]

_LABEL = "count"
_UNSAFE, _SAFE = "append", "look"
_MOST_SAFE = 3  # calls of a tool that may be repeated
_CALL_S = 8.0
_UNKNOWN = -32000  # the code of a call whose outcome is not known
_TOOLS = [DescribedTool(name=_UNSAFE), DescribedTool(name=_SAFE, annotations={"readOnlyHint": True})]
_TOOL: JsonBody = {"type": "mcp", "server_label": _LABEL, "require_approval": "never"}


@dataclass(frozen=True)
class _Plan:
    """What the model does: the tools that each turn calls."""

    turns: Sequence[Sequence[str]]

    def calls(self, number: int, body: JsonBody) -> list[tuple[str, str]]:
        """Return the calls of a turn, as tool and text. After an approval there are none: the model answers."""
        has_results = any(one["type"] == "function_call_output" for one in body["input"])
        if number >= len(self.turns) or (number == 0 and has_results):
            return []
        return [(name, f"{number}/{place}") for place, name in enumerate(self.turns[number])]


class ToolWorld:
    """The tools, outside of all servers, and what is known of their calls.

    Law 10: no call is made twice, unless its tool says that this does no harm, or the user has approved it; and none by
    a server that does not have the response. One key begins one response. Law 11: no call is lost in silence: each that
    went out is in the response, with its result, or as one of which nobody knows what came of it. Then the user is
    asked. Every server shows the same events.
    """

    def __init__(self, simulation: Simulation, host: RedisHost, *, may_lose: bool) -> None:
        self.may_lose = may_lose
        self.plan = _Plan([])
        self.calls = Counter[str]()  # that went out, by their texts
        self.allowed = Counter[str]()  # again, by the user
        self.simulation = simulation
        self._host = host

    def draw(self) -> None:
        """Let chance say what the model does."""
        random = self.simulation.random
        turns = [[_UNSAFE], [_SAFE], [_UNSAFE, _SAFE], [_UNSAFE, _UNSAFE]]
        self.plan = _Plan([random.choice(turns) for _ in range(random.choice((1, 2, 4)))])

    async def open(self, server: Server, table: Table, group: asyncio.TaskGroup) -> Loops:
        """Raises: StorageError."""
        model, tool_servers = _Model(server, self), _Tools(server, self)
        loops = Loops(model, Journal(table), tool_servers, CallLimits(_CALL_S, 1000), 16, group)
        await loops.start()
        return loops

    def goes_out(self, server: Server, begun: Begun, name: str, text: str) -> None:
        self.calls[text] += 1
        if self.may_lose:
            return
        most = (_MOST_SAFE if name == _SAFE else 1) * (1 + self.allowed[text])
        if self.calls[text] > most:
            self.simulation.failures.append(f"law 10: the call {text} went out {self.calls[text]} times")
        (holders,) = self._host.model.keys_like(b"*:mcp:holders") or [b""]
        holder, epoch = self._host.model.hget(holders, row_key(BEGUN, ANONYMOUS, begun.loop_id)), server.store.epoch
        if int(holder or 0) != epoch:
            self.simulation.failures.append(f"law 10: epoch {epoch} makes the call {text}, which {holder!r} has")

    def check(self, response: JsonBody, texts: set[str]) -> None:
        """Compare a response that has ended with the calls. `texts` gets those that it shows."""
        calls = [item for item in response["output"] if item["type"] == "mcp_call"]
        asks = [_text(item) for item in response["output"] if item["type"] == "mcp_approval_request"]
        unknown: list[str] = []
        for item in calls:
            text, count = _text(item), self.calls[_text(item)]
            texts.add(text)
            if item["status"] == "completed" and (item["output"] != text or not count):
                raise Violation(f"law 11: {text} has the result {item['output']} after {count} calls")
            if item["status"] == "failed" and item["error"]["code"] == _UNKNOWN:
                unknown.append(text)
            elif item["status"] == "failed" and not unknown:
                raise Violation(f"law 11: {text} was not called: {item['error']}")
        if response["status"] == "completed" and unknown != asks:
            raise Violation(f"law 11: nobody knows what came of {unknown}, and the user is asked about {asks}")


def _text(item: JsonBody) -> str:
    """Return the text of a call. One that the model has not ended has none."""
    return str(msgspec.json.decode(item["arguments"])["text"]) if item["arguments"] else ""


class _Model(served.Server):
    """What tool loops need of a server: turns of the model, and their streams."""

    def __init__(self, server: Server, world: ToolWorld) -> None:
        self.store = server.store
        self.settings = Settings()
        self._server = server
        self._world = world

    @property
    def model_names(self) -> frozenset[str]:
        return frozenset({MODEL})

    def principal_of(self, sender: Sender) -> Principal:
        return Principal(sender.owner)

    @asynccontextmanager
    async def begin(
        self,
        sender: Sender,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        logs: list[StreamLog],
        found_only: bool = False,
    ) -> AsyncIterator[InnerStream]:
        key = headers["idempotency-key"]
        loop_id, _, number = key.rpartition("-")
        request = GenerateRequest(
            model=MODEL,
            prompts=((tuple(key.encode()),),),
            sampling=Sampling(temperature=0.0, max_tokens=5, seed=1),
            on_disconnect="detach",
            linger_s=20.0,
        )
        claim = Claim(key, b"turn")
        try:
            log = await self.store.recall(ANONYMOUS, claim) if found_only else None
            if log is None and found_only:
                raise UnknownStream("There is no such stream.")
            log = log or await self._server.recall_or_create(request, claim)
        except TailraceError as error:
            yield InnerStream(error.status, {"retry-after": "1"}, _refusal(error))
            return
        logs.append(log)
        planned = self._world.plan.calls(int(number), msgspec.json.decode(body))
        calls = [(name, f"{loop_id}/{text}") for name, text in planned]
        async with aclosing(_events(log, calls, logs)) as parts:
            yield InnerStream(200, {}, parts)

    async def ask(
        self, sender: Sender, path: str, body: bytes, *, headers: Mapping[str, str], logs: list[StreamLog]
    ) -> InnerAnswer:
        raise AssertionError("these loops have no conversation")


async def _refusal(error: TailraceError) -> AsyncIterator[bytes]:
    yield msgspec.json.encode({"error": {"code": error.code, "message": error.message}})


async def _events(log: StreamLog, calls: list[tuple[str, str]], logs: list[StreamLog]) -> AsyncGenerator[bytes, None]:
    """Yield a turn as the wire of Responses does: its calls begin with its first token, and end with its last."""
    numbers = itertools.count()

    def event(kind: str, **fields: object) -> bytes:
        encoded = msgspec.json.encode({"type": kind, "sequence_number": next(numbers), **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded)

    items: list[JsonBody] = [
        {
            "type": "function_call",
            "id": f"fc_{place}",
            "call_id": f"call_{text}",
            "namespace": _LABEL,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        for place, (name, text) in enumerate(calls)
    ] or [{"type": "message", "id": "m", "status": "in_progress", "content": []}]
    has_begun = False
    with Reader(log) as reader:
        while True:
            match await reader.next():
                case list():
                    for place, item in enumerate(items) if not has_begun else ():
                        yield event("response.output_item.added", output_index=place, item=item)
                    has_begun = True
                case End(status="done"):
                    for place, item in enumerate(items):
                        arguments = msgspec.json.encode({"text": calls[place][1]}).decode() if calls else ""
                        ended = item | {"status": "completed", "arguments": arguments}
                        yield event("response.output_item.done", output_index=place, item=ended)
                    yield event("response.completed", response={"status": "completed", "error": None})
                    return
                case End() as end:
                    failed = {"status": "failed", "error": {"code": end.status, "message": ""}}
                    yield event("response.failed", response=failed)
                    return
                case Released():
                    logs.remove(log)  # it goes on elsewhere
                    return


class _Tools(ToolServers):
    """The tools of the world, as a server reaches them."""

    def __init__(self, server: Server, world: ToolWorld) -> None:
        self.connections = McpConnections()
        self._to = server
        self._world = world

    def labels(self, owner: str, key_id: str) -> list[str]:
        return [_LABEL]

    def lacks(self, needs: Needs) -> str:
        return ""

    async def tools_of(self, owner: str, key_id: str, tool: McpTool) -> list[DescribedTool]:
        return [msgspec.structs.replace(one, needs_approval=tool.needs_approval(one)) for one in _TOOLS]

    def connect(self, begun: Begun, headers: Mapping[str, Mapping[str, str]]) -> Connect:
        def connect(label: str, tool: str) -> AbstractAsyncContextManager[McpConnection]:
            return contextlib.nullcontext(_Connection(self._to, self._world, begun))

        return connect


class _Connection(McpConnection):
    def __init__(self, server: Server, world: ToolWorld, begun: Begun) -> None:
        self._server = server
        self._world = world
        self._begun = begun

    async def ready(self) -> Any:  # Any: nobody uses the client
        """It is connected at once."""

    async def call(self, item_id: str, name: str, arguments: JsonBody, *, limit_s: float, most_bytes: int) -> Called:
        process, simulation = self._server.process, self._world.simulation
        answered = process.create_future()

        def answer() -> None:
            if not answered.done() and not process.is_dead:
                answered.set_result(None)

        self._world.goes_out(self._server, self._begun, name, arguments["text"])
        if simulation.random.random() < 0.95:
            simulation.after(simulation.random.choice((0.01, 0.3, 2.0)), answer)
        try:
            async with asyncio.timeout(limit_s):
                await answered
        except TimeoutError:
            return unknown_outcome(item_id, "The tool did not answer.")
        return Called(item_id=item_id, output=arguments["text"])


class ToolClient:
    """Begins a response at any server, follows it at others, and approves what nobody knows the outcome of."""

    def __init__(
        self,
        simulation: Simulation,
        process: Process,
        world: ToolWorld,
        servers: Callable[[], Sequence[Server]],
        may_fail: Callable[[], bool],
    ) -> None:
        self.stream_id = "a tool loop"
        self.doing = "nothing"
        self._simulation = simulation
        self._process = process
        self._world = world
        self._servers = servers
        self._may_fail = may_fail  # whether a response may end with an error
        self._begun: dict[str, str] = {}  # responses, by their Idempotency-Keys
        self._seen: dict[str, list[str]] = {}  # their events
        self._cancels_after = simulation.random.choice((0, 0, 0, 0, 3))  # questions; 0: never

    async def run(self) -> None:
        body: JsonBody = {"model": MODEL, "input": "Go.", "background": True, "tools": [_TOOL]}
        texts: set[str] = set()
        loop_id = await self._begin("first", body)
        number = 0
        while loop_id is not None and (response := await self._ended(loop_id)) is not None:
            if not self._world.may_lose:
                self._check_status(response)
                self._world.check(response, texts)
            asks = [item for item in response["output"] if item["type"] == "mcp_approval_request"]
            if not asks:
                break
            (ask,) = asks
            number += 1
            self._world.allowed[_text(ask)] += 1
            answer = {"type": "mcp_approval_response", "approval_request_id": ask["id"], "approve": True}
            more = {"input": [answer], "previous_response_id": response["id"]}
            loop_id = await self._begin(f"approval {number}", body | more)
        if not self._world.may_lose and not set(self._world.calls) <= texts:
            raise Violation(f"law 11: {set(self._world.calls) - texts} were called, and no response shows them")
        self.doing = "nothing any more"

    def _check_status(self, response: JsonBody) -> None:
        may_end = {"completed"} | ({"cancelled"} if self._cancels_after else set())
        may_end |= {"failed"} if self._may_fail() else set()
        if response["status"] not in may_end:
            raise Violation(f"law 11: {response['id']} has ended as {response['status']}: {response['error']}")

    async def _begin(self, key: str, body: JsonBody) -> str | None:
        """Begin a response, at two servers at once. None: Redis has lost it."""
        asking = [self._begin_at_one(key, body) for _ in range(self._simulation.random.choice((1, 1, 2)))]
        return (await asyncio.gather(*asking))[0]

    async def _begin_at_one(self, key: str, body: JsonBody) -> str | None:
        async def begin(loops: Loops) -> str:
            scope = {"type": "http", "headers": [(b"idempotency-key", key.encode())], "client": ("127.0.0.1", 1)}
            return (await loops.begin(loops.asking(Request(scope), key), body)).begun.loop_id

        while True:
            self.doing = f"beginning {key}"
            message = await self._ask(begin)
            if isinstance(message, str):
                if self._begun.setdefault(key, message) != message and not self._world.may_lose:
                    raise Violation(f"law 10: one key has begun {message} and {self._begun[key]}")
                return message
            if self._world.may_lose and isinstance(message, TailraceError) and not isinstance(message, StorageError):
                return None

    async def _ended(self, loop_id: str) -> JsonBody | None:
        """Return a response at its end. None: Redis has lost it."""
        num_asked = 0
        while True:
            self.doing = f"following {loop_id}"
            num_asked += 1
            message = await self._ask(partial(_state, loop_id=loop_id, cancels=num_asked == self._cancels_after))
            if isinstance(message, UnknownLoop):
                if self._world.may_lose:
                    return None
                raise Violation(f"law 11: {loop_id} is unknown")
            if isinstance(message, str):
                response, events = msgspec.json.decode(message)
                self._check_events(loop_id, events)
                if response is not None:
                    return dict(response)
            await asyncio.sleep(self._simulation.random.uniform(0.2, 2.0))

    def _check_events(self, loop_id: str, events: list[str]) -> None:
        seen = self._seen.setdefault(loop_id, [])
        for number, (one, other) in enumerate(zip(seen, events, strict=False)):
            if one != other and not self._world.may_lose:
                raise Violation(f"law 11: event {number} of {loop_id} is {other} at one server, and was {one}")
        if len(events) > len(seen):
            self._seen[loop_id] = events

    async def _ask(self, work: Callable[[Loops], Any]) -> Message:  # Any: a coroutine
        while not (servers := self._servers()):
            await asyncio.sleep(0.05)
        answer = self._simulation.random.choice(servers).ask_tools(self._process, work)
        message: Message = None
        with suppress(TimeoutError):
            async with asyncio.timeout(20.0):
                message = await answer.take()
        answer.cut()
        if not isinstance(message, str):
            await asyncio.sleep(self._simulation.random.uniform(0.1, 1.0))
        return message


async def _state(loops: Loops, *, loop_id: str, cancels: bool) -> str:
    """Return a response that has ended, or null, and its events so far, as JSON."""
    loop = await loops.find(ANONYMOUS, loop_id)
    if cancels:
        loop = await loops.cancel(loop)
    response = loop.response() if loop.has_ended else None
    return msgspec.json.encode([response, [event.body.decode() for event in loop.output.events]]).decode()
