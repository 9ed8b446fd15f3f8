"""The bots of Ray Serve's tutorial, with `transformers` and the tutorial's clients: all on the real model, and the
first one also on a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # transformers' own types contradict each other

import pytest
import requests
from tests.apps.process import AppServer, write
from tests.waiting import LONG_S
from websockets.sync.client import connect

BOTS = Path(__file__).with_name("bots")
PROMPT = "Once upon a time"


def expected(checkpoint: Path) -> str:
    """Return the model's own greedy answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    words = AutoTokenizer.from_pretrained(checkpoint)
    prompt_ids = words([PROMPT], return_tensors="pt").input_ids
    answer = network.generate(prompt_ids)[0, prompt_ids.shape[1] :]
    return str(words.decode(answer, skip_special_tokens=True))


@contextlib.contextmanager
def running(bot: str, checkpoint: Path, directory: Path = BOTS) -> Iterator[AppServer]:
    os.environ["CHECKPOINT"] = str(checkpoint)
    try:
        with contextlib.closing(AppServer(f"{bot}:app", directory=directory)) as server:
            yield server.wait_ready(timeout_s=120)
    finally:
        del os.environ["CHECKPOINT"]


def ask(server: AppServer, prompt: str = PROMPT) -> list[str]:
    """Ask with the tutorial's client."""
    answer = requests.post(f"{server.url}/?prompt={prompt}", stream=True, timeout=120)
    answer.raise_for_status()
    return list(answer.iter_content(chunk_size=None, decode_unicode=True))


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=[pytest.mark.deep, pytest.mark.timeout(400)])])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a model's directory whose answers end after 40 tokens."""
    if request.param == "smollm2":
        return Path(request.getfixturevalue("smollm2_dir"))
    tiny = Path(shutil.copytree(request.getfixturevalue("tiny_gpt2_dir"), tmp_path / "tiny"))
    (tiny / "generation_config.json").write_text(json.dumps({"max_new_tokens": 40, "eos_token_id": 0}))
    return tiny


@pytest.mark.deep
def test_textbot(checkpoint: Path) -> None:
    with running("textbot", checkpoint) as server:
        chunks = ask(server)
    assert "".join(chunks) == expected(checkpoint)
    assert len(chunks) > 1


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_chatbot(smollm2_dir: Path) -> None:
    with running("chatbot", smollm2_dir) as server, connect(server.url.replace("http", "ws")) as ws:
        ws.send(PROMPT)
        first = "".join(iter(lambda: str(ws.recv(timeout=LONG_S)), "<<Response Finished>>"))
        ws.send(" And then")
        second = "".join(iter(lambda: str(ws.recv(timeout=LONG_S)), "<<Response Finished>>"))
    assert first == expected(smollm2_dir)
    assert second


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_batchbot(smollm2_dir: Path) -> None:
    """Two clients fill a batch, so it does not wait for 15 s. Both get the same answer as a single request."""
    with running("batchbot", smollm2_dir) as server:
        answers: list[list[str]] = []
        threads = [threading.Thread(target=lambda: answers.append(ask(server))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ["".join(answer) for answer in answers] == [expected(smollm2_dir)] * 2


_LEFT = """
import asyncio, os, time
from queue import Empty

from fastapi import FastAPI
from starlette.responses import StreamingResponse
from tailrace import serve
from tailrace.serve import huggingface
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList, TextIteratorStreamer

web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Textbot:
    def __init__(self, checkpoint):
        self.loop = asyncio.get_running_loop()
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.ended = {}

    @web.post("/tutorial")
    def tutorial(self, prompt: str):
        streamer = TextIteratorStreamer(self.tokenizer, timeout=0, skip_prompt=True, skip_special_tokens=True)
        self.loop.run_in_executor(None, self.generate_text, "tutorial", prompt, streamer)
        return StreamingResponse(self.consume_streamer(streamer), media_type="text/plain")

    @web.post("/stopped")
    def stopped(self, prompt: str):
        streamer = huggingface.TokenStream(self.tokenizer)
        self.loop.run_in_executor(None, self.generate_text, "stopped", prompt, streamer, streamer.stopping_criteria)
        return StreamingResponse(streamer, media_type="text/plain")

    def generate_text(self, name, prompt, streamer, stopping_criteria=()):
        steps = []

        def slowly(input_ids, scores, **kwargs):
            time.sleep(0.02)  # a larger model
            steps.append(input_ids.shape[1])
            return input_ids[:, 0] < 0

        input_ids = self.tokenizer([prompt], return_tensors="pt").input_ids
        criteria = StoppingCriteriaList([slowly, *stopping_criteria])
        self.model.generate(input_ids, streamer=streamer, max_new_tokens=100, stopping_criteria=criteria)
        self.ended[name] = len(steps)

    async def consume_streamer(self, streamer):
        while True:
            try:
                for token in streamer:
                    yield token
                break
            except Empty:
                await asyncio.sleep(0.001)

    @web.get("/ended")
    async def show_ended(self):
        return self.ended


app = Textbot.bind(os.environ["CHECKPOINT"])
"""


@pytest.mark.deep
@pytest.mark.timeout(200)
def test_a_disconnect_stops_the_model(tiny_gpt2_dir: Path, tmp_path: Path) -> None:
    """It ends the generator and, with tailrace's streamer, the model. The tutorial's thread continues to its end."""
    tiny = Path(shutil.copytree(tiny_gpt2_dir, tmp_path / "tiny"))
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": -1, "pad_token_id": 0}))
    write(tmp_path, "left.py", _LEFT)
    with running("left", tiny, tmp_path) as server:
        for name in ("tutorial", "stopped"):
            with requests.post(f"{server.url}/{name}?prompt=Once", stream=True, timeout=LONG_S) as answer:
                assert next(answer.iter_content(chunk_size=None))
        while len(ended := requests.get(f"{server.url}/ended", timeout=LONG_S).json()) < 2:
            time.sleep(0.05)
    assert ended["tutorial"] == 100
    assert ended["stopped"] < 50
