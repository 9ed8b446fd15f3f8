"""Links from the page: made in one browser, read in another without a key, and revoked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import Browser, expect
from tests.api.process import Server
from tests.browser.axe import violations
from tests.browser.tab import Tab
from tests.browser.test_page import ENDLESS, QUESTION, let_ask

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]


async def test_a_link_is_made_read_live_and_revoked(river: Server, open_tab: OpenTab, browser: Browser) -> None:
    tab = await open_tab(river.url)
    await let_ask(tab, max_tokens=ENDLESS)
    await tab.send(QUESTION)
    await tab.wait_text()
    stream_id = await tab.stream_id()
    await tab.button("Share this conversation").click()
    await tab.button("Make a link").click()
    link = await tab.page.locator(".links input").input_value()
    assert link.startswith(f"{river.url}/share#trs_")
    assert await violations(tab.page) == []
    async with await browser.new_context() as stranger:
        page = await stranger.new_page()
        faults: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(link)
        await expect(page.locator('article[data-role="user"]')).to_have_text(QUESTION)
        answer = page.locator('article[data-role="assistant"]')
        await expect(answer).to_have_attribute("aria-busy", "true")  # it is being written
        assert river.http.post(f"/v1/streams/{stream_id}/cancel").status_code == 200
        await expect(answer).to_have_attribute("aria-busy", "false")
        assert (await answer.inner_text()).split() == (await tab.wait_end()).split()
        assert await violations(page) == []
        assert not any("trs_" in url.partition("#")[0] for url in asked)
        await tab.button("Revoke").click()
        await expect(page.locator("#state")).to_have_text("This link was revoked.")
        await expect(page.locator("article")).to_have_count(0)
        await page.reload()
        await expect(page.locator("#state")).to_have_text("This link is not valid any more.")
        assert [fault for fault in faults if "404" not in fault] == []
    await expect(tab.page.locator(".links li")).to_have_count(0)
