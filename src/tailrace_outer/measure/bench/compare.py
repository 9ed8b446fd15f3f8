"""The two comparisons: server against engine, and server against a raw writer."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from threading import Thread
from typing import IO
from urllib.parse import urlsplit

import msgspec

from tailrace.engines import EngineSpec
from tailrace.system.child import stop
from tailrace.text import Tokenizer
from tailrace_outer.measure.bench.load import Round, Sample, Timeline, percentile, run_load

__all__ = ["Pair", "ReportLine", "compare_engine", "compare_server", "engine_alone"]

_STOP_S = 30.0  # then a process is killed


@dataclass(frozen=True, slots=True)
class ReportLine:
    """One side of a comparison at one load. Medians over the rounds; times in milliseconds."""

    what: str
    streams: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float

    @classmethod
    def of(cls, what: str, streams: int, samples: list[Sample]) -> ReportLine:
        def median(value: Callable[[Sample], float]) -> float:
            return statistics.median(value(sample) for sample in samples)

        return cls(
            what,
            streams,
            round(median(lambda s: s.events_per_s), 1),
            round(median(lambda s: 1e3 * percentile(s.ttft_s, 0.5)), 2),
            round(median(lambda s: 1e3 * percentile(s.ttft_s, 0.99)), 2),
            round(median(lambda s: 1e3 * percentile(s.itl_s, 0.5)), 2),
            round(median(lambda s: 1e3 * percentile(s.itl_s, 0.99)), 2),
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """The server's line, the line it is compared with, and the median ratio of their tokens per second."""

    ours: ReportLine
    theirs: ReportLine
    ratio: float

    @classmethod
    def of(cls, streams: int, our_name: str, ours: list[Sample], their_name: str, theirs: list[Sample]) -> Pair:
        ratio = statistics.median(a.events_per_s / b.events_per_s for a, b in zip(ours, theirs, strict=True))
        return cls(ReportLine.of(our_name, streams, ours), ReportLine.of(their_name, streams, theirs), round(ratio, 3))


@asynccontextmanager
async def _server(model: str, *flags: str) -> AsyncIterator[tuple[str, int]]:
    """Start a server process; yields its host and port. Raises: RuntimeError if it does not start."""
    process = subprocess.Popen(  # noqa: ASYNC220 - starting is fast, and a thread has to read its output
        [sys.executable, "-m", "tailrace", "serve", model, "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C on the terminal goes only to this process, which then ends the server
    )
    assert process.stderr is not None
    try:
        # In a thread, so that Ctrl-C ends the wait: the end of the server ends the thread.
        url = urlsplit(await asyncio.to_thread(_listening_url, process.stderr))
        assert url.hostname is not None
        assert url.port is not None
        Thread(target=process.stderr.read, daemon=True).start()  # else the server would wait when the pipe is full
        yield url.hostname, url.port
    finally:
        stop(process, within_s=_STOP_S)


def _listening_url(stderr: IO[str]) -> str:
    """Read a server's output until it listens; returns its URL. Raises: RuntimeError if it ends before."""
    lines = []
    for line in stderr:
        lines.append(line)
        if line.startswith("Listening on "):
            return line.split()[2].rstrip(".")
    raise RuntimeError("the server did not start:\n" + "".join(lines))


@contextmanager
def _child(module: str, *arguments: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Run a module of this package as a process; yields its stdin and stdout. An exception in the block kills it."""
    command = [sys.executable, "-m", module, *arguments]
    # Its own session: Ctrl-C on the terminal goes only to this process.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
            process.stdin.close()
            process.wait(_STOP_S)
        except BaseException:
            process.kill()
            raise


@contextmanager
def engine_alone(spec: EngineSpec) -> Iterator[Callable[[Round], Sample]]:
    """Run an engine in its own process, without a server. Yields a function that runs a round and blocks.

    Raises: RuntimeError if the engine does not load or dies; the reason is on stderr.
    """
    with _child("tailrace_outer.measure.bench.inprocess") as (stdin, stdout):

        def ask(line: bytes) -> bytes:
            with suppress(BrokenPipeError):
                stdin.write(line + b"\n")
                stdin.flush()
            if answer := stdout.readline():
                return answer
            raise RuntimeError("the engine did not load, or died")

        def run(load: Round) -> Sample:
            timelines, wall_s = msgspec.json.decode(ask(msgspec.json.encode(load)), type=tuple[list[Timeline], float])
            return Sample.of(timelines, wall_s)

        ask(msgspec.json.encode(spec))
        yield run


def _request(host: str, port: int, prompt: str, max_tokens: int) -> bytes:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "seed": 1}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/streams HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\nAccept: text/event-stream\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def compare_engine(
    model: str,
    spec: EngineSpec,
    tokenizer: Tokenizer,
    *,
    flags: tuple[str, ...] = (),
    streams: tuple[int, ...],
    max_tokens: int,
    rounds: int,
    on_progress: Callable[[str], None],
) -> list[Pair]:
    """Measure the same load over HTTP and in process, alternating. Every prompt is new, so caches have no effect.
    `flags` give the server the settings that `spec` was made with."""
    prompts = (f"{number}. A story about a river, a dog and a mill:" for number in range(1, 1_000_000))
    pairs = []
    async with AsyncExitStack() as stack:
        host, port = await stack.enter_async_context(_server(model, *flags))
        run_alone = stack.enter_context(engine_alone(spec))

        async def over_http(n: int, num_tokens: int) -> Sample:
            requests = [_request(host, port, next(prompts), num_tokens) for _ in range(n)]
            return await run_load(host, port, requests, concurrency=n)

        async def in_process(n: int, num_tokens: int) -> Sample:
            ids = [tuple(tokenizer.encode(next(prompts), special=True)) for _ in range(n)]
            return await asyncio.to_thread(run_alone, Round(ids, num_tokens))

        for warm in (over_http, in_process):
            await warm(2, 16)
        for n in streams:
            ours: list[Sample] = []
            theirs: list[Sample] = []
            for number in range(rounds):
                on_progress(f"{n} streams, round {number + 1} of {rounds}")
                # Alternates which side goes first, so that a change of the machine's speed favours neither.
                for side, samples in [(over_http, ours), (in_process, theirs)][:: 1 if number % 2 else -1]:
                    samples.append(await side(n, max_tokens))
            pairs.append(Pair.of(n, "over HTTP", ours, "in process", theirs))
    return pairs


async def compare_server(
    *, streams: int, max_tokens: int, rounds: int, on_progress: Callable[[str], None]
) -> list[Pair]:
    """Compare the server with the scripted engine to a raw writer of the same events, and to the same server without a
    journal."""
    ours, theirs, unkept = [], [], []
    flags = ("--kv-tokens", str(4 * streams * max_tokens), "--max-sequences", str(2 * streams))
    async with AsyncExitStack() as stack:
        host, port = await stack.enter_async_context(_server("scripted:utf8=0", *flags))
        in_memory_server = _server("scripted:utf8=0", *flags, "--journal", "memory")
        _, memory_port = await stack.enter_async_context(in_memory_server)
        _, stdout = stack.enter_context(_child("tailrace_outer.measure.bench.rawwriter", str(max_tokens)))
        raw_port = int(await asyncio.to_thread(stdout.readline))
        for number in range(rounds + 1):
            on_progress(f"{streams} streams of the scripted engine, round {number} of {rounds}")
            requests = [_request(host, port, f"{i} {number}", max_tokens) for i in range(streams)]
            sample = await run_load(host, port, requests, concurrency=streams)
            raw = await run_load("127.0.0.1", raw_port, requests, concurrency=streams)
            in_memory = await run_load(host, memory_port, requests, concurrency=streams)
            if number:  # the first warms up
                ours.append(sample)
                theirs.append(raw)
                unkept.append(in_memory)
    name = "tailrace, scripted engine"
    return [
        Pair.of(streams, name, ours, "raw asyncio writer", theirs),
        Pair.of(streams, name, ours, "with --journal memory", unkept),
    ]
