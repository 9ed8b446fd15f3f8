"""Which ASGI application answers for a deployment, called in this process."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tailrace import serve
from tailrace.serve.exceptions import BackPressureError, DeploymentUnavailableError
from tailrace_outer.serve.ingress import asgi_of, has_ingress, is_asgi


async def _get(instance: Any, path: str, method: str = "GET") -> httpx.Response:
    app = await asgi_of(instance)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.request(method, path)


async def _raw(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("raw")(scope, receive, send)


async def test_methods_become_routes_with_all_their_options() -> None:
    api = FastAPI()

    @serve.ingress(api)
    class Bot:
        word = "hello"

        @api.get("/one", status_code=202, tags=["words"], response_model=str, name="first")
        def one(self, n: int = 1) -> str:
            """Says it."""
            return self.word * n

        @api.post("/one")
        async def two(self) -> str:
            return "posted"

    bot = Bot()
    answer = await _get(bot, "/one?n=2")
    assert (answer.status_code, answer.json()) == (202, "hellohello")
    assert (await _get(bot, "/one", "POST")).json() == "posted"
    assert (await _get(bot, "/one?n=x")).status_code == 422
    described = (await _get(bot, "/openapi.json")).json()["paths"]["/one"]["get"]
    assert (described["tags"], described["description"]) == (["words"], "Says it.")
    assert [parameter["name"] for parameter in described["parameters"]] == ["n"]
    assert has_ingress(Bot)


async def test_functions_and_methods_of_bases_are_kept() -> None:
    api = FastAPI()

    class Other:
        @api.get("/other")
        def other(self) -> str:
            return "a base is no other"

    @api.get("/function")
    def function() -> str:
        return "function"

    @serve.ingress(api)
    class Bot(Other):
        pass

    assert (await _get(Bot(), "/function")).json() == "function"
    assert (await _get(Bot(), "/other")).json() == "a base is no other"


async def test_methods_of_other_classes_are_dropped() -> None:
    api = FastAPI()

    @serve.ingress(api)
    class Bot:
        pass

    class Other:
        @api.get("/other")
        def other(self) -> str:
            return "never"

    assert (await _get(Bot(), "/other")).status_code == 404


async def test_routers_that_are_included() -> None:
    api, router = FastAPI(), APIRouter()

    @serve.ingress(api)
    class Bot:
        word = "routed"

        @router.get("/x")
        async def show(self) -> str:
            return self.word

    api.include_router(router, prefix="/in")
    assert (await _get(Bot(), "/in/x")).json() == "routed"


async def test_a_base_class_with_an_ingress() -> None:
    api = FastAPI()

    @serve.ingress(api)
    class Base:
        @api.get("/name")
        def name(self) -> str:
            return type(self).__name__

    class Sub(Base):
        pass

    assert (await _get(Sub(), "/name")).json() == "Sub"


async def test_apps_that_are_made() -> None:
    def make() -> Starlette:
        async def show(request: Request) -> Response:
            return PlainTextResponse("made")

        return Starlette(routes=[Route("/", show)])

    async def make_later() -> FastAPI:
        return make()  # type: ignore[return-value]  # as good as one

    for builder in (make, make_later):
        assert (await _get(serve.ingress(builder)()(), "/")).text == "made"
    with pytest.raises(TypeError, match="did not return an ASGI app"):
        await asgi_of(serve.ingress(lambda: 5)()())  # type: ignore[arg-type]  # it should not


async def test_a_custom_asgi_app() -> None:
    @serve.ingress()
    class Bot:
        def __serve_build_asgi_app__(self) -> Any:
            return _raw

    assert (await _get(Bot(), "/")).text == "raw"
    assert (await _get(serve.ingress(_raw)()(), "/")).text == "raw"


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (BackPressureError("full", retry_after_s=3.2), 429, "4"),
        (BackPressureError("full", status=503), 503, "1"),
        (DeploymentUnavailableError("gone"), 503, "1"),
    ],
)
async def test_a_refusal_of_a_child_keeps_its_status(error: Exception, status: int, retry_after: str) -> None:
    api = FastAPI()

    @serve.ingress(api)
    class Bot:
        @api.get("/")
        async def ask(self) -> None:
            raise error

    answer = await _get(Bot(), "/")
    assert (answer.status_code, answer.headers["retry-after"]) == (status, retry_after)
    assert answer.json()["error"]["message"] == str(error)


async def test_an_app_may_answer_refusals_itself() -> None:
    api = FastAPI()

    @api.exception_handler(BackPressureError)
    async def tell(request: Request, error: Exception) -> Response:
        return PlainTextResponse("later", 599)

    @serve.ingress(api)
    class Bot:
        @api.get("/")
        async def ask(self) -> None:
            raise BackPressureError("full")

    assert (await _get(Bot(), "/")).status_code == 599


async def test_callables_that_get_the_request() -> None:
    class Bot:
        def __call__(self, request: Request) -> dict[str, str]:
            return {"path": request.url.path}

    class Nobody:
        pass

    assert (await _get(Bot(), "/x")).json() == {"path": "/x"}
    assert (await _get(Nobody(), "/")).status_code == 404
    assert (await _get(lambda request: _raw, "/")).text == "raw"


def test_objects_that_cannot_have_an_ingress() -> None:
    class Bot:
        def __call__(self) -> None: ...

    with pytest.raises(TypeError, match="Bot has both a __call__ and an ingress"):
        serve.ingress(FastAPI())(Bot)
    with pytest.raises(TypeError, match="takes an ASGI app"):
        serve.ingress(5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="decorates a class"):
        serve.ingress(FastAPI())(serve.deployment(type("Bot", (), {})))
    with pytest.raises(TypeError, match="decorates a class"):
        serve.ingress(FastAPI())(lambda: None)


def test_asgi_apps_are_recognised() -> None:
    def three(one: int, two: int, three: int) -> None: ...

    async def two(one: int, two: int) -> None: ...

    class Instance:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    for app in (_raw, FastAPI(), Starlette(), Instance()):
        assert is_asgi(app)
    for other in (three, two, FastAPI, Instance, 5, None, WebSocket):
        assert not is_asgi(other)
