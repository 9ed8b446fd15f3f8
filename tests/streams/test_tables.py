"""Tables of extensions: in memory, on disk, and in Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.testing.redis_server import OwnRedis, own_redis
from tests.waiting import wait_until

from tailrace.errors import LeaseLost
from tailrace.streams.memory_store import MemoryLogStore
from tailrace.streams.sqlite_store import open_sqlite
from tailrace.streams.tables import PAGE_BYTES, Table, TableLease
from tailrace_outer.redis.redis_store import open_redis

Open = Callable[[Path], AbstractAsyncContextManager[Table]]


@contextlib.asynccontextmanager
async def _in_memory(path: Path) -> AsyncIterator[Table]:
    with contextlib.closing(MemoryLogStore()) as store:
        yield await store.table_of("parrot")


@contextlib.asynccontextmanager
async def _on_disk(path: Path) -> AsyncIterator[Table]:
    async with open_sqlite(path) as store:
        yield await store.table_of("parrot")


@contextlib.asynccontextmanager
async def _encrypted(path: Path) -> AsyncIterator[Table]:
    async with open_sqlite(path, journal_key=b"k" * 32) as store:
        yield await store.table_of("parrot")


@contextlib.asynccontextmanager
async def _in_redis(path: Path) -> AsyncIterator[Table]:
    with own_redis(path / "redis") as (url, _):
        async with open_redis(url, journal_key=b"k" * 32) as store:
            yield await store.table_of("parrot")


everywhere = pytest.mark.parametrize("open_table", [_in_memory, _on_disk, _encrypted, _in_redis])


@everywhere
async def test_rows_come_in_the_order_of_their_keys(open_table: Open, tmp_path: Path) -> None:
    async with open_table(tmp_path) as table:
        await table.change({b"a/me/3": b"333", b"a/me/1": b"1", b"a/you/2": b"22", b"b/me/1": b"", b"a/me/2": b"2"})
        assert await table.get(b"a/me/1", b"a/me/", b"b/me/1") == [b"1", None, b""]
        assert await table.page(b"a/me/", most=2) == {b"a/me/1": b"1", b"a/me/2": b"2"}
        assert await table.page(b"a/me/", after=b"a/me/2", most=2) == {b"a/me/3": b"333"}
        assert await table.page(b"a/me/", after=b"a/me/3", most=2) == {}
        assert list((await table.sizes(b"a/", most=9)).items()) == [
            (b"a/me/1", 1), (b"a/me/2", 1), (b"a/me/3", 3), (b"a/you/2", 2)
        ]  # fmt: skip


@everywhere
async def test_pages_are_bounded(open_table: Open, tmp_path: Path) -> None:
    async with open_table(tmp_path) as table:
        await table.change({b"a/me/%d" % number: bytes(PAGE_BYTES // 2) for number in range(5)})
        assert list(await table.page(b"a/", most=9)) == [b"a/me/0", b"a/me/1"]
        assert len(await table.sizes(b"a/", most=9)) == 5


@everywhere
async def test_bytes_are_counted_by_account(open_table: Open, tmp_path: Path) -> None:
    calls: list[int] = []
    async with open_table(tmp_path) as table:
        table.listen(lambda: calls.append(table.used()))
        await table.change({b"a/me/1": b"12345", b"b/me/1": b"123", b"a/you/1": b"12"})
        assert (table.used(b"me"), table.used(b"you"), table.used()) == (8, 2, 10)
        await table.change({b"a/me/1": b"1"})
        assert (table.used(b"me"), table.used(b"nobody"), table.used()) == (4, 0, 6)
        calls.clear()
        await table.change({}, [b"a/me/1", b"b/me/1", b"b/me/2"])
        await table.change({}, [b"a/me/1"])
        assert (table.used(b"me"), table.used()) == (0, 2)
        assert calls[0] == 2


@everywhere
async def test_a_lease_ends_with_its_row(open_table: Open, tmp_path: Path) -> None:
    async with open_table(tmp_path) as table:
        assert await table.take(b"a/me/1") is None
        await table.change({b"a/me/1": b"one"})
        lease = await table.take(b"a/me/1")
        assert lease is not None
        assert await table.take(b"a/me/1") == lease
        await table.change({b"a/me/2": b"two"}, lease=lease)
        await table.change({}, [b"a/me/1"])
        with pytest.raises(LeaseLost):
            await table.change({b"a/me/3": b"three"}, [b"a/me/2"], lease=lease)
        assert await table.get(b"a/me/2", b"a/me/3") == [b"two", None]


@pytest.mark.parametrize("open_table", [_on_disk, _encrypted])
async def test_the_next_process_counts_what_is_there(open_table: Open, tmp_path: Path) -> None:
    async with open_table(tmp_path) as table:
        await table.change({b"a/me/1": b"12345", b"a/you/1": b"12"})
    async with open_table(tmp_path) as table:
        assert (table.used(b"me"), table.used()) == (5, 7)


@everywhere
async def test_rows_that_may_not_be_there(open_table: Open, tmp_path: Path) -> None:
    async with open_table(tmp_path) as table:
        assert await table.change({b"a/me/1": b"one"}, absent=[b"a/me/1", b"a/me/2"])
        lease = await table.take(b"a/me/1")
        assert lease is not None
        assert not await table.change({b"a/me/2": b"two"}, [b"a/me/1"], lease=lease, absent=[b"a/me/2", b"a/me/1"])
        assert await table.get(b"a/me/1", b"a/me/2") == [b"one", None]
        assert await table.change({b"a/me/2": b"two"}, [b"a/me/1"], absent=[b"a/me/2"])
        assert await table.get(b"a/me/1", b"a/me/2") == [None, b"two"]


@everywhere
async def test_who_has_a_lease(open_table: Open, tmp_path: Path) -> None:
    async with open_table(tmp_path) as table:
        await table.change({b"a/me/1": b"one"})
        assert not await table.is_held(b"a/me/1")
        lease = await table.take(b"a/me/1")
        assert lease is not None
        assert await table.is_held(b"a/me/1")
        with pytest.raises(LeaseLost):
            table.is_certain(TableLease(lease.key, lease.holder - 1))
        await table.change({}, [b"a/me/1"])
        assert not await table.is_held(b"a/me/1")


async def test_a_server_that_was_cut_off_is_not_certain_of_its_lease(tmp_path: Path) -> None:
    """It is again, when it has renewed its own. Another server cannot have taken what it is certain of."""
    with own_redis(tmp_path / "redis") as (url, redis):
        async with open_redis(url, lease_s=2.0) as store:
            table = await store.table_of("parrot")
            await table.change({b"a/me/1": b"one"})
            lease = await table.take(b"a/me/1")
            assert lease is not None
            assert table.is_certain(lease)
            redis.stop()
            await wait_until(lambda: not table.is_certain(lease))
            redis.resume()
            await wait_until(lambda: table.is_certain(lease))
            _declare_dead(redis, lease.holder)
            with pytest.raises(LeaseLost):
                await wait_until(lambda: table.is_certain(lease) and False)


async def test_tables_are_opened_while_others_are_read(tmp_path: Path) -> None:
    """A server opens those of its extensions when it runs already."""
    with own_redis(tmp_path / "redis") as (url, _):
        async with open_redis(url, lease_s=1.0) as store:
            opening: list[asyncio.Task[object]] = []
            tables = [await store.table_of(name) for name in ("a", "b", "c")]
            for table in tables:
                table.listen(lambda: opening.append(asyncio.create_task(store.table_of(f"{len(opening)}"))))
            await wait_until(lambda: len(opening) > 9)
            await asyncio.gather(*opening)


async def test_servers_share_a_table(tmp_path: Path) -> None:
    with own_redis(tmp_path / "redis") as (url, redis):
        async with open_redis(url, lease_s=2.0) as first, open_redis(url, lease_s=2.0) as second:
            ours, theirs = await first.table_of("parrot"), await second.table_of("parrot")
            await ours.change({b"a/me/1": b"one"})
            assert await theirs.get(b"a/me/1") == [b"one"]
            lease = await ours.take(b"a/me/1")
            assert lease is not None
            assert await theirs.take(b"a/me/1") is None
            _declare_dead(redis, lease.holder)
            taken = await theirs.take(b"a/me/1")
            assert taken is not None
            assert taken.holder != lease.holder
            with pytest.raises(LeaseLost):
                await ours.change({b"a/me/1": b"late"}, lease=lease)
            await theirs.change({b"a/me/1": b"two"}, lease=taken)
            assert await ours.get(b"a/me/1") == [b"two"]


def _declare_dead(redis: OwnRedis, epoch: int) -> None:
    with redis.client() as client:
        client.set(f"tailrace:{{0}}:lease:{epoch}", "dead")
