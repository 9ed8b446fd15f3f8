"""The page behind a real nginx with the recipe of docs/edge.md: TLS, a password, and an unusual port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser
from tests.api.process import Server
from tests.browser.tab import RIVER_TOKENS, Tab
from tests.http.nginx import PASSWORD, below_a_path, secured

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.deep
async def test_the_page_chats_behind_nginx(browser: Browser, river: Server, tmp_path: Path) -> None:
    name, password = PASSWORD
    with secured(tmp_path, river.port) as port:
        async with await browser.new_context(
            ignore_https_errors=True, http_credentials={"username": name, "password": password}
        ) as context:
            context.set_default_timeout(10_000)
            tab = await Tab.open(context, f"https://localhost:{port}/")
            await tab.send("Why do rivers bend?")
            assert await tab.wait_end()
            assert f"{RIVER_TOKENS} tokens" in await tab.state()
            assert tab.faults == []


async def test_the_page_chats_below_a_path(
    river: Server, open_tab: Callable[[str], Awaitable[Tab]], tmp_path: Path
) -> None:
    """It requests nothing from outside of the path, as `open_tab` checks."""
    with below_a_path(tmp_path, river.port) as port:
        tab = await open_tab(f"http://localhost:{port}/llm/")
        await tab.send("Why do rivers bend?")
        assert await tab.wait_end()
        assert f"{RIVER_TOKENS} tokens" in await tab.state()
        await tab.reload()
        assert await tab.wait_end()
