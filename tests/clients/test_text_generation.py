"""The `text-generation` package, the deprecated client of text-generation-inference's own: the cases of its tests.

Its pins contradict those of huggingface_hub, so it runs in an environment of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.oracle import LOGPROB, Answer
from tests.api.process import Server
from tests.clients.installed import run_python

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]  # the first one has it installed

PROMPT, SEED = "test", 11
ONE = Answer(PROMPT, 1, SEED)
MANY = Answer(PROMPT, 24, SEED)
METHODS = ["generate", "generate_stream", "async generate", "async generate_stream"]
WHOLE, STREAMS = METHODS[::2], METHODS[1::2]


def ask(url: str, method: str, prompt: str = PROMPT, **parameters: Any) -> dict[str, Any]:  # Any: JSON
    script = Path(__file__).parent / "scripts" / "text_generation_outcomes.py"
    (outcome,) = run_python(
        "text-generation==0.7.0", script, method=method, url=url, prompts=[prompt], parameters=parameters
    )
    assert isinstance(outcome, dict)
    return outcome


def shown(answer: Answer) -> list[dict[str, object]]:
    return [
        {"id": token_id, "text": text, "logprob": LOGPROB, "special": False}
        for token_id, text in zip(answer.token_ids, answer.texts, strict=True)
    ]


@pytest.mark.parametrize("method", WHOLE)
def test_generate(method: str, server: Server) -> None:
    response = ask(server.url, method, max_new_tokens=1, seed=SEED)["response"]
    details = response["details"]
    assert response["generated_text"] == ONE.text
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 1)
    assert details["seed"] is None, "nothing was left to chance"
    assert details["prefill"] == []
    assert details["tokens"] == shown(ONE)


@pytest.mark.parametrize("method", WHOLE)
def test_the_seed_is_shown_if_the_answer_is_sampled(method: str, server: Server) -> None:
    response = ask(server.url, method, max_new_tokens=24, seed=SEED, do_sample=True)["response"]
    assert response["generated_text"] == MANY.text
    assert response["details"]["seed"] == SEED
    assert response["details"]["tokens"] == shown(MANY)


@pytest.mark.parametrize("method", STREAMS)
def test_generate_stream(method: str, server: Server) -> None:
    (event,) = ask(server.url, method, max_new_tokens=1, seed=SEED)["events"]
    assert event["token"] == shown(ONE)[0]
    assert event["generated_text"] == ONE.text
    assert event["details"]["finish_reason"] == "length"
    assert (event["details"]["generated_tokens"], event["details"]["seed"]) == (1, None)
    *events, last = ask(server.url, method, max_new_tokens=24, seed=SEED)["events"]
    assert [each["token"] for each in (*events, last)] == shown(MANY)
    assert {each["generated_text"] for each in events} == {None}
    assert last["generated_text"] == MANY.text


@pytest.mark.parametrize("method", METHODS)
def test_stop_sequences(method: str, server: Server) -> None:
    stop = MANY.text[20:25]
    outcome = ask(server.url, method, max_new_tokens=24, seed=SEED, stop_sequences=[stop])
    assert outcome["text"] == MANY.text[: MANY.text.index(stop) + len(stop)]


@pytest.mark.parametrize("method", WHOLE)
def test_generate_best_of(method: str, server: Server) -> None:
    details = ask(server.url, method, max_new_tokens=1, best_of=2, do_sample=True)["response"]["details"]
    assert details["seed"] is not None
    assert [each["generated_tokens"] for each in details["best_of_sequences"]] == [1]
    assert details["best_of_sequences"][0]["seed"] is not None


@pytest.mark.parametrize("method", METHODS)
def test_validation_errors(method: str, server: Server) -> None:
    outcome = ask(server.url, method, max_new_tokens=100_000)
    assert (outcome["error"], "100000" in outcome["message"]) == ("ValidationError", True), outcome
    outcome = ask(server.url, method, prompt="")
    assert outcome["error"] == "ValidationError", outcome


@pytest.mark.parametrize("method", METHODS)
def test_not_found(method: str, server: Server) -> None:
    assert ask(f"{server.url}/nothing/here", method)["error"] == "NotFoundError"


@pytest.fixture(scope="module")
def full() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:tokens_per_s=20", "--max-concurrent-requests", "1")) as server:
        server.wait_ready().create({"prompt": "Long.", "max_tokens": 10_000, "linger_s": 600})
        yield server


@pytest.mark.parametrize("method", METHODS)
def test_overload(method: str, full: Server) -> None:
    assert ask(full.url, method)["error"] == "OverloadedError"


@pytest.mark.parametrize("method", METHODS)
def test_the_worker_dies(method: str, serve: Callable[..., Server]) -> None:
    outcome = ask(serve("scripted").url, method, prompt="<|crash|>", max_new_tokens=20)
    assert outcome["error"] == "GenerationError", outcome
