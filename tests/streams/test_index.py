from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.streams.virtual_time import run

from tailrace.errors import IdempotencyConflict, StreamExpired, UnknownStream
from tailrace.streams import StreamLog, _index
from tailrace.streams._index import StreamIndex
from tailrace.types import Claim, End, Record, TextDelta, Usage, new_stream_id

END = End("done", Usage(1, 1))


def create(store: StreamIndex, claim: Claim | None = None) -> StreamLog:
    log = StreamLog(Record(new_stream_id(), 0.0, claim=claim))
    store.admit(log)
    return log


def finish(store: StreamIndex, log: StreamLog, text: str = "") -> None:
    if text:
        log.extend([TextDelta(text, (1,))])
    log.extend([END])
    store.finish(log)


def status(store: StreamIndex, log: StreamLog) -> int:
    """Return the HTTP status of a stream: 200, 404 or 410."""
    try:
        assert store.get(log.stream_id) is log
    except (UnknownStream, StreamExpired) as error:
        return error.status
    return 200


def scenario(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with virtual time."""

    def wrapped() -> None:
        async def body() -> None:
            await test()

        run(body())

    wrapped.__name__ = test.__name__
    return wrapped


@scenario
async def test_a_new_stream_is_found_by_its_id_only() -> None:
    kept = StreamIndex()
    one, other = create(kept), create(kept)
    assert kept.get(one.stream_id) is one
    assert one.stream_id != other.stream_id
    assert len(one.stream_id) == 22  # 128 bits
    assert len(kept) == 2
    with pytest.raises(UnknownStream):
        kept.get("never")


@scenario
async def test_a_finished_stream_is_kept_for_its_time_and_no_longer() -> None:
    kept = StreamIndex(retention_s=900.0)
    log = create(kept)
    assert kept.get(log.stream_id).expires_in_s is None
    await asyncio.sleep(10_000)
    assert status(kept, log) == 200  # running streams do not age
    finish(kept, log)
    assert log.expires_in_s == 900.0
    await asyncio.sleep(400)
    assert log.expires_in_s == pytest.approx(500.0)
    await asyncio.sleep(499)
    assert status(kept, log) == 200
    await asyncio.sleep(1.1)
    assert status(kept, log) == 410
    assert len(kept) == 0
    assert log.expires_in_s is None


@scenario
async def test_each_stream_has_its_own_time() -> None:
    kept = StreamIndex(retention_s=100.0)
    logs = []
    for _ in range(5):
        log = create(kept)
        finish(kept, log)
        logs.append(log)
        await asyncio.sleep(10)
    await asyncio.sleep(70.5)  # 120.5 since the first, 80.5 since the last
    assert [status(kept, log) for log in logs] == [410, 410, 410, 200, 200]
    await asyncio.sleep(10)
    assert [status(kept, log) for log in logs] == [410, 410, 410, 410, 200]
    await asyncio.sleep(1000)
    assert len(kept) == 0


@scenario
async def test_the_oldest_finished_streams_are_dropped_for_space() -> None:
    kept = StreamIndex(budget_bytes=5_000)
    running = create(kept)
    running.extend([TextDelta("x" * 100_000, (1,))])
    logs = [create(kept) for _ in range(5)]
    for log in logs:
        finish(kept, log, "x" * 1_000)
    # Each takes 1,400 bytes, so that three fit.
    assert [status(kept, log) for log in logs] == [410, 410, 200, 200, 200]
    assert status(kept, running) == 200


@scenario
async def test_a_stream_above_the_budget_can_be_read() -> None:
    kept = StreamIndex(budget_bytes=5_000)
    small, large = create(kept), create(kept)
    finish(kept, small)
    finish(kept, large, "x" * 100_000)
    assert (status(kept, small), status(kept, large)) == (410, 200)
    after = create(kept)
    finish(kept, after)
    assert (status(kept, large), status(kept, after)) == (410, 200)


@scenario
async def test_dropped_streams_do_not_affect_the_timer() -> None:
    kept = StreamIndex(retention_s=100.0, budget_bytes=3_000)
    first = create(kept)
    finish(kept, first, "x" * 1_000)
    await asyncio.sleep(50)
    second = create(kept)
    finish(kept, second, "x" * 2_000)
    assert (status(kept, first), status(kept, second)) == (410, 200)
    await asyncio.sleep(99)
    assert status(kept, second) == 200
    await asyncio.sleep(2)
    assert status(kept, second) == 410


@scenario
async def test_a_deleted_stream_is_gone_and_a_running_one_is_not_deleted() -> None:
    kept = StreamIndex()
    log = create(kept)
    kept.delete(log)
    assert status(kept, log) == 200
    finish(kept, log)
    kept.delete(log)
    assert status(kept, log) == 410
    kept.delete(log)


@scenario
async def test_a_key_finds_its_stream_until_it_expires() -> None:
    kept = StreamIndex(retention_s=100.0)
    assert kept.recall(Claim("key", b"body")) is None
    log = create(kept, Claim("key", b"body"))
    assert kept.recall(Claim("key", b"body")) is log
    assert kept.recall(Claim("other", b"body")) is None
    with pytest.raises(IdempotencyConflict) as caught:
        kept.recall(Claim("key", b"another body"))
    assert caught.value.status == 409
    finish(kept, log)
    await asyncio.sleep(99)
    assert kept.recall(Claim("key", b"body")) is log
    await asyncio.sleep(2)
    assert kept.recall(Claim("key", b"body")) is None
    assert kept.recall(Claim("key", b"another body")) is None
    again = create(kept, Claim("key", b"another body"))
    assert kept.recall(Claim("key", b"another body")) is again


@scenario
async def test_a_key_is_dropped_with_its_stream() -> None:
    kept = StreamIndex(budget_bytes=1_000)
    log = create(kept, Claim("key", b"body"))
    finish(kept, log, "x" * 500)
    finish(kept, create(kept), "x" * 500)
    assert kept.recall(Claim("key", b"body")) is None


@scenario
async def test_a_closed_store_has_no_timer() -> None:
    kept = StreamIndex(retention_s=10.0)
    log = create(kept)
    finish(kept, log)
    kept.close()
    kept.close()
    await asyncio.sleep(20)
    assert status(kept, log) == 200


def test_ids_of_expired_streams_are_dropped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index, "_MAX_TOMBSTONES", 3)

    async def body() -> None:
        kept = StreamIndex()
        logs = [create(kept) for _ in range(5)]
        for log in logs:
            finish(kept, log)
            kept.delete(log)
        assert [status(kept, log) for log in logs] == [404, 404, 410, 410, 410]

    run(body())


actions = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(0, 2_000)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("delete"), st.integers(0, 9)),
        st.tuples(st.just("sleep"), st.integers(1, 60)),
    ),
    max_size=40,
)


@settings(max_examples=examples(100), deadline=None)
@given(actions)
@example([("create", 2_000), ("finish", 0), ("create", 2_000), ("finish", 0), ("create", 2_000), ("finish", 0)])
def test_against_a_list_of_what_is_kept(actions: list[tuple[str, int]]) -> None:
    """The model of the test is a plain list of finished streams, oldest first."""
    retention_s, budget_bytes = 100, 5_000

    async def body() -> None:
        kept = StreamIndex(retention_s=retention_s, budget_bytes=budget_bytes)
        running: list[StreamLog] = []
        finished: list[tuple[int, StreamLog]] = []
        gone: list[StreamLog] = []
        now = 0
        for action, number in actions:
            if action == "create":
                log = create(kept)
                log.extend([TextDelta("x" * number, (1,))])
                running.append(log)
            elif action == "finish" and running:
                log = running.pop(number % len(running))
                finish(kept, log)
                finished.append((now, log))
                while len(finished) > 1 and sum(log.num_bytes for _, log in finished) > budget_bytes:
                    gone.append(finished.pop(0)[1])
            elif action == "delete" and finished:
                log = finished.pop(number % len(finished))[1]
                kept.delete(log)
                gone.append(log)
            elif action == "sleep":
                await asyncio.sleep(number + 0.001)
                now += number
                gone += [log for since, log in finished if now - since >= retention_s]
                finished = [(since, log) for since, log in finished if now - since < retention_s]
            assert all(status(kept, log) == 200 for log in running)
            assert all(status(kept, log) == 200 for _, log in finished)
            assert all(status(kept, log) == 410 for log in gone)
            assert len(kept) == len(running) + len(finished)
        kept.close()

    run(body())
