"""The server's end of a worker: start it, hand it sequences, notice that it died or hangs, start the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from tailrace.engine import Capabilities, Delta, Sequence
from tailrace.engines.protocol import (
    PROTOCOL_VERSION,
    Abort,
    EngineSpec,
    Fatal,
    Frame,
    FrameBuffer,
    Ready,
    Start,
    Submit,
    decode_from_worker,
    encode,
)
from tailrace.errors import EngineError, EngineLost, EngineStalled

__all__ = ["Receiver", "Supervisor"]

logger = logging.getLogger("tailrace.engine")

# How far the engine may run ahead of the server. The kernel counts its own bookkeeping as well, so that a frame of one
# token takes about a kilobyte of this: some sixty steps at one stream.
_AHEAD_BYTES = 64 * 1024
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORT_LIFE_S = 5.0  # a worker that dies so soon counts as one that did not start


class Receiver(Protocol):
    """Takes what the engine adds to one sequence. Both are called on the event loop and must not raise or wait."""

    def push(self, delta: Delta) -> None:
        """One step's addition. The one with a finish_reason is the last call."""

    def lost(self, error: EngineError) -> None:
        """The worker died with this sequence unfinished. The last call."""


class _Worker(asyncio.Protocol):
    """One worker process and the socket to it."""

    def __init__(self, epoch: int, receivers: dict[int, Receiver]) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        self.ready: asyncio.Future[Capabilities] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()  # why
        self.last_progress = time.monotonic()
        self.transport: asyncio.Transport | None = None
        self._receivers = receivers
        self._buffer = FrameBuffer()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave("closed its socket")

    def data_received(self, data: bytes) -> None:
        self.last_progress = time.monotonic()
        if self.gone.done():
            return
        try:
            for body in self._buffer.feed(data):
                self._take(body)
        except (msgspec.DecodeError, ValueError) as error:
            self._leave(f"talked garbage ({error})")

    def _take(self, body: bytes) -> None:
        message = decode_from_worker(body)
        if isinstance(message, Frame):
            if message.epoch == self.epoch:
                self._dispatch(message.deltas)
        elif isinstance(message, Ready):
            if message.version != PROTOCOL_VERSION or message.epoch != self.epoch:
                self._leave("is of another version")
            elif not self.ready.done():
                self.ready.set_result(message.capabilities)
        elif isinstance(message, Fatal):
            self._leave(message.message)

    def _dispatch(self, deltas: list[Delta]) -> None:
        receivers = self._receivers
        for delta in deltas:
            receiver = receivers.get(delta.sequence_id)
            if receiver is None:
                continue
            if delta.finish_reason is not None:
                del receivers[delta.sequence_id]
            receiver.push(delta)

    def _leave(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)


class Supervisor:
    """Keeps one engine worker alive, and routes what it says to the sequences' receivers.

    `on_change` is called on the event loop whenever the engine came or went, before anything else hears of it.
    `capabilities` stay known while one worker is replaced by the next.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        on_change: Callable[[], None] = lambda: None,
        stall_s: float = 30.0,
        load_s: float = 600.0,
    ) -> None:
        self.spec = spec
        self.capabilities: Capabilities | None = None
        self.is_ready = False
        self.failures = 0  # workers in a row that did not start, or did not last
        self.restarts = 0
        self.last_reason = ""
        self.pid: int | None = None
        self._on_change = on_change
        self._stall_s = stall_s
        self._load_s = load_s
        self._epoch = 0
        self._worker: _Worker | None = None
        self._receivers: dict[int, Receiver] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._receivers)

    @property
    def retry_after_s(self) -> float:
        """When it is worth asking again for an engine that is not there."""
        return min(30.0, 0.5 * (1 << min(self.failures, 6)))

    def submit(self, sequence: Sequence, receiver: Receiver) -> None:
        """Hand a sequence to the worker.

        Raises: EngineLost if there is no worker just now.
        """
        worker = self._worker
        if not self.is_ready or worker is None or worker.transport is None:
            raise EngineLost("The engine is not running.", retry_after_s=self.retry_after_s)
        if not self._receivers:
            worker.last_progress = time.monotonic()
        self._receivers[sequence.sequence_id] = receiver
        worker.transport.write(encode(Submit(sequence)))

    def abort(self, sequence_id: int) -> None:
        """Ask for the end of a sequence; its receiver still gets the last delta, within a step."""
        worker = self._worker
        if sequence_id in self._receivers and worker is not None and worker.transport is not None:
            worker.transport.write(encode(Abort(sequence_id)))

    async def run(self, *, once: bool = False) -> None:
        """Start a worker, and another whenever it is lost, until cancelled. With `once`, return at the first loss.

        Cancellation: kills the worker and waits for it.
        """
        while True:
            error = await self._run_worker()
            self._report(error)
            if once:
                return
            self.restarts += 1
            has_worked = self.capabilities is not None
            if self.failures > has_worked:  # what has worked is worth one more try at once
                await asyncio.sleep(self.retry_after_s)

    def _report(self, error: EngineError) -> None:
        was_ready, self.is_ready = self.is_ready, False
        self.last_reason = error.message
        self._on_change()
        lost, self._receivers = list(self._receivers.values()), {}
        if was_ready:
            logger.error("%s Sequences lost: %d. Starting another engine.", error.message, len(lost))
        for receiver in lost:
            receiver.lost(error)

    async def _run_worker(self) -> EngineError:
        """One worker from start to end; says why it ended."""
        self._epoch += 1
        ours: socket.socket | None = None
        process: asyncio.subprocess.Process | None = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _AHEAD_BYTES)
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tailrace.engines.worker", str(theirs.fileno()), str(os.getpid()),
                    stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                    env=_worker_environment(),
                )  # fmt: skip
            self.pid = process.pid
            loop = asyncio.get_running_loop()
            _, worker = await loop.create_unix_connection(lambda: _Worker(self._epoch, self._receivers), sock=ours)
            self._worker = worker
            assert worker.transport is not None
            worker.transport.write(encode(Start(PROTOCOL_VERSION, self._epoch, self.spec)))
            return await self._watch(worker, process)
        except OSError as error:
            self.failures += 1
            return EngineLost(f"The engine worker could not be started: {error}.")
        finally:
            self.pid = None
            worker_, self._worker = self._worker, None
            if worker_ is not None and worker_.transport is not None:
                worker_.transport.abort()
            elif ours is not None:
                ours.close()
            if process is not None:
                await _kill(process)

    async def _watch(self, worker: _Worker, process: asyncio.subprocess.Process) -> EngineError:
        loaded: list[asyncio.Future[Any]] = [worker.ready, worker.gone]  # Any: their results differ
        await asyncio.wait(loaded, timeout=self._load_s, return_when=asyncio.FIRST_COMPLETED)
        if not worker.ready.done():
            self.failures += 1
            if not worker.gone.done():
                return EngineLost(f"The engine did not load within {self._load_s:g} s.")
            return EngineLost(f"The engine did not load: {await _why(worker, process)}.")
        self.capabilities = worker.ready.result()
        self.is_ready = True
        self._on_change()
        since_s = time.monotonic()
        error = await self._until_lost(worker, process)
        self.failures = self.failures + 1 if time.monotonic() - since_s < _SHORT_LIFE_S else 0
        return error

    async def _until_lost(self, worker: _Worker, process: asyncio.subprocess.Process) -> EngineError:
        while not worker.gone.done():
            idle_s = time.monotonic() - worker.last_progress
            if self._receivers and idle_s >= self._stall_s:
                return EngineStalled(f"The engine made no progress for {idle_s:.0f} s and was replaced.")
            wait_s = self._stall_s - idle_s if self._receivers else self._stall_s
            await asyncio.wait([worker.gone], timeout=max(wait_s, 0.01))
        return EngineLost(f"The engine stopped: {await _why(worker, process)}.")


async def _why(worker: _Worker, process: asyncio.subprocess.Process) -> str:
    """The worker's own words, or else what its exit status says."""
    reason = worker.gone.result()
    if reason != "closed its socket":
        return reason
    with contextlib.suppress(TimeoutError):
        status = await asyncio.wait_for(process.wait(), 1.0)
        return f"killed by {_signal_name(-status)}" if status < 0 else f"exit status {status}"
    return reason


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _worker_environment() -> dict[str, str]:
    """The server's environment without what looks like a secret: the engine has no use for any."""
    return {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
