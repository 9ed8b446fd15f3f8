"""The demo's page on the real model: every button is clicked once."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page, expect
from tests.browser.demo_page import (
    LONG_MS,
    QUESTION,
    button,
    copied,
    opened,
    run_program,
    shown_texts,
    until,
    until_ended,
)
from tests.demo.process import Demo, said_by_the_simulated

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.deep, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with contextlib.closing(Demo("--model=smollm2")) as running:
        yield running.wait_ready()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext, demo: Demo) -> AsyncIterator[Page]:
    """The page, once the model is loaded: it answers as soon as it is."""
    async with opened(context, demo) as page:
        page.set_default_timeout(4 * LONG_MS)  # for 250 tokens of the model on a busy machine
        await expect(page.locator("#speaker")).to_have_class("real", timeout=4 * LONG_MS)
        await expect(page.locator("#speaker")).to_contain_text("a real model on this machine")
        yield page


async def test_waiting_timeline_and_wires(page: Page, demo: Demo) -> None:
    await button(page, "waiting", "Ask both").click()
    await until_ended(page, "waiting", 2)
    waits, streams = await shown_texts(page, "waiting")
    assert len(waits.split()) > 40
    assert len(streams.split()) > 40
    whole_s, first_s = (
        float(re.findall(r"first words after ([\d.]+) s", text)[0])
        for text in await page.locator("#waiting footer").all_text_contents()
    )
    assert first_s < whole_s

    await page.get_by_label("behind 8 other streams").check()
    await button(page, "timeline", "Ask").click()
    await until(page, "document.querySelectorAll('#timeline .tick').length > 5")
    await button(page, "timeline", "Kill the engine").click()
    await until_ended(page, "timeline", 1)
    legend = await page.locator("#timeline .legend").text_content() or ""
    assert [word for word in ("queue", "prefill", "decode", "stall") if word not in legend] == []
    assert f"{await page.locator('#timeline .tick').count()} tokens" in legend

    await button(page, "wires", "Ask once").click()
    await until(page, "document.querySelectorAll('#wires footer strong').length === 4")
    native, openai, tgi, plain = await shown_texts(page, "wires")
    assert "event: done" in native
    assert openai.endswith("data: [DONE]")
    assert '"generated_text":"' in tgi
    assert len(plain.split()) > 20
    weights = [float(text.split()[0]) for text in await page.locator("#wires footer strong").all_text_contents()]
    assert min(weights) == weights[3] > 1


@pytest.mark.parametrize("what", ["engine", "server"])
async def test_the_plug(page: Page, demo: Demo, what: str) -> None:
    before = demo.demo_state()
    await button(page, "plug", "Start both").click()
    await until(page, "[...document.querySelectorAll('#plug .text')].every((each) => each.textContent.length > 20)")
    await button(page, "plug", f"Kill the {what}").click()
    kept = page.locator("#plug article:last-child")
    await until(page, "document.querySelector('#plug article:last-child').dataset.mood === 'ended'")
    await expect(kept).to_contain_text("complete; all tokens the same as without the kill")
    assert re.fullmatch(rf"{what} killed: [\d.]+ s", await kept.locator("mark.survived").text_content() or "")
    plain = page.locator("#plug article:first-child")
    await expect(plain).to_have_attribute("data-mood", "failed")
    await expect(plain.locator("mark.broken")).to_have_count(1)
    after = demo.demo_state()
    assert after["models"][1]["pid"] != before["models"][1]["pid"]
    assert (after["server"]["pid"] != before["server"]["pid"]) == (what == "server")


async def test_batch_and_models(page: Page) -> None:
    await button(page, "batch", "Ask one, then eight").click()
    await page.wait_for_selector("#gain")
    assert len(set(await shown_texts(page, "batch"))) == 8
    await expect(page.locator("#batch")).not_to_contain_text("The simulated engine reads no weights")
    await button(page, "models", "Ask both").click()
    await until_ended(page, "models", 2)
    assert await page.locator("#models .name em").all_text_contents() == ["simulated"]
    assert (await shown_texts(page, "models"))[1] == said_by_the_simulated(QUESTION, 80).strip()

    await page.locator("#speaker").get_by_role("combobox").select_option("scripted")
    await expect(page.locator("#speaker")).to_have_class("simulated")
    await button(page, "wires", "Ask once").click()
    await until(page, "document.querySelectorAll('#wires footer strong').length === 4")
    assert (await shown_texts(page, "wires"))[3] == said_by_the_simulated(QUESTION, 60).strip()


async def test_programs_run_as_they_are_copied(context: BrowserContext, page: Page) -> None:
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    programs = {
        "curl": await copied(page, "plug", "curl"),
        "Python": await copied(page, "waiting", "Python"),
        "JavaScript": await copied(page, "models", "JavaScript"),
    }
    assert all("smollm2" in program for program in programs.values())
    outputs = await asyncio.gather(*(run_program(language, program) for language, program in programs.items()))
    assert all(len(output) > 200 and b"rror" not in output for output in outputs)
