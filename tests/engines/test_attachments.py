"""The bytes of images on their way to the worker: once for all sequences that have them, without delaying others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from msgspec.structs import replace
from tests.engines.sequences import make_sequence
from tests.engines.test_worker import Worker
from tests.waiting import LONG_S, wait_until

from tailrace.engines.interface import Capabilities, Delta, Engine, Prefill, Sequence
from tailrace.engines.protocol import (
    Attach,
    Forget,
    Frame,
    Submit,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from tailrace.engines.worker import WorkerLink, run
from tailrace.engines.worker_process import WorkerProcess
from tailrace.errors import EngineError
from tailrace.system.frames import FrameBuffer
from tailrace.types import Attachment, Sampling

_CONTENT = b"an image"
_IMAGE = Attachment.of(_CONTENT, "image/png", 4)


def _sequence(sequence_id: int) -> Sequence:
    sampling = Sampling(temperature=0.0, seed=7, max_tokens=4 + sequence_id)
    return Sequence(sequence_id, ((60,), _IMAGE, (61,)), sampling, attachments={_IMAGE.digest: _CONTENT})


def _submit(sequence_id: int) -> Submit:
    """As it goes to the worker."""
    return Submit(replace(_sequence(sequence_id), attachments={}))


class _Ear:
    """A receiver that records all calls."""

    def __init__(self) -> None:
        self.deltas: dict[int, list[Delta]] = {}

    def push(self, delta: Delta) -> None:
        self.deltas.setdefault(delta.sequence_id, []).append(delta)

    def report(self, progress: Prefill) -> None:
        raise AssertionError(progress)

    def lost(self, error: EngineError) -> None:
        raise AssertionError(error)


async def _received(theirs: socket.socket, buffer: FrameBuffer, count: int) -> list[ToWorker]:
    messages: list[ToWorker] = []
    async with asyncio.timeout(LONG_S):
        while len(messages) < count:
            chunk = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
            messages += map(decode_to_worker, buffer.feed(chunk))
    return messages


async def test_the_worker_gets_an_image_once_and_keeps_it_while_a_sequence_has_it() -> None:
    worker, ear, buffer = WorkerProcess(1), _Ear(), FrameBuffer()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)

        def submit(*numbers: int) -> list[ToWorker]:
            worker.receivers.update(dict.fromkeys(numbers, ear))
            worker.submit(map(_sequence, numbers))
            return [*map(_submit, numbers)]

        async def end(*numbers: int) -> None:
            theirs.send(encode(Frame(1, 1, [Delta(number, 0, (), (), "length") for number in numbers])))
            await wait_until(lambda: not worker.receivers.keys() & set(numbers))

        attach, forget = Attach(_IMAGE.digest, _CONTENT), Forget(_IMAGE.digest)
        submitted = submit(1, 2, 3)
        assert await _received(theirs, buffer, 4) == [attach, *submitted]
        await end(1, 3)
        submitted = submit(4)
        assert await _received(theirs, buffer, 1) == submitted
        await end(2, 4)
        submitted = submit(5)
        assert await _received(theirs, buffer, 3) == [forget, attach, *submitted]
        transport.close()


class _Looking:
    """An engine that answers once it has the images of a prompt."""

    capabilities = Capabilities("looking", 100, 100, 1, 1, frozenset(), True)

    def __init__(self) -> None:
        self.images: dict[int, tuple[bytes, ...]] = {}
        self._ended: list[Delta] = []

    def submit(self, sequence: Sequence) -> None:
        self.images[sequence.sequence_id] = sequence.images
        self._ended.append(Delta(sequence.sequence_id, 0, (), (), "stop"))

    def abort(self, sequence_id: int) -> None: ...
    def close(self) -> None: ...

    def step(self) -> list[Delta]:
        ended, self._ended = self._ended, []
        return ended


def test_sequences_have_the_images_that_were_attached() -> None:
    engine, buffer, deltas = _Looking(), FrameBuffer(), list[Delta]()
    image, gone = Attach(_IMAGE.digest, _CONTENT), Forget(_IMAGE.digest)
    messages: list[ToWorker] = [image, _submit(1), _submit(2), gone, _submit(3)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        running = threading.Thread(target=_run_until_closed, args=(engine, theirs))
        running.start()
        ours.settimeout(LONG_S)
        ours.sendall(b"".join(map(encode, messages)))
        while len(deltas) < 3:
            for frame in map(decode_from_worker, buffer.feed(ours.recv(1 << 16))):
                assert isinstance(frame, Frame)
                deltas += frame.deltas
        ours.shutdown(socket.SHUT_RDWR)
        running.join(LONG_S)
    assert engine.images == {1: (_CONTENT,), 2: (_CONTENT,)}
    (refused,) = [delta for delta in deltas if delta.sequence_id == 3]
    assert (refused.failure, refused.is_refused) == ("an image of the prompt is missing", True)


def _run_until_closed(engine: Engine, ours: socket.socket) -> None:
    with contextlib.suppress(EOFError):
        run(engine, WorkerLink(ours), 1)


def test_a_large_image_takes_few_steps_of_its_neighbour() -> None:
    """The socket holds some 200 KB, so an image of 32 MiB comes in 150 parts or more."""
    content = bytes(32 * 2**20)
    image = Attachment.of(content, "image/png", 4)
    with contextlib.closing(Worker()) as worker:
        worker.start(tokens_per_s=200).send(Submit(make_sequence(1, 400)))
        first = worker.receive()
        assert isinstance(first, Frame)
        asked = Submit(Sequence(2, ((60,), image), Sampling(seed=7, max_tokens=1)))
        sending = threading.Thread(target=worker.send, args=(Attach(image.digest, content), asked))
        sending.start()
        last = worker.frames(1)[-1]
        sending.join()
        assert [delta.sequence_id for delta in last.deltas if delta.finish_reason] == [2]
        assert last.step - first.step < 100
