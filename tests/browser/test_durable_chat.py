"""The chat of examples/front_ends whose server keeps it in a durable stream of tailrace, with the client that TanStack
AI's users have for that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import BrowserContext
from tests.api.process import Server
from tests.browser.cable import Cable
from tests.browser.test_front_ends import ANSWER, EXAMPLES, ask, bundle, kill, opened, read, running_stream
from tests.clients.installed import node, packages
from tests.testing.redis_server import free_port
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.deep, pytest.mark.timeout(900)]

_LAST = "[...document.querySelectorAll('main > p')].at(-1)?.textContent ?? ''"


@contextmanager
def app_server(tailrace: str, port: int, folder: Path) -> Iterator[str]:
    """Run examples/front_ends/durable_server.mjs. Returns the URL of a chat."""
    installed = packages(EXAMPLES)
    program = folder / "durable_server.mjs"
    program.write_text((EXAMPLES / "durable_server.mjs").read_text())
    (folder / "node_modules").symlink_to(installed / "node_modules")
    command = [str(node()), str(program), tailrace, str(port), str(folder)]
    origin = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert running.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{origin}/durable.js", timeout=1).status_code == 200
        return False

    with subprocess.Popen(command) as running:
        try:
            until(answers)
            yield f"{origin}/river"
        finally:
            running.kill()


async def test_the_chat_is_kept_in_a_durable_stream(
    context: BrowserContext, tmp_path: Path, succeed_at: Callable[[str], Server]
) -> None:
    port = free_port()
    origin = f"http://127.0.0.1:{port}"
    server = succeed_at(origin)
    folder = tmp_path / "app"
    folder.mkdir()
    async with Cable(server.port) as cable:
        bundle("durable", cable.url, folder)
        with app_server(cable.url, port, folder) as url:
            async with opened(context, url) as page, opened(context, url) as other:
                await ask(page)
                begun = str(await page.evaluate(_LAST))
                stream_id = running_stream(server)
                await other.wait_for_function(f"() => ({_LAST}).length >= {len(begun)}")
                assert str(await other.evaluate(_LAST)).startswith(begun)

                await cable.cut()
                kill(server)
                server = await asyncio.to_thread(succeed_at, origin)
                cable.port = server.port
                await cable.mend()
                whole = (await asyncio.to_thread(server.wait_state, stream_id, "done"))["text"]
                for one in (page, other):
                    await one.wait_for_function(f"() => ({_LAST}) === {json.dumps(whole)}")
                await page.reload()
                await page.wait_for_function(f"() => ({_LAST}) === {json.dumps(whole)}")
                await read(page, 20)
                assert await page.evaluate(ANSWER) == whole
