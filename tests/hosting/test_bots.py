"""The bots of Ray Serve's tutorial, in its manner, through `transformers`, with its clients: on the real model, and the
first of them on a tiny one too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # transformers' own types contradict each other

import pytest
import requests
from tests.hosting.process import AppServer
from websockets.sync.client import connect

BOTS = Path(__file__).with_name("bots")
PROMPT = "Once upon a time"


def expected(checkpoint: Path) -> str:
    """What the model says by itself, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    words = AutoTokenizer.from_pretrained(checkpoint)
    prompt_ids = words([PROMPT], return_tensors="pt").input_ids
    answer = network.generate(prompt_ids)[0, prompt_ids.shape[1] :]
    return str(words.decode(answer, skip_special_tokens=True))


@contextlib.contextmanager
def running(bot: str, checkpoint: Path) -> Iterator[AppServer]:
    os.environ["CHECKPOINT"] = str(checkpoint)
    try:
        with contextlib.closing(AppServer(f"{bot}:app", directory=BOTS)) as server:
            yield server.wait_ready(timeout_s=120)
    finally:
        del os.environ["CHECKPOINT"]


def ask(server: AppServer, prompt: str = PROMPT) -> list[str]:
    """The tutorial's client."""
    answer = requests.post(f"{server.url}/?prompt={prompt}", stream=True, timeout=120)
    answer.raise_for_status()
    return list(answer.iter_content(chunk_size=None, decode_unicode=True))


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=[pytest.mark.deep, pytest.mark.timeout(400)])])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model's directory that ends answers after 40 tokens."""
    if request.param == "smollm2":
        return Path(request.getfixturevalue("smollm2_dir"))
    tiny = Path(shutil.copytree(request.getfixturevalue("tiny_gpt2_dir"), tmp_path / "tiny"))
    (tiny / "generation_config.json").write_text(json.dumps({"max_new_tokens": 40, "eos_token_id": 0}))
    return tiny


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
        first = "".join(iter(lambda: str(ws.recv(timeout=60)), "<<Response Finished>>"))
        ws.send(" And then")
        second = "".join(iter(lambda: str(ws.recv(timeout=60)), "<<Response Finished>>"))
    assert first == expected(smollm2_dir)
    assert second


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_batchbot(smollm2_dir: Path) -> None:
    """Two clients fill a batch, which does not wait for its fifteen seconds then; both get what one would."""
    with running("batchbot", smollm2_dir) as server:
        answers: list[list[str]] = []
        threads = [threading.Thread(target=lambda: answers.append(ask(server))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ["".join(answer) for answer in answers] == [expected(smollm2_dir)] * 2
