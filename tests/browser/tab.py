"""A tab of the browser, which also checks for console errors and foreign requests."""

from __future__ import annotations

import json
from typing import Any

from playwright.async_api import BrowserContext, ConsoleMessage, Locator, Page

__all__ = ["RIVER_TOKENS", "Tab"]

RIVER_TOKENS = 80  # that the server of these tests answers

_LAST = "#turns > .answer:last-child"
_WATCH_POLICY = """addEventListener("securitypolicyviolation",
    (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"""

_UNTIL_RECORDED = """async (path) => {
    for (;;) {
        const { data, answers } = await (await fetch(path)).json();
        if (!["running", undefined].includes(answers[data.at(-1).stream_id]?.status)) return;
        await new Promise(requestAnimationFrame);
    }
}"""


class Tab:
    """Wraps a page. `faults` are errors and refused loads; `requests` are all addresses that were asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))
        self.question = page.get_by_label("Your message", exact=True)
        self.questions = page.locator(".question")
        self.answers = page.locator(".answer")
        self.answer = page.locator(_LAST)
        self.alarm = page.locator("#alarm")
        self.note = page.locator("#note")
        self.titles = page.locator("#conversations a")

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

    def button(self, name: str) -> Locator:
        """The last one of that name."""
        return self.page.get_by_role("button", name=name, exact=True).last

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
        """The last answer, once it is over and all of it is shown."""
        await self.until(f"document.querySelector('{_LAST}')?.dataset.mood === '{mood}'")
        await self.until(f"document.querySelector('{_LAST} .text').dataset.isWhole === 'true'")
        return await self.text()

    async def until(self, condition: str) -> None:
        """Check at every frame; `expect` would poll less and less often."""
        await self.page.wait_for_function(f"() => {condition}")

    async def until_recorded(self) -> None:
        """Wait until the end of the last answer is recorded: in the conversation, then in the row of its request."""
        path = f"/v1/conversations/{await self.conversation_id()}/tree"
        await self.page.evaluate(_UNTIL_RECORDED, path)

    async def text(self) -> str:
        return await self.answer.locator(".text").text_content() or ""

    async def state(self) -> str:
        return await self.answer.locator(".state").text_content() or ""

    async def tree(self) -> dict[str, Any]:  # Any: of JSON
        """The open conversation, as the server has it."""
        path = f"/v1/conversations/{await self.conversation_id()}/tree"
        return dict(await self.page.evaluate("async (path) => (await fetch(path)).json()", path))

    async def conversation_id(self) -> str:
        return str(await self.page.evaluate("location.hash.slice(1)"))

    async def stream_id(self) -> str:
        """Of the last answer that was begun."""
        return str((await self.tree())["data"][-1]["stream_id"])

    def _on_console(self, message: ConsoleMessage) -> None:
        # The browser reports each refused or broken connection; those the tests bring about themselves.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.faults.append(message.text)
