"""A real browser: the machine's Chromium with Playwright. Without it these tests are skipped.

All share one event loop, since they share the browser.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, async_playwright, expect
from tests.api.process import Server
from tests.browser.cable import Cable
from tests.browser.tab import RIVER_TOKENS, Tab
from tests.missing import skip_missing

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-proxy-server", "--process-per-site",
]  # fmt: skip

_PATIENCE_MS = 30_000  # on a busy machine
expect.set_options(timeout=_PATIENCE_MS)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """TAILRACE_CHROMIUM may say where it is."""
    path = os.environ.get("TAILRACE_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        skip_missing("Chromium", "it is not on the PATH, nor named by TAILRACE_CHROMIUM")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def river() -> Iterator[Server]:
    """A server whose answers have RIVER_TOKENS unless asked otherwise, and take most of a second."""
    # A browser may ask over an idle connection that has died; it hears of that when the server lets go of it.
    flags = ("--default-max-tokens", str(RIVER_TOKENS), "--keep-alive-s", "2")
    with contextlib.closing(Server("scripted:tokens_per_s=100", *flags)) as server:
        yield server.wait_ready()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def profile(browser: Browser) -> AsyncIterator[BrowserContext]:
    """One for all tests, with an empty page that stays open. So pages share a cache and a process, and take half the
    processor time."""
    async with await browser.new_context() as profile:
        await profile.new_page()
        yield profile


@pytest_asyncio.fixture(loop_scope="session")
async def context(profile: BrowserContext) -> AsyncIterator[BrowserContext]:
    """A browser's profile without storage, cookies and permissions; only its cache is from earlier tests."""
    profile.set_default_timeout(_PATIENCE_MS)
    yield profile
    await profile.set_offline(False)
    for page in profile.pages[1:]:
        session, origin = await profile.new_cdp_session(page), await page.evaluate("origin")
        await page.goto("about:blank")  # the page of tailrace saves its draft when it is left
        await session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "local_storage"})
        await page.close()
    await profile.clear_cookies()
    await profile.clear_permissions()


@pytest_asyncio.fixture(loop_scope="session")
async def open_tab(context: BrowserContext) -> AsyncIterator[Callable[[str], Awaitable[Tab]]]:
    """Opens the page at an address. At the end there must be no faults, and no requests but to that address."""
    tabs: list[tuple[Tab, str]] = []

    async def open_at(url: str) -> Tab:
        tab = await Tab.open(context, url)
        tabs.append((tab, url.partition("#")[0]))
        return tab

    yield open_at
    for tab, url in tabs:
        assert tab.faults == []
        assert all(request.startswith(url) for request in tab.requests)


@pytest_asyncio.fixture(loop_scope="session")
async def plug() -> AsyncIterator[Callable[[Server], Awaitable[Cable]]]:
    """Puts a cable between the browser and a server."""
    async with AsyncExitStack() as cables:

        async def plug_in(server: Server) -> Cable:
            return await cables.enter_async_context(Cable(server.port))

        yield plug_in


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """What `python3 -m http.server` serves, and where."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(tmp_path))) as static:
        threading.Thread(target=static.serve_forever, daemon=True).start()
        yield tmp_path, f"http://127.0.0.1:{static.server_port}"
        static.shutdown()


@pytest.fixture
def succeed_at(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server over the same data as the one before, which pages of another origin may use."""
    with ExitStack() as running:

        def start(origin: str, source: str = "scripted:tokens_per_s=20") -> Server:
            flags = ("--allowed-origins", origin, "--data-dir", str(tmp_path / "data"), "--keep-alive-s", "2")
            server = Server(source, *flags)
            running.callback(server.close)
            return server.wait_ready(timeout_s=280)

        yield start
