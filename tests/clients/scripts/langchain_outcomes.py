"""Asks with LangChain's clients, Pydantic AI and OpenAI's agents, and writes what each returned, by the case's name.

It runs in an environment of its own and can import nothing of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from agents import Agent as OpenAIAgent
from agents import ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents.agent import StopAtTools
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_huggingface import HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings as PydanticSettings

QUESTION = "Which of the two cities is in France?"
BEGINNING = "Once upon a time"
MODEL = "default"
IMAGE = (  # a red square
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGP8"
    "z8DAwMDAxMDAwMDAAAANHQEDasKb6QAAAABJRU5ErkJggg=="
)


class City(BaseModel):
    """A city."""

    name: Literal["Bonn", "Paris"]
    is_capital: bool


@tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Bonn", "Paris"]) -> str:
    """Says what the weather is like in a city."""
    return f"It is raining in {city}."


def chat(url: str, **more: Any) -> ChatOpenAI:  # Any: settings of the client
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        model=MODEL,
        temperature=0,
        max_completion_tokens=60,
        max_retries=0,
        **more,
    )


def langchain_text(url: str) -> Any:  # Any: JSON, here and below
    return [chat(url).invoke(QUESTION).content, "".join(str(one.content) for one in chat(url).stream(QUESTION))]


def langchain_responses(url: str) -> Any:
    model = chat(url, use_responses_api=True)
    return [model.invoke(QUESTION).text, "".join(one.text for one in model.stream(QUESTION))]


def langchain_completions(url: str) -> Any:
    model = OpenAI(base_url=f"{url}/v1", api_key="unused", model=MODEL, temperature=0, max_tokens=20, max_retries=0)
    return [model.invoke(BEGINNING), "".join(model.stream(BEGINNING))]


def langchain_structured(url: str) -> Any:
    return {
        method: chat(url).with_structured_output(City, method=method).invoke(QUESTION).model_dump()
        for method in ("json_schema", "function_calling")
    }


def langchain_tools(url: str) -> Any:
    unasked = chat(url).bind_tools([get_weather]).invoke(QUESTION)
    forced = chat(url).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    message = forced.invoke(QUESTION)
    streamed = None
    for one in forced.stream(QUESTION):
        streamed = one if streamed is None else streamed + one
    assert isinstance(message, AIMessage)
    assert streamed is not None
    (call,) = message.tool_calls
    chat_so_far = [HumanMessage(QUESTION), message, ToolMessage("It is raining.", tool_call_id=call["id"])]
    after = chat(url).bind_tools([get_weather]).invoke(chat_so_far)
    calls = [{"name": one["name"], "args": one["args"]} for one in (call, *streamed.tool_calls)]
    return {"unasked": unasked.content, "calls": calls, "after": after.content}


def langchain_huggingface(url: str) -> Any:
    """With the defaults that it has: sampled, typical_p 0.95."""
    model = HuggingFaceEndpoint(endpoint_url=f"{url}/", max_new_tokens=12)
    return [model.invoke(BEGINNING), "".join(model.stream(BEGINNING))]


def pydantic_ai(url: str) -> Any:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="unused")
    settings = PydanticSettings(temperature=0, max_tokens=60)
    found: dict[str, Any] = {}
    for name, model in (
        ("chat", OpenAIChatModel(MODEL, provider=provider)),
        ("responses", PydanticResponsesModel(MODEL, provider=provider)),
    ):
        found[name] = Agent(model, model_settings=settings).run_sync(QUESTION).output
        structured: Agent[None, City] = Agent(model, output_type=ToolOutput(City), model_settings=settings, retries=0)
        found[f"{name} structured"] = structured.run_sync(QUESTION).output.model_dump()
    return found


def openai_agents(url: str) -> Any:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    found: dict[str, Any] = {}
    weather = function_tool(lambda city: f"It is raining in {city}.", name_override="get_weather")
    for name, model in (
        ("chat", OpenAIChatCompletionsModel(MODEL, client)),
        ("responses", OpenAIResponsesModel(MODEL, client)),
    ):
        settings = ModelSettings(temperature=0, max_tokens=60)
        plain = OpenAIAgent("plain", instructions="Be brief.", model=model, model_settings=settings)
        found[name] = Runner.run_sync(plain, QUESTION).final_output
        forced = ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False)
        agent = OpenAIAgent(
            "forced",
            model=model,
            model_settings=forced,
            tools=[weather],
            tool_use_behavior=StopAtTools(stop_at_tool_names=["get_weather"]),
        )
        found[f"{name} tool"] = Runner.run_sync(agent, QUESTION).final_output
    return found


def langchain_embeddings(url: str) -> Any:  # Any: JSON
    # By default it sends the ids of OpenAI's tokenizer, which it downloads.
    client = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="unused", model=MODEL, max_retries=0, check_embedding_ctx_length=False
    )
    return client.embed_documents([QUESTION, BEGINNING])


def langchain_image(url: str) -> Any:
    question = HumanMessage(
        [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "What is in it?"}]
    )
    answer = chat(url, seed=5).invoke([question])
    return [answer.content, answer.usage_metadata["input_tokens"], IMAGE]


CASES: dict[str, Callable[[str], Any]] = {
    one.__name__: one
    for one in (
        langchain_text,
        langchain_responses,
        langchain_completions,
        langchain_embeddings,
        langchain_structured,
        langchain_tools,
        langchain_huggingface,
        langchain_image,
        pydantic_ai,
        openai_agents,
    )
}


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps([CASES[job["case"]](job["url"])]))
