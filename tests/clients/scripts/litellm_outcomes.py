"""Asks with LiteLLM and Instructor, and writes what each returned, by the case's name.

It runs in an environment of its own and can import nothing of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import instructor
import litellm
from openai import OpenAI
from pydantic import BaseModel

litellm.suppress_debug_info = True

MESSAGES = [{"role": "user", "content": "Which of the two cities is in France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bonn", "Paris"]}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    """A city."""

    name: Literal["Bonn", "Paris"]
    is_capital: bool


def litellm_text(url: str) -> Any:  # Any: JSON, here and below
    """By each of the wires that it speaks."""
    found: dict[str, Any] = {}
    for name, base in (("openai/default", f"{url}/v1"), ("anthropic/default", url), ("ollama_chat/default", url)):
        asks = {"model": name, "api_base": base, "api_key": "unused", "temperature": 0, "max_tokens": 20}
        whole = litellm.completion(messages=MESSAGES, **asks)
        parts = litellm.completion(messages=MESSAGES, stream=True, **asks)
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        found[name] = [whole.choices[0].message.content, streamed]
    return found


def litellm_tools(url: str) -> Any:
    found: dict[str, Any] = {}
    for name, base in (("openai/default", f"{url}/v1"), ("anthropic/default", url)):
        asks = {"model": name, "api_base": base, "api_key": "unused", "temperature": 0, "max_tokens": 60}
        answer = litellm.completion(
            messages=MESSAGES, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **asks
        )
        (call,) = answer.choices[0].message.tool_calls
        found[name] = [call.function.name, json.loads(call.function.arguments)]
    return found


def instructor_modes(url: str) -> Any:
    found: dict[str, Any] = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            city = instructor.from_openai(client, mode=mode).chat.completions.create(
                model="default", messages=MESSAGES, response_model=City, temperature=0, max_tokens=60, max_retries=0
            )
        found[mode.value] = city.model_dump()
    return found


CASES: dict[str, Callable[[str], Any]] = {one.__name__: one for one in (litellm_text, litellm_tools, instructor_modes)}


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps([CASES[job["case"]](job["url"])]))
