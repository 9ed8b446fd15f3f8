"""`/v1/streams` beside users' apps: replicas without user code, which answer for the streams of all apps."""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.errors import NotFound
from tailrace.settings import Settings
from tailrace_outer.apps.app_streams import AppStreams
from tailrace_outer.apps.on_ray.stream_thread import StreamThread
from tailrace_outer.apps.stream_routes import STREAMS_PATH, stream_answer

__all__ = ["STREAMS_NAME", "streams_application"]

STREAMS_NAME = "tailrace-streams"  # of the application and its deployment
_NUM_REPLICAS = 2  # so that readers find one while Ray replaces the other
_MAX_CONNECTIONS = 1000  # per replica


class _Streams:
    """A replica, as Ray runs it. It also ends the streams of apps' replicas that are gone."""

    def __init__(self, settings: Settings) -> None:
        self._thread = StreamThread(settings)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        await self._thread.start()
        return Router(default=self._on_request)

    async def check_health(self) -> None:
        self._thread.check()

    async def __del__(self) -> None:
        await self._thread.stop(drain_s=0)

    async def _on_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        await self._thread.answer(lambda streams: _found(streams, scope), scope, receive, send)


async def _found(streams: AppStreams, scope: Scope) -> ASGIApp:
    """Raises: StreamError, StorageError, NotFound."""
    answer = await stream_answer(streams, scope, scope["path"])
    if answer is None:
        raise NotFound(f"There is no stream at this path. Streams are at {STREAMS_PATH}/ID.")
    return answer


def streams_application(settings: Settings) -> Any:  # Any: Ray's application
    deployment = serve.deployment(
        name=STREAMS_NAME,
        num_replicas=_NUM_REPLICAS,
        max_ongoing_requests=_MAX_CONNECTIONS,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment(serve.ingress()(_Streams)).bind(settings)
