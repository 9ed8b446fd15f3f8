"""The server dies at each point around the calls of tools, and another one continues over the same journal.

A death here is the end of all that this process does for the response: what is not in the journal is gone. The calls
go to a real MCP server, which counts them; the turns of the model are real streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from starlette.requests import Request
from tests.api.keyed import House, serving_with_keys
from tests.plugins.tool_loop.tool_servers import COUNTING, Json, Tools
from tests.waiting import LONG_S

pytest.importorskip("mcp")

from tailrace.server import LocalNotes, LocalTable, Note, row_key
from tailrace_plugins.tool_loop.call_maker import CallLimits
from tailrace_plugins.tool_loop.journal import Journal
from tailrace_plugins.tool_loop.loop import Loop
from tailrace_plugins.tool_loop.loop_keys import CLAIMS
from tailrace_plugins.tool_loop.loops import Loops
from tailrace_plugins.tool_loop.servers_file import McpServer
from tailrace_plugins.tool_loop.tool_servers import ToolServers

CALLS: list[list[tuple[str, Json]]] = [
    [("count__append", {"text": "first"}), ("count__look", {"text": "second"})],
    [("count__append", {"text": "third"}), ("count__put", {"text": "fourth"})],
    [("count__append", {"text": "fifth"})],
]
SAFE = ("look", "put")
BODY: Json = {
    "model": "scripted",
    "input": "Go.",
    "background": True,
    "tools": [{"type": "mcp", "server_label": "count", "require_approval": "never"}],
}
_MANY = 250  # with 1,000, nothing else was found
_UNKNOWN = -32000  # the code of a call whose outcome is not known
_NUM_WRITES = 2 + 4 + 2 * 5 + 1  # the request, the turns of the model, two for each call, and the end


class Died(asyncio.CancelledError):
    """The process is gone: what runs in it ends, and nothing handles this."""


class MortalNotes(LocalNotes):
    """Notes in memory. The process dies at write number `dies_at`, before or after it is on disk."""

    def __init__(self) -> None:
        super().__init__("mcp")
        self._inner = LocalNotes.in_memory("mcp")
        self.num_writes = 0
        self.dies_at: int | None = None
        self.is_kept_first = False  # whether that write is on disk
        self.on_death: Callable[[], None] = lambda: None
        self.is_dead = False

    def die(self) -> None:
        self.is_dead = True
        self.on_death()

    def _write(self, write: Callable[[], None]) -> None:
        if self.is_dead:
            raise Died
        self.num_writes += 1
        if self.num_writes != self.dies_at:
            write()
            return
        if self.is_kept_first:
            write()
        self.die()
        raise Died

    def read(self, prefix: bytes = b"") -> Iterator[Note]:
        return self._inner.read(prefix)

    def sizes(self, prefix: bytes = b"", *, after: bytes | None = None, most: int = -1) -> dict[bytes, int]:
        return self._inner.sizes(prefix, after=after, most=most)

    def get(self, key: bytes) -> bytes | None:
        return self._inner.get(key)

    def erase(self, *keys: bytes) -> None:
        self._write(lambda: self._inner.erase(*keys))

    def change(self, notes: Mapping[bytes, bytes], erased: Iterable[bytes]) -> None:
        gone = list(erased)
        self._write(lambda: self._inner.change(notes, gone))


class Case:
    """A house with the counting MCP server, of which servers of one journal follow each other."""

    def __init__(self, house: House, tools: Tools) -> None:
        self.house = house
        self.tools = tools
        self.specs = {"count": McpServer("count", (sys.executable, str(COUNTING), str(tools.counts)), {})}

    @contextlib.asynccontextmanager
    async def life(self, notes: MortalNotes) -> AsyncIterator[Loops]:
        """Context of a process with this journal, which ends when the journal says so."""
        server = self.house.server()
        self.house.build_app(server=server)
        async with asyncio.TaskGroup() as group:
            journal = Journal(await LocalTable.open(notes))
            tool_servers = ToolServers(server, self.specs, frozenset())
            loops = Loops(server, journal, tool_servers, CallLimits(30.0, 1000), 16, group)
            try:
                await loops.start()
                yield loops
            finally:
                notes.is_dead = True
                await loops.close()


def request_with(headers: dict[str, str]) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "client": ("127.0.0.1", 1)})


async def begin(loops: Loops, request: Request, body: Json) -> Loop:
    return await loops.begin(loops.asking(request, request.headers.get("idempotency-key")), body)


@dataclass(frozen=True)
class Death:
    """At a write, before or after it is on disk, or as soon as there are so many events."""

    at_write: int = 0
    is_kept: bool = False
    at_events: int = 0


async def _run(case: Case, deaths: Sequence[Death]) -> tuple[Loop, int, MortalNotes]:
    """Run a response through deaths, one in each life. Returns it at its end, and how many deaths came."""
    notes, num_deaths = MortalNotes(), 0
    while True:
        death = deaths[num_deaths] if num_deaths < len(deaths) else Death()
        notes.num_writes, notes.is_dead = 0, False
        notes.dies_at, notes.is_kept_first = death.at_write or None, death.is_kept
        dead = asyncio.Event()
        notes.on_death = dead.set
        async with case.life(notes) as loops:
            with contextlib.suppress(Died):
                known = notes.get(row_key(CLAIMS, "anonymous", hashlib.sha256(b"go").hexdigest()))
                if known is None:
                    loop = await begin(loops, request_with({"idempotency-key": "go"}), BODY)
                else:
                    loop = await loops.find("anonymous", known[:36].decode())
                await _until_end_or_death(loop, death, notes, dead)
                if not dead.is_set():
                    return loop, num_deaths, notes
        num_deaths += 1


async def _until_end_or_death(loop: Loop, death: Death, notes: MortalNotes, dead: asyncio.Event) -> None:
    async def watch() -> None:
        while death.at_events > len(loop.output.events) and not loop.has_ended:
            await loop.wait(len(loop.output.events))
        if death.at_events and not loop.has_ended:
            notes.die()
        await loop.ended()

    watching, dying = asyncio.ensure_future(watch()), asyncio.ensure_future(dead.wait())
    async with asyncio.timeout(LONG_S):
        await asyncio.wait((watching, dying), return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    dying.cancel()


def _check(case: Case, loop: Loop) -> str:
    """Compare a response with the calls that were counted. Returns its outcome."""
    lines = case.tools.counts.read_text().splitlines() if case.tools.counts.exists() else []
    counted = Counter(json.loads(line)[1]["text"] for line in lines)
    response = loop.response()
    calls = [item for item in response["output"] if item["type"] == "mcp_call"]
    asks = [
        json.loads(item["arguments"])["text"] for item in response["output"] if item["type"] == "mcp_approval_request"
    ]
    assert response["status"] == "completed"
    assert [json.loads(event.body)["sequence_number"] for event in loop.output.events] == list(
        range(len(loop.output.events))
    )
    unknown = []
    for item in calls:
        text = json.loads(item["arguments"])["text"]
        is_safe = item["name"] in SAFE
        if item["status"] == "completed":
            assert counted[text] >= 1 if is_safe else counted[text] == 1, item
        elif item["error"]["code"] == _UNKNOWN:
            unknown.append(text)
            assert not is_safe
            assert counted[text] <= 1
        else:
            assert unknown, item  # the rest is not called, and says so
            assert not counted[text]
    assert asks == unknown  # the user is asked
    texts = {json.loads(item["arguments"])["text"] for item in calls}
    assert set(counted) <= texts  # no call that the response does not show
    if not unknown:
        assert [item["status"] for item in calls] == ["completed"] * 5
        assert response["output"][-1]["type"] == "message"
    return "unknown" if unknown else "done"


@contextlib.asynccontextmanager
async def cases(path: Path) -> AsyncIterator[Case]:
    tools = Tools(path, CALLS)
    async with serving_with_keys(path, tools.source) as house:
        yield Case(house, tools)


async def _survived(case: Case, *deaths: Death) -> tuple[str, int]:
    case.tools.counts.unlink(missing_ok=True)
    loop, num_deaths, _ = await _run(case, deaths)
    return _check(case, loop), num_deaths


async def test_a_life_without_a_death(tmp_path: Path) -> None:
    async with cases(tmp_path) as case:
        loop, _, notes = await _run(case, ())
        assert _check(case, loop) == "done"
        assert case.tools.counted() == ["append", "look", "append", "put", "append"]
        assert notes.num_writes == _NUM_WRITES


@pytest.mark.deep
async def test_a_death_at_each_write(tmp_path: Path) -> None:
    async with cases(tmp_path) as case:
        outcomes = Counter[str]()
        for number in range(1, _NUM_WRITES + 1):
            for is_kept in (False, True):
                outcome, num_deaths = await _survived(case, Death(number, is_kept))
                assert num_deaths == 1
                outcomes[outcome] += 1
        # Of the three calls that may not be repeated, each is unknown where the process died after its announcement.
        assert outcomes["unknown"] == 3 * 2


@pytest.mark.deep
@pytest.mark.timeout(1800)
async def test_many_deaths(tmp_path: Path) -> None:
    random = Random(1)
    async with cases(tmp_path) as case:
        num_deaths = 0
        outcomes = Counter[str]()
        while num_deaths < _MANY:
            deaths = [_any_death(random) for _ in range(random.randint(1, 8))]
            outcome, num_here = await _survived(case, *deaths)
            num_deaths += num_here
            outcomes[outcome] += 1
        assert min(outcomes["done"], outcomes["unknown"]) > 10


def _any_death(random: Random) -> Death:
    if random.random() < 0.5:
        return Death(at_write=random.randint(1, 8), is_kept=random.random() < 0.5)
    return Death(at_events=random.randint(1, 120))
