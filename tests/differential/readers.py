"""Readers of HTTP, server-sent events and WebSockets, for any wire."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import httpx_sse
import requests
import sseclient
from tests.differential.drivers import MAX_TOKENS, TIMEOUT_S, ClientError, StreamFailed, async_driver, driver
from tests.http.wire import Wire
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import connect

__all__: list[str] = []

_EVENTS = {"accept": "text/event-stream"}


def _http(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S)


def _async_http(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT_S)


def _session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


@driver("requests lines of /generate_stream", "tgi", nullcontext)
def _(url: str, prompt: str) -> str:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": MAX_TOKENS}}
    with requests.post(f"{url}/generate_stream", json=body, stream=True, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        events = [_json(line[5:]) for line in response.iter_lines() if line.startswith(b"data:")]
    if "error" in events[-1]:
        raise StreamFailed(events[-1]["error"])
    return "".join(event["token"]["text"] for event in events if not event["token"]["special"])


@driver("httpx-sse chat stream", "openai", _http)
def _(client: httpx.Client, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "stream": True}
    with httpx_sse.connect_sse(client, "POST", "/v1/chat/completions", json=body) as source:
        *events, done = (event.data for event in source.iter_sse())
    assert done == "[DONE]"
    chunks = [_json(event) for event in events]
    if "error" in chunks[-1]:
        raise StreamFailed(chunks[-1]["error"])
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def _body(prompt: str) -> dict[str, Any]:  # Any: JSON
    return {"prompt": prompt, "max_tokens": MAX_TOKENS}


def _json(text: str | bytes) -> Any:  # Any: JSON
    return json.loads(text)


def _text(events: Sequence[tuple[str, str]]) -> str:
    """Return the text of a stream's events, given as type and data. Raises: StreamFailed unless the stream is done."""
    *deltas, (status, end) = events
    if status != "done":
        raise StreamFailed(f"{status}: {end}")
    assert {kind for kind, _ in deltas} <= {"message"}
    return "".join(_json(content)["text"] for _, content in deltas)


def _text_of_lines(lines: Sequence[str]) -> str:
    """As `_text`, from the lines of a body."""
    kind, events = "message", []
    for line in lines:
        field, _, content = line.partition(": ")
        if field == "event":
            kind = content
        elif field == "data":
            events.append((kind, content))
        else:
            assert field in ("", "id", "retry"), line  # comments and blank lines have no name
    return _text(events)


@driver("our own reader", "native", nullcontext)
def _(url: str, prompt: str) -> str:
    with Wire(int(url.rpartition(":")[2])) as wire:
        wire.send("POST", "/v1/streams", _body(prompt), _EVENTS)
        status = wire.head()
        body = wire.body().decode()
    if status != 200:
        raise StreamFailed(f"{status}: {body}")
    return _text_of_lines(body.split("\n"))


@driver("the state of a stream", "native", _http, streams=False)
def _(client: httpx.Client, prompt: str) -> str:
    path = client.post("/v1/streams", json=_body(prompt)).raise_for_status().headers["location"]
    client.get(f"{path}/events").raise_for_status()  # which ends with the stream
    state = client.get(path).raise_for_status().json()
    if state["status"] != "done":
        raise StreamFailed(state["status"])
    return str(state["text"])


@driver("httpx-sse", "native", _http)
def _(client: httpx.Client, prompt: str) -> str:
    with httpx_sse.connect_sse(client, "POST", "/v1/streams", json=_body(prompt)) as source:
        return _text([(event.event, event.data) for event in source.iter_sse()])


@async_driver("httpx-sse async", "native", _async_http)
async def _(client: httpx.AsyncClient, prompt: str) -> str:
    async with httpx_sse.aconnect_sse(client, "POST", "/v1/streams", json=_body(prompt)) as source:
        return _text([(event.event, event.data) async for event in source.aiter_sse()])


@driver("httpx lines", "native", _http)
def _(client: httpx.Client, prompt: str) -> str:
    with client.stream("POST", "/v1/streams", json=_body(prompt), headers=_EVENTS) as response:
        response.raise_for_status()
        return _text_of_lines(list(response.iter_lines()))


@driver("httpx-sse, resuming", "native", _http, resumes=True)
def _(client: httpx.Client, prompt: str) -> str:
    created = client.post("/v1/streams", json=_body(prompt)).raise_for_status()
    path = created.json()["events_url"]
    return _resumed(lambda headers: httpx_sse.connect_sse(client, "GET", path, headers=headers))


@driver("httpx-sse, posting again", "native", _http, resumes=True)
def _(client: httpx.Client, prompt: str) -> str:
    return _resumed(
        lambda headers: httpx_sse.connect_sse(client, "POST", "/v1/streams", json=_body(prompt), headers=headers)
    )


def _resumed(connect: Callable[[dict[str, str]], AbstractContextManager[httpx_sse.EventSource]]) -> str:
    """Return the text of a stream. After each cut, read it again from the last event on."""
    events: list[httpx_sse.ServerSentEvent] = []
    while not events or events[-1].event == "message":
        headers = {"last-event-id": events[-1].id} if events else {}
        try:
            with connect(headers) as source:
                source.response.raise_for_status()
                for event in source.iter_sse():
                    events.append(event)  # noqa: PERF402 - what comes before a cut has to stay
        except httpx.TransportError:
            continue
    stream_id, _, _ = events[0].id.rpartition("-")
    assert [event.id for event in events] == [f"{stream_id}-{seq}" for seq in range(1, len(events) + 1)]
    return _text([(event.event, event.data) for event in events])


@driver("sseclient-py", "native", nullcontext)
def _(url: str, prompt: str) -> str:
    with _post_with_requests(url, prompt) as response:
        response.raise_for_status()
        events = sseclient.SSEClient(response.iter_content(None)).events()
        return _text([(event.event, event.data) for event in events])


@driver("requests lines", "native", nullcontext)
def _(url: str, prompt: str) -> str:
    with _post_with_requests(url, prompt) as response:
        response.raise_for_status()
        return _text_of_lines([str(line) for line in response.iter_lines(decode_unicode=True)])


def _post_with_requests(url: str, prompt: str) -> requests.Response:
    return requests.post(f"{url}/v1/streams", json=_body(prompt), headers=_EVENTS, stream=True, timeout=TIMEOUT_S)


@async_driver("aiohttp lines", "native", _session)
async def _(session: aiohttp.ClientSession, prompt: str) -> str:
    async with session.post("/v1/streams", json=_body(prompt), headers=_EVENTS) as response:
        response.raise_for_status()
        return _text_of_lines([line.decode().removesuffix("\n") async for line in response.content])


# Plain text


def _path(prompt: str) -> str:
    return f"/?prompt={quote(prompt)}&max_tokens={MAX_TOKENS}"


@driver("requests as in the Ray tutorial", "plain", nullcontext)
def _(url: str, prompt: str) -> str:
    with requests.post(url + _path(prompt), stream=True, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        return "".join(response.iter_content(chunk_size=None, decode_unicode=True))


@driver("requests in one piece", "plain", nullcontext)
def _(url: str, prompt: str) -> str:
    response = requests.post(url + _path(prompt), timeout=TIMEOUT_S)
    response.raise_for_status()
    return response.text


@driver("httpx text", "plain", _http)
def _(client: httpx.Client, prompt: str) -> str:
    with client.stream("POST", _path(prompt)) as response:
        response.raise_for_status()
        return "".join(response.iter_text())


@async_driver("aiohttp bytes", "plain", _session)
async def _(session: aiohttp.ClientSession, prompt: str) -> str:
    async with session.post(_path(prompt)) as response:
        response.raise_for_status()
        return b"".join([piece async for piece in response.content.iter_any()]).decode()


@driver("curl -N", "plain", nullcontext)
def _(url: str, prompt: str) -> str:
    command = ["curl", "-sSNf", "--noproxy", "*", "--max-time", str(TIMEOUT_S), "-X", "POST", url + _path(prompt)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S + 5)
    if done.returncode:
        raise ClientError(f"exit {done.returncode}", done.stderr.decode())
    return done.stdout.decode()


@driver("requests as in the FastAPI article", "plain", nullcontext)
def _(url: str, prompt: str) -> str:
    address = f"{url}/query-stream/?query={quote(prompt)}&max_tokens={MAX_TOKENS}"
    with requests.get(address, stream=True, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        return b"".join(response.iter_content(1024)).decode()


# The vLLM article's, where every event has all the text so far


@driver("httpx-sse, text so far", "cumulative", _http)
def _(client: httpx.Client, prompt: str) -> str:
    with httpx_sse.connect_sse(client, "POST", "/generate-stream", json=_body(prompt)) as source:
        *events, last = (event.data for event in source.iter_sse())
    if last != "[DONE]":
        raise StreamFailed(last)
    return str(_json(events[-1])["text"]) if events else ""


# Triton's and Inferless'


def _triton(prompt: str) -> dict[str, Any]:  # Any: JSON
    return {"text_input": prompt, "max_tokens": MAX_TOKENS}


@driver("httpx of Triton", "triton", _http, streams=False)
def _(client: httpx.Client, prompt: str) -> str:
    answer = client.post("/v2/models/default/generate", json=_triton(prompt)).raise_for_status()
    return str(answer.json()["text_output"])


@driver("httpx-sse of Triton", "triton", _http)
def _(client: httpx.Client, prompt: str) -> str:
    with httpx_sse.connect_sse(client, "POST", "/v2/models/default/generate_stream", json=_triton(prompt)) as source:
        events = [_json(event.data) for event in source.iter_sse()]
    if events and "error" in events[-1]:
        raise StreamFailed(events[-1]["error"])
    return "".join(event["text_output"] for event in events)


# WebSockets


def _socket(url: str) -> str:
    return url.replace("http", "ws")


@driver("websockets as in the Ray tutorial", "chatbot", nullcontext)
def _(url: str, prompt: str) -> str:
    with connect(_socket(url), proxy=None) as websocket:
        websocket.send(prompt)
        texts = []
        while (received := str(websocket.recv(TIMEOUT_S))) != "<<Response Finished>>":
            texts.append(received)
    return "".join(texts)


@driver("websockets", "websocket", nullcontext)
def _(url: str, prompt: str) -> str:
    with connect(f"{_socket(url)}/v1/ws", proxy=None) as socket:
        socket.send(json.dumps({"type": "create", **_body(prompt)}))
        frames: list[Any] = []  # JSON
        while not frames or frames[-1]["type"] in ("created", "delta"):
            frames.append(_json(socket.recv(TIMEOUT_S)))
    return _text_of_frames(frames)


@async_driver("websockets async", "websocket", nullcontext)
async def _(url: str, prompt: str) -> str:
    async with connect_async(f"{_socket(url)}/v1/ws", proxy=None) as socket:
        await socket.send(json.dumps({"type": "create", **_body(prompt)}))
        frames: list[Any] = []  # JSON
        while not frames or frames[-1]["type"] in ("created", "delta"):
            frames.append(_json(await socket.recv()))
    return _text_of_frames(frames)


def _text_of_frames(frames: Sequence[Any]) -> str:  # Any: JSON
    *deltas, end = frames
    if end["type"] != "done":
        raise StreamFailed(end["error"])
    return "".join(frame["text"] for frame in deltas if frame["type"] == "delta")
