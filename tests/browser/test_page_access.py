"""Accessibility of the page: axe, phones and screen readers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from playwright.async_api import Browser, expect
from tests.api.process import Server
from tests.browser.axe import violations
from tests.browser.tab import Tab
from tests.browser.test_page import QUESTION, let_ask
from tests.browser.test_page_text import PYTHON, WRITE

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]
_TABLE = (
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- [x] done\n\n> [quoted](https://example.com) `code`\n\n"
    "$$ \\frac{a}{b} $$\n\n\\(x\\)\n"
)


@pytest.mark.deep
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(river: Server, browser: Browser, scheme: Any) -> None:  # Any: a literal
    async with await browser.new_context(color_scheme=scheme) as context:
        context.set_default_timeout(30_000)
        tab = await Tab.open(context, river.url)
        assert await violations(tab.page) == []
        await let_ask(tab, max_tokens=8)
        await tab.send(QUESTION)
        await tab.wait_end()
        await tab.button("Regenerate").click()
        await expect(tab.answer.locator(".branches > span")).to_have_text("2 / 2")
        await tab.wait_end()
        await tab.button("Edit").click()
        await tab.button("Rename " + QUESTION).click()
        assert await violations(tab.page) == []
        await tab.page.get_by_label("Title", exact=True).press("Escape")
        await tab.button("Delete " + QUESTION).click()
        assert await violations(tab.page) == []
        await tab.page.get_by_label("Edit your message").press("Escape")
        for key in ("s", "?"):
            await tab.page.locator("#chat").focus()
            await tab.page.keyboard.press(key)
            await expect(tab.page.get_by_role("dialog")).to_be_visible()
            assert await violations(tab.page) == []
            await tab.page.keyboard.press("Escape")
        await tab.page.evaluate(WRITE.replace("// Only the nodes", "return; //"), [PYTHON + "\n" + _TABLE, 50])
        await expect(tab.page.locator(".hl-keyword").first).to_be_visible()
        assert await violations(tab.page) == []


async def test_a_phone(river: Server, browser: Browser) -> None:
    async with await browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True) as phone:
        phone.set_default_timeout(30_000)
        tab = await Tab.open(phone, river.url)
        await expect(tab.page.locator("#sidebar")).to_have_count(0)
        await tab.send("word " * 60 + "x" * 300)
        await tab.wait_end()
        assert await tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        box = await tab.page.locator("#field").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 640
        await tab.button("Conversations").tap()
        await expect(tab.page.get_by_role("navigation", name="Conversations")).to_be_visible()
        await tab.button("New chat").tap()
        await expect(tab.page.locator("#sidebar")).to_have_count(0)
        await expect(tab.page.locator("#welcome")).to_be_visible()
        assert tab.faults == []


async def test_screen_readers_get_the_state_and_not_every_token(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await tab.page.evaluate("""() => {
        window.told = [];
        const announcer = document.querySelector("#announcer");
        new MutationObserver(() => told.push(announcer.textContent))
            .observe(announcer, { childList: true, characterData: true, subtree: true });
    }""")
    await tab.send(QUESTION)
    await tab.wait_end()
    await expect(tab.page.locator("#announcer")).to_have_text("End of the answer.")
    told = await tab.page.evaluate("told.filter(Boolean)")
    assert len(told) <= 5
    await expect(tab.page.get_by_role("log")).to_have_attribute("aria-live", "off")
