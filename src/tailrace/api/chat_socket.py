"""A chat of a wire on one WebSocket."""

from __future__ import annotations

import asyncio
from collections import deque

from tailrace.access.principal import arrival_of, principal_of, sent_by
from tailrace.assembly.models import Models
from tailrace.dialects import SocketChat
from tailrace.dialects.websocket import Close
from tailrace.dialects.wire import failure_of
from tailrace.errors import (
    KINDS,
    AdmissionError,
    ContextLengthExceeded,
    Draining,
    Interrupted,
    LeaseLost,
    QueueFull,
    RequestError,
    StorageError,
    TailraceError,
)
from tailrace.generation import Run
from tailrace.http.accepted_websocket import Over, Socket
from tailrace.settings import Settings
from tailrace.streams import Reader
from tailrace.types import End

__all__ = ["ChatSocket", "close_for"]

_MAX_WAITING = 16  # prompts


class ChatSocket:
    """Receives prompts, and sends one answer after the other."""

    def __init__(self, models: Models, settings: Settings, socket: Socket, chat: SocketChat, *, wire: str) -> None:
        self._models = models
        self._chat = chat
        self._wire = wire
        self._socket = socket
        self._queue_s = settings.queue_s
        self._max_characters = settings.ws_message_bytes
        self._waiting: deque[str] = deque()  # `listen` closes the socket if there are too many
        self._arrival = asyncio.Event()

    async def listen(self) -> None:
        while True:
            prompt = await self._socket.text()
            num_characters = sum(len(waiting) for waiting in self._waiting)
            if self._waiting and num_characters + len(prompt) > self._max_characters:
                raise Over(Close(1008, "The waiting prompts are too long together."))
            if len(self._waiting) >= _MAX_WAITING:
                raise Over(Close(1008, "Too many prompts wait for an answer."))
            self._waiting.append(prompt)
            self._arrival.set()

    async def answer_all(self) -> None:
        while True:
            await self._arrival.wait()
            while self._waiting:
                self._socket.busy()
                try:
                    await self._answer(self._waiting.popleft())
                except TailraceError as error:
                    raise Over(close_for(error)) from None
                finally:
                    self._socket.free()
            self._arrival.clear()

    async def _answer(self, prompt: str) -> None:
        """Raises: TailraceError if the answer cannot be started or completed."""
        self._socket.authenticate()
        served = self._models.first
        with served.arriving(arrival_of(self._socket.scope, wire=self._wire, model=served.model)):
            principal_of(self._socket.scope).require_generation(wire=self._wire, model=served.model)
            await self._models.load(served)
            run = await self._begin(prompt)
        with Reader(run.log) as reader:
            while isinstance(taken := await reader.next(), list):
                frames = [frame for event in taken if (frame := self._chat.encode(event))]
                await self._socket.say_all(frames)
        if not isinstance(taken, End) or taken.status != "done":
            raise failure_of(taken)
        if frame := self._chat.encode(taken):
            await self._socket.say(frame)

    async def _begin(self, prompt: str) -> Run:
        """Start the answer; shorten the chat or wait in the queue if necessary. Raises: TailraceError."""
        deadline_s = asyncio.get_running_loop().time() + self._queue_s
        while True:
            try:
                request = self._chat.ask(prompt)
                request = sent_by(self._socket.scope, request, wire=self._wire, model=self._models.first.model)
                return await self._models.first.generator.create(request)
            except ContextLengthExceeded as error:
                if not self._chat.shorten(error):
                    raise
            except QueueFull as error:
                retry_s = error.retry_after_s or 1.0
                if asyncio.get_running_loop().time() + retry_s > deadline_s:
                    raise
                await asyncio.sleep(retry_s)  # as HTTP clients do after a 429


def close_for(error: TailraceError) -> Close:
    """Return how to close the socket after an error."""
    if isinstance(error, ContextLengthExceeded):
        code = 1009
    elif isinstance(error, RequestError):
        code = 1008
    elif error.code in (Draining.code, Interrupted.code, LeaseLost.code):
        code = 1012
    elif isinstance(error, AdmissionError) or issubclass(KINDS.get(error.code, TailraceError), StorageError):
        code = 1013
    else:
        code = 1011
    return Close.with_reason(code, error.message)
