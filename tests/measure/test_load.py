"""The load client counts events however the network splits them, and notices broken streams."""

from __future__ import annotations

import asyncio

import pytest

from tailrace_outer.measure.bench.load import Sample, Timeline, percentile, run_load

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'id: s-1\ndata: {"text":"a","token_ids":[1]}\n\n'
LAST = b'id: s-9\nevent: done\ndata: {"status":"done"}\n\n'


async def serve_once(pieces: list[bytes]) -> Sample:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)  # so that pieces arrive as they were sent
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await run_load("127.0.0.1", port, [b"GET / HTTP/1.1\r\n\r\n"], concurrency=1)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_counts_events_in_any_pieces(size: int) -> None:
    stream = HEAD + EVENT * 3 + LAST
    sample = await serve_once([stream[at : at + size] for at in range(0, len(stream), size)])
    assert sample.num_events == 3
    assert len(sample.ttft_s) == 1


async def test_a_stream_without_its_terminal_event_is_an_error() -> None:
    with pytest.raises(ConnectionError):
        await serve_once([HEAD + EVENT * 3])


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([], 0.5) != percentile([], 0.5)  # nan


def test_sample_measures_gaps_within_streams_only() -> None:
    sample = Sample.of([Timeline(0.0, [1.0, 1.5], 2), Timeline(0.0, [5.0], 1)], 5.0)
    assert sample.ttft_s == [1.0, 5.0]
    assert sample.itl_s == [0.5]
    assert sample.events_per_s == pytest.approx(0.6)
