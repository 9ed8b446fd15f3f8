"""Where bad input is sent, and what every refusal of it promises."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.server.process import Server
from tests.server.wire import Wire, as_json

__all__ = [
    "BOUND_S", "CANARY", "CHAT", "GENERATE", "GENERATE_STREAM", "JSON_ENDPOINTS", "NATIVE", "PLAIN", "ROOT", "TEXT",
    "Endpoint", "Refusal", "Witness", "ask", "expected_status", "refused",
]  # fmt: skip

CANARY = "kanarie7f3a"
BOUND_S = 3.0  # catches what hangs; how long it really takes is a matter for bench


@dataclass(frozen=True)
class Endpoint:
    """A wire, with a body it takes and the shape of its refusals."""

    name: str
    path: str
    good: dict[str, Any]  # Any: of JSON
    shape: str
    prompt: str = "prompt"  # the field that has the text, "messages" where it is in one

    def with_prompt(self, text: Any) -> dict[str, Any]:
        if self.prompt == "messages":
            return {**self.good, "messages": [{"role": "user", "content": text}]}
        return {**self.good, self.prompt: text}

    def with_parameter(self, name: str, value: Any) -> dict[str, Any]:
        if self.shape == "tgi":
            return {**self.good, "parameters": {**self.good["parameters"], name: value}}
        return {**self.good, name: value}


_TGI = {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}
NATIVE = Endpoint("native", "/v1/streams", {"prompt": "Hello", "max_tokens": 1}, "openai")
CHAT = Endpoint(
    "chat",
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True},
    "openai",
    "messages",
)
TEXT = Endpoint("text", "/v1/completions", {"prompt": "Hello", "max_tokens": 1}, "openai")
ROOT = Endpoint("tgi", "/", {**_TGI, "stream": True}, "tgi", "inputs")
GENERATE = Endpoint("generate", "/generate", _TGI, "tgi", "inputs")
GENERATE_STREAM = Endpoint("generate-stream", "/generate_stream", _TGI, "tgi", "inputs")
PLAIN = Endpoint("plain", "/?prompt=Hello&max_tokens=1", {}, "openai")
JSON_ENDPOINTS = (NATIVE, CHAT, TEXT, ROOT, GENERATE, GENERATE_STREAM)


@dataclass
class Witness:
    """Follows one long stream, and notes when each piece came."""

    server: Server
    stream_id: str
    arrivals_s: list[float] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    def follow(self, begun: threading.Event) -> None:
        with self.server.wire() as wire:
            wire.send("GET", f"/v1/streams/{self.stream_id}/events")
            wire.head()
            while piece := wire.chunk():
                self.arrivals_s.append(time.monotonic())
                self.body += piece
                begun.set()

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max(later - earlier for earlier, later in pairs)


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str
    code: str  # or TGI's error_type
    param: str | None
    headers: dict[str, str]


def refused(wire: Wire, shape: str) -> Refusal:
    """Reads an answer and holds it to what every refusal promises."""
    status, body = wire.head(), wire.body()
    assert 400 <= status < 500, (status, body)
    assert wire.headers["content-type"] == "application/json"
    assert wire.headers["content-length"] == str(len(body))
    assert wire.headers["x-request-id"]
    assert len(body) < 1000
    assert CANARY.encode() not in body
    assert CANARY not in repr(wire.headers)
    found = as_json(body)
    if shape == "tgi":
        assert set(found) == {"error", "error_type"}
        return Refusal(status, found["error"], found["error_type"], None, wire.headers)
    assert set(found) == {"error"}
    error = found["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["message"]
    assert error["code"]
    return Refusal(status, error["message"], error["code"], error["param"], wire.headers)


def ask(
    server: Server, endpoint: Endpoint, body: object = None, headers: dict[str, str] | None = None, path: str = ""
) -> Refusal:
    """POSTs, and expects a refusal within the bound; a good request on the same connection is then served."""
    with server.wire() as wire:
        started_s = time.monotonic()
        wire.send("POST", path or endpoint.path, body, headers)
        refusal = refused(wire, endpoint.shape)
        assert time.monotonic() - started_s < BOUND_S
        if refusal.headers.get("connection") == "close":
            assert wire.is_closed()
            return refusal
        wire.send("POST", endpoint.path, endpoint.good or None)
        assert wire.head() in (200, 201)
        wire.body()
    return refusal


def expected_status(endpoint: Endpoint, status: int = 400) -> int:
    """TGI says 422 where the others say 400."""
    return 422 if endpoint.shape == "tgi" and status == 400 else status
