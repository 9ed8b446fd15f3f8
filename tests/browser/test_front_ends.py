"""The apps of examples/front_ends in a real browser, with the libraries from npm as they are: a reload in the middle, a
second tab, a server that is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, Page
from tests.api.process import Server
from tests.browser.cable import Cable
from tests.clients.installed import node, packages

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.deep, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "front_ends"
QUESTION = "Why do rivers bend?"
COUNT = 300  # tokens that the apps ask for
# Without the mark of assistant-ui where the answer goes on.
ANSWER = "[...document.querySelectorAll('.assistant')].map((one) => one.textContent.replace(/ ?●$/, '')).join('|')"
STATUS = "document.querySelector('main').dataset.status"


def bundle(app: str, server: str, folder: Path) -> None:
    """Make the page of an app, as the page of the documentation says."""
    installed = packages(EXAMPLES)
    command = [
        str(node()), str(installed / "node_modules/esbuild/bin/esbuild"), f"{app}.jsx", "--bundle", "--jsx=automatic",
        f"--define:SERVER={json.dumps(server)}", f"--outfile={folder / app}.js", "--log-level=warning",
    ]  # fmt: skip
    variables = {"NODE_PATH": str(installed / "node_modules"), "PATH": ""}
    done = subprocess.run(command, cwd=EXAMPLES, env=variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / f"{app}.html").write_text(f'<!doctype html><meta charset="utf-8"><script defer src="{app}.js"></script>')


@asynccontextmanager
async def opened(context: BrowserContext, url: str) -> AsyncIterator[Page]:
    page = await context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"uncaught: {error}"))
    await page.goto(url)
    yield page
    assert faults == []


async def read(page: Page, num_characters: int) -> str:
    """Return the answers of the page, once they are so long."""
    await page.wait_for_function(f"() => ({ANSWER}).length >= {num_characters}")
    return str(await page.evaluate(ANSWER))


async def ask(page: Page, question: str = QUESTION) -> str:
    field = page.get_by_label("Your message")
    await field.fill(question)
    await field.press("Enter")
    return await read(page, 20)


def running_stream(server: Server) -> str:
    """Return the id of the only stream."""
    (found,) = server.http.get("/v1/streams").json()["data"]
    return str(found["id"])


def kill(server: Server) -> None:
    server.send_signal(signal.SIGKILL)
    server.wait()


def is_made(server: Server, app: str) -> int:
    """Return the status of the request by which a page looks for an answer that is made."""
    path = "/v1/ag-ui/chat/events" if app == "tanstack" else "/v1/ai-sdk/chat/chat/stream"
    return server.http.get(path).status_code


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("app", ["ai_sdk", "assistant_ui", "tanstack"])
async def test_the_answer_goes_on(
    app: str, is_late: bool, context: BrowserContext, folder: tuple[Path, str], succeed_at: Callable[..., Server]
) -> None:
    path, origin = folder
    server = succeed_at(origin)
    async with Cable(server.port) as cable:
        bundle(app, cable.url, path)
        url = f"{origin}/{app}.html"
        async with opened(context, url) as page, opened(context, "about:blank") as other:
            assert is_made(server, app) == 204
            begun = await ask(page)
            stream_id = running_stream(server)
            await page.reload()
            assert (await read(page, len(begun))).startswith(begun)
            await other.goto(url)
            assert (await read(other, len(begun))).startswith(begun)

            await cable.cut()
            kill(server)
            seen = [str(await one.evaluate(ANSWER)) for one in (page, other)]
            server = await asyncio.to_thread(succeed_at, origin)
            cable.port = server.port
            assert running_stream(server) == stream_id
            if is_late:  # the pages come back when the answer has ended
                await asyncio.to_thread(server.wait_state, stream_id, "done")
            await cable.mend()
            whole = (await asyncio.to_thread(server.wait_state, stream_id, "done"))["text"]
            for one, before in zip((page, other), seen, strict=True):
                await one.wait_for_function(f"() => {ANSWER} === {json.dumps(whole)} && {STATUS} === 'ready'")
                assert whole.startswith(before)
                assert len(before) < len(whole)
            assert is_made(server, app) == 204

            await page.reload()
            await page.wait_for_function(f"() => {ANSWER} === {json.dumps(whole)} && {STATUS} === 'ready'")
            await ask(page, "And why do they meet the sea?")
            await page.wait_for_function(f"() => ({ANSWER}).startsWith({json.dumps(whole + '|')})")


@pytest.mark.parametrize("app", ["ai_sdk", "tanstack"])
async def test_an_answer_of_the_default_model_goes_on(
    app: str, context: BrowserContext, folder: tuple[Path, str], succeed_at: Callable[..., Server]
) -> None:
    path, origin = folder
    server = await asyncio.to_thread(succeed_at, origin, "smollm2")
    async with Cable(server.port) as cable:
        bundle(app, cable.url, path)
        async with opened(context, f"{origin}/{app}.html") as page:
            begun = await ask(page, "Write a long story about a river that meets the sea.")
            stream_id = running_stream(server)
            await cable.cut()
            kill(server)
            server = await asyncio.to_thread(succeed_at, origin, "smollm2")
            cable.port = server.port
            await cable.mend()
            state = await asyncio.to_thread(server.wait_state, stream_id, "done")
            await page.wait_for_function(f"() => {ANSWER} === {json.dumps(state['text'])} && {STATUS} === 'ready'")
            assert state["text"].startswith(begun)
