"""Images that a server fetches, `--fetch-images`, over HTTP. The rules: `tests/images/test_image_fetch.py`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from subprocess import run

import httpx
import pytest
from tests.api.process import Server
from tests.faults.apart import apart
from tests.seeing import data_url, picture
from tests.waiting import LONG_S

_PICTURE = picture(1)
_PUBLIC = "93.184.215.14"  # of this machine, in a network of its own


def _ask(server: Server, url: str) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "seed": 5}
    return server.post("/v1/chat/completions", body)


def _refusal(server: Server, url: str) -> str:
    answer = _ask(server, url)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


class _Site(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.headers["host"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(_PICTURE)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _site() -> Iterator[list[str]]:
    """Serve a picture at port 80 of every address. Yields the hosts that were asked for."""
    asked: list[str] = []
    with ThreadingHTTPServer(("0.0.0.0", 80), type("_Own", (_Site,), {"asked": asked})) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


@apart
def test_an_allowed_host_is_asked_and_a_private_address_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_FORK", "0")  # a fork would not be in this network
    run(["ip", "address", "add", f"{_PUBLIC}/32", "dev", "lo"], check=True, timeout=LONG_S)
    flags = ("--fetch-images", f"{_PUBLIC},127.0.0.1,localhost")
    with _site() as asked, contextlib.closing(Server("scripted", *flags)) as server:
        server.wait_ready()
        assert httpx.get("http://127.0.0.1/picture", trust_env=False).content == _PICTURE
        asked.clear()
        fetched = _ask(server, f"http://{_PUBLIC}/picture").json()
        assert fetched["choices"] == _ask(server, data_url(_PICTURE)).json()["choices"]
        for host in ("127.0.0.1", "localhost", "93.184.215.15"):
            assert "fetches no images from there" in _refusal(server, f"http://{host}/picture")
        assert asked == [_PUBLIC]


def test_by_default_nothing_is_fetched(server: Server) -> None:
    assert "--fetch-images" in _refusal(server, "http://example.com/a.png")


def test_only_hosts_of_the_list_are_allowed_and_no_private_address(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--fetch-images", "example.com,127.0.0.1,[::1]").wait_ready()
    for url in ("http://example.org/a.png", "http://127.0.0.1/a.png", "http://[::1]/a.png", "https://127.0.0.1/"):
        assert "fetches no images from there" in _refusal(server, url)
