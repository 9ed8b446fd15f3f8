"""The page on one device: chat, stop, branches, history, settings, keys."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import BrowserContext, Route, expect
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.browser.tab import RIVER_TOKENS, Tab

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]
Serve = Callable[..., Server]

QUESTION = "Why do rivers bend?"
ANSWER = Answer(chat_ids(QUESTION), RIVER_TOKENS, seed=5)
SHOWN = ANSWER.text.strip()  # nothing begins or ends with space
ENDLESS = 10_000


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """Runs one sequence at a time, and one more may wait. A number in a question makes the engine fail."""
    flags = ("--max-sequences", "1", "--max-concurrent-requests", "2")
    with contextlib.closing(Server("scripted:text=-1,tokens_per_s=20", *flags)) as server:
        yield server.wait_ready()


async def let_ask(tab: Tab, **fields: object) -> None:
    """Put this into the page's questions: a seed makes an oracle, `max_tokens` the time to do something."""

    async def add(route: Route) -> None:
        body: dict[str, Any] = route.request.post_data_json or {}  # Any: of JSON
        await route.continue_(post_data={**body, **fields})

    await tab.page.route("**/v1/streams", add)


async def test_chat(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await let_ask(tab, seed=ANSWER.seed)
    await expect(tab.page.locator("#model")).to_have_text("scripted")
    await expect(tab.question).to_be_focused()
    await tab.page.keyboard.type(QUESTION)
    await tab.page.keyboard.press("Enter")
    assert SHOWN.startswith((await tab.wait_text()).strip())  # while it runs
    assert (await tab.wait_end()).strip() == SHOWN
    state = await tab.state()
    assert re.fullmatch(
        rf"Reached the length limit · \d+ ms to the first token · \d+(\.\d)? tokens/s · {RIVER_TOKENS} tokens"
        r" · \d+ in the prompt",
        state,
    )
    await expect(tab.question).to_be_focused()
    await expect(tab.question).to_have_value("")
    await expect(tab.page.locator("#hint")).to_contain_text(re.compile(r"\b1\d\d of "))  # prompt and answer
    await expect(tab.titles.first).to_have_text(QUESTION)
    await expect(tab.page).to_have_title(QUESTION)
    await tab.reload()
    assert (await tab.wait_end()).strip() == SHOWN
    assert f"{RIVER_TOKENS} tokens" in await tab.state() or await tab.state() == "Not complete"


@pytest.mark.parametrize("how", ["button", pytest.param("escape", marks=pytest.mark.deep)])
async def test_stop_stops_the_engine(river: Server, open_tab: OpenTab, how: str) -> None:
    tab = await open_tab(river.url)
    await let_ask(tab, max_tokens=ENDLESS)
    await tab.send(QUESTION)
    await tab.wait_text()
    if how == "button":
        await tab.button("Stop").click()
    else:
        await tab.page.keyboard.press("Escape")
    text = await tab.wait_end()
    state = river.state(await tab.stream_id())
    assert state["status"] == "cancelled"
    assert text.strip() == state["text"].strip()
    assert (await tab.state()).startswith("Stopped · ")


async def test_branches(river: Server, open_tab: OpenTab) -> None:
    """Regenerate, edit, continue, and switch between branches."""
    tab = await open_tab(river.url)
    await let_ask(tab, max_tokens=8)
    await tab.send("One?")
    first = await tab.wait_end()
    await tab.button("Regenerate").click()
    await expect(tab.answer.locator(".branches > span")).to_have_text("2 / 2")
    second = await tab.wait_end()
    assert second != first
    await tab.button("Previous version").click()
    assert await tab.wait_end() == first
    await expect(tab.answer.locator(".branches > span")).to_have_text("1 / 2")
    await tab.button("Continue").click()
    await expect(tab.answer.locator(".branches > span")).to_have_text("3 / 3")
    longer = await tab.wait_end()
    assert longer.startswith(first.rstrip("\n "))
    assert len(longer) > len(first)
    await tab.questions.first.get_by_role("button", name="Edit").click()
    field = tab.page.get_by_label("Edit your message")
    await expect(field).to_be_focused()
    await expect(field).to_have_value("One?")
    await field.fill("Two?")
    await field.press("Enter")
    await expect(tab.questions.locator("p")).to_have_text(["Two?"])
    await tab.wait_end()
    await tab.reload()  # the server knows which branch is shown
    await expect(tab.questions.locator("p")).to_have_text(["Two?"])
    await tab.button("Previous version").click()
    await expect(tab.questions.locator("p")).to_have_text(["One?"])
    assert await tab.wait_end() == longer


@pytest.mark.deep
async def test_a_question_after_new_chat_begins_a_conversation(river: Server, open_tab: OpenTab) -> None:
    """However soon it comes."""
    tab = await open_tab(river.url)
    await let_ask(tab, max_tokens=3)
    await tab.send("One?")
    await tab.wait_end()
    before = await tab.conversation_id()
    await tab.question.fill("Two?")
    await tab.page.evaluate("""() => {
        document.querySelector("#new").click();
        document.querySelector("#composer").requestSubmit();
    }""")
    await expect(tab.questions.locator("p")).to_have_text("Two?")
    await tab.wait_end()
    assert await tab.conversation_id() != before


async def test_the_list(river: Server, open_tab: OpenTab, tmp_path: Path) -> None:
    """New, search, rename, delete, export, import."""
    tab = await open_tab(river.url)
    await let_ask(tab, max_tokens=3)
    for question in ("Of dogs?", "Of cats?"):
        await tab.button("New chat").click()
        await tab.send(question)
        await tab.wait_end()
    await expect(tab.titles.nth(0)).to_have_text("Of cats?")
    await tab.page.get_by_label("Search conversations").fill("dogs")
    await expect(tab.titles).to_have_text(["Of dogs?"])
    await tab.titles.click()
    await expect(tab.questions.locator("p")).to_have_text(["Of dogs?"])
    await tab.button("Rename Of dogs?").click()
    title = tab.page.get_by_label("Title")
    await title.fill("Dogs at the river")
    await title.press("Enter")
    await expect(tab.titles).to_have_text(["Dogs at the river"])
    await expect(tab.page.locator("h1")).to_have_text("Dogs at the river")
    async with tab.page.expect_download() as exporting:
        await tab.page.get_by_role("link", name="Export all").click()
    file = tmp_path / "all.json"
    await (await exporting.value).save_as(file)
    assert {"Dogs at the river", "Of cats?"} <= {one["title"] for one in json.loads(file.read_text())["conversations"]}
    await tab.button("Delete Dogs at the river").click()
    await tab.button("Delete").click()
    await expect(tab.titles).to_have_count(0)
    await expect(tab.page.locator("#welcome")).to_be_visible()
    await tab.page.locator("#sidebar input[type=file]").set_input_files(file)
    await expect(tab.note).to_contain_text("imported.")
    await expect(tab.titles).to_have_text(["Dogs at the river"])
    (tmp_path / "no.json").write_text("{}")
    await tab.page.locator("#sidebar input[type=file]").set_input_files(tmp_path / "no.json")
    await expect(tab.alarm).not_to_be_empty()


async def test_settings_are_the_conversations(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await tab.button("Settings of this conversation").click()
    system = "Ünd 🌊 " * 100  # longer than one entry of the metadata
    await tab.page.get_by_label("System prompt").fill(system)
    await tab.button("Precise").click()
    await tab.page.get_by_label("Longest answer").fill("7")
    await tab.page.get_by_label("Name of a new preset").fill("Mine")
    await tab.button("Save as preset").click()
    await tab.button("Save").click()
    async with tab.page.expect_request("**/v1/streams") as posted:
        await tab.send(QUESTION)
    body = (await posted.value).post_data_json
    assert body is not None
    assert (body["instructions"], body["temperature"], body["max_tokens"]) == (system, 0, 7)
    await tab.wait_end()
    assert " · 7 tokens" in await tab.state()
    await tab.reload()
    await tab.button("Settings of this conversation").click()
    await expect(tab.page.get_by_label("System prompt")).to_have_value(system)
    await expect(tab.button("Precise")).to_have_attribute("aria-pressed", "true")
    await expect(tab.page.get_by_role("button", name="Mine", exact=True)).to_have_attribute("aria-pressed", "true")
    await tab.page.keyboard.press("Escape")
    await tab.button("New chat").click()
    await tab.button("Settings of this conversation").click()
    await expect(tab.page.get_by_label("System prompt")).to_have_value("")
    await tab.button("Mine").click()
    await expect(tab.page.get_by_label("System prompt")).to_have_value(system)
    await tab.button("Delete the preset Mine").click()
    await expect(tab.page.get_by_role("button", name="Mine", exact=True)).to_have_count(0)


@pytest.mark.deep
async def test_models(serve: Serve, open_tab: OpenTab) -> None:
    """One is chosen for each conversation, its state is shown, and an answer can be had from another one, here from one
    that thinks."""
    server = serve("scripted", "--model", "other=scripted:thinks=20,tokens_per_s=100", "--default-max-tokens", "40")
    tab = await open_tab(server.url)
    models = tab.page.get_by_label("Model", exact=True)
    await expect(models.locator("option")).to_have_text(["scripted", "other (not loaded)"])
    await tab.send(QUESTION)
    await tab.wait_end()
    others = tab.page.get_by_label("Regenerate with another model")
    await expect(others.locator("option")).to_have_text(["with…", "other"])
    await others.select_option("other")
    await expect(tab.answer.locator(".branches > span")).to_have_text("2 / 2")
    await tab.wait_end()
    state = server.state(await tab.stream_id())
    assert state["model"] == "other"
    assert (await tab.text()).strip() == state["text"].strip()
    thoughts = tab.answer.locator(".reasoning")
    await expect(thoughts.locator("p")).not_to_be_visible()
    await thoughts.get_by_text(re.compile(r"^Thought for \d+ s$")).click()
    await expect(thoughts.locator("p")).to_be_visible()
    assert (await thoughts.locator("p").text_content() or "").strip() == state["reasoning"].strip()
    await expect(models.locator("option")).to_have_text(["scripted", "other"])
    await models.select_option("other")
    await tab.reload()
    await expect(models).to_have_value("other")
    await tab.send("And now?")
    await tab.wait_end()
    assert server.state(await tab.stream_id())["model"] == "other"


async def test_a_long_prompt_shows_how_much_of_it_is_read(open_tab: OpenTab) -> None:
    with contextlib.closing(Server("scripted:prefill_tokens_per_s=100")) as slow:
        tab = await open_tab(slow.wait_ready().url)
        await let_ask(tab, max_tokens=1)
        await tab.send("x" * 500)
        state = tab.answer.locator(".state")
        await expect(state).to_have_text(re.compile(r"^Reading the prompt: [1-9]\d? %…$"))
        assert await tab.wait_end()
        await expect(state).not_to_contain_text("Reading")


@pytest.mark.deep
async def test_the_queue_and_refusals_are_shown(narrow: Server, open_tab: OpenTab) -> None:
    busy = narrow.create({"prompt": "Long.", "max_tokens": 5000, "ignore_eos": True})
    tab = await open_tab(narrow.url)
    await tab.send(QUESTION)
    await tab.wait_state("In the queue, you are next…")
    other = await open_tab(narrow.url)
    await other.send("Is there room?")
    await expect(other.alarm).to_have_text(re.compile(r" Try again in \d+ s\.$"))
    await expect(other.questions.locator("p")).to_have_text("Is there room?")
    await expect(other.titles.first).to_have_text("Is there room?")
    narrow.http.post(f"/v1/streams/{busy}/cancel")
    assert await tab.wait_end()
    await other.send("And for two?")
    assert await other.wait_end()
    await expect(other.alarm).to_be_empty()
    await expect(other.questions.locator("p")).to_have_text(["Is there room?", "And for two?"])


@pytest.mark.deep
async def test_a_failed_answer_shows_the_reason_and_can_be_retried(narrow: Server, open_tab: OpenTab) -> None:
    """The control token is text in a chat, so the engine is told by a number to fail."""
    tab = await open_tab(narrow.url)
    await tab.send("Do 25.")
    await tab.wait_end("failed")
    assert (await tab.state()).startswith("Failed: ")
    await tab.until_recorded()
    await tab.reload()  # the server has recorded a code
    await tab.wait_state("Failed: The engine could not give this answer.")
    await tab.button("Try again").click()
    await expect(tab.answer.locator(".branches > span")).to_have_text("2 / 2")
    await tab.wait_end("failed")


async def test_drafts(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await let_ask(tab, max_tokens=3)
    await tab.send("One?")
    await tab.wait_end()
    await tab.question.fill("of one")
    await tab.button("New chat").click()
    await expect(tab.question).to_have_value("")
    await tab.question.fill("of none")
    await tab.titles.filter(has_text="One?").first.click()
    await expect(tab.question).to_have_value("of one")
    await tab.reload()
    await expect(tab.question).to_have_value("of one")
    await tab.page.go_back()
    await expect(tab.question).to_have_value("of none")


async def test_keys(river: Server, open_tab: OpenTab, context: BrowserContext) -> None:
    await context.grant_permissions(["clipboard-read", "clipboard-write"], origin=river.url)
    tab = await open_tab(river.url)
    keyboard = tab.page.keyboard
    await let_ask(tab, max_tokens=8)
    await keyboard.type("Two")
    await keyboard.press("Shift+Enter")
    await keyboard.type("lines")
    await keyboard.press("Enter")
    await expect(tab.questions.locator("p")).to_have_text("Two\nlines")
    await keyboard.press("Enter")  # nothing to send
    text = await tab.wait_end()
    await expect(tab.answers).to_have_count(1)
    await keyboard.press("ArrowUp")
    await expect(tab.page.get_by_label("Edit your message")).to_be_focused()
    await keyboard.press("Escape")
    await tab.page.locator("#chat").focus()
    await keyboard.press("c")
    await expect(tab.button("Copied")).to_be_visible()
    assert (await tab.page.evaluate("navigator.clipboard.readText()")).strip() == text.strip()
    await keyboard.press("r")
    await expect(tab.answer.locator(".branches > span")).to_have_text("2 / 2")
    await tab.wait_end()
    await keyboard.press("[")
    await expect(tab.answer.locator(".branches > span")).to_have_text("1 / 2")
    await keyboard.press("s")
    await expect(tab.page.get_by_role("dialog", name="This conversation")).to_be_visible()
    await keyboard.press("Escape")
    await keyboard.press("?")
    await expect(tab.page.get_by_role("dialog", name="Keys")).to_contain_text("Regenerate the last answer")
    await keyboard.press("Escape")
    await expect(tab.page.get_by_role("dialog")).to_have_count(0)
    await keyboard.press("Control+b")
    await expect(tab.page.locator("#sidebar")).to_have_count(0)
    await keyboard.press("Control+k")
    await expect(tab.page.get_by_label("Search conversations")).to_be_focused()
    await keyboard.press("Control+Shift+O")
    await expect(tab.page.locator("#welcome")).to_be_visible()
    await expect(tab.question).to_be_focused()
    await keyboard.press("Alt+ArrowDown")
    await expect(tab.questions.locator("p")).to_have_text("Two\nlines")


@pytest.mark.deep
async def test_reasoning_is_collapsed(serve: Serve, open_tab: OpenTab) -> None:
    server = serve("scripted:thinks=40,tokens_per_s=20", "--default-max-tokens", "80")
    tab = await open_tab(server.url)
    await tab.send(QUESTION)
    thoughts = tab.answer.locator(".reasoning")
    await tab.until("document.querySelector('.reasoning summary')?.textContent === 'Thinking…'")
    await expect(thoughts.locator("p")).not_to_be_visible()
    await thoughts.locator("summary").click()
    await tab.wait_end()
    await expect(thoughts.locator("summary")).to_have_text(re.compile(r"Thought for \d+ s"))
    state = server.state(await tab.stream_id())
    assert (await thoughts.locator("p").text_content() or "").strip() == state["reasoning"].strip()
    assert (await tab.text()).strip() == state["text"].strip()
    await tab.reload()
    await tab.wait_end()
    assert (await thoughts.locator("p").text_content() or "").strip() == state["reasoning"].strip()
