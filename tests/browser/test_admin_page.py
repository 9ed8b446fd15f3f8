"""The page of an operator, in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, expect
from tests.api.own_keys import key_of
from tests.api.process import Server
from tests.browser.axe import violations
from tests.browser.tab import Tab

pytestmark = pytest.mark.asyncio(loop_scope="session")

Serve = Callable[..., Server]
_LONG = {"prompt": "A secret.", "max_tokens": 3000}


async def test_an_operator_stops_a_stream_and_unloads_the_model(serve: Serve, context: BrowserContext) -> None:
    server = await asyncio.to_thread(serve, "scripted:tokens_per_s=50")
    stream = await asyncio.to_thread(server.create, _LONG)
    tab = await Tab.open(context, f"{server.url}/admin")
    streams, models = (tab.page.get_by_role("region", name=name) for name in ("Running streams", "Models"))
    await expect(streams).to_contain_text(stream)
    await expect(models).to_contain_text("ready")
    await expect(tab.page.get_by_role("region", name="Keys")).to_contain_text("every client has access")
    assert await violations(tab.page) == []
    assert "secret" not in await tab.page.content()
    await tab.button("Unload scripted").click()
    await expect(tab.alarm).to_contain_text("This model is in use.")
    await tab.button(f"Stop the stream {stream}").click()
    await expect(streams).to_contain_text("No stream runs.")
    assert (await asyncio.to_thread(server.state, stream))["status"] == "cancelled"
    await tab.button("Unload scripted").click()
    await expect(models).to_contain_text("unloaded")
    await tab.button("Load scripted").click()
    await expect(models).to_contain_text("ready")
    assert all("503" in fault for fault in tab.faults)  # the browser's line about the refusal
    assert all(request.startswith(server.url) for request in tab.requests)


async def test_the_page_needs_a_key_with_the_scope(serve: Serve, context: BrowserContext, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    user, admin = key_of(database, "alice"), key_of(database, "boss", "admin", "generate", "read")
    flags = ("--data-dir", str(tmp_path), "--database", database)
    server = await asyncio.to_thread(serve, "scripted:fault_after=2", *flags)
    tab = await Tab.open(context, f"{server.url}/admin")
    key = tab.page.get_by_label("Key", exact=True)
    await key.fill(user)
    await key.press("Enter")
    await expect(tab.alarm).to_contain_text("This key does not have the scope admin.")
    assert "boss" not in await tab.page.content()
    await context.clear_cookies()
    await tab.reload()
    await key.fill(admin)
    await key.press("Enter")
    owners, errors = (tab.page.get_by_role("region", name=name) for name in ("Owners", "Recent errors"))
    await expect(owners).to_contain_text("alice")
    await expect(tab.page.get_by_role("region", name="Keys")).to_contain_text("generate, read")
    await expect(errors).to_contain_text("There were none")
    failing = {"prompt": "Hi <|fail|>", "max_tokens": 9}
    await asyncio.to_thread(server.post, "/v1/streams", failing, Authorization=f"Bearer {user}")
    await expect(errors).to_contain_text("sequence_failed")
    await expect(errors).to_contain_text("alice")
    assert await violations(tab.page) == []
    assert all("401" in fault or "403" in fault for fault in tab.faults)
