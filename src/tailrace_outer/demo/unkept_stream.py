"""A plain stream, for comparison: writes the engine's tokens to the socket, as most servers do.

It uses the same engine as other streams. It stores nothing, and its events have no ids, so a client cannot resume. When
the engine or this process dies, the connection breaks; no code here breaks it on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

import msgspec
from starlette.types import Receive, Scope, Send

from tailrace.assembly.served import Served
from tailrace.engines import Delta, Prefill, Sequence
from tailrace.errors import EngineError, QueueFull
from tailrace.http.asgi_answers import client_disconnected
from tailrace.text import Detokenizer
from tailrace.types import GenerateRequest, Message, Sampling

__all__ = ["MAX_PLAIN_STREAMS", "PlainAnswer", "PlainBody"]

MAX_PLAIN_STREAMS = 2  # at once, since they bypass the queue
_running: set[PlainAnswer] = set()


class PlainBody(msgspec.Struct, kw_only=True):
    """The body of `POST /demo/plain`."""

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=512)] = 200
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 7


class PlainAnswer:
    """Server-sent events `{"text": …}`, and `[DONE]` at the end: an ASGI application."""

    def __init__(self, served: Served, body: PlainBody, headers: Mapping[str, str]) -> None:
        self._served = served
        self._body = body
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue(body.max_tokens + 1)  # None: the engine is lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: RequestError, QueueFull, EngineLost before the first byte."""
        if len(_running) == MAX_PLAIN_STREAMS:
            raise QueueFull("Too many plain streams run.", retry_after_s=1.0)
        generator, supervisor, body = self._served.generator, self._served.supervisor, self._body
        _running.add(self)
        try:
            request = GenerateRequest(messages=(Message("user", body.prompt),))
            (prompt,) = await generator.prompts.encode(request)
            sampling = Sampling(temperature=body.temperature, seed=body.seed, max_tokens=body.max_tokens)
            sequence = Sequence(generator.new_sequence_id(), prompt.segments, sampling)
            supervisor.submit(sequence, self)
            try:
                await self._write_until_disconnect(receive, send)
            finally:
                supervisor.abort(sequence.sequence_id)
        finally:
            _running.remove(self)

    async def _write_until_disconnect(self, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._write(send)), group.create_task(client_disconnected(receive))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _write(self, send: Send) -> None:
        detokenizer = Detokenizer(self._served.generator.prompts.tokenizer)
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        while (delta := await self._deltas.get()) is not None and delta.finish_reason not in ("cancelled", "error"):
            data = msgspec.json.encode({"text": detokenizer.push(delta.token_ids)})
            is_last = delta.finish_reason is not None
            body = b"data: " + data + (b"\n\ndata: [DONE]\n\n" if is_last else b"\n\n")
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            if is_last:
                return

    # Called by the engine (engines.Receiver)

    def push(self, delta: Delta) -> None:
        self._deltas.put_nowait(delta)

    def report(self, progress: Prefill) -> None:
        pass

    def lost(self, error: EngineError) -> None:
        self._deltas.put_nowait(None)
