"""Signing in to the page with a key, staying signed in, and the end of the session."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, expect
from tests.api.own_keys import key_of
from tests.api.process import TAILRACE, Server, environment
from tests.browser.axe import violations
from tests.browser.cable import Cable
from tests.browser.tab import Tab

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]
Serve = Callable[..., Server]
Plug = Callable[[Server], Awaitable[Cable]]


@pytest.mark.deep
async def test_a_key_opens_the_page_until_it_is_revoked(
    serve: Serve, open_tab: OpenTab, context: BrowserContext, plug: Plug, tmp_path: Path
) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    token = key_of(database, "alice")
    flags = ("--data-dir", str(tmp_path), "--database", database, "--default-max-tokens", "60")
    server = await asyncio.to_thread(serve, "scripted:tokens_per_s=100", *flags)
    cable = await plug(server)
    tab = await open_tab(cable.url)
    key = tab.page.get_by_label("Key", exact=True)
    await expect(key).to_be_focused()
    await key.fill("tr_wrong")
    await key.press("Enter")
    await expect(tab.page.get_by_role("alert")).to_have_text("This key is not valid on this server.")
    assert await violations(tab.page) == []
    await key.fill(token)
    await key.press("Enter")
    await expect(tab.page.locator(".owner")).to_have_text("alice")
    await tab.send("Why do rivers bend?")
    await tab.wait_text()
    assert all("?ticket=" not in request.target for request in cable.requests)
    assert await tab.wait_end()
    kept = await tab.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert token.rpartition("_")[2] not in kept
    assert all(token not in request.target for request in cable.requests)
    (cookie,) = await context.cookies(cable.url)
    assert (cookie.get("httpOnly"), cookie.get("sameSite")) == (True, "Strict")

    # The server is another one now, and knows the session all the same.
    await asyncio.to_thread(server.close)
    server = await asyncio.to_thread(serve, "scripted:tokens_per_s=100", *flags)
    cable.port = server.port
    await cable.cut()
    await cable.mend()
    await tab.reload()
    await expect(tab.page.locator(".owner")).to_have_text("alice")
    await expect(tab.answers).to_have_count(1)

    await tab.button("Sign out").click()
    await expect(key).to_be_focused()
    await key.fill(token)
    await key.press("Enter")
    await expect(tab.titles).to_have_text(["Why do rivers bend?"])
    revoking = [TAILRACE, "keys", "revoke", token.split("_")[1], "--database", database]
    await asyncio.to_thread(subprocess.run, revoking, check=True, env=environment(), stdout=subprocess.DEVNULL)
    await expect(key).to_be_visible(timeout=20_000)  # without a touch
    await expect(tab.page.locator("#turns")).to_have_count(0)
