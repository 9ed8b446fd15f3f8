"""Images on the page: attached, pasted, dropped, made smaller, shown, sent one at a time, and refused in words."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.async_api import BrowserContext, FilePayload, Locator, Route, expect
from tests.api.process import Server
from tests.browser.axe import violations
from tests.browser.tab import Tab
from tests.seeing import picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]

_QUESTION = "What is in it?"
_TRANSFER = """(files) => {
    const transfer = new DataTransfer();
    for (const { name, type, base64 } of files) {
        const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
        transfer.items.add(new File([bytes], name, { type }));
    }
    return transfer;
}"""


def _file(name: str, content: bytes, mime_type: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": mime_type, "buffer": content}


def _photo(width: int, height: int) -> bytes:
    """A picture as of a camera: large, in JPEG, lying on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(file, "JPEG", quality=85, exif=exif)
    return file.getvalue()


def _thumbs(tab: Tab) -> Locator:
    return tab.page.locator("#pictures img")


def _shown(tab: Tab) -> Locator:
    return tab.questions.last.locator(".images img")


async def _attach(tab: Tab, *files: FilePayload) -> None:
    await tab.page.set_input_files("#files", list(files))


async def _until_loaded(images: Locator) -> None:
    await expect(images.first).to_be_visible()
    for image in await images.all():
        await image.evaluate("async (image) => image.decode()")


async def _sizes(tab: Tab) -> list[tuple[int, int]]:
    await _until_loaded(_shown(tab))
    return [
        (await one.evaluate("(image) => image.naturalWidth"), await one.evaluate("(image) => image.naturalHeight"))
        for one in await _shown(tab).all()
    ]


async def test_an_image_is_attached_sent_and_shown_after_a_reload(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await _attach(tab, _file("one.png", picture(1)), _file("two.webp", picture(2, kind="WEBP"), "image/webp"))
    await expect(_thumbs(tab)).to_have_count(2)
    assert [await one.get_attribute("alt") for one in await _thumbs(tab).all()] == ["one.png", "two.webp"]
    await tab.button("Remove one.png").click()
    await expect(_thumbs(tab)).to_have_count(1)
    await expect(tab.question).to_be_focused()
    await tab.send(_QUESTION)
    await expect(_thumbs(tab)).to_have_count(0)
    await tab.wait_end()
    for _ in range(2):
        await expect(tab.questions.locator("p")).to_have_text([_QUESTION])
        assert await _sizes(tab) == [(90, 50)]
        assert await _shown(tab).get_attribute("alt") == "Your image"
        await tab.reload()
    await tab.send("And now?")
    await tab.wait_end()
    question = (await tab.tree())["data"][0]
    assert [part["type"] for part in question["content"]] == ["input_image", "input_text"]


async def test_an_image_alone_is_a_question(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await expect(tab.button("Send")).to_be_disabled()
    await _attach(tab, _file("one.png", picture(1)))
    await tab.button("Send").click()
    await tab.wait_end()
    await expect(tab.questions.locator("p")).to_have_count(0)
    assert await _sizes(tab) == [(90, 50)]


async def test_a_photo_is_made_smaller_and_stands_upright(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await _attach(tab, _file("photo.jpg", _photo(4000, 3000), "image/jpeg"))
    await expect(_thumbs(tab)).to_have_count(1)
    await tab.send(_QUESTION)
    await tab.wait_end()
    assert await _sizes(tab) == [(1176, 1568)]


@pytest.mark.parametrize("how", ["paste", "drop"])
async def test_images_are_pasted_and_dropped(river: Server, open_tab: OpenTab, how: str) -> None:
    tab = await open_tab(river.url)
    files = [{"name": "x.png", "type": "image/png", "base64": base64.b64encode(picture(1)).decode()}]
    transfer = await tab.page.evaluate_handle(_TRANSFER, files)
    if how == "paste":
        await tab.question.evaluate(
            "(field, clipboardData) => field.dispatchEvent("
            "new ClipboardEvent('paste', { clipboardData, bubbles: true, cancelable: true }))",
            transfer,
        )
    else:
        await tab.page.dispatch_event("#chat", "drop", {"dataTransfer": transfer})
    await expect(_thumbs(tab)).to_have_count(1)
    await tab.question.fill("Text")
    await expect(tab.question).to_have_value("Text")
    await tab.question.press("Enter")
    await tab.wait_end()
    assert await _sizes(tab) == [(90, 50)]


async def test_what_is_no_image_is_named(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await _attach(
        tab,
        _file("bad.png", b"not a picture"),
        _file("good.png", picture(1)),
        _file("x.svg", b"<svg/>", "image/svg+xml"),
    )
    await expect(tab.alarm).to_have_text(
        "bad.png cannot be used: it is damaged. x.svg cannot be used: it is none of PNG, JPEG, WebP or GIF."
    )
    await expect(_thumbs(tab)).to_have_count(1)
    await _attach(tab, *(_file(f"{number}.png", picture(number, 8, 8)) for number in range(20)))
    await expect(tab.alarm).to_have_text("A message can have at most 16 images.")
    await expect(_thumbs(tab)).to_have_count(16)


_LATE = """() => {
    const make = window.createImageBitmap;
    const may = new Promise((resolve) => (window.mayMake = resolve));
    window.createImageBitmap = (...given) => {
        document.title = "preparing";
        return may.then(() => make(...given));
    };
}"""


async def test_an_image_belongs_to_the_conversation_it_was_attached_in(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await tab.send("One?")
    await tab.wait_end()
    await tab.page.evaluate(_LATE)
    await _attach(tab, _file("one.png", picture(1)), _file("two.png", picture(2)))
    await expect(tab.page).to_have_title("preparing")
    await tab.button("New chat").click()
    await expect(tab.questions).to_have_count(0)
    await tab.question.fill("Two?")
    await expect(tab.button("Send")).to_be_disabled()
    await tab.page.evaluate("window.mayMake()")
    await expect(tab.button("Send")).to_be_enabled()
    await expect(_thumbs(tab)).to_have_count(0)
    await tab.titles.first.click()
    await expect(_thumbs(tab)).to_have_count(2)


async def test_an_edited_question_keeps_its_images(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await _attach(tab, _file("one.png", picture(1)), _file("two.png", picture(2, 64, 64)))
    await tab.send(_QUESTION)
    await tab.wait_end()
    await tab.questions.first.get_by_role("button", name="Edit").click()
    await tab.button("Remove image 1 of 2").click()
    field = tab.page.get_by_label("Edit your message")
    await field.fill("And this?")
    await field.press("Enter")
    await expect(tab.questions.locator("p")).to_have_text(["And this?"])
    await tab.wait_end()
    assert await _sizes(tab) == [(64, 64)]
    await tab.button("Previous version").click()
    await expect(tab.questions.locator("p")).to_have_text([_QUESTION])
    assert await _sizes(tab) == [(90, 50), (64, 64)]


async def test_a_refused_image_comes_back_to_the_field(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    refusal = '{"error": {"message": "No room.", "code": "invalid_request"}}'

    async def refuse(route: Route) -> None:
        await route.fulfill(status=400, content_type="application/json", body=refusal)

    await tab.page.route("**/images", refuse)
    await _attach(tab, _file("one.png", picture(1)))
    await tab.send(_QUESTION)
    await expect(tab.alarm).to_have_text("No room.")
    await expect(tab.question).to_have_value(_QUESTION)
    await expect(_thumbs(tab)).to_have_count(1)
    await tab.page.unroute("**/images")
    await tab.question.press("Enter")
    await tab.wait_end()
    assert await _sizes(tab) == [(90, 50)]


async def test_a_reload_while_images_are_sent_brings_the_text_back(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    asked: list[Route] = []
    await tab.page.route("**/images", lambda route: asked.append(route))
    await _attach(tab, _file("one.png", picture(1)))
    await tab.send(_QUESTION)
    await expect(tab.answer.locator(".state")).to_have_text("Sending the image…")
    await tab.page.unroute("**/images")
    await tab.reload()
    await expect(tab.alarm).to_have_text("The images of your last message were not sent. Attach them again.")
    await expect(tab.question).to_have_value(_QUESTION)
    await expect(tab.answers).to_have_count(0)


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script: Path = tmp_path_factory.mktemp("blind") / "script.jsonl"
    script.write_text('{"rules": [{"say": "Hello."}]}', encoding="utf-8")
    with contextlib.closing(Server(f"scripted:script={script}")) as server:
        yield server.wait_ready()


async def test_a_model_without_eyes_says_so(blind: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(blind.url)
    attach = tab.button("Attach images")
    await expect(attach).to_have_attribute("aria-disabled", "true")
    await attach.press("Enter")
    await expect(tab.alarm).to_have_text("scripted does not read images.")
    await _attach(tab, _file("one.png", picture(1)))
    await expect(_thumbs(tab)).to_have_count(0)


async def test_it_is_accessible(river: Server, open_tab: OpenTab, context: BrowserContext) -> None:
    tab = await open_tab(river.url)
    await _attach(tab, _file("one.png", picture(1)), _file("two.png", picture(2)))
    await tab.send(_QUESTION)
    await tab.wait_end()
    await _attach(tab, _file("three.png", picture(3)))
    await expect(_thumbs(tab)).to_have_count(1)
    assert await violations(tab.page) == []
    for name in ("Remove three.png", "Attach images"):
        await tab.button(name).focus()
        await expect(tab.button(name)).to_be_focused()
    await tab.button("Remove three.png").press("Enter")
    await expect(_thumbs(tab)).to_have_count(0)
