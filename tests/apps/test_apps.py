"""Every way to write an app, in one file of Ray Serve's shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.apps.process import AppServer, write

_MAIN = """
import asyncio, os
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse
from tailrace import serve

api = FastAPI()
router = APIRouter(prefix="/routed")
made = []


@serve.deployment(max_ongoing_requests=7)
class Word:
    def __init__(self, text):
        self.text = text
        made.append(self)

    def __call__(self):
        return [self.text, os.getpid(), len(made)]


class Base:
    @api.get("/inherited")
    async def inherited(self):
        return type(self).__name__


@serve.deployment(user_config={"volume": 1}, autoscaling_config={"max_replicas": 3})
@serve.ingress(api)
class Choir(Base):
    async def __init__(self, first, *, words, by_name, title):
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        self.first, self.words, self.by_name, self.title = first, words, by_name, title

    def reconfigure(self, config):
        self.volume = config["volume"]

    @api.get("/sing")
    async def sing(self):
        asked = [self.first, *self.words, self.by_name["last"]]
        return [await word.remote() for word in asked]

    @api.get("/about")
    async def about(self, request: Request):
        return {
            "title": self.title, "volume": self.volume, "secret": os.environ.get("SECRET"),
            "root_path": request.scope["root_path"], "url": str(request.url_for("about").path),
            "names": [self.first.deployment_name, *(word.deployment_name for word in self.words)],
            "here": os.path.basename(os.getcwd()),
        }

    @router.get("/method")
    async def routed(self, x: int):
        return [self.title, x]


api.include_router(router)


def build(args: dict):
    hello = Word.bind("hello")
    return Choir.bind(hello, words=[hello, Word.bind("two")], by_name={"last": Word.bind("three")}, title=args["title"])


class Config(BaseModel):
    size: int
    words: list[str] = ["none"]


def make_app():
    app = FastAPI()

    @app.get("/")
    async def root():
        return {"made": "by a function"}

    return app


@serve.deployment
@serve.ingress(make_app)
class Made:
    def __init__(self, config):
        self.config = config


@serve.deployment
@serve.ingress()
class Built:
    def __init__(self, config):
        self.config = config

    async def __serve_build_asgi_app__(self):
        app = FastAPI()
        app.get("/")(self.show)
        return app

    def show(self):
        return self.config.model_dump()


def typed(config: Config):
    return Built.bind(config)


made_app = Made.options(name="Other").bind(5)


@serve.deployment
def kinds(request):
    kind = request.query_params["kind"]

    def sync():
        yield from ("a", "b", "c")

    async def asynchronous():
        for letter in "abc":
            yield letter

    return {
        "text": "héllo", "bytes": b"\\x00\\xff", "dict": {"a": [1]}, "none": None, "response": JSONResponse([1], 418),
        "sync": sync(), "async": asynchronous(), "large": b"0123456789abcdef" * (5 * 2**20),
    }[kind]


kinds_app = kinds.bind()


@serve.deployment
class Called:
    async def __call__(self, request):
        return f"{request.method} {(await request.body()).decode()}"


called_app = Called  # bound with nothing
"""

_WEB = """
import contextlib
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

@contextlib.asynccontextmanager
async def lifespan(app):
    yield {"model": "loaded"}
    open("shut-down", "w").write("yes")

async def show(request):
    return JSONResponse([request.state.model, request.scope["root_path"], request.scope["path"]])

app = Starlette(routes=[Route("/show", show)], lifespan=lifespan)

async def raw(scope, receive, send):
    assert scope["type"] == "http", "it knows of nothing else"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-raw", b"1"), (b"x-raw", b"2")]})
    await send({"type": "http.response.body", "body": scope["root_path"].encode()})
"""

_PLAN = """
proxy_location: EveryNode
http_options: {port: 1, request_timeout_s: 5, keep_alive_timeout_s: 30}
applications:
  - name: choir
    route_prefix: /choir
    import_path: main:build
    args: {title: mass}
    runtime_env:
      env_vars: {SECRET: "1234"}
      pip: [torch]
    deployments:
      - {name: Choir, user_config: {volume: 11}}
      - {name: Word_1, max_ongoing_requests: 3, ray_actor_options: {num_cpus: 1}}
  - {name: typed, route_prefix: /typed, import_path: "main:typed", args: {size: "3", words: [x]}}
  - {name: made, route_prefix: /made, import_path: main:made_app}
  - {name: kinds, route_prefix: /kinds, import_path: main:kinds_app}
  - {name: called, route_prefix: /choir/called, import_path: main:called_app}
  - {name: web, route_prefix: /web, import_path: web:app, logging_config: {}}
  - {name: raw, route_prefix: /raw, import_path: web:raw}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apps")
    write(path, "main.py", _MAIN)
    write(path, "web.py", _WEB)
    (path / "apps.yaml").write_text(_PLAN)
    return path


@pytest.fixture(scope="module")
def apps(directory: Path) -> Iterator[AppServer]:
    with contextlib.closing(AppServer("apps.yaml", directory=directory)) as server:
        yield server.wait_ready()
    assert (directory / "shut-down").read_text() == "yes"  # the lifespan has ended, too


@pytest.fixture
def http(apps: AppServer) -> httpx.Client:
    return apps.http


def test_children_in_lists_and_dicts_become_handles(http: httpx.Client) -> None:
    """A deployment that is bound once becomes one deployment; two deployments of one class become two."""
    sung = http.get("/choir/sing").json()
    assert [text for text, _, _ in sung] == ["hello", "hello", "two", "three"]
    assert [made for _, _, made in sung] == [1, 1, 1, 1]
    assert len({pid for _, pid, _ in sung}) == 3
    assert http.get("/choir/about").json()["names"] == ["Word", "Word", "Word_1"]


def test_an_app_knows_its_place_and_its_options(http: httpx.Client, directory: Path) -> None:
    assert http.get("/choir/about").json() == {
        "title": "mass", "volume": 11, "secret": "1234", "root_path": "/choir", "url": "/choir/about",
        "names": ["Word", "Word", "Word_1"], "here": directory.name,
    }  # fmt: skip
    assert http.get("/-/readyz").json()["apps"]["choir"].keys() == {"Word", "Word_1", "Word_2", "Choir"}


def test_methods_of_routers_and_of_base_classes_are_routes(http: httpx.Client) -> None:
    assert http.get("/choir/routed/method?x=4").json() == ["mass", 4]
    assert http.get("/choir/inherited").json() == "Choir"


def test_builders_take_models(http: httpx.Client) -> None:
    assert http.get("/typed/").json() == {"size": 3, "words": ["x"]}


def test_apps_made_in_each_process(http: httpx.Client) -> None:
    assert http.get("/made/").json() == {"made": "by a function"}


@pytest.mark.parametrize(
    ("kind", "content_type", "body"),
    [
        ("text", "text/plain; charset=utf-8", "héllo".encode()),
        ("bytes", None, b"\x00\xff"),
        ("dict", "application/json", b'{"a":[1]}'),
        ("none", "application/json", b"null"),
        ("response", "application/json", b"[1]"),
        ("sync", "text/plain; charset=utf-8", b"abc"),
        ("async", "text/plain; charset=utf-8", b"abc"),
    ],
)
def test_the_result_of_a_function_is_the_answer(
    http: httpx.Client, kind: str, content_type: str | None, body: bytes
) -> None:
    answer = http.get("/kinds/", params={"kind": kind})
    assert answer.status_code == (418 if kind == "response" else 200)
    assert answer.headers.get("content-type") == content_type
    assert answer.content == body


def test_an_answer_may_be_longer_than_any_message(http: httpx.Client) -> None:
    assert http.get("/kinds/", params={"kind": "large"}).content == b"0123456789abcdef" * (5 * 2**20)


def test_an_instance_is_called_with_the_request(http: httpx.Client) -> None:
    """The longest matching prefix is used."""
    assert http.put("/choir/called", content=b"body").text == "PUT body"


def test_the_state_of_the_startup_reaches_requests(http: httpx.Client) -> None:
    assert http.get("/web/show").json() == ["loaded", "/web", "/web/show"]


def test_an_app_without_lifespan(http: httpx.Client) -> None:
    answer = http.get("/raw/any/where")
    assert (answer.text, answer.headers.get_list("x-raw")) == ("/raw", ["1", "2"])


def test_paths_without_an_app(http: httpx.Client) -> None:
    for path in ("/", "/rawer", "/choirs"):
        assert http.get(path).status_code == 404
    assert http.get("/-/routes").json() == {
        "/choir": "choir", "/choir/called": "called", "/typed": "typed", "/made": "made", "/kinds": "kinds",
        "/web": "web", "/raw": "raw",
    }  # fmt: skip
    assert http.get("/-/nothing").status_code == 404


def test_options_without_effect_are_named(apps: AppServer) -> None:
    for words in (
        "apps.yaml: proxy_location is ignored: it has no effect on one machine.",
        "apps.yaml: http_options.request_timeout_s is ignored: tailrace does not use it.",
        "applications[0].runtime_env.pip is ignored; install what the app needs yourself.",
        "applications[5].logging_config is ignored: it has no effect on one machine.",
        "Choir: autoscaling_config is ignored: the number of processes is num_replicas.",
        "Word_1: ray_actor_options is ignored",
    ):
        assert apps.log.count(words) == 1, apps.log
    assert "Traceback" not in apps.log
