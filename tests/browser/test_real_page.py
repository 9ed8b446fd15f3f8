"""The page on the real model: every feature is clicked once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, expect
from tests.api.own_keys import key_of
from tests.api.process import Server
from tests.browser.cable import Cable
from tests.browser.tab import Tab
from tests.browser.test_page import let_ask
from tests.checkpoints import smollm2_thinking

__all__ = ["smollm2_thinking"]

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.deep, pytest.mark.timeout(900)]

OpenTab = Callable[[str], Awaitable[Tab]]
Plug = Callable[[Server], Awaitable[Cable]]

QUESTION = "Why do rivers bend?"
STORY = "Tell me a story about a lighthouse."
SYSTEM = "You are a poet."
SHORT, LONG = 24, 200  # tokens
PATIENCE_MS = 120_000
LOADED_S = 300


@pytest.fixture(scope="module")
def model(smollm2_thinking: Path) -> Iterator[Server]:
    """Two real models, each for one sequence at a time."""
    flags = ("--model", f"thinker={smollm2_thinking}", "--max-sequences", "1", "--default-max-tokens", str(LONG))
    with contextlib.closing(Server("smollm2", *flags)) as server:
        yield server.wait_ready(timeout_s=LOADED_S)


@pytest.fixture
def patient(context: BrowserContext) -> BrowserContext:
    context.set_default_timeout(PATIENCE_MS)
    return context


def _greedy(server: Server, *messages: tuple[str, str], max_tokens: int = SHORT, **headers: str) -> str:
    """What the model answers at temperature 0, without the page."""
    body = {
        "messages": [{"role": role, "content": text} for role, text in messages],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    answer = server.post("/v1/chat/completions", body, **headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"]).strip()


def _letters(text: str) -> str:
    """A text without space, which Markdown leaves out between paragraphs."""
    return "".join(text.split())


async def _wait_version(tab: Tab, text: str) -> None:
    await expect(tab.answer.locator(".branches > span")).to_have_text(text)


async def test_answers(model: Server, open_tab: OpenTab, patient: BrowserContext) -> None:
    """An example, stop, settings, continue, regenerate, versions, edit, copy, and the keys of all this."""
    await patient.grant_permissions(["clipboard-read", "clipboard-write"], origin=model.url)
    tab = await open_tab(model.url)
    await tab.button(STORY).click()
    begun = await tab.wait_text()
    await tab.button("Stop").click()
    stopped = await tab.wait_end()
    assert stopped.startswith(begun)
    assert (await tab.state()).startswith("Stopped · ")
    await expect(tab.page.locator("#hint")).to_contain_text(re.compile(r"^[1-9]\d* of [1-9][\d,]* tokens"))
    assert float(await tab.page.locator("#gauge").get_attribute("value") or 0) > 0

    await tab.button("Settings of this conversation").click()
    dialog = tab.page.get_by_role("dialog", name="This conversation")
    await dialog.get_by_label("System prompt").fill(SYSTEM)
    await dialog.get_by_label("Longest answer").fill(str(SHORT))
    await dialog.get_by_label("Top p").fill("0.9")
    await dialog.get_by_role("button", name="Precise").click()
    await expect(dialog.get_by_label("Temperature")).to_have_value("0")
    await expect(dialog.get_by_label("Top p")).to_have_value("1")
    await dialog.get_by_role("button", name="Save", exact=True).click()

    await tab.button("Continue").click()
    await _wait_version(tab, "2 / 2")
    longer = await tab.wait_end()
    assert longer.startswith(stopped.rstrip())
    assert len(longer) > len(stopped)
    await tab.button("Regenerate").click()
    await _wait_version(tab, "3 / 3")
    again = await tab.wait_end()
    assert again.strip() == await asyncio.to_thread(_greedy, model, ("system", SYSTEM), ("user", STORY))
    await tab.button("Previous version").click()
    assert await tab.wait_end() == longer
    await tab.button("Next version").click()
    assert await tab.wait_end() == again

    edit = tab.questions.get_by_role("button", name="Edit")
    await edit.click()
    await tab.button("Cancel").click()
    await edit.click()
    await tab.page.get_by_label("Edit your message").fill(QUESTION)
    await tab.page.locator(".edit-question").get_by_role("button", name="Send").click()
    await expect(tab.questions.locator("p")).to_have_text(QUESTION)
    answer = await tab.wait_end()
    assert answer.strip() == await asyncio.to_thread(_greedy, model, ("system", SYSTEM), ("user", QUESTION))
    await tab.button("Copy").click()
    await expect(tab.button("Copied")).to_be_visible()
    copied = await tab.page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == answer.strip()

    await tab.page.get_by_role("button", name="Keys", exact=True).click()
    await expect(tab.page.get_by_role("dialog", name="Keys")).to_be_visible()
    await tab.button("Close").click()
    await tab.page.locator("#chat").focus()
    await tab.page.keyboard.press("r")
    await _wait_version(tab, "2 / 2")
    assert (await tab.wait_end()).strip() == answer.strip()
    await tab.page.keyboard.press("/")
    await tab.page.keyboard.type("Thank you.")
    await tab.page.keyboard.press("Enter")
    await expect(tab.answers).to_have_count(2)
    await tab.wait_end()


async def test_another_model_that_thinks(model: Server, open_tab: OpenTab, patient: BrowserContext) -> None:
    tab = await open_tab(model.url)
    models = tab.page.get_by_label("Model", exact=True)
    await expect(models.locator("option")).to_have_text(["smollm2", "thinker (not loaded)"])
    await let_ask(tab, max_tokens=SHORT, temperature=0)
    await tab.send(QUESTION)
    first = await tab.wait_end()
    await tab.page.get_by_label("Regenerate with another model").select_option("thinker")
    await tab.wait_state("The model is being loaded…")
    await _wait_version(tab, "2 / 2")
    assert (await tab.wait_end()).strip() != first.strip()  # the same weights, with another template
    assert model.state(await tab.stream_id())["model"] == "thinker"
    await expect(models.locator("option")).to_have_text(["smollm2", "thinker"])

    await models.select_option("thinker")
    await let_ask(tab, max_tokens=LONG, chat_template_kwargs={"open_thinking": True})
    await tab.send("And why are they long?")
    thoughts = tab.answer.locator(".reasoning")
    await thoughts.get_by_text("Thinking…").click()
    await tab.wait_end()
    state = model.state(await tab.stream_id())
    assert state["model"] == "thinker"
    assert len(state["reasoning"].split()) > 10
    await expect(thoughts.locator("p")).to_have_text(state["reasoning"].strip())


TOOLS: dict[str, Any] = {
    "format": "tailrace.conversations",
    "version": 1,
    "conversations": [
        {
            "title": "With tools",
            "head": "e",
            "items": [
                {"id": "a", "role": "system", "text": "You look at rivers."},
                {"id": "b", "parent_id": "a", "role": "user", "text": "How high is the Danube?"},
                {"id": "c", "parent_id": "b", "type": "function_call", "call_id": "1", "name": "look", "text": "{}"},
                {"id": "d", "parent_id": "c", "type": "function_call_output", "call_id": "1", "text": "Two metres."},
                {"id": "e", "parent_id": "d", "role": "assistant", "text": "It is two metres high."},
            ],
        }
    ],
}


async def test_the_list(model: Server, open_tab: OpenTab, patient: BrowserContext, tmp_path: Path) -> None:
    """Of more conversations than fit a page: more, search, drafts, rename, delete, export and import of one."""
    for number in range(31):
        model.post("/v1/conversations", {"title": f"Number {number}"}).raise_for_status()
    tab = await open_tab(model.url)
    await expect(tab.titles).to_have_count(30)
    await tab.button("More").click()
    await expect(tab.titles.filter(has_text="Number 0")).to_have_count(1)
    await tab.button("Hide the list").click()
    await expect(tab.page.locator("#sidebar")).to_have_count(0)
    await tab.button("Conversations").click()
    search = tab.page.get_by_label("Search conversations")
    await search.fill("nobody has said this")
    await expect(tab.page.locator("#conversations")).to_have_text("Nothing found.")
    await search.fill("Number 7")
    await expect(tab.titles).to_have_text(["Number 7"])
    await tab.titles.click()
    await expect(tab.page.locator("h1")).to_have_text("Number 7")
    await let_ask(tab, max_tokens=SHORT, temperature=0)
    await tab.send(QUESTION)
    answer = await tab.wait_end()

    await tab.question.fill("A draft")
    await tab.button("New chat").click()
    await expect(tab.question).to_have_value("")
    await tab.titles.click()
    await expect(tab.question).to_have_value("A draft")
    await tab.question.fill("")

    await tab.button("Rename Number 7").click()
    title = tab.page.get_by_label("Title", exact=True)
    await title.fill("Never mind")
    await title.press("Escape")
    await tab.button("Rename Number 7").click()
    await title.fill("Number 77")
    await title.press("Enter")
    await expect(tab.titles).to_have_text(["Number 77"])
    await tab.button("Delete Number 77").click()
    await tab.button("Cancel").click()
    await tab.button("Settings of this conversation").click()
    async with tab.page.expect_download() as exporting:
        await tab.page.get_by_role("link", name="Export", exact=True).click()
    file, tools = tmp_path / "one.json", tmp_path / "tools.json"
    await (await exporting.value).save_as(file)
    assert [one["title"] for one in json.loads(file.read_text())["conversations"]] == ["Number 77"]
    await tab.button("Close").click()
    await tab.button("Delete Number 77").click()
    await tab.button("Delete").click()
    await expect(tab.titles).to_have_count(0)

    tools.write_text(json.dumps(TOOLS))
    async with tab.page.expect_file_chooser() as choosing:
        await tab.button("Import").click()
    await (await choosing.value).set_files([file, tools])
    await expect(tab.note).to_have_text("2 conversations imported.")
    await tab.titles.click()
    await expect(tab.page.locator("h1")).to_have_text("Number 77")
    assert await tab.wait_end() == answer
    await tab.send("And then?")
    await expect(tab.answers).to_have_count(2)
    await tab.wait_end()

    await search.fill("With tools")
    await tab.titles.filter(has_text="With tools").click()
    for summary, text in (
        ("System prompt", "You look at rivers."),
        ("Call of look", "{}"),
        ("Result of the tool", "Two metres."),
    ):
        aside = tab.page.locator("details").filter(has=tab.page.get_by_text(summary, exact=True))
        await expect(aside.locator("p")).not_to_be_visible()
        await aside.locator("summary").click()
        await expect(aside.get_by_text(text, exact=True)).to_be_visible()
    await tab.send("Is that high?")
    await expect(tab.answers).to_have_count(2)
    assert await tab.wait_end()


async def test_a_busy_model(open_tab: OpenTab, patient: BrowserContext) -> None:
    """The place in the queue, an error with its reason, and a try that succeeds."""
    with contextlib.closing(Server("smollm2", "--max-sequences", "1", "--queue-s", "4")) as model:
        await asyncio.to_thread(model.wait_ready, timeout_s=LOADED_S)
        await _queue_and_try_again(model, open_tab)


async def _queue_and_try_again(model: Server, open_tab: OpenTab) -> None:
    busy = model.create({"prompt": "A river is", "max_tokens": 4000, "ignore_eos": True, "linger_s": 600})
    tab = await open_tab(model.url)
    await let_ask(tab, max_tokens=SHORT, temperature=0)
    await tab.send(QUESTION)
    await tab.wait_state("In the queue, you are next…")
    await tab.wait_end("failed")
    assert (await tab.state()).startswith("Failed: The model was too busy to begin")
    assert model.post(f"/v1/streams/{busy}/cancel", {}).json()["status"] == "cancelled"
    await tab.until_recorded()
    await tab.reload()
    await tab.wait_state("Failed: The model was too busy to begin in time.")
    await tab.button("Try again").click()
    await _wait_version(tab, "2 / 2")
    assert (await tab.wait_end()).strip() == await asyncio.to_thread(_greedy, model, ("user", QUESTION))


@pytest.fixture
def succeed(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """Starts a server over the same data as the one before."""
    with contextlib.ExitStack() as running:

        def start() -> Server:
            database = f"sqlite:///{tmp_path / 'records.sqlite'}"
            server = Server("smollm2", "--data-dir", str(tmp_path), "--database", database)
            running.callback(server.close)
            return server.wait_ready(timeout_s=LOADED_S)

        yield start


async def _sign_in(tab: Tab, token: str) -> None:
    await tab.page.get_by_label("Key", exact=True).fill(token)
    await tab.button("Sign in").click()
    await expect(tab.page.locator(".owner")).to_have_text("alice")


async def test_start_on_one_browser_kill_the_server_finish_on_another(
    succeed: Callable[[], Server],
    browser: Browser,
    open_tab: OpenTab,
    patient: BrowserContext,
    plug: Plug,
    tmp_path: Path,
) -> None:
    """Signed in on both. Before that, the engine alone is killed."""
    token = await asyncio.to_thread(key_of, f"sqlite:///{tmp_path / 'records.sqlite'}", "alice")
    server = await asyncio.to_thread(succeed)
    cable = await plug(server)
    laptop = await open_tab(cable.url)
    await _sign_in(laptop, token)
    await let_ask(laptop, max_tokens=LONG, temperature=0)
    await laptop.send(QUESTION)
    await laptop.wait_text()
    server.worker().kill()
    undisturbed = _letters(await laptop.wait_end())
    key = {"authorization": f"Bearer {token}"}
    greedy = await asyncio.to_thread(_greedy, server, ("user", QUESTION), max_tokens=LONG, **key)
    assert undisturbed == _letters(greedy)

    await laptop.button("Regenerate").click()
    assert undisturbed.startswith(_letters(await laptop.wait_text(40)))
    server.send_signal(signal.SIGKILL)
    await asyncio.to_thread(server.wait)
    await laptop.wait_state("Connection lost. Reconnecting…")
    cable.port = (await asyncio.to_thread(succeed)).port
    async with await browser.new_context() as context:
        context.set_default_timeout(PATIENCE_MS)
        phone = await Tab.open(context, cable.url)
        await _sign_in(phone, token)
        await phone.titles.click()
        await expect(laptop.note).to_have_text("The server was restarted. Nothing was lost.")
        assert _letters(await phone.wait_end()) == undisturbed
        assert _letters(await laptop.wait_end()) == undisturbed
        await _wait_version(laptop, "2 / 2")
        await phone.button("Sign out").click()
        await expect(phone.page.get_by_label("Key", exact=True)).to_be_focused()
        assert phone.faults == []
