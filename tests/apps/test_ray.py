"""The same bots and the same server on a local Ray with two replicas: same answers, spread load, refusal of overload.
Ray has its own environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # JSON

import httpx
import psutil
import pytest
from tests.api.process import Server
from tests.apps.process import AppServer, write
from tests.clients.installed import environment
from tests.waiting import LONG_S
from websockets.sync.client import connect

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]  # the first one has it installed

ROOT = Path(__file__).parent.parent.parent
PORT = 18_431
PROMPT = "Once upon a time"


class _OnRay(Server):
    """`tailrace serve … --on ray`."""

    listening = rf"127\.0\.0\.1:({PORT})/? \(.*on Ray"

    def __init__(self, *arguments: str, directory: Path | None = None) -> None:
        python = environment("ray", "-e", f"{ROOT}[ray]", "torch==2.13.0", "transformers>=5.19,<6")
        self.command = (str(python), "-m", "tailrace")
        super().__init__(*arguments, "--port", str(PORT), "--on", "ray", directory=directory)

    def close(self) -> None:
        with contextlib.suppress(AssertionError):  # Ray's own log has tracebacks of its own
            super().close()


class _RunOnRay(_OnRay):
    verb = "run"


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


def test_an_app_on_two_replicas(tmp_path: Path, on_ray: contextlib.ExitStack) -> None:
    write(tmp_path, "bot.py", _BOTS)
    with contextlib.closing(AppServer("bot:app", directory=tmp_path)) as here:
        here.wait_ready()
        expected = _text(here)
    server = on_ray.enter_context(contextlib.closing(_RunOnRay("bot:app", directory=tmp_path)))
    server.wait_ready(timeout_s=180)
    assert _text(server) == expected
    assert server.http.get("/shout?text=hey").json() == "HEY"
    with connect(server.url.replace("http", "ws") + "/ws") as ws:
        ws.send(PROMPT)
        assert "".join(iter(lambda: str(ws.recv(timeout=LONG_S)), "<<Response Finished>>")) == expected
    assert len({server.http.get("/pid").json() for _ in range(40)}) == 2
    # Made here: each loads certificates, and OpenSSL has crashed where several threads did that at once.
    clients = [httpx.Client(base_url=server.url, timeout=LONG_S, trust_env=False) for _ in range(8)]
    readers = [threading.Thread(target=_read, args=[client, "/long"]) for client in clients]
    for reader in readers:
        reader.start()
    answers = iter(lambda: server.http.get("/pid"), None)  # until the readers have taken all places
    refusal = next(answer for answer in answers if answer.status_code != 200)
    assert refusal.status_code == 429
    assert int(refusal.headers["retry-after"]) >= 1
    server.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join()


def _read(client: httpx.Client, path: str) -> None:
    with client, contextlib.suppress(httpx.HTTPError):
        client.get(path)


def test_the_tutorials_bot(smollm2_dir: Path, on_ray: contextlib.ExitStack) -> None:
    bots = Path(__file__).with_name("bots")
    os.environ["CHECKPOINT"] = str(smollm2_dir)
    try:
        with contextlib.closing(AppServer("textbot:app", directory=bots)) as here:
            here.wait_ready(timeout_s=120)
            expected = _text(here)
        server = on_ray.enter_context(contextlib.closing(_RunOnRay("textbot:app", directory=bots)))
        server.wait_ready(timeout_s=240)
        assert _text(server) == expected
    finally:
        del os.environ["CHECKPOINT"]


def test_the_server_on_two_replicas(on_ray: contextlib.ExitStack) -> None:
    source = "scripted:tokens_per_s=100"
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 11}
    wires = ("/v1/completions", "/generate", "/v1/chat/completions", "/api/generate")
    bodies = (
        body,
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "seed": 11}},
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "seed": 11},
        {"model": "scripted", "prompt": PROMPT, "stream": False, "options": {"num_predict": 20, "seed": 11}},
    )
    with contextlib.closing(Server(source)) as here:
        here.wait_ready()
        expected = [_said(here.post(wire, asked).json()) for wire, asked in zip(wires, bodies, strict=True)]
    server = on_ray.enter_context(
        contextlib.closing(_OnRay(source, "--replicas", "2", "--max-concurrent-requests", "2"))
    )
    server.wait_ready(timeout_s=180)
    assert [_said(server.post(wire, asked).json()) for wire, asked in zip(wires, bodies, strict=True)] == expected
    assert len(server.http.get("/healthz").headers.get_list("x-request-id")) == 1
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[0]
    assert len(chunks) > 5
    statuses: list[int] = []
    retries: list[str] = []

    def ask(client: httpx.Client) -> None:
        with client:
            got = client.post("/v1/completions", json=body | {"max_tokens": 600})
        statuses.append(got.status_code)
        retries.extend([got.headers["retry-after"]] if got.status_code != 200 else [])

    clients = [httpx.Client(base_url=server.url, timeout=LONG_S, trust_env=False) for _ in range(12)]
    askers = [threading.Thread(target=ask, args=[client]) for client in clients]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert set(statuses) == {200, 429}
    assert 2 < statuses.count(200) <= 4, "more than one replica's worth, and no more than two's"
    assert len(retries) == statuses.count(429)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert sum("tailrace.engines.worker" in " ".join(child.cmdline()) for child in children) == 2


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


def test_an_inferless_folder(tmp_path: Path, on_ray: contextlib.ExitStack) -> None:
    """It may import and open what lies beside it. A second server on the port says that it is taken."""
    folder = tmp_path / "words"
    folder.mkdir()
    write(folder, "app.py", _WORDS)
    write(folder, "beside.py", "MARK = '!'")
    write(folder, "mark.txt", "?")
    schema = '{"TEXT": {"datatype": "STRING", "required": True, "shape": [1], "example": ["a"]}}'
    write(folder, "input_schema.py", f"INPUT_SCHEMA = {schema}\nIS_STREAMING_OUTPUT = True\n")
    server = on_ray.enter_context(contextlib.closing(_RunOnRay("./words", directory=tmp_path)))
    server.wait_ready(timeout_s=180)
    answer = server.post("/v2/models/words/generate_stream", {"TEXT": "one two"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert [event["OUT"] for event in events] == ["one!?", "two!?"]
    assert len(answer.headers.get_list("x-request-id")) == 1
    second = on_ray.enter_context(contextlib.closing(_RunOnRay("./words", directory=tmp_path)))
    second.wait_line(rf"tailrace: cannot listen on 127\.0\.0\.1:{PORT} \(Address already in use\)", timeout_s=LONG_S)
    assert second.wait() == 1
    assert server.post("/v2/models/words/generate_stream", {"TEXT": "one"}).status_code == 200


def _said(answer: dict[str, object]) -> object:
    """The text of an answer, whatever the wire."""
    for name in ("generated_text", "response"):
        if name in answer:
            return answer[name]
    choices: Any = answer["choices"]
    return choices[0].get("text") or choices[0]["message"]["content"]
