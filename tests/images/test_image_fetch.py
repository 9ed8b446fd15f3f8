"""Images that are fetched: only from allowed hosts, never from private addresses, whatever a name or a server says."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from tests.http.certificates import write_certificate
from tests.seeing import picture

from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.images import image_fetch
from tailrace.images.image_fetch import ImageFetcher, is_public
from tailrace.types import Image

_PICTURE = picture(1)


class _Site(BaseHTTPRequestHandler):
    """What it answers is in the path; what it was asked is kept."""

    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.headers["host"], self.path))
        _, kind, rest = self.path.split("/", 2)
        if kind == "to":
            self.send_response(302)
            self.send_header("location", rest)
            self.end_headers()
            return
        self.send_response(200 if kind == "picture" else 404)
        self.end_headers()
        self.wfile.write(_PICTURE if kind == "picture" else b"secret")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _site(files: tuple[Path, Path] | None = None) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    asked: list[tuple[str, str]] = []
    handler = type("_Own", (_Site,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if files is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*files)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


class _ToPort(httpx.AsyncHTTPTransport):
    """Connects to the address that it is told, at a port of the test: only port 80 and 443 are allowed."""

    def __init__(self, port: int, verify: ssl.SSLContext | bool = True) -> None:
        super().__init__(verify=verify)
        self._port = port

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=self._port)
        return await super().handle_async_request(request)


class _Names:
    """A name server of a test. The addresses of a name may change from one question to the next."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def _fetched(fetcher: ImageFetcher, *urls: str) -> list[bytes]:
    async def run() -> tuple[Image, ...]:
        return await fetcher.fetch(tuple(Image(b"", "where", url=url) for url in urls))

    return [image.content for image in asyncio.run(run())]


def _local(address: str) -> bool:
    """As `is_public`, with one address of the test as a public one."""
    return address == "127.0.0.1"


def test_an_image_of_an_allowed_host_is_fetched_by_its_name() -> None:
    with _site() as (port, asked):
        names = _Names(["127.0.0.1"])
        fetcher = ImageFetcher("a.example, *.b.example", resolve=names, is_allowed=_local, transport=_ToPort(port))
        assert _fetched(fetcher, "http://a.example/picture/1", "http://x.b.example/picture/2") == [_PICTURE] * 2
        assert asked == [("a.example", "/picture/1"), ("x.b.example", "/picture/2")]
        assert _fetched(fetcher, "http://a.example/to/http://x.b.example/picture/3") == [_PICTURE]


@pytest.mark.parametrize("name", ["a.example", "b.example"])
def test_a_certificate_has_to_be_of_the_name(name: str, tmp_path: Path) -> None:
    """Although the connection goes to an address, for which the certificate is valid."""
    files = write_certificate(tmp_path, name)
    with _site(files) as (port, asked):
        transport = _ToPort(port, ssl.create_default_context(cafile=str(files[0])))
        fetcher = ImageFetcher("a.example", resolve=_Names(["127.0.0.1"]), is_allowed=_local, transport=transport)
        if name == "a.example":
            assert _fetched(fetcher, "https://a.example/picture/1") == [_PICTURE]
        else:
            with pytest.raises(RequestError, match="does not answer"):
                _fetched(fetcher, "https://a.example/picture/1")
            assert not asked


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/picture/1",
        "http://b.example/picture/1",
        "http://a.example.evil/picture/1",
        "http://evila.example/picture/1",
        "http://a.example@evil/picture/1",
        "http://user:password@a.example/picture/1",
        "http://a.example:6379/picture/1",
        "http://a.example:99999/picture/1",
        "http://a.example./picture/1",
        "http:///picture/1",
        "http://[::1/picture/1",
        "http://evil\\@a.example/picture/1",
        "https://evil#@a.example/",
    ],
)
def test_another_host_is_not_asked(url: str) -> None:
    names = _Names(["127.0.0.1"])
    fetcher = ImageFetcher("a.example,*.b.example", resolve=names, is_allowed=_local, transport=_ToPort(1))
    with pytest.raises(UnsupportedParameter, match="where: this server fetches no images from there"):
        _fetched(fetcher, url)
    assert not names.asked


def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(UnsupportedParameter, match="--fetch-images") as caught:
        _fetched(ImageFetcher(""), "http://a.example/")
    assert caught.value.param == "where"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "0x7f.1", "2130706433", "017700000001", "0", "localhost", "[::1]", "[::]",
        "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "10.0.0.1", "192.168.1.1",
        "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "[fe80::1]",
        "[fc00::1]",
    ],
)  # fmt: skip
def test_no_spelling_of_a_private_address_is_asked(host: str) -> None:
    """The system's own resolver reads them, with any host allowed."""
    with pytest.raises((UnsupportedParameter, RequestError), match=r"from there|does not answer"):
        _fetched(ImageFetcher("*", transport=_Never()), f"http://{host}/picture/1")


class _Never(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise AssertionError("asked")


def test_what_is_public() -> None:
    assert all(map(is_public, ("93.184.215.14", "1.1.1.1", "2606:4700::1111")))
    wrapped = ("::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2001:0:1::1")
    private = (*wrapped, "127.0.0.1", "::1", "ff02::1", "x")
    assert not any(map(is_public, private))


def test_a_name_with_one_private_address_is_not_asked() -> None:
    fetcher = ImageFetcher("*", resolve=_Names(["93.184.215.14", "10.0.0.1"]), transport=_Never())
    with pytest.raises(UnsupportedParameter):
        _fetched(fetcher, "http://a.example/picture/1")


def test_a_name_that_changes_is_resolved_once() -> None:
    """The second answer would be a private address: it is never asked for."""
    with _site() as (port, asked):
        names = _Names(["127.0.0.1"], ["10.0.0.1"])
        fetcher = ImageFetcher("a.example", resolve=names, is_allowed=_local, transport=_ToPort(port))
        assert _fetched(fetcher, "http://a.example/picture/1") == [_PICTURE]
        assert names.asked == ["a.example"]
        with pytest.raises(UnsupportedParameter):  # on a later request, too
            _fetched(fetcher, "http://a.example/picture/1")
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://evil.example/picture/1", "from there"),
        ("http://a.example:8080/picture/1", "from there"),
        ("file:///etc/passwd", "from there"),
        ("//evil.example/picture/1", "from there"),
        ("/to//to//to//to//picture/1", "more than 3 redirects|from there"),
        ("/to/http://[", "cannot be fetched|from there|address"),
        ("/missing/1", "its server answers 404"),
    ],
)
def test_redirects_are_checked_like_addresses(target: str, reason: str) -> None:
    with _site() as (port, _):
        fetcher = ImageFetcher("a.example", resolve=_Names(["127.0.0.1"]), is_allowed=_local, transport=_ToPort(port))
        with pytest.raises(RequestError, match=reason) as caught:
            _fetched(fetcher, f"http://a.example/to/{target}")
    assert "secret" not in caught.value.message


def test_the_bytes_and_the_time_of_a_request_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with _site() as (port, _):
        fetcher = ImageFetcher("a.example", resolve=_Names(["127.0.0.1"]), is_allowed=_local, transport=_ToPort(port))
        url = "http://a.example/picture/1"
        monkeypatch.setattr(image_fetch, "MAX_BYTES", 2 * len(_PICTURE) - 1)
        assert _fetched(fetcher, url) == [_PICTURE]
        with pytest.raises(RequestError, match="MiB"):
            _fetched(fetcher, url, url)

    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(image_fetch, "TIMEOUT_S", 0.01)
    slow = ImageFetcher("a.example", resolve=_Names(["127.0.0.1"]), is_allowed=_local, transport=Slow())
    with pytest.raises(RequestError, match="too long"):
        _fetched(slow, url)
