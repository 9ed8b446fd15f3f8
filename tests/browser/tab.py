"""A tab of the browser, and everything that should not happen in it."""

from __future__ import annotations

import json
from typing import Any

from playwright.async_api import BrowserContext, ConsoleMessage, Page

__all__ = ["RIVER_TOKENS", "Tab"]

RIVER_TOKENS = 80  # that the server of these tests answers

_LAST = ".answer:last-child"
_WATCH_POLICY = """addEventListener("securitypolicyviolation",
    (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"""


class Tab:
    """Wraps a page. `faults` are errors and refused loads; `requests` are all addresses that were asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))
        self.question = page.get_by_label("Your message")
        self.answers = page.locator(".answer")
        self.answer = page.locator(_LAST)
        self.notice = page.locator("#notice")

    @classmethod
    async def open(cls, context: BrowserContext, url: str) -> Tab:
        tab = cls(await context.new_page())
        await tab.page.add_init_script(_WATCH_POLICY)
        await tab.goto(url)
        return tab

    async def goto(self, url: str) -> None:
        await self.page.goto(url)
        await self.page.wait_for_selector("body.ready")

    async def reload(self) -> None:
        await self.page.reload()
        await self.page.wait_for_selector("body.ready")

    async def send(self, question: str) -> None:
        await self.question.fill(question)
        await self.question.press("Enter")

    async def wait_text(self, num_characters: int = 20) -> str:
        """The last answer, once it is so long."""
        await self.until(f"(document.querySelector('{_LAST} .text')?.textContent ?? '').length >= {num_characters}")
        return await self.text()

    async def wait_state(self, text: str) -> None:
        """Wait until the line below the last answer has this in it."""
        await self.until(f"document.querySelector('{_LAST} .state')?.textContent.includes({json.dumps(text)})")

    async def wait_end(self, mood: str = "ended") -> str:
        """The last answer, once it is over."""
        await self.until(f"document.querySelector('{_LAST}')?.dataset.mood === '{mood}'")
        return await self.text()

    async def until(self, condition: str) -> None:
        """Looks at every frame, where `expect` would look ever more seldom."""
        await self.page.wait_for_function(f"() => {condition}")

    async def text(self) -> str:
        return await self.answer.locator(".text").text_content() or ""

    async def state(self) -> str:
        return await self.answer.locator(".state").text_content() or ""

    async def chat(self) -> dict[str, Any]:  # Any: of JSON
        """What this tab keeps."""
        kept = await self.page.evaluate("localStorage.getItem(sessionStorage.getItem('tailrace.place'))")
        return dict(json.loads(kept or "{}"))

    async def last_answer(self) -> dict[str, Any]:  # Any: of JSON
        return dict((await self.chat())["exchanges"][-1]["answer"])

    async def stream_id(self) -> str:
        return str((await self.last_answer())["events_url"]).split("/")[3]

    def _on_console(self, message: ConsoleMessage) -> None:
        # The browser reports each refused or broken connection; those the tests bring about themselves.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.faults.append(message.text)
