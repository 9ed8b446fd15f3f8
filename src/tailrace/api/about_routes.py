"""Routes about the server itself: its welcome, its metrics, what it answers, and the files of its page."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace import __version__
from tailrace.access.principal import principal_of
from tailrace.api.pages import Pages, wants_page
from tailrace.api.routes import route
from tailrace.api.server_metrics import Metrics
from tailrace.assembly.models import Models
from tailrace.http.asgi_answers import JsonAnswer

__all__ = ["AboutRoutes"]


class AboutRoutes:
    """`describe` returns the OpenAPI document. It is called once, at the first request for it."""

    def __init__(self, models: Models, metrics: Metrics, describe: Callable[[], bytes]) -> None:
        self._models = models
        self._metrics = metrics
        self._describe = describe
        self._pages = Pages()

    def table(self) -> list[Route]:
        return [
            route("GET", "/", self.welcome),
            route("GET", "/metrics", self.show_metrics),
            route("GET", "/openapi.json", self.show_openapi),
            route("GET", "/docs", self.show_docs),
            *self._pages.table(),
        ]

    async def welcome(self, request: Request) -> ASGIApp:
        if wants_page(request):
            return await self._pages.index(request)
        return PlainTextResponse(
            f"tailrace {__version__} runs {', '.join(named.model for named in self._models.names)}. "
            "POST /?prompt=… streams text; /openapi.json lists all routes.\n",
            headers={"vary": "accept"},
        )

    async def show_metrics(self, request: Request) -> ASGIApp:
        principal_of(request.scope).require("metrics")
        return self._metrics.answer()

    async def show_openapi(self, request: Request) -> ASGIApp:
        return JsonAnswer(self._document)

    async def show_docs(self, request: Request) -> ASGIApp:
        return self._pages.docs(request, self._document)

    @cached_property
    def _document(self) -> bytes:
        return self._describe()
