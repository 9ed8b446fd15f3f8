"""What a link shows, live, as server-sent events.

- `state`: `title`, and the messages of users and of the assistant on the current branch, in order. Each has a number,
  its `role`, whether it `is_running`, and its `text` if that is new to the reader;
- `text`: what is added to the running message `id`;
- `end`: nothing more comes; `reason` says why.

Nothing else of a conversation is shown: no instructions, reasoning, tools' calls and results, images, names or ids. A
reader of a link counts as no reader of its streams: so a link keeps nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import assert_never

from starlette.types import Receive, Scope, Send

from tailrace.access.shares import Share
from tailrace.conversations.items import Conversation, Item
from tailrace.dialects.bodies import JsonBody, to_json
from tailrace.dialects.wire import HEARTBEAT
from tailrace.errors import StorageError, StreamError, TailraceError, UnknownConversation
from tailrace.http.asgi_answers import NO_INDEX, STREAM_HEADERS, client_disconnected
from tailrace.http.stream_actions import StreamActions
from tailrace.records.records_service import Records
from tailrace.streams import Reader, StreamLog
from tailrace.text import ToolCallReader
from tailrace.types import CallReading, End, Released, TextDelta

__all__ = ["SharedAnswer"]

_HEADERS = {
    **STREAM_HEADERS,
    **NO_INDEX,
    "cache-control": "no-store, no-transform",  # a revoked link must not be in a cache
    "vary": "x-tailrace-share",
    "content-type": "text/event-stream; charset=utf-8",
}
_POLL_S = 2.0  # between two looks for changes of a conversation
_SOON_S = 0.3  # until the database has an answer that has ended
_LOOK_S = 5.0  # between two looks for a stream's log, which another server may write by now
_LAST_WORDS_S = 1.0


class SharedAnswer:
    """The answer to one reader of a link: an ASGI application."""

    def __init__(self, share: Share, records: Records, streams: StreamActions, heartbeat_s: float) -> None:
        self._share = share
        self._records = records
        self._streams = streams
        self._heartbeat_s = heartbeat_s
        self._ids: dict[str, int] = {}  # the numbers of messages, by their ids
        self._known: dict[int, tuple[bytes, bool]] = {}  # digest of the text, and whether it runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), text.encode()) for name, text in _HEADERS.items()]
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body"})
            return
        with self._records.shares.reading(self._share) as revoked:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            writer = asyncio.ensure_future(self._write(send, revoked))
            leaving = asyncio.ensure_future(client_disconnected(receive))
            ending = asyncio.ensure_future(revoked.wait())
            tasks = (writer, leaving, ending)
            left_s = max(0.0, self._records.shares.ends_s(self._share) - time.time())
            try:
                await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return
                if writer.done():
                    writer.result()
                    return
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        with contextlib.suppress(TimeoutError):  # a reader that takes nothing does not get the last event either
            async with asyncio.timeout(_LAST_WORDS_S):
                is_revoked = revoked.is_set() and time.time() < self._records.shares.ends_s(self._share)
                last = _event("end", {"reason": "revoked" if is_revoked else "expired"})
                await send({"type": "http.response.body", "body": last})

    async def _write(self, send: Send, revoked: asyncio.Event) -> None:
        """Write until there is nothing more to show."""
        if revoked.is_set():  # before the first word
            await asyncio.Event().wait()
        chunks = self._of_stream() if self._share.kind == "stream" else self._of_conversation()
        reason = "done"
        try:
            async for chunk in chunks:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (UnknownConversation, StreamError):
            reason = "deleted"
        except StorageError:
            reason = "unavailable"
        await send({"type": "http.response.body", "body": _event("end", {"reason": reason})})

    # A stream

    async def _of_stream(self) -> AsyncIterator[bytes]:
        log = await self._streams.find(self._share.owner, self._share.target)
        numbers = range(log.record.num_choices)
        texts = ["" for _ in numbers]
        if log.end is not None:
            for choice in numbers:
                plain = _PlainText(log.record.calls)
                texts[choice] = plain.push(log.text(choice)) + plain.flush()
        items = [_shown(number, "assistant", texts[number], is_running=log.end is None) for number in numbers]
        yield _event("state", {"title": "", "items": items})
        if log.end is None:
            async for chunk in self._deltas(log, {choice: choice for choice in numbers}):
                yield chunk

    async def _deltas(self, log: StreamLog, numbers: Mapping[int, int]) -> AsyncGenerator[bytes, None]:
        """Yield what is written of a stream, up to its end, and b"" if nothing was for a while. `numbers` are those of
        its choices' messages."""
        reader = Reader(log)  # not entered: the log does not count it
        plain = {choice: _PlainText(log.record.calls) for choice in numbers}
        beaten_s = looked_s = time.monotonic()
        while True:
            match await reader.next(_POLL_S):
                case list() as events:
                    texts: dict[int, str] = {}
                    for event in events:
                        if isinstance(event, TextDelta) and event.choice in numbers and event.text:
                            number = numbers[event.choice]
                            texts[number] = texts.get(number, "") + plain[event.choice].push(event.text)
                    for number, text in texts.items():
                        if text:
                            yield _event("text", {"id": number, "text": text})
                    if events:
                        beaten_s = looked_s = time.monotonic()
                        continue
                    yield b""
                    if time.monotonic() - looked_s >= _LOOK_S:
                        looked_s = time.monotonic()
                        found = await self._streams.find(self._share.owner, log.stream_id)
                        if found is not log:
                            log, reader = found, Reader(found, min(reader.cursor, found.last_seq))
                    if time.monotonic() - beaten_s >= self._heartbeat_s:
                        beaten_s = time.monotonic()
                        yield HEARTBEAT
                case End():
                    for choice, number in numbers.items():
                        if text := plain[choice].flush():
                            yield _event("text", {"id": number, "text": text})
                    return
                case Released():  # another server writes it; it is found again there
                    await asyncio.sleep(_SOON_S)
                    found = await self._streams.find(self._share.owner, log.stream_id)
                    log, reader = found, Reader(found, min(reader.cursor, found.last_seq))
                case never:
                    assert_never(never)

    # A conversation

    async def _of_conversation(self) -> AsyncIterator[bytes]:
        followed = ""  # the id of the last stream that was followed to its end
        beaten_s = time.monotonic()
        while True:
            conversation, last, state = await self._look()
            yield state
            del state
            if last is not None and last.stream_id and last.stream_id != followed:
                followed = last.stream_id
                log = await self._find(last.stream_id)
                if log is None:
                    continue
                number = self._ids[last.item_id]
                looked_s = time.monotonic()
                # It may have expired: then the database has it.
                async with contextlib.aclosing(self._deltas(log, {0: number})) as chunks:
                    with contextlib.suppress(StreamError):
                        async for chunk in chunks:
                            yield chunk
                            if time.monotonic() - looked_s < _POLL_S:
                                continue
                            looked_s = time.monotonic()
                            if (await self._get()).head != conversation.head:
                                del self._known[number]  # if it is shown again, it is shown from its beginning
                                followed = ""
                                break
                continue
            pause_s = _SOON_S if last is not None else _POLL_S
            loaded_s = time.monotonic()
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
                if await self._get() != conversation:
                    break
                if last is not None and time.monotonic() - loaded_s >= _LOOK_S:
                    break
                if time.monotonic() - beaten_s >= self._heartbeat_s:
                    beaten_s = time.monotonic()
                    yield HEARTBEAT

    async def _get(self) -> Conversation:
        """Raises: UnknownConversation, StorageError."""
        owner, its_id = self._share.owner, self._share.target
        return await self._records.conversations.ask(lambda store: store.get(owner, its_id))

    async def _look(self) -> tuple[Conversation, Item | None, bytes]:
        """Return the conversation, the message that is running at its end, and the state for the reader. The other
        messages are not kept in memory. Raises: UnknownConversation, StorageError."""
        owner, its_id = self._share.owner, self._share.target
        conversation, items = await self._records.conversations.ask(lambda store: store.tree(owner, its_id))
        branch = _visible(items, conversation.head)
        last = branch[-1] if branch and branch[-1].status == "in_progress" else None
        return conversation, last, self._state(conversation.title, branch)

    async def _find(self, stream_id: str) -> StreamLog | None:
        with contextlib.suppress(TailraceError):
            return await self._streams.find(self._share.owner, stream_id)
        return None

    def _state(self, title: str, branch: Iterable[Item]) -> bytes:
        shown = []
        for item in branch:
            number = self._ids.setdefault(item.item_id or item.stream_id, len(self._ids))
            is_running = item.status == "in_progress"
            text = "" if is_running else item.text
            known = hashlib.sha256(text.encode()).digest(), is_running
            is_known = self._known.get(number) == known
            self._known[number] = known
            shown.append(_shown(number, item.role, None if is_known else text, is_running=is_running))
        return _event("state", {"title": title, "items": shown})


class _PlainText:
    """The text of an answer without its tool calls."""

    def __init__(self, calls: CallReading | None) -> None:
        self._reader = ToolCallReader(calls) if calls is not None else None

    def push(self, text: str) -> str:
        """Return what is plain text for certain by now."""
        return text if self._reader is None else _joined(self._reader.push(text))

    def flush(self) -> str:
        """Return the rest at the end of the answer."""
        return "" if self._reader is None else _joined(self._reader.flush())


def _joined(parts: Iterable[object]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def _shown(number: int, role: str, text: str | None, *, is_running: bool) -> JsonBody:
    fields: JsonBody = {"id": number, "role": role, "is_running": is_running}
    return fields if text is None else {**fields, "text": text}


def _visible(items: Iterable[Item], head: str | None) -> list[Item]:
    """Return the messages of the branch that ends in `head` that a link shows."""
    by_id = {item.item_id: item for item in items}
    branch = []
    at = head
    while at is not None and at in by_id:
        item = by_id.pop(at)  # so that a circle ends
        branch.append(item)
        at = item.parent_id
    branch.reverse()
    return [item for item in branch if item.kind == "message" and item.role in ("user", "assistant")]


def _event(name: str, fields: JsonBody) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(fields))
