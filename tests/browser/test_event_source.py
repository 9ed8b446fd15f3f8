"""The browser's EventSource on /v1/streams: every event once despite cuts, and no reconnect after the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import BrowserContext, Page
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.browser.cable import Cable

pytestmark = pytest.mark.asyncio(loop_scope="session")

Plug = Callable[[Server], Awaitable[Cable]]

ANSWER = Answer("Tell me of rivers.", 120, seed=7)
BODY = {"prompt": ANSWER.prompt, "max_tokens": ANSWER.count, "seed": ANSWER.seed}
# It never closes the source: that is what a client does which knows nothing of our ends.
FOLLOW = """(url) => {
    const seen = { events: [], opened: 0, source: new EventSource(url) };
    const note = (event) => event.data !== undefined && seen.events.push([event.type, event.lastEventId, event.data]);
    for (const type of ["message", "done", "cancelled", "error", "interrupted"])
        seen.source.addEventListener(type, note);
    seen.source.onopen = () => seen.opened++;
    window.seen = seen;
}"""


def _expected(stream_id: str) -> list[list[str]]:
    events = []
    for block in ANSWER.native(stream_id):
        fields = dict(line.split(": ", 1) for line in block.decode().splitlines() if line)
        events.append([fields.get("event", "message"), fields["id"], fields["data"]])
    return events


async def _page_at(context: BrowserContext, url: str) -> Page:
    page = await context.new_page()
    await page.goto(url + "/v1/models")  # any document of the same origin
    return page


async def _wait_events(page: Page, count: int) -> None:
    await page.wait_for_function("count => seen.events.length >= count", arg=count)


async def _wait_closed(page: Page) -> list[list[str]]:
    await page.wait_for_function("() => seen.source.readyState === EventSource.CLOSED")
    events: list[list[str]] = await page.evaluate("seen.events")
    return events


def _follows(cable: Cable) -> list[str]:
    """The ids with which the stream was asked for; "" is from the start."""
    return [request.headers.get("last-event-id", "") for request in cable.seen("GET", "/events")]


async def test_a_page_creates_and_follows_and_stops_at_the_end(
    context: BrowserContext, river: Server, plug: Plug
) -> None:
    cable = await plug(river)
    page = await _page_at(context, cable.url)
    stream_id = await page.evaluate(
        """async (body) => {
            const headers = {"content-type": "application/json", "accept": "application/json"};
            const created = await fetch("/v1/streams", {method: "POST", headers, body: JSON.stringify(body)});
            return (await created.json()).id;
        }""",
        BODY,
    )
    await page.evaluate(FOLLOW, f"/v1/streams/{stream_id}/events")
    assert await _wait_closed(page) == _expected(stream_id)
    # After the end it asked once more, was told 204, and will never ask again.
    assert _follows(cable) == ["", f"{stream_id}-{ANSWER.count + 1}"]
    assert len(cable.seen("POST")) == 1


async def test_cuts_lose_and_repeat_nothing(context: BrowserContext, river: Server, plug: Plug) -> None:
    cable = await plug(river)
    page = await _page_at(context, cable.url)
    stream_id = river.create(BODY)
    await page.evaluate(FOLLOW, f"/v1/streams/{stream_id}/events")
    await _wait_events(page, 10)
    await cable.cut()
    await page.wait_for_function("() => seen.source.readyState === EventSource.CONNECTING")
    num_seen = len(await page.evaluate("seen.events"))
    assert num_seen < ANSWER.count
    await cable.mend()
    assert await _wait_closed(page) == _expected(stream_id)
    assert _follows(cable)[1] == f"{stream_id}-{num_seen}"
    assert await page.evaluate("seen.opened") == 2
    assert river.state(stream_id)["usage"]["completion_tokens"] == ANSWER.count


@pytest.mark.deep
async def test_a_refused_connection_is_retried(context: BrowserContext, river: Server, plug: Plug) -> None:
    """The stream ends while the browser is refused the connection, more than once."""
    cable = await plug(river)
    page = await _page_at(context, cable.url)
    stream_id = river.create(BODY)
    await page.evaluate(FOLLOW, f"/v1/streams/{stream_id}/events")
    await _wait_events(page, 5)
    await cable.cut()
    await asyncio.sleep(1.5)  # one refused attempt: `retry` is a second
    await cable.mend()
    assert await _wait_closed(page) == _expected(stream_id)


@pytest.mark.deep
async def test_cancel_is_an_end(context: BrowserContext, river: Server) -> None:
    page = await _page_at(context, river.url)
    stream_id = river.create(BODY)
    await page.evaluate(FOLLOW, f"/v1/streams/{stream_id}/events")
    await _wait_events(page, 5)
    await page.evaluate("url => fetch(url, {method: 'POST'})", f"/v1/streams/{stream_id}/cancel")
    *deltas, end = await _wait_closed(page)
    assert deltas == _expected(stream_id)[: len(deltas)]
    assert end[0] == "cancelled"
    assert river.state(stream_id)["status"] == "cancelled"


async def test_an_unknown_stream_is_not_retried(context: BrowserContext, river: Server, plug: Plug) -> None:
    cable = await plug(river)
    page = await _page_at(context, cable.url)
    await page.evaluate(FOLLOW, "/v1/streams/AAAAAAAAAAAAAAAAAAAAAA/events")
    assert await _wait_closed(page) == []
    assert len(_follows(cable)) == 1
