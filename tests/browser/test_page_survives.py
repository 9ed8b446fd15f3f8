"""The page after reloads, network failures and server crashes; one answer in two tabs and on two devices."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Route, expect
from tests.api.process import Server
from tests.browser.cable import Cable
from tests.browser.tab import Tab
from tests.browser.test_page import QUESTION, let_ask

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]
Plug = Callable[[Server], Awaitable[Cable]]
Serve = Callable[..., Server]
LONG = 200  # tokens, to be caught in the middle


@pytest.fixture
def succeed(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server over the same data as the one before."""
    with ExitStack() as running:

        def start(*flags: str) -> Server:
            server = Server("scripted:tokens_per_s=40", "--data-dir", str(tmp_path), *flags)
            running.callback(server.close)
            return server.wait_ready()

        yield start


async def test_a_reload_continues(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    cable = await plug(river)
    tab = await open_tab(cable.url)
    await let_ask(tab, max_tokens=LONG)
    await tab.send(QUESTION)
    text = (await tab.wait_text()).strip()
    await tab.reload()
    assert (await tab.wait_text(len(text))).strip().startswith(text)
    whole = await tab.wait_end()
    assert whole.strip() == river.state(await tab.stream_id())["text"].strip()
    assert len(cable.seen("POST", "/v1/streams")) == 1


@pytest.mark.deep
async def test_a_reload_before_the_answer_has_an_id(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    """The page does not know whether its request arrived, and repeats it with the same key."""
    cable = await plug(river)
    tab = await open_tab(cable.url)

    async def lose_answer(route: Route) -> None:
        await route.fetch()
        await route.abort()

    await tab.page.route("**/v1/streams", lose_answer)
    await tab.send(QUESTION)
    await tab.wait_state("The server cannot be reached. Trying again…")
    await tab.page.unroute_all()
    await tab.reload()
    await tab.wait_end()
    first, *others = cable.seen("POST", "/v1/streams")
    assert {each.headers["idempotency-key"] for each in others} == {first.headers["idempotency-key"]}
    await expect(tab.questions).to_have_count(1)
    assert len((await tab.tree())["data"]) == 2


async def test_a_tab_that_is_closed_before_its_first_question_is_heard(river: Server, open_tab: OpenTab) -> None:
    """The question is in its conversation, and can be answered there."""
    tab = await open_tab(river.url)
    await tab.page.route("**/v1/streams", lambda route: route.abort())
    await tab.send("Who hears me?")
    await tab.wait_state("The server cannot be reached. Trying again…")
    await tab.page.close()
    other = await open_tab(river.url)
    await other.titles.filter(has_text="Who hears me?").click()
    await expect(other.questions.locator("p")).to_have_text("Who hears me?")
    await other.button("Answer").click()
    assert await other.wait_end()
    await expect(other.questions).to_have_count(1)
    assert len((await other.tree())["data"]) == 2


async def test_a_cut_network_is_shown_and_survived(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    cable = await plug(river)
    tab = await open_tab(cable.url)
    await let_ask(tab, max_tokens=LONG)
    await tab.send(QUESTION)
    await tab.wait_text()
    await cable.cut()
    await tab.wait_state("Connection lost. Reconnecting…")
    await cable.mend()
    await expect(tab.note).to_contain_text("The connection was lost for")
    await expect(tab.note).to_contain_text("Nothing was lost.")
    whole = await tab.wait_end()
    assert whole.strip() == river.state(await tab.stream_id())["text"].strip()
    await expect(tab.answers).to_have_count(1)


@pytest.mark.deep
async def test_the_browser_goes_offline(river: Server, open_tab: OpenTab, context: BrowserContext, plug: Plug) -> None:
    """Playwright's switch leaves open connections alone, so the network goes as well."""
    cable = await plug(river)
    tab = await open_tab(cable.url)
    await let_ask(tab, max_tokens=LONG)
    await tab.send(QUESTION)
    await tab.wait_text()
    await context.set_offline(True)
    await cable.cut()
    await cable.mend()
    await tab.wait_state("Connection lost. Reconnecting…")
    await context.set_offline(False)
    await expect(tab.note).to_have_text(re.compile(r"^The connection was lost for \d+ s\. Nothing was lost\.$"))
    whole = await tab.wait_end()
    assert whole.strip() == river.state(await tab.stream_id())["text"].strip()
    await expect(tab.alarm).to_have_text("")


async def test_start_on_one_device_kill_the_server_finish_on_another(
    succeed: Callable[..., Server], browser: Browser, open_tab: OpenTab, plug: Plug
) -> None:
    server = await asyncio.to_thread(succeed)
    cable = await plug(server)
    laptop = await open_tab(cable.url)
    await let_ask(laptop, max_tokens=LONG)
    await laptop.send(QUESTION)
    begun = (await laptop.wait_text(40)).strip()
    server.send_signal(signal.SIGKILL)
    await asyncio.to_thread(server.wait)
    await laptop.wait_state("Connection lost. Reconnecting…")
    successor = await asyncio.to_thread(succeed)
    cable.port = successor.port
    async with await browser.new_context() as context:
        context.set_default_timeout(30_000)
        phone = await Tab.open(context, cable.url)
        await phone.titles.click()
        await expect(laptop.note).to_have_text("The server was restarted. Nothing was lost.")
        whole = (await phone.wait_end()).strip()
        assert whole.startswith(begun)
        assert whole == successor.state(await phone.stream_id())["text"].strip()
        assert (await laptop.wait_end()).strip() == whole
        assert phone.faults == []


@pytest.mark.deep
async def test_two_tabs_see_the_same(river: Server, open_tab: OpenTab) -> None:
    one = await open_tab(river.url)
    await let_ask(one, max_tokens=LONG)
    await one.send("Do two tabs see the same?")
    await one.wait_text()
    two = await open_tab(f"{river.url}/#{await one.conversation_id()}")
    assert await two.wait_text()
    assert await one.wait_end() == await two.wait_end()
    await let_ask(two, max_tokens=8)
    await two.send("Two?")
    second = await two.wait_end()
    await expect(one.answers).to_have_count(2)  # nobody has touched this tab
    assert await one.wait_end() == second
    await two.button("Regenerate").click()
    await expect(one.answer.locator(".branches > span")).to_have_text("2 / 2")
    await one.button("Delete Do two tabs see the same?").click()
    await one.button("Delete").click()
    await expect(two.note).to_have_text("This conversation no longer exists.")


@pytest.mark.deep
async def test_stop_while_the_network_is_gone(serve: Serve, open_tab: OpenTab, plug: Plug) -> None:
    """It is said again when there is a connection."""
    server = serve("scripted:tokens_per_s=50")
    cable = await plug(server)
    tab = await open_tab(cable.url)
    await tab.send(QUESTION)
    await tab.wait_text()
    await cable.cut()
    await tab.page.keyboard.press("Escape")
    await cable.mend()
    text = await tab.wait_end()
    state = server.state(await tab.stream_id())
    assert state["status"] == "cancelled"
    assert text.strip() == state["text"].strip()


@pytest.mark.deep
async def test_a_dead_connection_is_replaced(river: Server, browser: Browser, plug: Plug) -> None:
    """No bytes arrive and nothing breaks: EventSource alone would wait forever."""
    cable = await plug(river)
    async with await browser.new_context() as context:  # whose clock is this test's
        await context.clock.install()
        tab = await Tab.open(context, cable.url)
        await let_ask(tab, max_tokens=LONG)
        await tab.send(QUESTION)
        await tab.wait_text()
        cable.freeze()
        await context.clock.fast_forward(40_000)
        whole = await tab.wait_end()
        assert whole.strip() == river.state(await tab.stream_id())["text"].strip()


@pytest.mark.deep
async def test_an_expired_stream_is_shown_as_such(
    succeed: Callable[..., Server], open_tab: OpenTab, plug: Plug
) -> None:
    """Streams are not kept, conversations are: the answer's text is gone, and can be had anew."""
    server = await asyncio.to_thread(succeed, "--journal", "memory")
    cable = await plug(server)
    tab = await open_tab(cable.url)
    await let_ask(tab, max_tokens=LONG)
    await tab.send(QUESTION)
    await tab.wait_text()
    server.send_signal(signal.SIGKILL)
    await asyncio.to_thread(server.wait)
    cable.port = (await asyncio.to_thread(succeed, "--journal", "memory")).port
    await tab.wait_state("no longer knows this answer")
    await tab.button("Try again").click()
    await tab.wait_text()
    await tab.wait_end()
    await expect(tab.answers).to_have_count(1)


@pytest.mark.deep
async def test_another_server_at_the_same_address(serve: Serve, open_tab: OpenTab, plug: Plug) -> None:
    server, successor = serve("scripted:tokens_per_s=50"), serve("scripted")
    cable = await plug(server)
    tab = await open_tab(cable.url)
    await tab.send(QUESTION)
    await tab.wait_text()
    cable.port = successor.port
    await cable.cut()
    await cable.mend()
    await expect(tab.note).to_have_text("This conversation no longer exists.")
    await tab.send("And now?")
    await tab.wait_end()


@pytest.mark.deep
async def test_an_unreachable_server_is_retried(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    cable = await plug(river)
    tab = await open_tab(cable.url)
    await tab.send(QUESTION)
    await tab.wait_end()
    await cable.cut()
    await tab.send("And then?")
    await tab.wait_state("The server cannot be reached. Trying again…")
    await tab.page.keyboard.press("Escape")  # nobody has heard it: it can be sent again
    await expect(tab.question).to_have_value("And then?")
    await expect(tab.answers).to_have_count(1)
    await cable.mend()
    await tab.question.press("Enter")
    await expect(tab.answers).to_have_count(2)
    await tab.wait_end()


@pytest.mark.deep
async def test_new_text_does_not_scroll_a_reader_who_scrolled_up(river: Server, browser: Browser) -> None:
    async with await browser.new_context(viewport={"width": 360, "height": 400}) as small:
        tab = await Tab.open(small, river.url)
        bottom = "((box) => box.scrollTop + box.clientHeight >= box.scrollHeight - 2)(document.querySelector('#chat'))"
        await tab.send(QUESTION)
        await tab.wait_end()
        await tab.until(bottom)
        await tab.send(QUESTION)
        await expect(tab.answers).to_have_count(2)
        await tab.wait_text()
        await tab.page.mouse.move(100, 150)
        while await tab.page.evaluate(
            "document.querySelector('#chat').scrollTop"
        ):  # the first turn may meet a new line
            await tab.page.mouse.wheel(0, -2000)
            await asyncio.sleep(0.3)
        await tab.wait_end()
        assert await tab.page.evaluate("document.querySelector('#chat').scrollTop") == 0
        await tab.button("To the latest text").click()
        await tab.until(bottom)
