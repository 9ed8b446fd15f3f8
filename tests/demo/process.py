"""A real `tailrace demo`: its parent process and its current server."""

from __future__ import annotations

from typing import Any

import httpx
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.waiting import until

__all__ = ["TOKEN", "Demo", "said_by_the_simulated"]

TOKEN = "x-tailrace-demo"


def said_by_the_simulated(prompt: str, count: int, seed: int = 7) -> str:
    """What the demo's simulated engine answers."""
    return Answer(chat_ids(prompt), count, seed, utf8=False).text


class Demo(Server):
    """`source` is --offline, or --model=NAME. `port` stays the same for all servers of a demo."""

    verb = "demo"
    usual_flags = ("--port", "0")
    listening = r"is ready: http://127\.0\.0\.1:([0-9]+)/demo"

    def demo_state(self) -> dict[str, Any]:  # Any: of JSON
        answer = httpx.get(f"{self.url}/demo/state", trust_env=False)
        assert answer.status_code == 200
        return dict(answer.json())

    def model(self, name: str = "scripted") -> dict[str, Any]:  # Any: of JSON
        return next(model for model in self.demo_state()["models"] if model["name"] == name)

    def kill(self, what: str, **headers: str) -> httpx.Response:
        """Ask for it as the page does."""
        token = {TOKEN: self.demo_state()["token"]}
        return httpx.post(f"{self.url}/demo/kill/{what}", headers={**token, **headers}, trust_env=False)

    def wait_life(self, number: int) -> dict[str, Any]:  # Any: of JSON
        """Return the state of the demo's server with this number."""

        def is_there() -> bool:
            try:
                return bool(self.demo_state()["server"]["life"] == number)
            except httpx.TransportError:
                return False

        until(is_there)
        return self.demo_state()
