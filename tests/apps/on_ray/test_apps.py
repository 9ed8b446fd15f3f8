"""Users' apps on a local Ray with two replicas: the same answers, spread load, refusal of overload."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from tests.api.process import Server
from tests.apps.on_ray.cluster import START_S, RayRun, ServeRun, free_port
from tests.apps.process import AppServer, write
from tests.testing.redis_server import prefix_of, shared_url
from tests.waiting import LONG_S, until
from websockets.sync.client import connect

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]  # the first one has it installed

PROMPT = "Once upon a time"


_TORCH = ("torch==2.13.0", "transformers>=5.19,<6")


class _RunOnRay(RayRun):
    packages = _TORCH


class _PlainRay(ServeRun):
    packages = _TORCH


@pytest.fixture
def on_ray() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as running:
        yield running


def _text(server: Server, prompt: str = PROMPT) -> str:
    return httpx.post(server.url, params={"prompt": prompt}, timeout=120, trust_env=False).text


_BOTS = """
import os
import tailrace
from fastapi import FastAPI, WebSocket
from starlette.responses import StreamingResponse
from tailrace import serve

web = FastAPI()


@serve.deployment
class Shouter:
    def shout(self, text):
        return text.upper()


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=2, max_queued_requests=0)
@serve.ingress(web)
class Bot:
    def __init__(self, shouter):
        self.shouter = shouter
        self.model = tailrace.engine("scripted:tokens_per_s=200")

    @web.post("/")
    async def answer(self, prompt: str):
        return StreamingResponse(await self.model.stream(prompt, max_tokens=8, seed=3), media_type="text/plain")

    @web.get("/pid")
    async def pid(self):
        return os.getpid()

    @web.get("/shout")
    async def shout(self, text: str):
        return await self.shouter.shout.remote(text)

    @web.get("/long")
    async def long(self):
        return StreamingResponse(await self.model.stream("long", max_tokens=2000), media_type="text/plain")

    @web.websocket("/ws")
    async def ws(self, ws: WebSocket):
        await ws.accept()
        async for prompt in ws.iter_text():
            async for piece in self.model.stream(prompt, max_tokens=8, seed=3):
                await ws.send_text(piece)
            await ws.send_text("<<Response Finished>>")


app = Bot.bind(Shouter.bind())
"""


@pytest.fixture(params=["disk", "redis"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Where the streams of apps are. With a Redis, each replica has a part of the front."""
    return ["--journal", f"{shared_url()}?prefix={prefix_of(tmp_path)}"] if request.param == "redis" else []


def test_an_app_on_two_replicas(tmp_path: Path, on_ray: contextlib.ExitStack, journal: list[str]) -> None:
    write(tmp_path, "bot.py", _BOTS)
    with contextlib.closing(AppServer("bot:app", directory=tmp_path)) as here:
        here.wait_ready()
        expected = _text(here)
    server = on_ray.enter_context(contextlib.closing(_RunOnRay("bot:app", *journal, directory=tmp_path)))
    server.wait_ready(timeout_s=180)
    assert _text(server) == expected
    assert server.http.get("/shout?text=hey").json() == "HEY"
    with connect(server.url.replace("http", "ws") + "/ws") as ws:
        ws.send(PROMPT)
        assert "".join(iter(lambda: str(ws.recv(timeout=LONG_S)), "<<Response Finished>>")) == expected
    assert len({server.http.get("/pid").json() for _ in range(40)}) == 2
    # Made here: each loads certificates, and OpenSSL has crashed where several threads did that at once.
    clients = [httpx.Client(base_url=server.url, timeout=LONG_S, trust_env=False) for _ in range(8)]
    was_refused = threading.Event()
    readers = [threading.Thread(target=_read, args=[client, "/long", was_refused]) for client in clients]
    for reader in readers:
        reader.start()
    answers = iter(lambda: server.http.get("/pid"), None)  # until the readers have taken all places
    refusal = next(answer for answer in answers if answer.status_code != 200)
    was_refused.set()
    assert refusal.status_code == 429
    assert int(refusal.headers["retry-after"]) >= 1
    server.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join()


def _read(client: httpx.Client, path: str, is_over: threading.Event) -> None:
    """Read it again and again, so that all places are taken for as long as that takes."""
    with client, contextlib.suppress(httpx.HTTPError):
        while not is_over.is_set():
            client.get(path)


def test_the_tutorials_bots(tmp_path: Path, smollm2_dir: Path, on_ray: contextlib.ExitStack) -> None:
    """The same file of three apps, with the same answers, here and on Ray; and, with the import of Ray's own `serve`,
    under Ray without tailrace."""
    bots = Path(__file__).parents[1] / "bots"
    apps, plain = tmp_path / "apps.yaml", tmp_path / "plain"
    plain.mkdir()
    for bot in bots.glob("*.py"):
        write(plain, bot.name, bot.read_text().replace("from tailrace import serve", "from ray import serve"))
    listed = [
        {
            "name": name,
            "route_prefix": f"/{name}",
            "import_path": f"{name}:app",
            "deployments": [{"name": name.title(), "ray_actor_options": {"num_cpus": 0.3}}],
        }
        for name in ("textbot", "chatbot", "batchbot")
    ]
    apps.write_text(yaml.safe_dump({"applications": listed}))
    os.environ["CHECKPOINT"] = str(smollm2_dir)
    try:
        with contextlib.closing(AppServer(str(apps), directory=bots)) as here:
            here.wait_ready(timeout_s=LONG_S)
            expected = _answers(here)
        server = on_ray.enter_context(contextlib.closing(_RunOnRay(str(apps), directory=bots)))
        server.wait_line("batchbot runs at", timeout_s=START_S)
        server.wait_ready()
        assert _answers(server) == expected
        assert expected[0] == expected[1], "the same prompt"
        on_ray.close()
        config = {"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": listed}
        write(plain, "config.yaml", yaml.safe_dump(config))
        with contextlib.closing(_PlainRay(plain / "config.yaml", ready_path="/-/routes")) as ray:
            ray.wait_ready()
            until(lambda: len(ray.http.get("/-/routes").json()) == len(listed), timeout_s=START_S)
            assert _answers(ray) == expected
    finally:
        del os.environ["CHECKPOINT"]


def _answers(server: Server) -> list[str]:
    """What each of the bots says to the prompt; the last one is asked by two at once."""

    def ask(path: str) -> str:
        return httpx.post(f"{server.url}{path}", params={"prompt": PROMPT}, timeout=LONG_S, trust_env=False).text

    with connect(server.url.replace("http", "ws") + "/chatbot/", open_timeout=LONG_S) as ws:  # it may still load
        ws.send(PROMPT)
        chat = "".join(iter(lambda: str(ws.recv(timeout=LONG_S)), "<<Response Finished>>"))
    with ThreadPoolExecutor(2) as askers:
        return [ask("/textbot/"), chat, *askers.map(ask, ["/batchbot/"] * 2)]


_WORDS = """
from beside import MARK

class InferlessPythonModel:
    def initialize(self):
        self.opened = open("mark.txt").read()

    def infer(self, inputs, stream_output_handler):
        for word in inputs["TEXT"].split():
            stream_output_handler.send_streamed_output({"OUT": word + MARK + self.opened})
        stream_output_handler.finalise_streamed_output()
"""


def test_an_inferless_folder(tmp_path: Path, on_ray: contextlib.ExitStack, journal: list[str]) -> None:
    """It may import and open what lies beside it. A second server on the port says that it is taken."""
    folder = tmp_path / "words"
    folder.mkdir()
    write(folder, "app.py", _WORDS)
    write(folder, "beside.py", "MARK = '!'")
    write(folder, "mark.txt", "?")
    schema = '{"TEXT": {"datatype": "STRING", "required": True, "shape": [1], "example": ["a"]}}'
    write(folder, "input_schema.py", f"INPUT_SCHEMA = {schema}\nIS_STREAMING_OUTPUT = True\n")
    server = on_ray.enter_context(contextlib.closing(_RunOnRay("./words", *journal, directory=tmp_path)))
    server.wait_ready(timeout_s=180)
    answer = server.post("/v2/models/words/generate_stream", {"TEXT": "one two"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["OUT"] for event in events] == ["one!?", "two!?"]
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert ("x-stream-id" in answer.headers) == bool(journal)
    taken = _RunOnRay("./words", directory=tmp_path, port=server.port)
    second = on_ray.enter_context(contextlib.closing(taken))
    second.wait_line(
        rf"tailrace: cannot listen on 127\.0\.0\.1:{server.port} \(Address already in use\)", timeout_s=LONG_S
    )
    assert second.wait() == 1
    assert server.post("/v2/models/words/generate_stream", {"TEXT": "one"}).status_code == 200
