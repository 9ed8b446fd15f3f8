"""A replica on Ray: a whole server without sockets."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.api.lifecycle import RunningServer, open_server
from tailrace.assembly.served import Served
from tailrace.assembly.source import find_named
from tailrace.errors import ModelError
from tailrace.models.directories import prepared_path
from tailrace.models.progress import NoProgress
from tailrace.system.eventloop import first_error
from tailrace.transport.addresses import listens_on_loopback
from tailrace_outer.apps.on_ray.spec import ServerSpec

__all__ = ["RayReplica"]

_NO_KEYS = "There are no keys, so everybody could use this server. Create a key, or set `insecure`."


class RayReplica:
    """The built-in server, as Ray runs it.

    Its streams are in Redis. If Ray stops the replica, the other replicas continue its streams at once. If Ray kills
    it, they do so when its lease has expired.
    """

    def __init__(self, spec: ServerSpec) -> None:
        level = spec.settings.log_level.upper()
        logging.basicConfig(level=level, stream=sys.stderr, format="tailrace: %(message)s")
        self._spec = spec
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._server: RunningServer | None = None

    async def _serve(self, ready: asyncio.Event) -> None:
        """Serve until the replica is stopped. One task does it all, because task groups need that."""
        spec, settings = self._spec, self._spec.settings
        source, *more = await asyncio.to_thread(
            find_named, spec.named, NoProgress(), settings, first=spec.first, own=spec.own
        )
        with tempfile.TemporaryDirectory(prefix="tailrace-") as directory:
            async with open_server(
                source, settings, data_path=Path(directory), cache_path=prepared_path(), more=more
            ) as server:
                if not (listens_on_loopback(settings.host) or settings.insecure) and server.records.keyring.is_empty:
                    raise ModelError(_NO_KEYS)
                self._server = server
                ready.set()
                await self._stopping.wait()
                await server.drain(0)  # Ray has waited for the requests: what is left has no readers here

    # What Ray calls

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start the server. Raises: ModelError."""
        ready = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self._server is None:
            waiting.cancel()
            try:
                await self._serving
            except BaseExceptionGroup as group:
                raise first_error(group) from None
        assert self._server is not None
        return _without_request_id(self._server.app)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"requests": float(self._num_running() + self._num_waiting())}

    def record_routing_stats(self) -> dict[str, float]:
        return {"waiting": float(self._num_waiting())}

    async def check_health(self) -> None:
        """Raises: RuntimeError if the server has ended."""
        if self._serving is not None and self._serving.done() and not self._stopping.is_set():
            raise RuntimeError("The server has ended.") from self._serving.exception()

    async def __del__(self) -> None:
        self._stopping.set()
        if self._serving is not None:
            await self._serving

    def _models(self) -> Iterable[Served]:
        return self._server.service.models if self._server is not None else ()

    def _num_running(self) -> int:
        return sum(served.generator.gate.num_running for served in self._models())

    def _num_waiting(self) -> int:
        return sum(served.generator.gate.num_waiting for served in self._models())


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Drop the header X-Request-Id of an application, since Ray's proxy adds its own."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if "headers" in message:
                kept = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await app(scope, receive, send_rest)

    return wrapped
