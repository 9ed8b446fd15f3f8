"""A reader of a link, over a real socket, without a key."""

from __future__ import annotations

import json
import threading
from types import TracebackType
from typing import Any

import httpx
from tests.api.process import Server
from tests.waiting import LONG_S, until

__all__ = ["SharedReader", "token_in"]


def token_in(made: httpx.Response) -> str:
    assert made.status_code == 201, made.text
    path, _, token = made.json()["path"].partition("#")
    assert path == "/share"
    return str(token)


class SharedReader:
    """Reads what a link shows, in a thread, up to its end or the end of the connection."""

    def __init__(self, server: Server, token: str) -> None:
        self.texts: dict[int, str] = {}
        self.roles: dict[int, str] = {}
        self.branch: list[int] = []
        self.title = ""
        self.is_running = False
        self.reason = ""
        self.status = 0
        self.body = ""
        self.headers: dict[str, str] = {}
        self._server = server
        self._token = token
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SharedReader:
        self._thread.start()
        until(lambda: self.status != 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait_end()

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The messages in order: role and text."""
        return [(self.roles[number], self.texts[number]) for number in self.branch]

    def wait_end(self) -> None:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with httpx.Client(timeout=LONG_S, trust_env=False) as client:
            headers = {"x-tailrace-share": self._token}
            try:
                with client.stream("GET", f"{self._server.url}/v1/shared", headers=headers) as answer:
                    self.headers = dict(answer.headers)
                    self.status = answer.status_code
                    name = ""
                    for line in answer.iter_lines():
                        self.body += f"{line}\n"
                        if line.startswith("event: "):
                            name = line.removeprefix("event: ")
                        elif line.startswith("data: "):
                            self._take(name, json.loads(line.removeprefix("data: ")))
            except httpx.TransportError:
                self.status = self.status or -1

    def _take(self, name: str, fields: dict[str, Any]) -> None:
        if name == "state":
            self.title = fields["title"]
            for item in fields["items"]:
                self.roles[item["id"]] = item["role"]
                self.texts[item["id"]] = item.get("text", self.texts.get(item["id"], ""))
            self.branch = [item["id"] for item in fields["items"]]
            self.is_running = any(item["is_running"] for item in fields["items"])
        elif name == "text":
            self.texts[fields["id"]] += fields["text"]
        elif name == "end":
            self.reason = fields["reason"]
