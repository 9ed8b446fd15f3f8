"""Writes the answers of streams into their conversations, and stored responses into the database, in the background. No
token waits for the database.

Streams are queued, and one task writes them in order. Reading a conversation waits for the writes that were queued
before. So clients find an answer that they have just read. While the database is unreachable, turns stay in the queue,
and reads wait until a timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.conversations.items import Branch, BranchPoint
from tailrace.conversations.turns import Spoken, read_turn
from tailrace.errors import JournalDamaged, KeyRevoked, ModelError, RequestError, StorageError, StreamError
from tailrace.generation import Observer, Observers, Times
from tailrace.images.reader import MAX_BYTES
from tailrace.records.threads import UNREACHABLE, DatabaseThreads
from tailrace.streams import LogStore, StreamLog
from tailrace.types import GenerateRequest, Image, KeptImage, Record, TextDelta

if TYPE_CHECKING:
    from tailrace.records.conversation_store import ConversationStore
    from tailrace.records.kept_images import KeptImages
    from tailrace.records.kept_streams import KeptStreams

__all__ = ["ConversationKeeper"]

logger = logging.getLogger("tailrace.records")

_Opened = TypeVar("_Opened")
_Result = TypeVar("_Result")
_RETRY_S = 1.0
FLUSH_TIMEOUT_S = 10.0  # for queued writes, before a read and at shutdown
MAX_QUEUED = 10_000


class ConversationKeeper(Observer):
    """The conversations of a server, and its stored responses, if `may_keep` returns true.

    `open_store` and `open_kept` block, and raise ModelError if the database cannot be opened. `on_opened` is awaited
    after calls on the store, which may have created the database. Writes have threads of their own, in `background`.
    """

    def __init__(
        self,
        open_store: Callable[[], ConversationStore],
        open_kept: Callable[[], KeptStreams],
        open_images: Callable[[], KeptImages],
        may_keep: Callable[[], bool],
        may_keep_images_of_responses: bool,
        on_opened: Callable[[], Awaitable[None]],
        threads: DatabaseThreads,
        background: DatabaseThreads,
    ) -> None:
        self._open_store = open_store
        self._open_kept = open_kept
        self._open_images = open_images
        self._may_keep = may_keep
        self._may_keep_images_of_responses = may_keep_images_of_responses
        self._on_opened = on_opened
        self._threads = threads
        self._background = background
        self._streams: LogStore | None = None
        self._queue: asyncio.Queue[tuple[str, str] | asyncio.Future[None]] = asyncio.Queue()
        self._is_writing = False
        self._num_queued = 0  # streams in the queue
        self._last_flush: asyncio.Future[None] | None = None  # at the end of the queue

    # Reading

    async def ask(self, call: Callable[[ConversationStore], _Result]) -> _Result:
        """Run a call on the store in a thread, after the writes that are queued now.

        Raises: what the call raises; StorageError if the database is unreachable.
        """
        await self.flush()
        result = await self._in_thread(self._open_store, call)
        await self._on_opened()
        return result

    async def kept(self, owner: str, stream_id: str) -> StreamLog | None:
        """Return the stream of a stored response, which may have expired in the log store. Raises: StorageError."""
        if not self._may_keep():
            return None
        await self.flush()
        return await self._in_thread(self._open_kept, lambda kept: kept.get(owner, stream_id))

    async def forget(self, owner: str, stream_id: str) -> None:
        """Delete a stored response. Raises: StorageError."""
        if self._may_keep():
            await self.flush()
            await self._in_thread(self._open_kept, lambda kept: kept.delete(owner, stream_id))

    async def branch(self, owner: str, point: BranchPoint) -> Branch:
        """Return the branch that a request continues. Its last item is in progress only if its stream still runs.
        Raises: as `ask`."""
        branch = await self.ask(lambda store: store.branch(owner, point.id, point.parent_id))
        last = branch.items[-1] if branch.items else None
        if last is None or last.status != "in_progress" or await self._find(owner, last.stream_id) is not None:
            return branch
        await self.ask(lambda store: store.abandon(owner, point.id, last.item_id))
        return await self.ask(lambda store: store.branch(owner, point.id, point.parent_id))

    # Images

    def keeps(self, request: GenerateRequest) -> bool:
        """As in `observers.ImageKeeper`, also the next ones."""
        return bool(request.turn) or (request.keep and self._may_keep_images_of_responses)

    async def find_images(self, owner: str, images: Sequence[Image]) -> list[Image]:
        """Return images with the content of those that the database has. Raises: RequestError if the owner does not
        have one of them, or they are too large for a request; StorageError."""
        digests = {one.kept.digest for one in images if one.kept is not None}
        if not digests:
            return list(images)
        found = await self._in_thread(self._open_images, lambda kept: kept.get(owner, digests, most_bytes=MAX_BYTES))
        read = []
        for image in images:
            if image.kept is None:
                read.append(image)
                continue
            if image.kept.digest not in found:
                raise RequestError(f"{image.param}: this image is not kept. Send it again.", param=image.param)
            kept, content = found[image.kept.digest]
            read.append(replace(image, kept=kept, content=content))
        return read

    async def keep_images(self, record: Record) -> None:
        """Keep the images of a stream that is about to begin, in its conversation or with its stored response.

        Raises: KeyRevoked, UnknownConversation, RequestError if there is no room, StorageError. A response without room
        begins all the same, but the next one cannot continue it.
        """
        owner, key_id = record.owner, record.key_id
        if record.turn:
            turn = read_turn(record.turn)
            new = record.images[len(record.images) - turn.num_images :]
            given = {one: record.attachments[one.digest] for one in new}
            await self.put_images(owner, turn.conversation_id, given, key_id=key_id)
            return
        given = {one: record.attachments[one.digest] for one in record.images}
        try:
            await self._in_thread(
                self._open_images,
                lambda kept: kept.put_in_response(owner, record.stream_id, given, key_id=key_id),
            )
        except KeyRevoked:
            raise
        except RequestError:
            pass  # there is no room
        await self._on_opened()

    async def put_images(
        self, owner: str, conversation_id: str, given: Mapping[KeptImage, bytes], *, key_id: str = ""
    ) -> None:
        """Raises: as `KeptImages.put_in_conversation`."""
        await self._in_thread(
            self._open_images, lambda kept: kept.put_in_conversation(owner, conversation_id, given, key_id=key_id)
        )

    async def image(self, owner: str, conversation_id: str, digest: str) -> tuple[KeptImage, bytes]:
        """Raises: UnknownConversation if the conversation has no such image; StorageError."""
        return await self._in_thread(
            self._open_images, lambda kept: kept.of_conversation(owner, conversation_id, digest)
        )

    # Observing streams

    def on_begun(self, record: Record) -> None:
        if record.turn:
            self._put(record.owner, record.stream_id)

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        if record.turn or (record.keep and self._may_keep()):
            self._put(record.owner, record.stream_id)

    # Start, writing, shutdown

    def observe(self, observers: Observers, store: LogStore[Any]) -> None:  # Any: apps have no conversations
        """Observe all streams from now on, and keep their images. Streams are read from `store`."""
        self._streams = store
        observers.add(self)
        observers.keeper = self

    def queue_earlier_streams(self, running: Iterable[Record], *, has_past: bool) -> None:
        """Queue the streams of an earlier process for writing. `running` are those that continue. With `has_past`, also
        check answers in the database that were in progress when the server stopped."""
        if self._streams is None:
            return
        for record in running:
            self.on_begun(record)
        if has_past:
            self._num_queued += 1
            self._last_flush = None
            self._queue.put_nowait(("", ""))

    async def write_until_cancelled(self) -> None:
        """Write the queued streams until cancelled."""
        while True:
            wanted = await self._queue.get()
            self._is_writing = True
            if isinstance(wanted, asyncio.Future):
                wanted.set_result(None)
            else:
                self._num_queued -= 1
                await self._write(*wanted)
            self._is_writing = False

    async def write_all(self, streams: Iterable[tuple[str, str]]) -> None:
        """Write these streams of earlier servers now, each given by its owner and its id. Raises: StorageError."""
        for owner, stream_id in streams:
            await self._write_stream(owner, stream_id)

    async def finish(self) -> None:
        """Wait until the queued streams are written, or a timeout."""
        try:
            await self.flush()
        except StorageError:
            logger.error("the last answers of conversations could not be written: the database is unreachable")

    async def flush(self) -> None:
        """Wait until the streams that are queued now are written. Raises: StorageError after a timeout."""
        if self._queue.empty() and not self._is_writing:
            return
        done = self._last_flush
        if done is None or done.done():  # readers share it, so that the queue does not grow with each of them
            done = self._last_flush = asyncio.get_running_loop().create_future()
            self._queue.put_nowait(done)
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await asyncio.shield(done)
        except TimeoutError:
            raise StorageError(UNREACHABLE) from None

    def _put(self, owner: str, stream_id: str) -> None:
        if self._num_queued < MAX_QUEUED:
            self._num_queued += 1
            self._last_flush = None
            self._queue.put_nowait((owner, stream_id))
        else:
            logger.error(
                "stream %s is not written to its conversation: the database was unreachable for too long", stream_id
            )

    async def _write(self, owner: str, stream_id: str) -> None:
        """Write the current state of a stream; with id "", of all streams whose answers are still in progress."""
        is_unreachable = False
        while True:
            try:
                if stream_id:
                    await self._write_stream(owner, stream_id)
                else:
                    for entry in await self._in_background(self._open_store, lambda store: store.in_progress()):
                        await self._write_stream(*entry)
                return
            except StorageError as error:
                if not is_unreachable:
                    logger.warning("answers of conversations are not written yet: %s", error)
                is_unreachable = True
                await asyncio.sleep(_RETRY_S)

    async def _write_stream(self, owner: str, stream_id: str) -> None:
        """Raises: StorageError. A bug must not stop the writing of other streams, so other errors are only logged."""
        try:
            log = await self._find(owner, stream_id)
            if log is not None and log.record.turn:
                record, turn, spoken = log.record, read_turn(log.record.turn), _spoken(log)
                await self._in_background(
                    self._open_store,
                    lambda store: store.put_turn(owner, turn, stream_id, spoken, record.created_s, record.images),
                )
            if log is not None and log.end is not None and log.record.keep and self._may_keep():
                await self._in_background(self._open_kept, lambda kept: kept.put(log))
        except StorageError:
            raise
        except Exception:
            logger.exception("stream %s could not be written to its conversation", stream_id)

    async def _find(self, owner: str, stream_id: str) -> StreamLog | None:
        """Return the stream's log, or None if this server does not have it. Another server over the same database
        may."""
        assert self._streams is not None
        try:
            return await self._streams.read(owner, stream_id)
        except (StreamError, JournalDamaged):
            return None

    async def _in_thread(self, open_store: Callable[[], _Opened], call: Callable[[_Opened], _Result]) -> _Result:
        """Run a call of a client in a database thread. Raises: what the call raises; StorageError."""
        return await _run(self._threads.run(lambda: call(open_store())))

    async def _in_background(self, open_store: Callable[[], _Opened], call: Callable[[_Opened], _Result]) -> _Result:
        """Run a call that no client waits for. It is repeated after an error, so it has to end by itself. Raises: as
        `_in_thread`."""
        return await _run(self._background.run(lambda: call(open_store()), within_s=None))


async def _run(call: Awaitable[_Result]) -> _Result:
    """Raises: what the call raises; StorageError."""
    try:
        return await call
    except ModelError as error:
        raise StorageError(error.message) from None


def _spoken(log: StreamLog) -> Spoken:
    if log.end is None:
        return Spoken()
    last = next((event for event in reversed(log.events) if isinstance(event, TextDelta)), None)
    is_whole = log.end.status == "done" and (last is None or last.finish_reason != "length")
    return Spoken(log.text(), "completed" if is_whole else "incomplete", log.reasoning())
