"""Tools of MCP servers on the page: they are chosen, allowed, called once, and their text is never markup."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import expect
from tests.api.process import Server
from tests.browser.axe import violations
from tests.browser.cable import Cable
from tests.browser.tab import Tab
from tests.plugins.tool_loop.tool_servers import Tools

pytest.importorskip("mcp")

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]


@pytest.fixture
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    tools = Tools(tmp_path_factory.mktemp("tools"), [])
    markup = "<img src=x onerror=alert(1)> **bold**"
    hidden = markup + "\u202efdp.\u200b\u3164 é"
    rules = [
        {"when": "Write", "calls": [{"name": "count__append", "arguments": {"text": hidden}}]},
        {"when": "Look", "calls": [{"name": "count__look", "arguments": {"text": markup}}]},
        {"when": "Kill", "calls": [{"name": "count__append", "arguments": {"text": "a", "kill": "after"}}]},
        {"when": "<tool_response>", "say": "The tool has answered."},
        {"when": ".", "say": "Hello."},
    ]
    (tools.path / "script.json").write_text(json.dumps({"rules": rules}))
    return tools


async def _choose(tab: Tab) -> None:
    await tab.page.locator("body").press("s")
    await tab.page.get_by_label("count", exact=True).check()
    await tab.page.get_by_role("button", name="Save", exact=True).click()


async def test_tools_are_chosen_allowed_and_called_once(tools: Tools, open_tab: OpenTab) -> None:
    with contextlib.closing(tools.start()) as server:
        tab = await open_tab(server.url)
        await tab.question.blur()
        await _choose(tab)
        await tab.send("Look at it.")
        await expect(tab.answer.locator(".text")).to_have_text("The tool has answered.")
        assert tools.counted() == ["look"]
        asides = tab.page.locator("details.aside")
        await expect(asides).to_have_count(2)
        await expect(asides.first).to_contain_text("Call of count__look")
        await expect(asides.last).to_contain_text("<img src=x onerror=alert(1)> **bold**")
        await tab.send("Write it.")
        ask = tab.page.locator(".approvals")
        await expect(ask).to_contain_text("count: append")
        await expect(ask).to_contain_text(r"onerror=alert(1)> **bold**\u{202e}fdp.\u{200b}\u{3164} é")
        await expect(ask.locator("mark")).to_have_count(3)
        assert await violations(tab.page) == []
        await tab.reload()  # it is still asked for
        await expect(ask).to_contain_text("count: append")
        assert tools.counted() == ["look"]
        await tab.button("Allow").click()
        await expect(tab.answer.locator(".text")).to_have_text("The tool has answered.")
        await expect(ask).to_have_count(0)
        assert tools.counted() == ["look", "append"]
        assert await tab.page.locator("#turns img, #turns strong").count() == 0
        await tab.send("Write it again.")
        await tab.button("Do not allow").click()
        await expect(asides.last).to_contain_text("The user did not allow this call.")
        await expect(tab.answer.locator(".text")).to_have_text("The tool has answered.")
        assert tools.counted() == ["look", "append"]


async def test_a_page_without_servers_offers_no_tools(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await tab.question.blur()
    await tab.page.locator("body").press("s")
    await expect(tab.page.get_by_role("button", name="Save", exact=True)).to_be_visible()
    assert await tab.page.locator("fieldset.tools").count() == 0


@pytest.mark.deep
async def test_a_server_that_dies_in_a_call_asks_before_it_repeats_it(
    tools: Tools, open_tab: OpenTab, plug: Callable[[Server], Awaitable[Cable]]
) -> None:
    with contextlib.ExitStack() as running:
        server = running.enter_context(contextlib.closing(tools.start()))
        cable = await plug(server)
        tab = await open_tab(cable.url)
        await tab.question.blur()
        await _choose(tab)
        await tab.send("Kill it.")
        ask = tab.page.locator(".approvals")
        await expect(ask).to_contain_text("count: append")
        await tab.button("Allow").click()
        await asyncio.to_thread(server.wait)
        successor = running.enter_context(contextlib.closing(await asyncio.to_thread(tools.start)))
        cable.port = successor.port
        await expect(tab.page.locator("details.aside").last).to_contain_text(
            "It is not known whether the tool was called"
        )
        await expect(ask).to_contain_text("count: append")
        assert tools.counted() == ["append"]
        await tab.button("Do not allow").click()
        await expect(tab.answer.locator(".text")).to_have_text("The tool has answered.")
        assert tools.counted() == ["append"]
