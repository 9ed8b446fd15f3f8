"""Asks with the `text-generation` package, for each of some prompts, and writes what it returned or raised.

It runs in an environment of its own and can import nothing of this project. `method` is `generate` or
`generate_stream`, with `async ` before it for the asynchronous client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from text_generation import AsyncClient, Client
from text_generation.types import Response, StreamResponse

Outcome = dict[str, Any]  # Any: JSON


def ask(url: str, method: str, prompt: str, parameters: dict[str, Any]) -> Outcome:  # Any: JSON
    try:
        client = Client(url, timeout=30)
        if method == "generate":
            return _whole(client.generate(prompt, **parameters))
        return _gathered(list(client.generate_stream(prompt, **parameters)))
    except Exception as error:
        return _failure(error)


async def ask_async(url: str, method: str, prompt: str, parameters: dict[str, Any]) -> Outcome:  # Any: JSON
    try:
        client = AsyncClient(url, timeout=30)
        if method == "generate":
            return _whole(await client.generate(prompt, **parameters))
        return _gathered([event async for event in client.generate_stream(prompt, **parameters)])
    except Exception as error:
        return _failure(error)


def _whole(response: Response) -> Outcome:
    return {"text": response.generated_text, "response": response.model_dump(mode="json")}


def _gathered(events: Sequence[StreamResponse]) -> Outcome:
    text = "".join(event.token.text for event in events if not event.token.special)
    return {"text": text, "events": [event.model_dump(mode="json") for event in events]}


def _failure(error: Exception) -> Outcome:
    return {"error": type(error).__name__, "message": str(error)}


async def _all(url: str, method: str, prompts: Sequence[str], parameters: dict[str, Any]) -> list[Outcome]:
    return await asyncio.gather(*(ask_async(url, method, prompt, parameters) for prompt in prompts))


def main() -> None:
    job = json.loads(sys.argv[1])
    url, prompts, parameters = job["url"], job["prompts"], job["parameters"]
    before, _, method = job["method"].rpartition(" ")
    if before == "async":
        outcomes = asyncio.run(_all(url, method, prompts, parameters))
    else:
        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(lambda prompt: ask(url, method, prompt, parameters), prompts))
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
