"""A fake upstream server that sends any bytes, like the servers of OpenAI and TGI or invalid ones."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

__all__ = ["SSE", "Answer", "FakeUpstream", "UpstreamRequest", "answer_of", "chat_chunk", "done", "head", "text_chunk"]

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class UpstreamRequest:
    """A request."""

    path: str
    headers: dict[str, str]
    body: Any  # JSON
    sock: socket.socket

    def is_left(self) -> bool:
        """Wait until the client disconnects."""
        self.sock.settimeout(_TIMEOUT_S)
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


Answer = Callable[[UpstreamRequest], bytes]


def head(status: str = "200 OK", kind: str = "text/event-stream", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", "connection: close", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


SSE = head()


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text_chunk(text: str, finish_reason: str | None = None) -> bytes:
    return _event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def chat_chunk(delta: dict[str, object], finish_reason: str | None = None) -> bytes:
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def done(usage: tuple[int, int] | None = (3, 4)) -> bytes:
    counts = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True)) if usage is not None else None
    return (_event({"choices": [], "usage": counts}) if counts else b"") + b"data: [DONE]\n\n"


def answer_of(*texts: str, usage: tuple[int, int] | None = (3, 4)) -> bytes:
    """Return a whole answer of `/v1/completions`."""
    return SSE + b"".join(map(text_chunk, texts)) + text_chunk("", "stop") + done(usage)


class FakeUpstream:
    """A server that answers requests with `answers`, one after the other. The last answer is repeated."""

    def __init__(self, *answers: Answer | bytes, models: object = None) -> None:
        self.asked: list[UpstreamRequest] = []
        self.answers = list(answers)
        self._models = models
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = [threading.Thread(target=self._accept, daemon=True)]

    def say(self, *answers: Answer | bytes) -> None:
        """Set the answers to later requests, and forget earlier requests."""
        with self._lock:
            self.asked.clear()
            self.answers[:] = answers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeUpstream:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(_TIMEOUT_S)
        with sock, contextlib.suppress(OSError):
            asked = _read(sock)
            if asked is None:
                return
            if asked.path.endswith("/models"):
                sock.sendall(head(kind="application/json") + json.dumps(self._models).encode())
                return
            with self._lock:
                self.asked.append(asked)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            sock.sendall(answer if isinstance(answer, bytes) else answer(asked))


def _read(sock: socket.socket) -> UpstreamRequest | None:
    heard = b""
    while b"\r\n\r\n" not in heard:
        piece = sock.recv(1 << 16)
        if not piece:
            return None
        heard += piece
    top, _, body = heard.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += sock.recv(1 << 16)
    return UpstreamRequest(first.split(" ")[1], headers, json.loads(body) if body else None, sock)
