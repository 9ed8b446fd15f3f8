"""The page: it chats, stops, and goes on after whatever happens to it, its network and its server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, Page, Route, expect
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.browser.cable import Cable
from tests.browser.tab import RIVER_TOKENS, Tab

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]
Plug = Callable[[Server], Awaitable[Cable]]
Serve = Callable[..., Server]

QUESTION = "Why do rivers bend?"
ANSWER = Answer(chat_ids(QUESTION), RIVER_TOKENS, seed=5)
SHOWN = ANSWER.text.lstrip()  # nothing begins with space
LONG = replace(ANSWER, count=200)  # to be caught in the middle
ENDLESS = 10_000


async def _let_ask(tab: Tab, **fields: int) -> None:
    """Put this into the page's questions: a seed makes an oracle, `max_tokens` the time to do something."""

    async def add(route: Route) -> None:
        body: dict[str, Any] = route.request.post_data_json or {}  # Any: of JSON
        await route.continue_(post_data={**body, **fields})

    await tab.page.route("**/v1/streams", add)


async def _let_ask_for(tab: Tab, answer: Answer) -> None:
    await _let_ask(tab, seed=answer.seed, max_tokens=answer.count)


async def test_chat(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await _let_ask_for(tab, ANSWER)
    await expect(tab.page.locator("#model")).to_have_text("scripted")
    await tab.send(QUESTION)
    assert SHOWN.startswith(await tab.wait_text())  # while it runs
    assert await tab.wait_end() == SHOWN
    assert (await tab.last_answer())["text"] == ANSWER.text
    assert river.state(await tab.stream_id())["text"] == ANSWER.text
    assert re.fullmatch(
        rf"Cut off at its greatest length · \d+ ms to the first token · \d+(\.\d)? tokens/s · {RIVER_TOKENS} tokens",
        await tab.state(),
    )
    await expect(tab.question).to_be_focused()
    await expect(tab.question).to_have_value("")


@pytest.mark.deep
async def test_the_whole_chat_is_sent(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await tab.send("One?")
    first = await tab.wait_end()
    async with tab.page.expect_request("**/v1/streams") as posted:
        await tab.send("Two?")
    body = (await posted.value).post_data_json
    assert body is not None
    assert [message["content"].lstrip() for message in body["messages"]] == ["One?", first, "Two?"]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("how", ["button", pytest.param("escape", marks=pytest.mark.deep)])
async def test_stop_stops_the_engine(river: Server, open_tab: OpenTab, how: str) -> None:
    tab = await open_tab(river.url)
    await _let_ask(tab, max_tokens=ENDLESS)
    await tab.send(QUESTION)
    await tab.wait_text()
    if how == "button":
        await tab.page.get_by_role("button", name="Stop").click()
    else:
        await tab.page.keyboard.press("Escape")
    text = await tab.wait_end()
    state = river.state(await tab.stream_id())
    assert state["status"] == "cancelled"
    assert text == state["text"].lstrip()
    assert (await tab.state()).startswith("Stopped · ")
    await expect(tab.question).to_be_focused()


async def test_a_reload_goes_on(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    cable = await plug(river)
    tab = await open_tab(cable.url)
    await _let_ask_for(tab, LONG)
    await tab.send(QUESTION)
    text = await tab.wait_text()
    await tab.reload()
    assert (await tab.text()).startswith(text)  # at once, out of the browser's storage
    assert await tab.wait_end() == LONG.text.lstrip()
    assert (await tab.last_answer())["text"] == LONG.text
    assert len(cable.seen("POST")) == 1
    await tab.reload()
    assert await tab.text() == LONG.text.lstrip()
    assert len(cable.seen("GET", "/events")) == 2  # what is over is not asked for again


@pytest.mark.deep
async def test_a_reload_before_the_answer_has_an_id(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    """The page does not know whether its question was heard. It asks again under the same key."""
    cable = await plug(river)
    tab = await open_tab(cable.url)

    async def lose_answer(route: Route) -> None:
        await route.fetch()
        await route.abort()

    await tab.page.route("**/v1/streams", lose_answer)
    await tab.send(QUESTION)
    await tab.wait_state("Cannot reach the server. Trying again…")
    await tab.page.unroute_all()
    await tab.reload()
    text = await tab.wait_end()
    first, second = cable.seen("POST")
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert text == river.state(await tab.stream_id())["text"].lstrip()


async def test_a_cut_network_is_said_and_survived(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    cable = await plug(river)
    tab = await open_tab(cable.url)
    await _let_ask_for(tab, LONG)
    await tab.send(QUESTION)
    await tab.wait_text()
    await cable.cut()
    await tab.wait_state("Connection lost. Reconnecting…")
    await cable.mend()
    assert await tab.wait_end() == LONG.text.lstrip()
    assert (await tab.state()).endswith(f" · {LONG.count} tokens")
    assert len(cable.seen("POST")) == 1


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
    assert text == state["text"].lstrip()


@pytest.mark.deep
async def test_a_dead_connection_is_replaced(river: Server, context: BrowserContext, plug: Plug) -> None:
    """Nothing comes and nothing breaks: EventSource alone would wait for ever."""
    cable = await plug(river)
    page = await context.new_page()
    await page.clock.install()
    tab = Tab(page)
    await tab.goto(cable.url)
    await _let_ask_for(tab, LONG)
    await tab.send(QUESTION)
    await tab.wait_text()
    cable.freeze()
    await page.clock.fast_forward(40_000)
    assert await tab.wait_end() == LONG.text.lstrip()
    assert len(cable.seen("GET", "/events")) == 2


@pytest.mark.deep
async def test_a_restarted_server_is_said_and_the_text_kept(serve: Serve, open_tab: OpenTab, plug: Plug) -> None:
    server, successor = serve("scripted:tokens_per_s=50"), serve("scripted")
    cable = await plug(server)
    tab = await open_tab(cable.url)
    await tab.send(QUESTION)
    await tab.wait_text()
    cable.port = successor.port
    await cable.cut()
    await cable.mend()
    text = await tab.wait_end("failed")
    assert text
    assert "it was probably restarted" in await tab.state()
    await tab.reload()
    assert await tab.text() == text
    await tab.send("And now?")
    await tab.wait_end()
    await expect(tab.answers).to_have_count(2)


@pytest.mark.deep
async def test_an_expired_stream_is_said(serve: Serve, open_tab: OpenTab) -> None:
    server = serve("scripted:tokens_per_s=100", "--default-max-tokens", "150", "--retention-s", "0.1")
    tab = await open_tab(server.url)
    await tab.send(QUESTION)
    text = await tab.wait_text()
    stream_id = await tab.stream_id()
    await tab.page.goto(server.url + "/v1/models")
    while server.http.get(f"/v1/streams/{stream_id}").status_code == 200:
        await asyncio.sleep(0.05)
    await tab.goto(server.url)
    assert (await tab.wait_end("failed")).startswith(text)
    assert "this one's time is over" in await tab.state()


@pytest.mark.deep
async def test_an_engine_that_fails_is_said(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    body = 'id: s-1\ndata: {"text":"The river","token_ids":[1]}\n\nid: s-2\nevent: error\ndata: '
    body += '{"status":"error","error":{"code":"engine_unavailable","message":"The engine died."},'
    body += '"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
    await _script(tab.page, body)
    await tab.send(QUESTION)
    assert await tab.wait_end("failed") == "The river"
    assert (await tab.state()).startswith("Failed: The engine died.")


async def _script(page: Page, events: str) -> None:
    """Answer the page's next question with these events."""
    created = {
        "id": "s",
        "events_url": "/v1/streams/s/events",
        "cancel_url": "/v1/streams/s/cancel",
        "model": "scripted",
    }

    async def follow(route: Route) -> None:
        await route.fulfill(content_type="text/event-stream", body=events)

    async def create(route: Route) -> None:
        await route.fulfill(status=201, json=created)

    await page.route("**/v1/streams/s/events*", follow)
    await page.route("**/v1/streams", create)


async def _room(server: Server) -> None:
    """Wait until the server takes a request again."""
    while (answer := server.post("/v1/streams", {"prompt": "Short.", "max_tokens": 1})).status_code == 429:
        await asyncio.sleep(0.02)
    await asyncio.to_thread(server.wait_state, answer.json()["id"], "done")


async def test_a_full_server_is_said_and_the_question_kept(serve: Serve, open_tab: OpenTab) -> None:
    server = serve("scripted:tokens_per_s=20", "--max-concurrent-requests", "1")
    busy = server.create({"prompt": "Long.", "max_tokens": 5000})
    tab = await open_tab(server.url)
    await tab.send(QUESTION)
    await expect(tab.notice).to_have_text(re.compile(r" Try again in \d+ s\.$"))
    await expect(tab.question).to_have_value(QUESTION)
    await expect(tab.answers).to_have_count(0)
    server.http.post(f"/v1/streams/{busy}/cancel")
    await _room(server)
    await tab.question.press("Enter")
    await tab.wait_text()
    await expect(tab.notice).to_be_empty()
    # Regenerating is refused, too, and loses nothing.
    await tab.page.get_by_role("button", name="Stop").click()
    text = await tab.wait_end()
    await _room(server)
    server.create({"prompt": "Long.", "max_tokens": 5000})
    await tab.page.get_by_role("button", name="Regenerate").click()
    await expect(tab.notice).not_to_be_empty()
    assert await tab.text() == text


@pytest.mark.deep
async def test_a_draining_server_is_said(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)

    async def refuse(route: Route) -> None:
        error = {"message": "The server is shutting down.", "type": "server_error", "code": "draining", "param": None}
        await route.fulfill(status=503, json={"error": error}, headers={"retry-after": "5"})

    await tab.page.route("**/v1/streams", refuse)
    await tab.send(QUESTION)
    await expect(tab.notice).to_have_text("The server is shutting down. Try again in 5 s.")
    await expect(tab.question).to_have_value(QUESTION)


@pytest.mark.deep
async def test_an_unreachable_server_is_asked_until_it_is_there(river: Server, open_tab: OpenTab, plug: Plug) -> None:
    cable = await plug(river)
    tab = await open_tab(cable.url)
    await cable.cut()
    await tab.send(QUESTION)
    await tab.wait_state("Cannot reach the server. Trying again…")
    await cable.mend()
    await tab.wait_end()
    await cable.cut()
    await tab.send("And then?")
    await tab.wait_state("Cannot reach the server. Trying again…")
    await tab.page.keyboard.press("Escape")  # nobody has heard it: it can be sent again
    await expect(tab.question).to_have_value("And then?")
    await expect(tab.answers).to_have_count(1)


@pytest.mark.deep
async def test_a_chat_that_outgrows_the_model_goes_on_without_its_beginning(serve: Serve, open_tab: OpenTab) -> None:
    server = serve("scripted", "--context-tokens", "700", "--default-max-tokens", "20")
    tab = await open_tab(server.url)
    for number in range(5):
        await tab.send(f"Question {number}: " + "how? " * 20)
        await expect(tab.answers).to_have_count(number + 1)
        await tab.wait_end()
    await expect(tab.page.locator(".border")).to_be_visible()
    assert (await tab.chat())["from"] > 0
    await tab.send("how? " * 200)
    await expect(tab.notice).to_have_text(re.compile("700 is the limit"))
    await expect(tab.answers).to_have_count(5)


HOSTILE = """<script>document.title = "owned"</script><img src=x onerror="document.title='owned'">
<svg onload="document.title='owned'"> </textarea> javascript:alert(1) ![](http://example.com/leak.png)

```html"><script>document.title = 'owned'</script>
<iframe src="http://example.com"></iframe>
```
`<b>` &lt;i&gt; [DONE]"""


async def test_markup_of_a_model_is_text(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    escaped = HOSTILE.replace('"', '\\"').replace("\n", "\\n")
    body = f'id: s-1\ndata: {{"text":"{escaped}","token_ids":[1]}}\n\nid: s-2\nevent: done\ndata: {{"status":"done",'
    body += '"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
    await _script(tab.page, body)
    await tab.send("<img src=x onerror=\"document.title='owned'\">")
    text = await tab.wait_end()
    for piece in ("<script>", "onerror=", "<svg", "</textarea>", "![](http://example.com/leak.png)", "<iframe"):
        assert piece in text
    assert "&lt;i&gt; [DONE]" in text
    await expect(tab.page.locator(".question")).to_have_text("<img src=x onerror=\"document.title='owned'\">")
    assert await tab.page.locator("#chat").locator("script, img, svg, iframe, a, b").count() == 0
    await tab.reload()  # and out of the browser's storage as well
    assert await tab.text() == text
    assert await tab.page.title() == "tailrace"


async def test_keys(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await expect(tab.question).to_be_focused()
    await tab.page.keyboard.type("Two")
    await tab.page.keyboard.press("Shift+Enter")
    await tab.page.keyboard.type("lines")
    await tab.page.keyboard.press("Enter")
    await expect(tab.page.locator(".question")).to_have_text("Two\nlines")
    await tab.page.keyboard.press("Enter")  # nothing to send
    await tab.wait_end()
    await expect(tab.answers).to_have_count(1)
    for name in ("Regenerate", "Copy", "New chat"):  # backwards from where one writes
        await tab.page.keyboard.press("Shift+Tab")
        await expect(tab.page.get_by_role("button", name=name)).to_be_focused()


@pytest.mark.deep
async def test_regenerate_copy_and_new_chat(river: Server, open_tab: OpenTab, context: BrowserContext) -> None:
    await context.grant_permissions(["clipboard-read", "clipboard-write"], origin=river.url)
    tab = await open_tab(river.url)
    await tab.send(QUESTION)
    first = await tab.wait_end()
    first_id = await tab.stream_id()
    await tab.page.get_by_role("button", name="Regenerate").click()
    await expect(tab.page.get_by_role("button", name="Stop")).to_be_visible()
    second = await tab.wait_end()
    assert second != first
    assert await tab.stream_id() != first_id
    await expect(tab.answers).to_have_count(1)
    await tab.page.get_by_role("button", name="Copy").click()
    await expect(tab.page.get_by_role("button", name="Copied")).to_be_visible()
    assert await tab.page.evaluate("navigator.clipboard.readText()") == (await tab.last_answer())["text"]
    await tab.page.get_by_role("button", name="New chat").click()
    await expect(tab.answers).to_have_count(0)
    await expect(tab.question).to_be_focused()
    await tab.page.get_by_role("button", name="Back to the last chat").click()
    assert await tab.text() == second


async def test_a_new_chat_keeps_the_old_ones(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    earlier = tab.page.get_by_label("Earlier chats")
    answers = []
    for question in ("One?", "Two?", "Three?"):
        await tab.send(question)
        answers.append(await tab.wait_end())
        await tab.page.get_by_role("button", name="New chat").click()
    await tab.reload()
    await expect(earlier.locator("option")).to_have_text(["Earlier chats", "Three?", "Two?", "One?"])
    await earlier.select_option("One?")
    assert await tab.wait_end() == answers[0]
    await earlier.select_option("Three?")
    assert await tab.wait_end() == answers[2]
    await expect(earlier.locator("option")).to_have_text(["Earlier chats", "One?", "Two?"])


async def test_a_model_is_chosen_for_each_chat(serve: Serve, open_tab: OpenTab) -> None:
    server = serve("scripted", "--model", "other=scripted:tokens_per_s=1000", "--load", "all")
    tab = await open_tab(server.url)
    models = tab.page.get_by_label("Model")
    await expect(models.locator("option")).to_have_text(["scripted", "other"])
    await models.select_option("other")
    await _let_ask(tab, max_tokens=20)
    await tab.send(QUESTION)
    await tab.wait_end()
    assert server.state(await tab.stream_id())["model"] == "other"
    await tab.reload()
    await expect(models).to_have_value("other")


async def test_no_speed_is_shown_where_it_cannot_be_measured(serve: Serve, open_tab: OpenTab) -> None:
    tab = await open_tab(serve("scripted").url)
    await _let_ask(tab, max_tokens=5)
    await tab.send(QUESTION)
    await tab.wait_end()
    assert re.fullmatch(r".* · \d+ ms to the first token · 5 tokens", await tab.state())


@pytest.mark.deep
async def test_new_chat_stops_what_runs(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await _let_ask(tab, max_tokens=ENDLESS)
    await tab.send(QUESTION)
    await tab.wait_text()
    stream_id = await tab.stream_id()
    await tab.page.get_by_role("button", name="New chat").click()
    await asyncio.to_thread(river.wait_state, stream_id, "cancelled")
    await tab.page.unroute_all()
    await tab.send("Anew?")
    await tab.wait_end()
    await expect(tab.answers).to_have_count(1)


async def test_tabs_keep_out_of_each_others_way(river: Server, open_tab: OpenTab) -> None:
    one = await open_tab(river.url)
    await one.send("One?")
    two = await open_tab(river.url)
    await expect(two.answers).to_have_count(0)  # a further tab begins anew
    await two.send("Two?")
    first, second = await one.wait_end(), await two.wait_end()
    await one.reload()
    await two.reload()
    assert (await one.text(), await two.text()) == (first, second)
    await one.page.close()
    await two.page.close()
    three = await open_tab(river.url)
    await expect(three.page.locator(".question")).to_have_text("Two?")  # the only tab takes up the latest


@pytest.mark.deep
async def test_a_duplicated_tab_gets_a_copy(river: Server, open_tab: OpenTab, context: BrowserContext) -> None:
    one = await open_tab(river.url)
    await one.send(QUESTION)
    await one.wait_text()
    place = await one.page.evaluate("sessionStorage.getItem('tailrace.place')")
    page = await context.new_page()
    await page.add_init_script(f"sessionStorage.setItem('tailrace.place', '{place}')")
    two = Tab(page)
    await two.goto(river.url)
    assert await one.wait_end() == await two.wait_end()  # two readers of one stream
    assert await page.evaluate("sessionStorage.getItem('tailrace.place')") != place
    assert await one.stream_id() == await two.stream_id()
    await two.send("And then?")
    await two.wait_end()
    await one.reload()
    await expect(one.answers).to_have_count(1)


@pytest.mark.deep
async def test_a_question_of_any_height_leaves_the_page_in_place(river: Server, browser: Browser) -> None:
    async with await browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True) as phone:
        tab = await Tab.open(phone, river.url)
        await tab.send("word " * 60 + "x" * 300)
        await tab.wait_end()
        width = await tab.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360
        box = await tab.page.locator("#field").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 640
        assert tab.faults == []


@pytest.mark.deep
async def test_who_has_scrolled_up_is_left_in_peace(river: Server, browser: Browser) -> None:
    async with await browser.new_context(viewport={"width": 360, "height": 300}) as small:
        tab = await Tab.open(small, river.url)
        await tab.send(QUESTION)
        await tab.wait_end()
        await tab.until("scrollY + innerHeight >= document.documentElement.scrollHeight - 2")
        await tab.send(QUESTION)
        await tab.wait_text()
        await tab.page.mouse.move(100, 150)
        while await tab.page.evaluate("scrollY"):  # the first turn of the wheel may meet a line that is just coming
            await tab.page.mouse.wheel(0, -2000)
            await asyncio.sleep(0.3)
        await tab.wait_end()
        assert await tab.page.evaluate("scrollY") == 0
        await tab.page.get_by_role("button", name="To the latest text").click()
        await tab.until("scrollY + innerHeight >= document.documentElement.scrollHeight - 2")


@pytest.mark.deep
async def test_screen_readers_get_phrases_and_the_end(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await tab.send(QUESTION)
    await tab.wait_end()
    announced = tab.page.locator("#announcer")
    await expect(announced).to_contain_text("End of the answer.")
    assert await announced.locator("p").count() <= 3
