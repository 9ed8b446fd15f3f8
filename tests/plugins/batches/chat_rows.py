"""Files of rows for the scripted engine, whose answers are known."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI
from openai.types import Batch
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.waiting import LONG_S, until

__all__ = ["CHAT", "answers_of", "chat_file", "chat_row", "client_of", "expected", "run_batch", "wait_ended"]

CHAT = "/v1/chat/completions"

Json = dict[str, Any]  # Any: JSON


def chat_row(number: int, *, max_tokens: int = 8, **more: object) -> Json:
    messages = [{"role": "user", "content": f"Row {number}"}]
    body = {"model": "scripted", "messages": messages, "max_tokens": max_tokens, "seed": number, **more}
    return {"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": body}


def chat_file(num_rows: int, *, max_tokens: int = 8) -> bytes:
    return b"".join(json.dumps(chat_row(one, max_tokens=max_tokens)).encode() + b"\n" for one in range(num_rows))


def expected(number: int, *, max_tokens: int = 8) -> str:
    return Answer(chat_ids(f"Row {number}"), max_tokens, number).text


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LONG_S)


def run_batch(client: OpenAI, content: bytes, *, endpoint: Any = CHAT, window: Any = "24h") -> Batch:
    """Upload a file and create a batch. `window` may be any time here, unlike on OpenAI's API."""
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)


def wait_ended(client: OpenAI, batch: Batch) -> Batch:
    found = [batch]

    def has_ended() -> bool:
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    until(has_ended)
    return found[-1]


def answers_of(client: OpenAI, file_id: str | None) -> list[Json]:
    """Return the lines of a file of results; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
