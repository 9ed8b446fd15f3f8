"""Frameworks: LangChain, Pydantic AI, OpenAI's agents, LiteLLM and Instructor. They use the default model, whose chat
template has no tools. Each set of packages has its own environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.api.process import Server
from tests.clients.installed import environment, run_script

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]  # the first test of each set has it installed

LANGCHAIN = (
    "langchain-openai==1.7.3",
    "langchain-huggingface==1.2.3",
    "pydantic-ai-slim[openai]==2.68.0",
    "openai-agents==0.24.0",
)
# LiteLLM imports `mcp` where tools are given, and does not require it.
LITELLM = ("litellm==1.106.2", "mcp==2.3.0", "instructor==1.17.0")
COMMUNITY = ("langchain-community==0.4.2", "text-generation==0.7.0")
QUESTION = "Which of the two cities is in France?"
CITIES = ("Bonn", "Paris")


@pytest.fixture(autouse=True)
def nothing_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the packages' telemetry and their downloads of model lists and prices."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture(scope="module")
def model() -> Iterator[Server]:
    with contextlib.closing(Server("smollm2")) as running:
        yield running.wait_ready(timeout_s=280)


@cache
def answer(server: Server, max_tokens: int) -> str:
    """Return the model's answer to the question."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": max_tokens}
    text = str(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])
    assert len(text) > 5
    return text


def langchain(case: str, server: Server) -> Any:  # Any: JSON
    return _outcome("langchain", LANGCHAIN, case, server)


def litellm(case: str, server: Server) -> Any:  # Any: JSON
    return _outcome("litellm", LITELLM, case, server)


def _outcome(name: str, requirements: tuple[str, ...], case: str, server: Server) -> Any:  # Any: JSON
    script = Path(__file__).parent / "scripts" / f"{name}_outcomes.py"
    (outcome,) = run_script(environment(name, *requirements), script, case=case, url=server.url)
    return outcome


def test_langchain_chats(model: Server) -> None:
    for case in ("langchain_text", "langchain_responses"):
        assert langchain(case, model) == [answer(model, 60)] * 2


def test_langchain_completes(model: Server) -> None:
    whole, streamed = langchain("langchain_completions", model)
    assert whole == streamed
    assert len(whole.split()) > 3


def test_langchain_embeddings() -> None:
    with contextlib.closing(Server("minilm")) as server:
        server.wait_ready(timeout_s=280)
        body = {"input": [QUESTION, "Once upon a time"]}
        data = server.post("/v1/embeddings", body).json()["data"]
        expected = [pytest.approx(one["embedding"], abs=1e-5) for one in data]
        assert langchain("langchain_embeddings", server) == expected


def test_langchain_structured_output(model: Server) -> None:
    found = langchain("langchain_structured", model)
    assert sorted(found) == ["function_calling", "json_schema"]
    assert all(city["name"] in CITIES and isinstance(city["is_capital"], bool) for city in found.values())


def test_langchain_tools(model: Server) -> None:
    found = langchain("langchain_tools", model)
    assert found["unasked"] == answer(model, 60)
    whole, streamed = found["calls"]
    assert whole == streamed
    assert whole["name"] == "get_weather"
    assert whole["args"]["city"] in CITIES
    assert found["after"]


def test_langchain_for_text_generation_inference(model: Server) -> None:
    for text in langchain("langchain_huggingface", model):
        assert len(text.split()) > 3
    script = Path(__file__).parent / "scripts" / "langchain_community_outcomes.py"
    for text in run_script(environment("langchain-community", *COMMUNITY), script, url=model.url):
        assert len(text.split()) > 3


def test_pydantic_ai(model: Server) -> None:
    found = langchain("pydantic_ai", model)
    assert found["chat"] == found["responses"] == answer(model, 60)
    for name in ("chat structured", "responses structured"):
        assert found[name]["name"] in CITIES


def test_openai_agents(model: Server) -> None:
    found = langchain("openai_agents", model)
    assert found["chat"] == found["responses"]
    assert found["chat"]
    assert found["chat tool"].startswith("It is raining in ")
    assert found["responses tool"].startswith("It is raining in ")


def test_litellm(model: Server) -> None:
    texts = litellm("litellm_text", model)
    assert list(texts) == ["openai/default", "anthropic/default", "ollama_chat/default"]
    assert all(text == [answer(model, 20)] * 2 for text in texts.values())
    for name, arguments in litellm("litellm_tools", model).values():
        assert name == "get_weather"
        assert arguments["city"] in CITIES


def test_instructor(model: Server) -> None:
    found = litellm("instructor_modes", model)
    assert len(found) == 3
    assert all(city["name"] in CITIES for city in found.values())
