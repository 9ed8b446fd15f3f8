"""The engine's own process: `python -m tailrace.engines.worker FD PARENT_PID`.

One thread reads work from the socket, steps the engine and sends one frame per step. It blocks on the socket only when
no sequence runs. The process ends when the server closes the socket. On Linux, the kernel also ends it when the parent
dies during a long step.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import cast

from msgspec.structs import replace

from tailrace.engines import load_engine
from tailrace.engines.huge_pages import move_to_huge_pages
from tailrace.engines.interface import Delta, Engine, Prefill, Reporting, Seeing, Sequence, Waiting
from tailrace.engines.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    EngineSpec,
    Fatal,
    Forget,
    Frame,
    FromWorker,
    Ready,
    See,
    Seen,
    Start,
    Submit,
    ToWorker,
    decode_to_worker,
    encode,
)
from tailrace.errors import SequenceFailed, TailraceError
from tailrace.system.child import begin_child, end_family_with_me
from tailrace.system.frames import FrameBuffer
from tailrace.system.processors import usable_processors
from tailrace.types import Attachment

__all__ = ["WorkerLink", "main", "run"]

_FLUSH_TIMEOUT_S = 2.0
_MAX_STEP_BYTES = 64 * 2**20  # read before one step
_PIECE_TIMEOUT_MS = 10  # for the next piece of a message


class WorkerLink:
    """The worker's end of the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = FrameBuffer()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self, *, wait: bool) -> Iterator[ToWorker]:
        """Yield the received messages. With `wait`, blocks until bytes arrive.

        The socket holds a small part of a large message. Once it is empty, the server needs a moment to write the next
        part: without waiting for it, each part would take one step of the engine.

        Raises: EOFError when the server has closed the socket.
        """
        timeout_ms = None if wait else 0
        num_bytes = 0
        while num_bytes < _MAX_STEP_BYTES and self._poll.poll(timeout_ms):
            try:
                chunk = self._sock.recv(1 << 20)
            except ConnectionError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            num_bytes += len(chunk)
            for body in self._buffer.feed(chunk):
                yield decode_to_worker(body)
            timeout_ms = _PIECE_TIMEOUT_MS if self._buffer.is_partial else 0

    def receive_first(self) -> ToWorker:
        """Wait for the first complete message. Raises: EOFError."""
        while True:
            for message in self.receive(wait=True):
                return message

    def send(self, message: FromWorker) -> None:
        """Send a message. Blocks while the socket's buffer is full, which is the backpressure on the engine."""
        try:
            self._sock.sendall(encode(message))
        except ConnectionError as error:
            raise EOFError from error

    def flush_and_close(self) -> None:
        """Wait until the server has read everything. If it wrote to a closed socket, it would lose the last message."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(_FLUSH_TIMEOUT_S)
            while self._sock.recv(1 << 16):
                pass


class _Reports:
    """What an engine says about the prompts that it reads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = cast("Reporting", engine) if engine.capabilities.reports_progress else None
        self._last: list[Prefill] = []

    def new(self) -> list[Prefill]:
        """Return what has changed since the last step. An engine that hangs must not seem to make progress."""
        if self._engine is None:
            return []
        last, self._last = self._last, self._engine.progress()
        return [progress for progress in self._last if progress not in last]


def run(engine: Engine, link: WorkerLink, epoch: int) -> None:
    """Step the engine until the server closes the socket.

    Raises: EOFError then; anything else means that the engine is lost.
    """
    live: set[int] = set()
    attachments: dict[str, bytes] = {}  # by digest
    step = 0
    reports = _Reports(engine)
    if engine.capabilities.waits:
        cast("Waiting", engine).return_for(link.fileno())
    small_pages = move_to_huge_pages()  # one by one, while nothing runs: nobody waits for them after a crash
    while True:
        deltas: list[Delta] = []
        is_moving = not live and next(small_pages, None) is not None
        for message in link.receive(wait=not live and not is_moving):
            if isinstance(message, Submit):
                sequence = _with_attachments(message.sequence, attachments)
                try:
                    engine.submit(sequence)
                    live.add(sequence.sequence_id)
                except SequenceFailed as error:
                    deltas.append(Delta(sequence.sequence_id, 0, (), (), "error", error.message, is_refused=True))
            elif isinstance(message, Abort):
                engine.abort(message.sequence_id)
            elif isinstance(message, Attach):
                attachments[message.digest] = message.content
            elif isinstance(message, Forget):
                attachments.pop(message.digest, None)
            elif isinstance(message, See):
                link.send(_seen(engine, message))
        if live:
            stepped = engine.step()
            for delta in stepped:
                if delta.finish_reason is not None:
                    live.discard(delta.sequence_id)
            deltas += stepped
        elif not deltas:
            continue
        step += 1
        link.send(Frame(epoch, step, deltas, reports.new()))
        if not live:
            engine.step()  # with nothing running, lets the engine free what it kept for the last sequence


def _with_attachments(sequence: Sequence, attachments: dict[str, bytes]) -> Sequence:
    wanted = {one.digest for one in sequence.segments if isinstance(one, Attachment)} & attachments.keys()
    return replace(sequence, attachments={digest: attachments[digest] for digest in wanted}) if wanted else sequence


def _seen(engine: Engine, question: See) -> Seen:
    if not engine.capabilities.sees:
        return Seen(question.number, None, "this engine reads no images")
    try:
        return Seen(question.number, cast("Seeing", engine).see(question.image))
    except SequenceFailed as error:
        return Seen(question.number, None, error.message)


def _with_threads(spec: EngineSpec) -> EngineSpec:
    """Return a setting that states the number of threads, where fewer processors than the machine has may be used: the
    libraries do not look at quotas, and threads that wait for throttled ones cost most of the speed."""
    usable = usable_processors()
    return replace(spec, threads=usable) if not spec.threads and usable < (os.cpu_count() or 1) else spec


def main(argv: list[str]) -> int:
    """Run the worker. `argv` is the socket's descriptor and the parent's process id. Returns the exit status."""
    fd, parent_pid = int(argv[0]), int(argv[1])
    begin_child(parent_pid)
    link = WorkerLink(socket.socket(fileno=fd))
    with contextlib.suppress(EOFError):
        start = link.receive_first()
        if not isinstance(start, Start) or start.version != PROTOCOL_VERSION:
            link.send(Fatal("server and worker have different versions"))
            return 1
        if start.starts_processes:
            end_family_with_me()
        try:
            spec = _with_threads(start.spec)
            engine = resolve_name(start.engine_class)(spec) if start.engine_class else load_engine(spec)
            link.send(Ready(PROTOCOL_VERSION, start.epoch, engine.capabilities))
            run(engine, link, start.epoch)
        except EOFError:
            raise
        except BaseException as error:
            link.send(
                Fatal(
                    str(error)[:2000] if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"[:2000]
                )
            )
            link.flush_and_close()
            return 1
    return 0


if __name__ == "__main__":
    # Does not wait for the engine's threads, which may still compute.
    os._exit(main(sys.argv[1:]))
