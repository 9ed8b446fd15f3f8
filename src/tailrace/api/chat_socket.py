"""The conversation of a chatbot on one WebSocket."""

from __future__ import annotations

import asyncio
from collections import deque

from tailrace.access.principal import arrival_of, sent_by
from tailrace.dialects import chatbot
from tailrace.dialects.websocket import Close
from tailrace.dialects.wire import failure_of
from tailrace.errors import ContextLengthExceeded, QueueFull, TailraceError
from tailrace.generation import Run
from tailrace.generation.models import Models
from tailrace.http.websocket import Over, Socket
from tailrace.settings import Settings
from tailrace.streams import Reader

__all__ = ["ChatSocket"]


class ChatSocket:
    """Receives prompts, and sends one answer after the other."""

    def __init__(self, models: Models, settings: Settings, socket: Socket) -> None:
        generator = models.first.generator
        self._models = models
        self._socket = socket
        self._queue_s = settings.queue_s
        self._max_characters = settings.ws_message_bytes
        self._waiting: deque[str] = deque()  # `listen` closes the socket if there are too many
        self._arrival = asyncio.Event()
        self._max_tokens = min(generator.limits.default_max_tokens, max(1, generator.limit_tokens() // 2))
        self._conversation = chatbot.ChatbotConversation(
            has_template=generator.prompts.chat is not None,
            repetition_penalty=1.1 if "repetition_penalty" in generator.parameters else 1.0,
        )

    async def listen(self) -> None:
        while True:
            prompt = await self._socket.text()
            num_characters = sum(len(waiting) for waiting in self._waiting)
            if self._waiting and num_characters + len(prompt) > self._max_characters:
                raise Over(Close(1008, "The waiting prompts are too long together."))
            if len(self._waiting) >= chatbot.MAX_WAITING:
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
                    raise Over(chatbot.close_for(error)) from None
                finally:
                    self._socket.free()
            self._arrival.clear()

    async def _answer(self, prompt: str) -> None:
        """Raises: TailraceError if the answer cannot be started or completed."""
        served = self._models.first
        with served.arriving(arrival_of(self._socket.scope, wire="chatbot", model=served.model)):
            await self._models.load(served)
            run = await self._begin(prompt)
        with Reader(run.log) as reader:
            while isinstance(taken := await reader.next(), list):
                texts = [event.text.encode() for event in taken if event.text]
                for start in range(0, len(texts), self._socket.max_frames):
                    await self._socket.say(*texts[start : start + self._socket.max_frames])
        if taken.status != "done":
            raise failure_of(taken)
        self._conversation.add(prompt, run.log.text(), taken.usage)
        await self._socket.say(chatbot.FINISHED.encode())

    async def _begin(self, prompt: str) -> Run:
        """Start the answer; shorten the conversation or wait in the queue if necessary. Raises: TailraceError."""
        deadline_s = asyncio.get_running_loop().time() + self._queue_s
        max_tokens: int | None = self._max_tokens
        while True:
            try:
                request = self._conversation.ask(prompt, max_tokens=max_tokens)
                request = sent_by(self._socket.scope, request, wire="chatbot", model=self._models.first.model)
                return await self._models.first.generator.create(request)
            except ContextLengthExceeded as error:
                num_excess = error.num_prompt_tokens + error.max_tokens - error.limit_tokens
                if not self._conversation.shorten(num_excess):
                    if max_tokens is None:
                        raise
                    max_tokens = None  # as much as fits
            except QueueFull as error:
                retry_s = error.retry_after_s or 1.0
                if asyncio.get_running_loop().time() + retry_s > deadline_s:
                    raise
                await asyncio.sleep(retry_s)  # as HTTP clients do after a 429
