"""Takes the pictures of docs/page.md: the page with the default model, on a desk, on a phone and in the dark.

.venv/bin/python -m scripts.page_pictures
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

from playwright.async_api import async_playwright
from tests.api.process import Server
from tests.browser.tab import Tab

__all__: list[str] = []

DOCS = Path(__file__).parent.parent / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-proxy-server"]
FIRST, SECOND = "Why do rivers bend?", "Write a Python function that tells whether a number is prime."


async def main() -> None:
    with contextlib.closing(Server("smollm2", "--default-max-tokens", "160")) as server:
        server.wait_ready()
        path = shutil.which("chromium") or shutil.which("google-chrome")
        async with (
            async_playwright() as playwright,
            await playwright.chromium.launch(executable_path=path, args=FLAGS) as browser,
            await browser.new_context(viewport={"width": 1100, "height": 720}) as desk,
            await browser.new_context(
                viewport={"width": 390, "height": 720}, has_touch=True, color_scheme="light"
            ) as phone,
            await browser.new_context(viewport={"width": 1100, "height": 720}, color_scheme="dark") as night,
        ):
            for context in (desk, phone, night):
                context.set_default_timeout(120_000)
            tab = await Tab.open(desk, server.url)
            await tab.send(FIRST)
            await tab.wait_end()
            await tab.button("New chat").click()
            await tab.send(SECOND)
            await tab.wait_end()
            await tab.button("Regenerate").click()
            await tab.wait_text()
            await tab.wait_end()
            await asyncio.sleep(0.5)
            await tab.page.screenshot(path=DOCS / "page-desktop.png")
            other = await Tab.open(phone, f"{server.url}/#{await tab.conversation_id()}")
            await other.wait_end()
            await asyncio.sleep(0.5)
            await other.page.screenshot(path=DOCS / "page-phone.png")
            dark = await Tab.open(night, f"{server.url}/#{await tab.conversation_id()}")
            await dark.send("Now in JavaScript.")
            await dark.wait_text(150)
            await dark.page.screenshot(path=DOCS / "page-dark.png")


if __name__ == "__main__":
    asyncio.run(main())
