"""The default model with popular clients."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from ollama import Client
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from tests.api.process import Server
from tests.http.wire import as_json, sse_data, sse_ids
from tests.missing import skip_missing
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)  # the first run fetches 93 MB

PROMPT = "Once upon a time"
GREEDY = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three rivers."}]
SSE = {"accept": "text/event-stream"}


@pytest.fixture(scope="module")
def model() -> Iterator[Server]:
    with contextlib.closing(Server("smollm2")) as running:
        try:
            running.wait_ready(timeout_s=280)
        except AssertionError:
            if running.process.poll() == 1 and "fetch" in running.log.lower():
                skip_missing("smollm2", running.log.strip().splitlines()[-1])
            raise
        yield running


@pytest.fixture(scope="module")
def undisturbed(model: Server) -> str:
    """Return the model's answer without any interruption."""
    answer = model.post("/v1/completions", GREEDY)
    text = str(answer.json()["choices"][0]["text"])
    assert len(text.split()) > 10
    return text


def _text(body: bytes) -> str:
    return "".join(as_json(line).get("text", "") for line in sse_data(body))


def test_a_stream_that_was_cut_continues(model: Server, undisturbed: str) -> None:
    with model.wire() as wire:
        wire.send("POST", "/v1/streams", GREEDY, SSE)
        assert wire.head() == 200
        first_half = b"".join(wire.event() for _ in range(20))
        path = wire.headers["location"]
    with model.wire() as wire:
        wire.send("GET", path, headers={"last-event-id": sse_ids(first_half)[-1]})
        assert wire.head() == 200
        second_half = wire.body()
    with model.wire() as wire:
        status, whole = wire.request("GET", path)
    assert status == 200
    assert first_half + second_half == whole
    assert b"event: done\n" in second_half
    assert _text(whole) == undisturbed


@pytest.mark.deep
def test_other_sequences_change_nothing(model: Server) -> None:
    """Which sequences are beside a sequence makes no difference, if there is any."""
    prompts = [PROMPT, "Dogs and cats", "The weather in spring is often"]
    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(model.wire())
        beside.send("POST", "/v1/completions", {**GREEDY, "max_tokens": 1000, "ignore_eos": True, "stream": True})
        assert beside.head() == 200
        in_turn = [model.post("/v1/completions", {**GREEDY, "prompt": prompt}).json() for prompt in prompts]
        wires = [stack.enter_context(model.wire()) for _ in prompts]
        for wire, prompt in zip(wires, prompts, strict=True):
            wire.send("POST", "/v1/streams", {**GREEDY, "prompt": prompt}, SSE)
        together = [_text(wire.body()) for wire in wires if wire.head() == 200]
    until(lambda: model.http.get("/v1/streams").json()["data"] == [])
    assert together == [answer["choices"][0]["text"] for answer in in_turn]


def test_the_clients_agree(model: Server, undisturbed: str) -> None:
    with InferenceClient(model.url) as hub:
        assert hub.text_generation(PROMPT, max_new_tokens=40, return_full_text=False) == undisturbed
        assert "".join(hub.text_generation(PROMPT, max_new_tokens=40, stream=True)) == undisturbed
    with OpenAI(base_url=f"{model.url}/v1", api_key="unused", max_retries=0) as client:
        completion = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=40, temperature=0)
        assert completion.choices[0].text == undisturbed
        with client.completions.create(
            model="smollm2", prompt=PROMPT, max_tokens=40, temperature=0, stream=True
        ) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == undisturbed


async def test_a_chat(model: Server) -> None:
    with InferenceClient(model.url) as hub:
        chunks = hub.chat_completion(MESSAGES, max_tokens=30, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(text.split()) > 3
    async with AsyncOpenAI(base_url=f"{model.url}/v1", api_key="unused", max_retries=0) as client:
        completion = await client.chat.completions.create(
            model="smollm2", messages=MESSAGES, max_tokens=30, temperature=0
        )
    assert completion.choices[0].message.content == text
    assert completion.usage is not None
    assert 1 <= completion.usage.completion_tokens <= 30


def test_ollamas_client_is_told_what_the_file_is(model: Server) -> None:
    with Client(model.url) as client:
        (listed,) = client.list().models
        shown = client.show("smollm2")
        (running,) = client.ps().models
    assert listed.details == shown.details == running.details
    assert listed.details is not None
    assert (listed.details.format, listed.details.family, listed.details.families) == ("gguf", "llama", ["llama"])
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("134.52M", "Q4_1")
    assert (listed.size, running.size) == (96_576_768, 96_576_768)
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    assert shown.modelinfo["llama.context_length"] == 8192


def test_an_answer_ends_at_its_stop_string(model: Server, undisturbed: str) -> None:
    stop = undisturbed[30:36]
    body = {**GREEDY, "stop": [stop]}
    choice = model.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == undisturbed[: undisturbed.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_the_plain_wire(model: Server) -> None:
    with model.wire() as wire:
        status, body = wire.request("POST", "/?prompt=Tell%20me%20a%20story%20about%20dogs.&max_tokens=30")
    assert status == 200
    assert len(body.decode().split()) > 10


# Tools, for which this model's chat template has no place

WEATHER = {
    "name": "get_weather",
    "description": "Says what the weather is like in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bonn", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": WEATHER}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
CHAT = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "tools"),
    [
        ("/v1/chat/completions", CHAT, [TOOL]),
        pytest.param(
            "/v1/responses", {"input": MESSAGES, "max_output_tokens": 12, "temperature": 0}, [{**TOOL, **WEATHER}],
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "/v1/messages", {**CHAT, "model": "default"}, [{"name": "get_weather", "input_schema": {"type": "object"}}],
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "/api/chat",
            {**CHAT, "model": "default", "stream": False, "options": {"temperature": 0, "num_predict": 12}},
            [TOOL],
            marks=pytest.mark.deep,
        ),
    ],
    ids=["openai", "responses", "anthropic", "ollama"],
)  # fmt: skip
def test_optional_tools_change_nothing(model: Server, path: str, body: dict[str, Any], tools: list[Any]) -> None:
    plain = model.post(path, body)
    with_tools = model.post(path, {**body, "tools": tools})
    assert with_tools.status_code == 200, with_tools.text
    assert "tools" in with_tools.headers["x-tailrace-ignored"].split(", ")
    assert _said(with_tools.json()) == _said(plain.json())


def _said(answer: Any) -> str:  # Any: JSON of four wires
    """Return the text of an answer of any wire."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["message"]["content"] if "message" in answer else answer["content"][0]["text"])


@pytest.mark.deep
def test_a_forced_call_is_made(model: Server) -> None:
    forced = {"messages": QUESTION, "temperature": 0, "max_tokens": 100, "tools": [TOOL]}
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    message = model.post("/v1/chat/completions", {**forced, "tool_choice": chosen}).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Bonn", "Paris")
    body = {"input": QUESTION, "tools": [{"type": "function", **WEATHER}], "tool_choice": "required"}
    (item,) = model.post("/v1/responses", {**body, "temperature": 0}).json()["output"]
    assert (item["type"], item["name"]) == ("function_call", "get_weather")
    assert json.loads(item["arguments"])["city"] in ("Bonn", "Paris")
    tools = [{"name": "get_weather", "input_schema": WEATHER["parameters"]}]
    body = {"model": "default", "max_tokens": 100, "temperature": 0, "messages": QUESTION, "tools": tools}
    (block,) = model.post("/v1/messages", {**body, "tool_choice": {"type": "any"}}).json()["content"]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    assert block["input"]["city"] in ("Bonn", "Paris")


@pytest.mark.deep
def test_a_chat_continues_after_the_result_of_a_call(model: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is raining in Paris."},
    ]
    answer = model.post("/v1/chat/completions", {**CHAT, "messages": messages, "tools": [TOOL]})
    assert answer.status_code == 200, answer.text
    assert len(_said(answer.json()).split()) > 3


_CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}  # Any: JSON
_NOT_FOR_ENGINES = ["a\0b", "\0", "[\0]", ".*z.{13}", "[ab]*a[ab]{16}", ".*a.{10}", "(.*a.{20}|.*b.{19})c"]


def _places(pattern: str) -> Iterator[dict[str, Any]]:  # Any: JSON
    """Return all fields of a chat that may contain a pattern."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    yield {"guided_regex": pattern}
    yield {"structured_outputs": {"regex": pattern}}
    yield {"guided_json": schema}
    yield {"response_format": {"type": "regex", "value": pattern}}
    yield {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.deep
def test_patterns_that_crash_engines_do_no_harm(model: Server) -> None:
    """These patterns ended or blocked the engine's process, and so all answers. They are refused or kept."""
    worker = model.worker().pid
    with model.wire() as wire:
        wire.send("POST", "/v1/completions", {**GREEDY, "max_tokens": 200, "stream": True})
        assert wire.head() == 200
        for number, pattern in enumerate(_NOT_FOR_ENGINES):
            places = list(_places(pattern))
            body = places[number % len(places)]
            answer = model.post("/v1/chat/completions", {**_CHAT, **body})
            if answer.status_code == 200:
                choice = answer.json()["choices"][0]
                if choice["finish_reason"] == "stop":
                    text = choice["message"]["content"]
                    assert re.fullmatch(pattern, json.loads(text)["a"] if text[0] == "{" else text), (body, text)
                continue
            assert answer.status_code == 400, (pattern, body, answer.text)
            assert json.dumps(pattern)[1:-1] not in answer.text
        for body in ({"guided_choice": ["a\0b"]}, {"structured_outputs": {"choice": ["\0"]}}):
            assert model.post("/v1/chat/completions", {**_CHAT, **body}).status_code == 400
        assert wire.body().endswith(b"data: [DONE]\n\n")
    assert model.worker().pid == worker


@pytest.mark.deep
def test_ambiguous_patterns_are_answered(model: Server) -> None:
    for pattern in (r"(\w+\s?)+\.", "([^,]*,?)*;", "((a|b)*(a|b)*)*c"):
        choice = model.post("/v1/chat/completions", {**_CHAT, "guided_regex": pattern}).json()["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["message"]["content"], re.ASCII)


@pytest.mark.deep
def test_json_does_not_end_in_white_space(model: Server) -> None:
    """Small models prefer white space; without a limit they wrote only white space up to `max_tokens`."""
    river = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "length_km": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["name", "length_km"],
    }
    schema = {"type": "json_schema", "json_schema": {"name": "river", "schema": river}}

    def ask(number: int, form: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        text = f"Describe the river number {number} of Europe, as JSON with many lines."
        asked = {"messages": [{"role": "user", "content": text}], "temperature": number / 5, "seed": number}
        answer = model.post("/v1/chat/completions", {**_CHAT, **asked, "response_format": form})
        return dict(answer.json()["choices"][0])

    with ThreadPoolExecutor(12) as pool:  # together, which is one batch
        rivers = [pool.submit(ask, number, schema) for number in range(6)]
        others = [pool.submit(ask, number, {"type": "json_object"}) for number in range(6)]
    for choice in (future.result() for future in rivers):
        assert choice["finish_reason"] == "stop", choice
        assert set(json.loads(choice["message"]["content"])) == {"name", "length_km"}
    for choice in (future.result() for future in others):
        outside = re.sub(r'"([^"\\]|\\.)*("|\\?$)', '""', choice["message"]["content"])
        assert not re.search(r"(?<![:,])\s|\s\s|[\n\t\r]", outside), choice
