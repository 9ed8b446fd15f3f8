"""Responses with MCP tools of two servers that share a Redis, when they end or go while another server reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message
from tests.api.keyed import serving_with_keys
from tests.plugins.tool_loop.test_tool_deaths import BODY, CALLS, Case, begin, request_with
from tests.plugins.tool_loop.tool_servers import Json, Tools
from tests.testing.redis_server import delete_keys, prefix_of, shared_url
from tests.waiting import LONG_S, turn

pytest.importorskip("mcp")

from tailrace.errors import TailraceError
from tailrace.server import InnerStream, Sender, Server, Table, row_key
from tailrace.types import ANONYMOUS
from tailrace_outer.redis.redis_store import open_redis
from tailrace_outer.redis.shared_table import RedisTable
from tailrace_plugins.tool_loop.call_maker import CallLimits
from tailrace_plugins.tool_loop.journal import Journal, new_loop_id
from tailrace_plugins.tool_loop.loop import Loop
from tailrace_plugins.tool_loop.loop_keys import READ, step_key
from tailrace_plugins.tool_loop.loop_rows import Begun, Needs
from tailrace_plugins.tool_loop.loops import Loops
from tailrace_plugins.tool_loop.mcp_errors import NotBegun, UnknownLoop
from tailrace_plugins.tool_loop.response_answers import begun_answer, has_begun
from tailrace_plugins.tool_loop.tool_servers import ToolServers

_SLOW = "tokens_per_s=0.001"  # so that a turn of the model does not end by itself
_LEASE_S = 60.0  # nobody takes the other one for dead


Calls: TypeAlias = list[list[tuple[str, Json]]]


@dataclass(frozen=True)
class Pair:
    """Two servers. They have one model, whose streams are not shared."""

    model: Server  # as the first one asks it
    first: Loops
    second: Loops
    tables: list[Table]
    url: str  # of their Redis


@contextlib.asynccontextmanager
async def _pair(path: Path, *, is_slow: bool = True, calls: Calls = CALLS) -> AsyncIterator[Pair]:
    url, prefix = shared_url(), prefix_of(path)
    tools = Tools(path, calls)
    source = tools.source.replace("tokens_per_s=0", _SLOW) if is_slow else tools.source
    try:
        async with serving_with_keys(path, source) as house, contextlib.AsyncExitStack() as stack:
            case = Case(house, tools)
            models = [house.server(), house.server()]
            tables: list[Table] = []
            for _ in models:
                store = await stack.enter_async_context(open_redis(f"{url}?prefix={prefix}", lease_s=_LEASE_S))
                tables.append(await store.table_of("mcp"))
            first, second = [
                await stack.enter_async_context(_loops(case, model, table))
                for model, table in zip(models, tables, strict=True)
            ]
            yield Pair(models[0], first, second, tables, f"{url}?prefix={prefix}")
    finally:
        delete_keys(prefix)


@contextlib.asynccontextmanager
async def _loops(case: Case, server: Server, table: Table) -> AsyncIterator[Loops]:
    case.house.build_app(server=server)
    async with asyncio.TaskGroup() as group:
        tool_servers = ToolServers(server, case.specs, frozenset())
        loops = Loops(server, Journal(table), tool_servers, CallLimits(30.0, 1000), 16, group)
        try:
            await loops.start()
            yield loops
        finally:
            await loops.close()


async def _found(loops: Loops, loop: Loop) -> Loop:
    return await loops.find(ANONYMOUS, loop.begun.loop_id)


async def test_a_reader_learns_that_a_response_was_deleted_elsewhere(tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        ours = await begin(pair.first, request_with({}), BODY)
        theirs = await _found(pair.second, ours)
        with theirs.reading():
            await pair.first.delete(ours)
            await theirs.ended()
        assert theirs.is_lost
        with pytest.raises(UnknownLoop):
            await theirs.again()


async def test_a_reader_learns_that_all_responses_of_its_owner_are_forgotten(tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        theirs = await _found(pair.second, await begin(pair.first, request_with({}), BODY))
        with theirs.reading():
            await pair.first.forget(ANONYMOUS)
            await theirs.ended()
        assert theirs.is_lost


async def test_a_reader_of_a_response_that_is_not_stored_does_not_wait_after_its_end(tmp_path: Path) -> None:
    """Its server deletes it as soon as it has ended, perhaps before others have read the end."""
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        ours = await begin(pair.first, request_with({}), BODY | {"store": False})
        theirs = await _found(pair.second, ours)
        with theirs.reading():
            await pair.first.cancel(ours)
            await pair.first.leave(ours)
            await theirs.ended()
        assert theirs.is_over


async def test_a_cancel_ends_when_another_server_deletes_the_response(tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        ours = await begin(pair.first, request_with({}), BODY)
        theirs = await _found(pair.second, ours)
        cancelling = asyncio.ensure_future(pair.second.cancel(theirs))
        await turn()
        await pair.first.delete(ours)
        (result,) = await asyncio.gather(cancelling, return_exceptions=True)
        assert isinstance(result, UnknownLoop) or (isinstance(result, Loop) and result.has_ended)


async def test_a_request_with_a_key_does_not_wait_for_a_response_that_was_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is told to try again."""
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        both_wait = asyncio.Event()
        ask = pair.model.begin

        @contextlib.asynccontextmanager
        async def ask_late(*given: Any, **more: Any) -> AsyncIterator[InnerStream]:  # Any: as `begin` takes them
            await both_wait.wait()
            async with ask(*given, **more) as answer:
                yield answer

        monkeypatch.setattr(pair.model, "begin", ask_late)
        request, body = request_with({"idempotency-key": "go"}), BODY | {"model": "none", "background": False}
        ours = await begin(pair.first, request, body)
        first = asyncio.ensure_future(has_begun(ours))
        theirs = await begin(pair.second, request, body)
        assert theirs.begun.loop_id == ours.begun.loop_id
        second = asyncio.ensure_future(has_begun(theirs))
        await turn()
        both_wait.set()
        refused, told = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(refused, TailraceError)
        assert refused.status == 404
        assert isinstance(told, NotBegun)
        assert told.retry_after_s


async def test_a_cancel_that_is_interrupted_still_ends_the_response(tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        ours = await begin(pair.first, request_with({}), BODY)
        theirs = await _found(pair.second, ours)
        cancelling = asyncio.ensure_future(pair.first.cancel(ours))
        await turn()  # it waits for the response's task
        cancelling.cancel()
        with theirs.reading():
            await asyncio.wait((cancelling,))
            found = await _found(pair.first, ours)
            await asyncio.gather(found.ended(), theirs.ended())
        assert [one.response()["status"] for one in (ours, found, theirs)] == ["cancelled"] * 3


async def test_two_cancels_at_once_end_a_response_once(tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        ours = await begin(pair.first, request_with({}), BODY)
        await asyncio.gather(pair.first.cancel(ours), pair.first.cancel(ours))
        kinds = [event.kind for event in ours.output.events]
        assert len(kinds) == len(set(kinds))


async def test_a_response_that_is_found_while_it_begins_has_one_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are written, but its server does not know that yet."""
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        is_written, goes_on = asyncio.Event(), asyncio.Event()
        change = pair.tables[0].change

        async def change_slowly(rows: Mapping[bytes, bytes], *given: Any, **more: Any) -> bool:  # Any: as `change`
            is_changed = await change(rows, *given, **more)
            if more.get("absent"):
                is_written.set()
                await goes_on.wait()
            return is_changed

        monkeypatch.setattr(pair.tables[0], "change", change_slowly)
        request = request_with({"idempotency-key": "go"})
        beginning = asyncio.ensure_future(begin(pair.first, request, BODY))
        await is_written.wait()
        reading = await begin(pair.first, request, BODY)
        with reading.reading():
            goes_on.set()
            ours = await beginning
            assert reading is not ours
            await pair.first.cancel(ours)
            await reading.ended()
        assert await reading.again() is not reading
        assert reading.task is not None
        await asyncio.wait((reading.task,))


async def test_a_client_that_waits_for_a_response_learns_that_it_was_deleted_elsewhere(tmp_path: Path) -> None:
    """As if it had asked for it then. It is during a call."""
    calls: Calls = [[("count__append", {"text": "a", "sleep_s": 60})]]
    async with asyncio.timeout(LONG_S), _pair(tmp_path, is_slow=False, calls=calls) as pair:
        request, body = request_with({"idempotency-key": "go"}), BODY | {"background": False}
        ours = await begin(pair.first, request, body)
        with ours.reading():
            theirs = await begin(pair.second, request, body)
            answer = await begun_answer(theirs, Request(request.scope, _nothing), is_stream=False, heartbeat_s=0)
            waiting = asyncio.ensure_future(answer(request.scope, _nothing, _refuse))
            await turn()
            await pair.first.delete(ours)
            with pytest.raises(UnknownLoop):
                await waiting


async def _nothing() -> Message:
    message: Message = await asyncio.get_running_loop().create_future()
    return message


async def _refuse(message: Message) -> None:
    raise AssertionError(message)


async def test_readers_of_dead_servers_do_not_count(tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        begun = (await begin(pair.first, request_with({}), BODY)).begun
        journal = Journal(pair.tables[0])
        async with open_redis(pair.url, lease_s=_LEASE_S) as store:
            reading = Journal(await store.table_of("mcp"))
            await reading.begin_reading(begun)
            assert await journal.is_read(begun)
            await reading.end_reading(begun)
            assert not await journal.is_read(begun)
            await reading.begin_reading(begun)
        while await journal.is_read(begun):
            await turn()
        assert not await pair.tables[0].sizes(row_key(READ, ANONYMOUS, begun.loop_id), most=1)


async def test_a_server_does_not_count_itself_as_another_reader(tmp_path: Path) -> None:
    """It has read a response, and goes on with it after the death of its server."""
    url, prefix = shared_url(), prefix_of(tmp_path)
    try:
        async with asyncio.timeout(LONG_S), open_redis(f"{url}?prefix={prefix}", lease_s=_LEASE_S) as store:
            journal = Journal(await store.table_of("mcp"))
            begun = _begun()
            async with open_redis(f"{url}?prefix={prefix}", lease_s=_LEASE_S) as other:
                assert await Journal(await other.table_of("mcp")).begin(begun, b"", Needs(owner=ANONYMOUS))
                await journal.begin_reading(begun)
            kept = await journal.load(ANONYMOUS, begun.loop_id)
            assert kept is not None
            while not await journal.take(kept):
                await turn()
            assert not await journal.is_read(begun)
    finally:
        delete_keys(prefix)


async def test_a_response_that_has_lost_steps_is_over_when_its_server_has_gone(tmp_path: Path) -> None:
    """Redis has lost steps that it had confirmed, and the server wrote the next one. A repeated request does not begin
    the response once more: that would make its calls again."""
    async with asyncio.timeout(LONG_S), _pair(tmp_path) as pair:
        begun, table = msgspec.structs.replace(_begun(), claim="key"), pair.tables[0]
        async with open_redis(pair.url, lease_s=_LEASE_S) as store:
            gone = Journal(await store.table_of("mcp"))
            assert await gone.begin(begun, b"digest", Needs(owner=ANONYMOUS))
            await table.change({step_key(ANONYMOUS, begun.loop_id, 2): b""})
            assert await gone.load(ANONYMOUS, begun.loop_id) is None
            assert not await Journal(table).close_damaged(ANONYMOUS, begun.loop_id)
        assert isinstance(table, RedisTable)
        while begun.loop_id in await Journal(table).unfinished():
            await table.refresh()  # as after each tick: then the servers look
            await turn()
        assert await Journal(table).claimed(ANONYMOUS, "key") == (begun.loop_id, b"digest")
        with pytest.raises(UnknownLoop):
            await pair.first.find(ANONYMOUS, begun.loop_id)


def _begun() -> Begun:
    return Begun(
        loop_id=new_loop_id(),
        sender=Sender(ANONYMOUS),
        created_s=0,
        body={},
        echo={},
        said=[],
        previous=None,
        choice=None,
        own_tools=[],
        tools={},
        listed=[],
        urls={},
        with_secrets=[],
        decided=[],
        most_calls=1,
        is_background=True,
        is_stored=True,
        headers={},
    )
