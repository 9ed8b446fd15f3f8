"""An Inferless app in the manner of the vendor's page on streaming, with transformers and a real model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any  # transformers' own types contradict each other

import httpx
import pytest
from tests.apps.process import AppServer, write

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

_SCHEMA = """
INPUT_SCHEMA = {"TEXT": {"datatype": "STRING", "required": True, "shape": [1], "example": ["What is for dinner?"]}}
IS_STREAMING_OUTPUT = True
"""
# What the page has beside this needs a graphics card: AWQ's weights, and `.cuda()` behind the prompt.
_APP = """
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer


class InferlessPythonModel:
    def initialize(self):
        self.network = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
        self.words = AutoTokenizer.from_pretrained(CHECKPOINT)
        self.pieces = TextIteratorStreamer(self.words, skip_prompt=True, skip_special_tokens=True)

    def infer(self, inputs, stream_output_handler):
        asked = [{"role": "system", "content": "You cook."}, {"role": "user", "content": inputs["TEXT"]}]
        prompt = self.words.apply_chat_template(
            asked, tokenize=True, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        wanted = dict(inputs=prompt, streamer=self.pieces, do_sample=False, repetition_penalty=1.2, max_new_tokens=24)
        cook = Thread(target=self.network.generate, kwargs=wanted)
        cook.start()
        for piece in self.pieces:
            stream_output_handler.send_streamed_output({"OUT": piece})
        cook.join()
        stream_output_handler.finalise_streamed_output()

    def finalize(self, args):
        self.network = None
"""
_DISHES = ("an omelette", "a soup", "bread")


def _expected(network: Any, words: Any, text: str) -> str:
    asked = [{"role": "system", "content": "You cook."}, {"role": "user", "content": text}]
    prompt = words.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    answer = network.generate(**prompt, do_sample=False, repetition_penalty=1.2, max_new_tokens=24)
    return str(words.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def test_its_streams_have_the_models_text(smollm2_dir: Path, tmp_path: Path) -> None:
    """Three clients share one streamer at the same time, and each gets its own text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "cook"
    folder.mkdir()
    write(folder, "app.py", f"CHECKPOINT = {str(smollm2_dir)!r}\n{_APP}")
    write(folder, "input_schema.py", _SCHEMA)
    with closing(AppServer("./cook", directory=tmp_path)) as server, ThreadPoolExecutor() as pool:
        server.wait_ready(timeout_s=120)

        def ask(dish: str) -> str:
            url = f"{server.url}/v2/models/cook/generate_stream"
            answer = httpx.post(url, json={"TEXT": f"How is {dish} made?"}, timeout=120, trust_env=False)
            assert answer.status_code == 200, answer.text
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            assert len(events) > 5
            return "".join(event["OUT"] for event in events)

        texts = list(pool.map(ask, _DISHES))
    network: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    words = AutoTokenizer.from_pretrained(smollm2_dir)
    assert texts == [_expected(network, words, f"How is {dish} made?") for dish in _DISHES]


def test_without_return_dict_there_is_an_error(smollm2_dir: Path) -> None:
    """docs/deployments.md states this for transformers 5."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(smollm2_dir)
    asked = [{"role": "user", "content": "How is a soup made?"}]
    assert not hasattr(words.apply_chat_template(asked, return_tensors="pt"), "cuda")
    assert hasattr(words.apply_chat_template(asked, return_tensors="pt", return_dict=False), "cuda")
