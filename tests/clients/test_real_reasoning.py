"""Reasoning of a real model, forced by a grammar or by its chat template."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.api.process import Server
from tests.api.test_reasoning import joined
from tests.waiting import LONG_S

pytestmark = pytest.mark.timeout(600)  # the first run fetches 93 MB, and prepares them for the engine

ASKED = {"role": "user", "content": "Why do rivers bend?"}
OPENED = {"messages": [ASKED], "temperature": 0, "max_tokens": 40, "chat_template_kwargs": {"open_thinking": True}}
SSE = {"accept": "text/event-stream"}


@pytest.fixture(scope="module")
def model(smollm2_thinking: Path) -> Iterator[Server]:
    with contextlib.closing(Server(str(smollm2_thinking))) as running:
        yield running.wait_ready(timeout_s=500)


@pytest.fixture(scope="module")
def undisturbed(model: Server) -> bytes:
    """Return the model's reasoning without any interruption."""
    stream_id = model.create(OPENED)
    body = model.http.get(f"/v1/streams/{stream_id}/events").content
    reasoning, text = joined(body)
    assert len(reasoning.split()) > 10
    assert not text
    return body


@pytest.mark.deep
def test_a_grammar_makes_it_reason(model: Server) -> None:
    with OpenAI(base_url=f"{model.url}/v1", api_key="none", timeout=LONG_S, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "Why do rivers bend?"}], temperature=0, stream=True,
            extra_body={"guided_regex": "<think>[a-z ]{20,24}</think>[a-z ]{5,10}"},
        )  # fmt: skip
        deltas = [chunk.choices[0].delta for chunk in stream]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert re.fullmatch("[a-z][a-z ]{5,23}", "".join(thoughts))
    assert re.fullmatch("[a-z ]{1,10}", "".join(delta.content or "" for delta in deltas))
    assert sum(map(bool, thoughts)) > 3  # as it comes


@pytest.mark.deep
def test_a_grammar_applies_to_the_answer_after_opened_reasoning(model: Server) -> None:
    answer = model.post("/v1/chat/completions", OPENED | {"guided_regex": "[a-z]{3,9} [a-z]{3,9}"}).json()
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert re.fullmatch("[a-z]{3,9} [a-z]{3,9}", message["content"])


def _bodies(server: Server, stream_id: str, first: bytes, seen: int) -> bytes:
    with server.wire() as wire:
        wire.send("GET", f"/v1/streams/{stream_id}/events", headers={"last-event-id": f"{stream_id}-{seen}"})
        assert wire.head() == 200
        return first + wire.body()


def _begin(server: Server, seen: int) -> tuple[str, bytes]:
    body: dict[str, Any] = OPENED | {"linger_s": 600}
    with server.wire() as wire:
        wire.send("POST", "/v1/streams", body, SSE)
        assert wire.head() == 200
        return wire.headers["x-stream-id"], b"".join(wire.event() for _ in range(seen))


@pytest.mark.deep
def test_the_engine_dies_during_reasoning(model: Server, undisturbed: bytes) -> None:
    stream_id, first = _begin(model, 12)
    model.worker().kill()
    assert joined(_bodies(model, stream_id, first, 12)) == joined(undisturbed)


@pytest.mark.deep
def test_the_server_dies_during_reasoning(smollm2_thinking: Path, undisturbed: bytes, tmp_path: Path) -> None:
    with contextlib.closing(Server(str(smollm2_thinking), "--data-dir", str(tmp_path))) as server:
        stream_id, first = _begin(server.wait_ready(timeout_s=500), 12)
        server.send_signal(signal.SIGKILL)
        server.wait()
    with contextlib.closing(Server(str(smollm2_thinking), "--data-dir", str(tmp_path))) as server:
        body = _bodies(server.wait_ready(timeout_s=500), stream_id, first, 12)
    assert joined(body) == joined(undisturbed)


@pytest.mark.deep
def test_incomplete_reasoning_is_continued(model: Server, undisturbed: bytes) -> None:
    whole, _ = joined(undisturbed)
    cut = model.post("/v1/chat/completions", OPENED | {"max_tokens": 15}).json()["choices"][0]["message"]
    assert whole.startswith(cut["reasoning_content"])
    begun = {"role": "assistant", "content": "", "reasoning_content": cut["reasoning_content"]}
    more = model.post("/v1/chat/completions", OPENED | {"messages": [ASKED, begun], "max_tokens": 10}).json()
    assert more["choices"][0]["message"]["reasoning_content"]
    assert more["choices"][0]["message"]["content"] == ""
