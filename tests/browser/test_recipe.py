"""The page of docs/wires/browser.md, from another origin than the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext
from tests.api.process import Server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.deep]

DOCUMENT = Path(__file__).parents[2] / "docs" / "wires" / "browser.md"
WHOLE = "() => document.querySelector('#end').textContent"


async def test_it_runs_as_printed(
    context: BrowserContext, serve: Callable[..., Server], folder: tuple[Path, str]
) -> None:
    path, origin = folder
    flags = ("--allowed-origins", origin, "--default-max-tokens", "60")
    server = serve("scripted:tokens_per_s=20", *flags)  # the button is pressed while it answers
    match = re.search(r"```html\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert match is not None
    (path / "river.html").write_text(match[1].replace("http://127.0.0.1:8000", server.url))
    page = await context.new_page()
    async with page.expect_response(lambda answer: answer.status == 201) as created:
        await page.goto(f"{origin}/river.html")
    stream_id = (await (await created.value).json())["id"]
    assert await (await page.wait_for_function(WHOLE)).json_value() == "done after 60 tokens"
    assert await page.text_content("#answer") == server.state(stream_id)["text"]

    await page.reload()
    await page.wait_for_function("() => document.querySelector('#answer').textContent.length > 20")
    await page.get_by_role("button").click()
    assert re.fullmatch(r"cancelled after \d+ tokens", await (await page.wait_for_function(WHOLE)).json_value())
