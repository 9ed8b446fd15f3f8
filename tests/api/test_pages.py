"""The files of the page and their security headers."""

from __future__ import annotations

import gzip
import json
import re
from importlib import resources
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from tailrace.api.pages import Pages, wants_page
from tailrace.errors import (
    KINDS,
    EngineError,
    JournalDamaged,
    JournalFull,
    KeyRevoked,
    QueueTimeout,
    RequestRefused,
    StorageError,
    TailraceError,
)

_MAX_BYTES = 160_000  # of all files of the three pages, compressed
_FOLDER = Path(str(resources.files("tailrace.api").joinpath("page")))

FILES = sorted(
    path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*") if path.is_file() and path.suffix != ".txt"
)
OWN_FILES = [name for name in FILES if not name.startswith("lib/")]


@pytest.fixture
async def client() -> httpx.AsyncClient:
    pages = Pages()
    app = Starlette(routes=[Route("/", pages.index), *pages.table()])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


_THAT_END_STREAMS: tuple[type[TailraceError], ...] = (  # what a run fails with, beside all errors of engines
    JournalDamaged, KeyRevoked, QueueTimeout, RequestRefused, StorageError, JournalFull, TailraceError,
)  # fmt: skip


def test_the_page_has_a_sentence_for_each_error_that_ends_a_stream() -> None:
    text = (_FOLDER / "turns.js").read_text("utf-8")
    engines = [kind for kind in KINDS.values() if issubclass(kind, EngineError)]
    codes = {kind.code for kind in (*engines, *_THAT_END_STREAMS)} - {"cancelled", "interrupted"}
    assert [code for code in sorted(codes) if f'  {code}: "' not in text] == []


def _address(name: str) -> str:
    return {"index.html": "/", "admin.html": "/admin", "share.html": "/share"}.get(name, f"/page/{name}")


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_with_its_type_and_policy(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(_address(name))
    assert answer.status_code == 200
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].partition(";")[0] == kind[name.rpartition(".")[2]]
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[part] for part in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {policy[part] for part in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", FILES)
async def test_cached_files_are_304(client: httpx.AsyncClient, name: str) -> None:
    first = await client.get(_address(name))
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
        again = await client.get(_address(name), headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert (await client.get(_address(name), headers={"if-none-match": '"other"'})).status_code == 200


@pytest.mark.parametrize(
    "name", ["", "none.js", "lib/licences.txt", "..%2Fpages.py", "%2e%2e", "page.js%00", "PAGE.JS", "../pages.py"]
)
async def test_other_paths_are_404(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/page/{name}")).status_code == 404


async def test_the_page_loads_nothing_that_is_not_there_and_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    for name in OWN_FILES:
        text = (await client.get(_address(name))).text
        assert not re.findall(r"https?://(?!www\.w3\.org/(?:2000/svg|1998/Math/MathML))", text)
        assert not re.findall(r'(?:src|href|from) ?=?"/', text)  # a proxy may serve the page below a path
        for address in re.findall(r'(?:(?:src|href)=|from )"([^"]+)"', text):
            assert (await client.get(urljoin(_address(name), address))).status_code == 200, address
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=", text)


async def test_libraries_are_there_and_import_only_each_other(client: httpx.AsyncClient) -> None:
    libraries = [name for name in FILES if name.startswith("lib/")]
    assert {"lib/highlight.js", "lib/language-python.js", "lib/preact.js", "lib/signals.js"} <= set(libraries)
    for name in libraries:
        text = (await client.get(_address(name))).text
        for imported in re.findall(r'\b(?:from|import) ?"([@./a-z][^" ,]*)"', text):
            assert f"lib/{imported.removeprefix('./')}" in libraries, (name, imported)
        assert not re.search(r"\beval\(|new Function|sourceMappingURL", text)


async def test_libraries_come_with_their_licences() -> None:
    licences = (_FOLDER / "lib" / "licences.txt").read_text()
    pinned = json.loads((Path(__file__).parents[2] / "package.json").read_text())["dependencies"]
    assert all(re.search(rf"^{re.escape(name)}$", licences, re.MULTILINE) for name in pinned)


async def test_the_page_is_small(client: httpx.AsyncClient) -> None:
    files = [(await client.get(_address(name))).content for name in FILES]
    assert sum(len(gzip.compress(content)) for content in files) < _MAX_BYTES


async def test_the_index_depends_on_what_is_asked_for(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).headers["vary"] == "accept"


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8", True),
        ("text/html", True),
        ("Text/HTML ; q=0.5", True),
        ("text/plain;q=0.4, text/html;q=0.5", True),
        ("*/*", False),
        ("", False),
        ("text/*", False),
        ("text/plain", False),
        ("text/plain, text/html;q=0.5", False),
        ("text/html;q=0", False),
        ("text/html;q=much", False),
        ("application/json", False),
        ("text/event-stream", False),
    ],
)
def test_browsers_want_the_page_and_curl_does_not(accept: str, wanted: bool) -> None:
    headers = [(b"accept", part.encode()) for part in accept.split(", ")] if accept else []
    assert wants_page(Request({"type": "http", "headers": headers})) is wanted
