"""The baseline: `python -m tailrace_outer.measure.bench.rawwriter NUM_EVENTS` sends fixed events, one write per event.

It shows what plain asyncio can do without other work: no engine, no log, no JSON, no HTTP parsing. It prints its port,
and serves until its stdin closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

__all__ = ["main"]

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


async def _serve(num_events: int) -> None:
    event = _chunk(b'id: AAAAAAAAAAAAAAAAAAAAAA-1000\ndata: {"text":" bridges","token_ids":[272]}\n\n')
    last = _chunk(b'id: AAAAAAAAAAAAAAAAAAAAAA-1001\nevent: done\ndata: {"status":"done"}\n\n') + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_HEAD)
            for number in range(num_events):
                writer.write(event)
                await writer.drain()
                if number % 32 == 31:  # lets other connections run, like an engine's steps
                    await asyncio.sleep(0)
            writer.write(last)
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()  # and does not wait for its connections, as leaving a context does from Python 3.12.1 on


def main() -> None:
    asyncio.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
