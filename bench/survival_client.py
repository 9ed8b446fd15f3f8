"""The client of bench/survival.py, its wires, and what it counts.

It is one client for all servers, and it does what a careful client can do: when an answer breaks off, it comes back.
A server that can continue an answer is asked for the rest. Every other server is asked for the whole answer again, and
the client shows the new one in place of the old one.
"""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import httpx
from tokenizers import Tokenizer

__all__ = ["Counts", "NativeWire", "OpenAIWire", "Reader", "TextWire", "Wire", "count"]

GIVE_UP_S = 600.0  # without a new token; longer than any server here needs for its start
PAUSE_S = 0.25  # between two tries, as browsers and SDKs have one
SILENT_S = 60.0  # a read without a byte ends after it


@dataclass(frozen=True)
class Message:
    """How an answer broke off, or ended."""

    text: str
    is_end: bool = False  # the server says that the answer is complete


@dataclass
class Answer:
    """One response of a server, while it is read."""

    pieces: list[str] = field(default_factory=list)
    told: Message | None = None
    rest: bytes | None = None  # of a line that is not complete

    def lines(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that a chunk completes."""
        *lines, self.rest = ((self.rest or b"") + chunk).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")


class Wire(ABC):
    """How a server is asked, and what its bytes say. One object for one answer, over all its tries."""

    at_the_end = Message("the response ended, the answer did not")  # of a response that does not break

    @abstractmethod
    def request(self, url: str) -> httpx.Request:
        """Ask for the answer from its start."""

    @abstractmethod
    def read(self, answer: Answer, chunk: bytes) -> None:
        """Take bytes: adds text to the answer, and says if it has ended."""

    def opened(self, response: httpx.Response) -> None:
        """See the head of a response."""
        del response

    def of_another_reader(self) -> Wire:
        """Return a wire for another client that knows the address of this answer."""
        return copy.copy(self)

    def rest(self, url: str, *, from_start: bool = False) -> httpx.Request | None:
        """Ask for what the client does not have, or for all of it, without a new generation.

        Returns: None if the wire has no way.
        """
        del url, from_start
        return None


class NativeWire(Wire):
    """tailrace's own: every event has an id, after which a reader goes on, as browsers' EventSource does."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._seen = ""
        self.place = ""

    def request(self, url: str) -> httpx.Request:
        self.place = self._seen = ""
        headers = {"Accept": "text/event-stream"}
        return httpx.Request("POST", f"{url}/v1/streams", json=dict(self._body), headers=headers)

    def opened(self, response: httpx.Response) -> None:
        self.place = response.headers["X-Stream-Id"]

    def rest(self, url: str, *, from_start: bool = False) -> httpx.Request | None:
        headers = {} if from_start or not self._seen else {"Last-Event-ID": self._seen}
        return httpx.Request("GET", f"{url}/v1/streams/{self.place}/events", headers=headers)

    def read(self, answer: Answer, chunk: bytes) -> None:
        for line in answer.lines(chunk):
            if line.startswith("id:"):
                self._seen = line[3:].strip()
            elif line.startswith("data: {"):
                event = json.loads(line[6:])
                answer.pieces += filter(None, [event.get("text")])
                if event.get("status") == "done":
                    answer.told = Message("done", is_end=True)
                elif error := event.get("error"):
                    answer.told = Message(f"event: {error.get('code')}")


class OpenAIWire(Wire):
    """/v1/chat/completions. llama.cpp's server keeps the bytes of an answer for a client that names a conversation."""

    def __init__(self, model: str, body: Mapping[str, Any], *, conversation: str = "") -> None:
        self._body = {"model": model, "stream": True, **body}
        self._conversation = conversation
        self._num_bytes = 0
        self._rest = b""

    def request(self, url: str) -> httpx.Request:
        self._num_bytes, self._rest = 0, b""
        headers = {"X-Conversation-Id": self._conversation} if self._conversation else {}
        return httpx.Request("POST", f"{url}/v1/chat/completions", json=self._body, headers=headers)

    def rest(self, url: str, *, from_start: bool = False) -> httpx.Request | None:
        if not self._conversation:
            return None
        query = {"conv_id": self._conversation, "from": "0" if from_start else str(self._num_bytes)}
        return httpx.Request("GET", f"{url}/v1/stream", params=query)

    def read(self, answer: Answer, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        if answer.rest is None:  # it goes on in the middle of a line
            answer.rest = self._rest
        for line in answer.lines(chunk):
            if line.startswith("data:") and line[5:].strip() != "[DONE]":
                self._read_event(answer, json.loads(line[5:]))
        self._rest = answer.rest or b""

    def _read_event(self, answer: Answer, event: dict[str, Any]) -> None:
        if error := event.get("error"):
            answer.told = Message(f"event: {error.get('message') if isinstance(error, dict) else error}"[:160])
        for choice in event.get("choices") or []:
            answer.pieces += filter(None, [(choice.get("delta") or {}).get("content")])
            if choice.get("finish_reason"):
                answer.told = Message(f"finish_reason {choice['finish_reason']}", is_end=True)


class TextWire(Wire):
    """Bare text, as in Ray Serve's tutorial. The end of the response is the end of the answer."""

    at_the_end = Message("the response ended", is_end=True)

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = dict(body)

    def request(self, url: str) -> httpx.Request:
        return httpx.Request("POST", f"{url}/", json=self._body)

    def read(self, answer: Answer, chunk: bytes) -> None:
        answer.pieces.append(chunk.decode("utf-8", "replace"))


class Reader(threading.Thread):
    """Reads one answer to its end, whatever happens.

    `addresses` are those that the client knows, tried in turn as a load balancer would. With `joins` it reads the
    answer of another client, and never asks for one.
    """

    def __init__(self, wire: Wire, addresses: list[str], *, mark: int, joins: bool = False) -> None:
        super().__init__(daemon=True)
        self.text = ""  # what the user sees now
        self.before: list[str] = []  # what the user saw and the client replaced
        self.told: list[str] = []  # by the server, at each break and at the end
        self.ways: list[str] = []  # of the responses with a part of the answer
        self.is_complete = False
        self.marked = threading.Event()  # at this number of pieces, or at the end
        self._wire = wire
        self._addresses = addresses
        self._mark = mark
        self._joins = joins
        self._growth_s: list[float] = []  # when the user saw more text than ever before
        self._longest = 0
        self._pause: tuple[bool, float] | None = None

    def cut(self, seconds: float) -> None:
        """Close the connection, and come back after a while."""
        self._pause = True, seconds

    def sleep(self, seconds: float) -> None:
        """Read nothing for a while, with the connection open."""
        self._pause = False, seconds

    @property
    def silence_s(self) -> float:
        """The longest time without new text, from the first one to the last."""
        return max((b - a for a, b in zip(self._growth_s, self._growth_s[1:], strict=False)), default=0.0)

    def run(self) -> None:
        give_up_s = time.monotonic() + GIVE_UP_S
        way, num_tries = ("joined" if self._joins else "asked"), 0
        while not self.is_complete and time.monotonic() < give_up_s:
            url = self._addresses[num_tries % len(self._addresses)]
            num_tries += 1
            request = self._wire.request(url) if "asked" in way else self._wire.rest(url, from_start=way == "joined")
            if request is None:  # only for a reader that joins
                self.told.append("the answer has no address")
                break
            num_texts = len(self._growth_s)
            told, status = self._read(request, is_new="asked" in way)
            self.is_complete = told.is_end
            self.told += [told.text] if told.text not in self.told[-1:] else []
            self.ways += [way] if status == 200 else []
            if len(self._growth_s) > num_texts:
                give_up_s = time.monotonic() + GIVE_UP_S
            if self._joins and status != 200:
                break
            if status not in (0, 503):  # the server was there
                can_continue = status == 200 and bool(self._growth_s) and self._wire.rest(url) is not None
                way = "continued" if can_continue else "asked again"
            time.sleep(0 if self.is_complete else PAUSE_S)
        self.marked.set()

    def _read(self, request: httpx.Request, *, is_new: bool) -> tuple[Message, int]:
        """Read one response. The status is 0 if there is none."""
        answer, status = Answer(), 0
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096), (socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)]
        transport = httpx.HTTPTransport(socket_options=options)  # little is in flight, as on a phone
        timeout = httpx.Timeout(SILENT_S, connect=5)
        try:
            with httpx.Client(transport=transport, timeout=timeout, trust_env=False) as http:
                with contextlib.closing(http.send(request, stream=True)) as response:
                    status = response.status_code
                    if status != 200:
                        return Message(f"{status}: {_error_of(response.read())}"), status
                    self._wire.opened(response)
                    if is_new and self.text:
                        self.before.append(self.text)
                        self.text = ""
                    for chunk in response.iter_raw():
                        self._take(answer, chunk)
                        if answer.told is not None and answer.told.is_end:
                            return answer.told, status
                        if self._pause is not None and self.marked.is_set():
                            is_away, seconds = self._pause
                            self._pause = None
                            if is_away:
                                response.close()
                            time.sleep(seconds)
                            if is_away:
                                return Message("the client left"), status
                return answer.told or self._wire.at_the_end, status
        except httpx.ConnectError:
            return Message("connection refused"), 0
        except httpx.ReadTimeout:
            return answer.told or Message(f"nothing for {SILENT_S:.0f} s"), status
        except httpx.TransportError:
            return answer.told or Message("the connection broke"), status

    def _take(self, answer: Answer, chunk: bytes) -> None:
        num_pieces = len(answer.pieces)
        self._wire.read(answer, chunk)
        if new := answer.pieces[num_pieces:]:
            self.text += "".join(new)
            if len(self.text) > self._longest:
                self._longest = len(self.text)
                self._growth_s.append(time.monotonic())
            self._mark -= len(new)
            if self._mark <= 0:
                self.marked.set()


def _error_of(body: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        error = json.loads(body).get("error")
        return str(error.get("message") if isinstance(error, dict) else error)[:120]
    return body.decode("utf-8", "replace").strip()[:120]


@dataclass(frozen=True)
class Counts:
    """Tokens that the user sees at the end, beside those of the same answer without a fault."""

    lost: int  # missing
    doubled: int  # too many
    changed: int  # others
    again: int  # seen, thrown away and generated once more, because the answer was asked for again


def count(text: str, before: list[str], expected: str, tokenizer: Tokenizer) -> Counts:
    """Compare a text with what the same server answers undisturbed. `before` is what the client threw away."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    lost = doubled = changed = 0
    for tag, i, j, k, m in SequenceMatcher(None, ids(expected), ids(text), autojunk=False).get_opcodes():
        if tag == "delete":
            lost += j - i
        elif tag == "insert":
            doubled += m - k
        elif tag == "replace":
            changed += max(j - i, m - k)
    return Counts(lost, doubled, changed, sum(len(ids(one)) for one in before))
