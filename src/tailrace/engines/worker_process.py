"""The server's handle on one worker: its process, the socket, and its running sequences."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Protocol, cast

import msgspec
from msgspec.structs import replace

from tailrace.engines.interface import Capabilities, Delta, Prefill, Sequence, Sight
from tailrace.engines.kinds import find_kind
from tailrace.engines.protocol import (
    PROTOCOL_VERSION,
    Attach,
    EngineSpec,
    Fatal,
    Forget,
    Frame,
    Ready,
    See,
    Seen,
    Start,
    Submit,
    ToWorker,
    decode_from_worker,
    encode,
)
from tailrace.errors import EngineError, EngineLost, RequestRefused
from tailrace.system.child import how_it_ended
from tailrace.system.frames import FrameBuffer

__all__ = ["Receiver", "WorkerProcess"]

# Buffer between engine and server. The kernel also counts its own overhead, so that a frame with one token takes about
# one kilobyte: about sixty steps with one stream.
_BUFFER_BYTES = 64 * 1024
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_CLOSED = "closed its socket"
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # the kernel's OOM killer sends SIGKILL too
_EXIT_TIMEOUT_S = 5.0  # from the closed socket to the exit; long, because a wrong guess would blame a request


class Receiver(Protocol):
    """Receives the deltas of one sequence. All methods are called on the event loop, and must not raise or block."""

    def push(self, delta: Delta) -> None:
        """Take one step's delta. A delta with a finish_reason is the last call."""

    def report(self, progress: Prefill) -> None:
        """Take how much of the prompt is read, before the first delta."""

    def lost(self, error: EngineError) -> None:
        """The worker was lost before the sequence ended. This is the last call."""


class WorkerProcess(asyncio.Protocol):
    """One worker process and the socket to it."""

    def __init__(self, epoch: int) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        self.ready: asyncio.Future[Capabilities] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()  # the reason
        self.receivers: dict[int, Receiver] = {}
        self.last_frame_s = time.monotonic()
        self.last_token_s = self.last_frame_s  # of the prompt or of an answer
        self.has_given = False  # a token, ever; or it was asked about an image, whose fault its death may be
        self.process: asyncio.subprocess.Process
        self._attached: dict[str, set[int]] = {}  # the sequences that have each attachment, by its digest
        self._questions: dict[int, asyncio.Future[Sight]] = {}
        self._number = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._buffer = FrameBuffer()

    @property
    def is_working(self) -> bool:
        """Whether it has sequences, or a question about an image, so that it should make progress."""
        return bool(self.receivers or self._questions)

    def expect_progress(self) -> None:
        """It gets work. If it had none, its silence counts from now."""
        if not self.is_working:
            self.last_frame_s = self.last_token_s = time.monotonic()

    @classmethod
    async def start(cls, spec: EngineSpec, epoch: int) -> WorkerProcess:
        """Start a process, which begins to load its model. Raises: EngineLost."""
        worker = cls(epoch)
        with contextlib.ExitStack() as on_failure:
            try:
                ours, theirs = socket.socketpair()
                on_failure.callback(ours.close)
                with theirs:
                    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                    worker.process = await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "tailrace.engines.worker", str(theirs.fileno()), str(os.getpid()),
                        stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                        env=_worker_environment(),
                        start_new_session=True,  # Ctrl-C on the terminal goes only to the server
                    )  # fmt: skip
                try:
                    await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
                except BaseException:
                    await worker.stop()
                    raise
            except OSError as error:
                raise EngineLost(f"The engine worker could not be started: {error}.") from None
            on_failure.pop_all()
        kind = find_kind(spec.engine)
        if kind is None or kind.missing:  # the worker says so
            worker.send(Start(PROTOCOL_VERSION, epoch, spec))
        else:
            worker.send(Start(PROTOCOL_VERSION, epoch, spec, kind.class_for(spec.task), kind.starts_processes))
        return worker

    async def stop(self) -> None:
        """Kill the process, and wait for it."""
        if self._transport is not None:
            self._transport.abort()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def send(self, *messages: ToWorker) -> None:
        """Send messages, which the worker reads together. Does nothing if the worker is lost: its receivers get the
        error."""
        assert self._transport is not None
        if not self.gone.done():  # uvloop raises if its transport is closed
            self._transport.write(b"".join(map(encode, messages)))

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Send sequences. The worker gets the bytes of an attachment once, and keeps them while a sequence has it."""
        messages: list[ToWorker] = []
        for sequence in sequences:
            for digest, content in sequence.attachments.items():
                if digest not in self._attached:
                    messages.append(Attach(digest, content))
                self._attached.setdefault(digest, set()).add(sequence.sequence_id)
            messages.append(Submit(replace(sequence, attachments={}) if sequence.attachments else sequence))
        self.send(*messages)

    async def see(self, image: bytes) -> Sight:
        """Return how an image is written in a prompt.

        Cancellation: the worker still reads it.

        Raises: RequestRefused if the model cannot read it, EngineLost if the worker is lost, with `is_crash` if that
        was while it read the image.
        """
        if self.gone.done():
            raise EngineLost("The engine is not running.")
        self.has_given = True
        number = next(self._number)
        reply: asyncio.Future[Sight] = asyncio.get_running_loop().create_future()
        self.expect_progress()
        self._questions[number] = reply
        self.send(See(number, image))
        return await reply

    async def exit_reason(self) -> tuple[str, bool]:
        """Return why the worker ended (its own message or its exit status), and whether it crashed."""
        reason = self.gone.result()
        if reason != _CLOSED:
            return reason, True
        with contextlib.suppress(TimeoutError):
            status = await asyncio.wait_for(self.process.wait(), _EXIT_TIMEOUT_S)
            return how_it_ended(status), -status not in _FROM_OUTSIDE
        return reason, True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        self._mark_lost(_CLOSED)

    def data_received(self, data: bytes) -> None:
        self.last_frame_s = time.monotonic()
        if self.gone.done():
            return
        try:
            for body in self._buffer.feed(data):
                self._on_message(body)
        except (msgspec.DecodeError, ValueError) as error:
            self._mark_lost(f"sent invalid data ({error})")

    def _on_message(self, body: bytes) -> None:
        message = decode_from_worker(body)
        if isinstance(message, Frame):
            if message.epoch == self.epoch:
                if message.progress:
                    self._report(message.progress)
                self._dispatch(message.deltas)
        elif isinstance(message, Ready):
            if message.version != PROTOCOL_VERSION or message.epoch != self.epoch:
                self._mark_lost("has another version")
            elif not self.ready.done():
                self.ready.set_result(message.capabilities)
        elif isinstance(message, Seen):
            self._answer(message)
        elif isinstance(message, Fatal):
            self._mark_lost(message.message)

    def _answer(self, seen: Seen) -> None:
        question = self._questions.pop(seen.number, None)
        if question is None or question.done():
            return
        if seen.sight is not None:
            question.set_result(seen.sight)
        else:
            question.set_exception(RequestRefused(f"The model cannot read this image: {seen.failure}."))

    def _report(self, reports: list[Prefill]) -> None:
        self.last_token_s = self.last_frame_s
        for progress in reports:
            if (receiver := self.receivers.get(progress.sequence_id)) is not None:
                receiver.report(progress)

    def _dispatch(self, deltas: list[Delta]) -> None:
        if deltas:
            self.last_token_s = self.last_frame_s
            self.has_given = True
        receivers = self.receivers
        for delta in deltas:
            receiver = receivers.get(delta.sequence_id)
            if receiver is None:
                continue
            if delta.finish_reason is not None:
                del receivers[delta.sequence_id]
            receiver.push(delta)
            if delta.finish_reason is not None:
                self._release(delta.sequence_id)

    def _release(self, sequence_id: int) -> None:
        """Let the worker forget what only this sequence had."""
        for digest, owners in list(self._attached.items()):
            owners.discard(sequence_id)
            if not owners:
                del self._attached[digest]
                self.send(Forget(digest))

    def _mark_lost(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)
        for question in self._questions.values():
            if not question.done():
                lost = EngineLost("The engine was lost while it read an image.", is_crash=True)
                question.set_exception(lost)


def _worker_environment() -> dict[str, str]:
    """Return the server's environment without variables that look like secrets, which the engine does not need."""
    return {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
