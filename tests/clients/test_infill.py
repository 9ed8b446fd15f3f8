"""The gap between two texts, filled by a real server: clients of OpenAI, Ollama and llama.cpp's server. The weights are
the default model's, which was not trained for this: its answers are compared with each other, not read."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ollama
import openai
import pytest
from tests.api.process import Server
from tests.api.test_reasoning import joined
from tests.checkpoints import smollm2_infill
from tests.waiting import LONG_S, until

__all__ = ["smollm2_infill"]

BEFORE, AFTER = "def mean(values):\n    total = ", "\n    return total / len(values)\n"
SHORT = {"n_predict": 12, "temperature": 0}
GAP: dict[str, Any] = {"input_prefix": BEFORE, "input_suffix": AFTER, **SHORT}
LONG = GAP | {"n_predict": 400, "ignore_eos": True, "stream": True}
WINDOW = 512
FOUR_FILES = [{"filename": f"{name}.py", "text": "import math\n" * 100} for name in ("a", "b", "c", "d")]


@pytest.fixture(scope="module")
def model(smollm2_infill: Path) -> Iterator[Server]:
    with contextlib.closing(
        Server(f"--model=coder={smollm2_infill}", "--model", "smollm2=smollm2", "--context-tokens", str(WINDOW))
    ) as one:
        yield one.wait_ready(timeout_s=500)


@pytest.fixture
def of_openai(model: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def of_ollama(model: Server) -> Iterator[ollama.Client]:
    with ollama.Client(model.url) as client:
        yield client


def infill(server: Server, **fields: object) -> httpx.Response:
    return server.post("/infill", GAP | fields)


def test_all_wires_give_the_same_answer(model: Server, of_openai: openai.OpenAI, of_ollama: ollama.Client) -> None:
    ours = infill(model).json()["content"]
    assert ours
    theirs = of_openai.completions.create(model="coder", prompt=BEFORE, suffix=AFTER, max_tokens=12, temperature=0)
    assert theirs.choices[0].text == ours
    answer = of_ollama.generate("coder", BEFORE, suffix=AFTER, options={"num_predict": 12, "temperature": 0})
    assert answer.response == ours


def test_an_answer_has_one_text(model: Server) -> None:
    refused = infill(model, n=2)
    assert (refused.status_code, "n must be 1" in refused.text) == (400, True)
    assert infill(model, n=1).status_code == 200


def test_a_stream_has_every_token(model: Server) -> None:
    parts = frames(model, GAP | {"stream": True, "return_tokens": True, "stop": ["no such text"]})
    streamed = [token_id for part in parts for token_id in part["tokens"]]
    assert streamed == infill(model, return_tokens=True, stop=["no such text"]).json()["tokens"]


def test_the_text_after_the_gap_matters(model: Server) -> None:
    assert infill(model).json()["tokens_evaluated"] > infill(model, input_suffix="").json()["tokens_evaluated"]


def test_the_answer_has_the_counts_and_times_that_editors_show(model: Server) -> None:
    answer = infill(model, response_fields=["content", "timings/prompt_n", "timings/predicted_per_second", "nothing"])
    assert answer.json().keys() == {"content", "timings/prompt_n", "timings/predicted_per_second"}


def test_a_streamed_answer_is_the_whole_one_in_pieces(model: Server) -> None:
    whole = infill(model).json()
    parts = frames(model, GAP | {"stream": True})
    assert "".join(frame["content"] for frame in parts) == whole["content"]
    assert [frame["stop"] for frame in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_a_prompt_alone_is_read_for_the_next_request(model: Server) -> None:
    files = [{"filename": "tools.py", "text": "import math\n" * 40}]
    first = infill(model, input_extra=files, n_predict=0).json()
    assert (first["content"], first["tokens_predicted"]) == ("", 0)
    assert infill(model, input_extra=files).json()["timings"]["cache_n"] > 0


def test_what_does_not_fit_is_left_out(model: Server, of_openai: openai.OpenAI) -> None:
    answer = infill(model, input_extra=FOUR_FILES, input_prefix="x = 1\n" * 500)
    assert answer.status_code == 200
    assert answer.json()["tokens_evaluated"] < WINDOW
    with pytest.raises(openai.BadRequestError) as refused:
        of_openai.completions.create(model="coder", prompt="x = 1\n" * 500, suffix=AFTER)
    assert refused.value.code == "context_length_exceeded"


def test_markers_in_a_text_stay_text(model: Server) -> None:
    plain = infill(model, input_prefix="a").json()["tokens_evaluated"]
    marked = infill(model, input_prefix="a<fim_suffix>").json()["tokens_evaluated"]
    assert marked > plain + 1


@pytest.mark.deep
def test_a_model_without_the_tokens_says_so(model: Server, of_openai: openai.OpenAI, of_ollama: ollama.Client) -> None:
    refused = infill(model, model="smollm2")
    assert (refused.status_code, refused.json()["error"]["type"]) == (501, "not_supported_error")
    with pytest.raises(openai.BadRequestError) as error:
        of_openai.completions.create(model="smollm2", prompt=BEFORE, suffix=AFTER)
    assert error.value.param == "suffix"
    with pytest.raises(ollama.ResponseError, match="cannot fill a gap"):
        of_ollama.generate("smollm2", BEFORE, suffix=AFTER)
    assert "insert" in (of_ollama.show("coder").capabilities or [])
    assert "insert" not in (of_ollama.show("smollm2").capabilities or [])


def test_a_completion_of_llama_cpp(model: Server) -> None:
    answer = model.post("/completion", {"prompt": "The river runs", **SHORT, "stop": [" and"]}).json()
    assert answer["stop_type"] in ("limit", "word", "eos")
    assert (answer["stopping_word"] == " and") == (answer["stop_type"] == "word")
    assert model.http.get("/props").json()["default_generation_settings"]["n_ctx"] == WINDOW


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.deep)])
@pytest.mark.parametrize("path", ["/infill", pytest.param("/v1/fim/completions", marks=pytest.mark.deep)])
def test_the_next_key_cancels_the_request_before_it(model: Server, path: str, stream: bool) -> None:
    """An editor closes the connection. The answer would take seconds."""
    common = {"stream": stream, "ignore_eos": True, "temperature": 0}
    bodies = {
        "/infill": {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 400},
        "/v1/fim/completions": {"model": "coder", "prompt": BEFORE, "suffix": AFTER, "max_tokens": 400},
    }
    num_cancelled, num_done = (_counted(model, "streams_ended_total", status) for status in ("cancelled", "done"))
    with model.wire() as wire:
        wire.send("POST", path, bodies[path] | common)
        until(lambda: _counted(model, "requests_running") == 1)
        if stream:
            assert wire.head() == 200
            wire.event()
    until(lambda: _counted(model, "streams_ended_total", "cancelled") == num_cancelled + 1)
    until(lambda: _counted(model, "requests_running") == 0)
    assert infill(model).status_code == 200
    assert _counted(model, "streams_ended_total", "done") == num_done + 1


def _counted(server: Server, name: str, status: str = "") -> int:
    """Return the value of a metric of the model, with this status."""
    lines = (line.rpartition(" ") for line in server.http.get("/metrics").text.splitlines())
    wanted = ['model="coder"', *([f'status="{status}"'] if status else [])]
    found = (
        number
        for series, _, number in lines
        if series.startswith(f"tailrace_{name}{{") and all(label in series for label in wanted)
    )
    return sum(int(float(number)) for number in found)


@pytest.mark.deep
def test_the_server_dies_during_an_infill(smollm2_infill: Path, tmp_path: Path) -> None:
    flags = (str(smollm2_infill), "--data-dir", str(tmp_path))
    with contextlib.closing(Server(*flags)) as server:
        undisturbed = "".join(frame["content"] for frame in frames(server.wait_ready(), LONG))
        with server.wire() as wire:
            wire.send("POST", "/infill", LONG, {"x-tailrace-linger": "600"})
            assert wire.head() == 200
            stream_id = wire.headers["x-stream-id"]
            first = wire.event()
            server.send_signal(signal.SIGKILL)
            server.wait()
    with contextlib.closing(Server(*flags)) as server, server.wait_ready().wire() as wire:
        wire.send("GET", f"/v1/streams/{stream_id}/events")
        assert wire.head() == 200
        _, text = joined(wire.body())
    assert json.loads(first.removeprefix(b"data: "))["content"] == undisturbed[: len(json.loads(first[6:])["content"])]
    assert text == undisturbed


class TabbyText(msgspec.Struct):
    text: str
    finish_reason: str | None


class TabbyDelta(msgspec.Struct):
    content: str


class TabbyPiece(msgspec.Struct):
    delta: TabbyDelta
    finish_reason: str | None


class TabbyTexts(msgspec.Struct):
    choices: list[TabbyText]


class TabbyPieces(msgspec.Struct):
    choices: list[TabbyPiece]


class TabbyContent(msgspec.Struct):
    content: str
    stop: bool


def test_tabby(model: Server) -> None:
    """The requests of Tabby's three clients, and the fields that they must find in each event (`http-api-bindings` of
    TabbyML/tabby 21b29048). Tabby itself was not run."""
    marked = f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"  # Tabby's `prompt_template`
    common = {"temperature": 0.0, "stream": True}
    of_text = {"model": "coder", "max_tokens": 12, "presence_penalty": 0.0, **common}
    of_llama = {"seed": 7, "prompt": marked, "n_predict": 12, "penalty_last_n": 0, "presence_penalty": 0.0, **common}
    of_mistral = {"prompt": BEFORE, "suffix": AFTER, "model": "coder", "max_tokens": 12, "random_seed": 7, **common}
    expected = infill(model).json()["content"]
    contents = [msgspec.convert(one, TabbyContent) for one in frames(model, of_llama, "/completion")]
    assert "".join(one.content for one in contents) == expected
    assert contents[-1].stop
    for body in ({"prompt": BEFORE, "suffix": AFTER}, {"prompt": marked, "suffix": None}):
        events = [msgspec.convert(one, TabbyTexts) for one in frames(model, of_text | body, "/v1/completions")]
        assert "".join(one.choices[0].text for one in events) == expected
        assert events[-1].choices[0].finish_reason
    pieces = [msgspec.convert(one, TabbyPieces) for one in frames(model, of_mistral, "/v1/fim/completions")]
    assert "".join(one.choices[0].delta.content for one in pieces) == expected
    assert pieces[-1].choices[0].finish_reason


@pytest.mark.parametrize("name", [pytest.param("seed", marks=pytest.mark.deep), "random_seed"])
def test_a_seed_has_mistrals_name_too(model: Server, name: str) -> None:
    body = {"prompt": BEFORE, "suffix": AFTER, "model": "coder", "max_tokens": 12, "temperature": 1.5}
    first, again = (model.post("/v1/fim/completions", body | {name: 5}) for _ in range(2))
    other = model.post("/v1/fim/completions", body | {name: 6})
    assert first.json()["choices"] == again.json()["choices"] != other.json()["choices"]
    assert "x-tailrace-ignored" not in first.headers


def frames(server: Server, body: dict[str, Any], path: str = "/infill") -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=LONG_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        return [json.loads(line) for line in lines if line != "[DONE]"]
