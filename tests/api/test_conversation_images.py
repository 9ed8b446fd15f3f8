"""Images in conversations and in stored responses: kept, shown again to the model, owned, bounded, deleted."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.api.keyed import House, serving_with_keys
from tests.api.oracle import Answer, chat_ids
from tests.seeing import data_url, picture

from tailrace.access.quota import Quota
from tailrace.errors import QueueFull
from tailrace.images.reader import ImageReader
from tailrace.settings import Settings
from tailrace.types import Attachment, Image, Segment
from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS, read_ids

Json = dict[str, Any]  # Any: of JSON
_COUNT = 8
_USER, _ASSISTANT = (256 + CONTROL_TOKENS.index(f"<|{name}|>") for name in ("user", "assistant"))
_LOOK = "What is in it?"


@pytest_asyncio.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with serving_with_keys(tmp_path) as house:
        yield house


async def _canonical(content: bytes) -> bytes:
    (image,) = await ImageReader().read((Image(content),), as_sent=False)
    return image.content


async def _shown(content: bytes) -> Attachment:
    return Attachment.of(await _canonical(content), "image/png", 90 * 50 // 1024)


def _answer(*segments: Segment) -> Answer:
    return Answer(read_ids(segments), _COUNT, 1)


def _part(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def _question(*urls: str, text: str = _LOOK) -> Json:
    return {"role": "user", "content": [*map(_part, urls), {"type": "text", "text": text}]}


async def _new(client: httpx.AsyncClient, **fields: object) -> str:
    found = await client.post("/v1/conversations", json=fields)
    assert found.status_code == 200, found.text
    return str(found.json()["id"])


async def _chat(client: httpx.AsyncClient, place: object, *messages: Json, status: int = 200) -> str:
    body = {"messages": messages, "conversation": place, "max_tokens": _COUNT, "seed": 1}
    found = await client.post("/v1/chat/completions", json=body)
    assert found.status_code == status, found.text
    return str(found.json()["choices"][0]["message"]["content"]) if status == 200 else found.text


async def _tree(client: httpx.AsyncClient, its_id: str) -> list[Json]:
    return list((await client.get(f"/v1/conversations/{its_id}/tree")).json()["data"])


async def _show(client: httpx.AsyncClient, its_id: str, image_id: str) -> httpx.Response:
    return await client.get(f"/v1/conversations/{its_id}/images/{image_id}")


async def test_a_turn_keeps_its_image_and_the_next_one_shows_it_again(house: House) -> None:
    client, sent = house.client(house.key()), picture(1, kind="JPEG")
    its_id, shown = await _new(client), await _shown(sent)
    said = await _chat(client, its_id, _question(data_url(sent, "image/jpeg")))
    first = (_USER,), shown, (*_LOOK.encode(), 10, _ASSISTANT)
    assert said == _answer(*first).text
    asked = (*said.encode(), 10, *chat_ids("And now?"))
    assert await _chat(client, its_id, {"role": "user", "content": "And now?"}) == _answer(*first, asked).text
    question, *_ = await _tree(client, its_id)
    image, text = question["content"]
    assert (image["type"], text["text"], question["role"]) == ("input_image", _LOOK, "user")
    file = await _show(client, its_id, image["file_id"])
    assert file.content == await _canonical(sent)
    headers = {name: file.headers[name] for name in ("content-type", "x-content-type-options", "cache-control")}
    assert headers == {
        "content-type": "image/png",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-cache",
    }
    assert "sandbox" in file.headers["content-security-policy"]
    path = f"/v1/conversations/{its_id}/images/{image['file_id']}"
    assert (await client.get(path, headers={"if-none-match": file.headers["etag"]})).status_code == 304


async def test_edits_and_branches_have_the_images_of_their_own_path(house: House) -> None:
    client = house.client(house.key())
    pictures = [picture(1), picture(2)]
    its_id = await _new(client)
    await _chat(client, its_id, _question(data_url(pictures[0])))
    question = (await _tree(client, its_id))[0]
    image_id = question["content"][0]["file_id"]
    again = await _chat(client, {"id": its_id, "parent_id": question["id"]})
    segments = (_USER,), await _shown(pictures[0]), (*_LOOK.encode(), 10, _ASSISTANT)
    assert again == _answer(*segments).text
    edited = await _chat(client, {"id": its_id, "parent_id": None}, _question(data_url(pictures[1]), image_id))
    both = (_USER,), await _shown(pictures[1]), await _shown(pictures[0]), (*_LOOK.encode(), 10, _ASSISTANT)
    assert edited == _answer(*both).text
    assert (await client.delete(f"/v1/conversations/{its_id}/items/{question['id']}")).status_code == 200
    assert (await _show(client, its_id, image_id)).status_code == 200  # the other branch has it, too


async def test_items_have_images_and_the_model_reads_them(house: House) -> None:
    client, sent = house.client(house.key()), picture(1)
    content = [
        {"type": "input_text", "text": "Look: "},
        {"type": "input_image", "image_url": data_url(sent)},
        {"type": "input_text", "text": _LOOK},
    ]
    its_id = await _new(client, items=[{"role": "user", "content": content}])
    shown = (*b"Look: ",), await _shown(sent), (*_LOOK.encode(), 10, _ASSISTANT)
    answer = _answer((_USER,), *shown).text
    assert await _chat(client, its_id) == answer
    (item,) = [one for one in await _tree(client, its_id) if one["role"] == "user"]
    assert [one["type"] for one in item["content"]] == ["input_text", "input_image", "input_text"]
    copy = await _new(client, items=[{"role": "user", "content": item["content"]}])
    assert await _chat(client, copy) == answer


async def test_an_uploaded_image_is_named_by_its_id(house: House) -> None:
    client, sent = house.client(house.key()), picture(1, kind="WEBP", lossless=True)
    its_id = await _new(client)
    path = f"/v1/conversations/{its_id}/images"
    made = await client.post(path, content=sent, headers={"content-type": "image/webp"})
    canonical = await _canonical(sent)
    assert made.json() == {
        "id": made.json()["id"],
        "object": "conversation.image",
        "media_type": "image/png",
        "bytes": len(canonical),
    }
    said = await _chat(client, its_id, _question(made.json()["id"]))
    assert said == _answer((_USER,), await _shown(sent), (*_LOOK.encode(), 10, _ASSISTANT)).text
    for content, kind, status in ((sent, "text/plain", 415), (b"", "image/png", 400), (b"<svg/>", "image/svg", 400)):
        assert (await client.post(path, content=content, headers={"content-type": kind})).status_code == status
    other = path.replace(its_id, "conv_none")
    assert (await client.post(other, content=sent, headers={"content-type": "image/webp"})).status_code == 404


async def test_another_owner_never_reaches_an_image(house: House) -> None:
    mine, other = (house.client(house.key(name)) for name in ("me", "you"))
    its_id, theirs = await _new(mine), await _new(other)
    await _chat(mine, its_id, _question(data_url(picture(1))))
    image_id = (await _tree(mine, its_id))[0]["content"][0]["file_id"]
    for place in (its_id, theirs):
        assert (await _show(other, place, image_id)).status_code == 404
    assert "is not kept" in await _chat(other, theirs, _question(image_id), status=400)
    item = {"role": "user", "content": [{"type": "input_image", "file_id": image_id}]}
    assert (await other.post("/v1/conversations", json={"items": [item]})).status_code == 400
    assert (await _show(mine, its_id, "img_" + "0" * 64)).status_code == 404
    for wrong in ("img_", "img_" + "g" * 64, image_id.upper(), image_id[4:], "img_..%2f" + "0" * 60):
        assert (await _show(mine, its_id, wrong)).status_code == 404
        assert (await mine.post("/v1/chat/completions", json={"messages": [_question(wrong)]})).status_code == 400


async def test_images_are_deleted_with_the_last_thing_that_has_them(house: House) -> None:
    client, url = house.client(house.key()), data_url(picture(1))
    places = [await _new(client), await _new(client)]
    for place in places:
        await _chat(client, place, _question(url))
    response = (await client.post("/v1/responses", json=_response(url))).json()
    assert _num_images(house) == 1
    for place in places:
        assert (await client.delete(f"/v1/conversations/{place}")).status_code == 200
    assert _num_images(house) == 1
    assert (await client.delete(f"/v1/responses/{response['id']}")).status_code == 200
    assert _num_images(house) == 0


def _num_images(house: House) -> int:
    from sqlalchemy import func, select

    from tailrace.records.database_tables import images
    from tailrace.records.record_database import RecordDatabase

    database = RecordDatabase(house.database)
    with database.begin() as connection:
        number = connection.execute(select(func.count()).select_from(images)).scalar_one()
    database.close()
    return int(number)


def _response(url: str, **more: object) -> Json:
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": _LOOK}]
    return {"input": [{"role": "user", "content": content}], "max_output_tokens": _COUNT, "seed": 1, **more}


async def test_a_stored_response_with_an_image_is_continued(house: House) -> None:
    client, sent = house.client(house.key()), picture(1)
    first = (await client.post("/v1/responses", json=_response(data_url(sent)))).json()
    said = first["output"][0]["content"][0]["text"]
    body = {"input": "More.", "previous_response_id": first["id"], "max_output_tokens": _COUNT, "seed": 1}
    second = (await client.post("/v1/responses", json=body)).json()
    prompt = (_USER,), await _shown(sent), (*_LOOK.encode(), 10, _ASSISTANT), (*said.encode(), 10, *chat_ids("More."))
    assert second["output"][0]["content"][0]["text"] == _answer(*prompt).text
    third = await client.post("/v1/responses", json={**body, "previous_response_id": second["id"]})
    assert third.status_code == 200
    assert (await client.delete(f"/v1/responses/{first['id']}")).status_code == 200
    assert (await client.post("/v1/responses", json={**body, "previous_response_id": second["id"]})).status_code == 200
    other = house.client(house.key("you"))
    assert "not found" in (await other.post("/v1/responses", json={**body, "previous_response_id": second["id"]})).text
    plain = (await client.post("/v1/responses", json=_response(data_url(picture(2)), store=False))).json()
    assert "not stored" in (await client.post("/v1/responses", json={**body, "previous_response_id": plain["id"]})).text
    assert _num_images(house) == 1


async def test_a_response_that_does_not_begin_keeps_no_image(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client, body = house.client(house.key()), _response(data_url(picture(1)))
    store = type(house.service.store)

    async def full(*given: object) -> None:
        assert _num_images(house) == 1
        raise QueueFull("full", retry_after_s=1.0)

    with monkeypatch.context() as broken:
        broken.setattr(store, "open", full)
        assert (await client.post("/v1/responses", json=body)).status_code == 429
    assert _num_images(house) == 0
    assert (await client.post("/v1/responses", json=body)).status_code == 200
    assert _num_images(house) == 1


async def test_a_response_of_a_deleted_owner_does_not_begin(house: House) -> None:
    client, body = house.client(house.key()), _response(data_url(picture(1)))
    house.records.keys().forget("me")  # this server does not know it yet
    found = await client.post("/v1/responses", json=body)
    assert (found.status_code, found.json()["error"]["code"]) == (401, "key_revoked")
    assert _num_images(house) == 0


async def test_a_file_has_the_images_of_its_conversations(house: House) -> None:
    mine, other = (house.client(house.key(name)) for name in ("me", "you"))
    its_id, sent = await _new(mine), picture(1)
    await _chat(mine, its_id, _question(data_url(sent)))
    file = (await mine.get(f"/v1/conversations/{its_id}/export")).json()
    (image,) = file["images"]
    assert base64.b64decode(image["content"]) == await _canonical(sent)
    (made,) = (await other.post("/v1/conversations/import", json=file)).json()["data"]
    question = (await _tree(other, made["id"]))[0]
    assert question["content"] == (await _tree(mine, its_id))[0]["content"]
    found = await _show(other, made["id"], question["content"][0]["file_id"])
    assert found.content == await _canonical(sent)
    for images, reason in (
        ([], "missing in the file"),
        ([{**image, "content": "AAAA"}], "cannot be used"),
        ([{**image, "content": "AAAA"}] * 300, "at most 256 images"),
    ):
        refused = await other.post("/v1/conversations/import", json={**file, "images": images})
        assert (refused.status_code, reason in refused.text) == (400, True), refused.text


async def test_items_count_as_bodies_until_their_images_are_kept(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, read = asyncio.Event(), ImageReader.read

    async def late(self: ImageReader, *given: Any, **more: Any) -> tuple[Image, ...]:  # Any: as of the method
        await may_read.wait()
        return await read(self, *given, **more)

    monkeypatch.setattr(ImageReader, "read", late)
    content = [{"type": "input_image", "image_url": data_url(picture(1))}, {"type": "input_text", "text": "a" * 70_000}]
    body = {"items": [{"role": "user", "content": content}]}
    async with house.opened(Settings(body_bytes=100_000, pending_body_bytes=400_000)):
        client = house.client(house.key())
        posts = [asyncio.ensure_future(client.post("/v1/conversations", json=body)) for _ in range(8)]
        refused, waiting = await asyncio.wait(posts, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        may_read.set()
        assert {one.result().status_code for one in refused} == {429}
        assert 200 in [one.status_code for one in await asyncio.gather(*waiting)]


async def test_a_model_without_eyes_gets_placeholders(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client = house.client(house.key())
    its_id = await _new(client)
    said = await _chat(client, its_id, _question(data_url(picture(1))))
    monkeypatch.setattr(type(house.service.generator), "sees", False)
    prompt = (_USER, *b"[image omitted]\n", *_LOOK.encode(), 10, _ASSISTANT, *said.encode(), 10, *chat_ids("Well?"))
    assert await _chat(client, its_id, {"role": "user", "content": "Well?"}) == _answer(prompt).text


@pytest.mark.deep
async def test_of_many_images_the_model_sees_the_newest_again(house: House) -> None:
    client = house.client(house.key())
    content = [[{"type": "input_image", "image_url": data_url(picture(seed))}] for seed in range(18)]
    items = [{"role": "user", "content": one} for one in content]
    its_id = await _new(client, items=items[:9])
    path = f"/v1/conversations/{its_id}/items"
    assert (await client.post(path, json={"items": items[9:]})).status_code == 200
    run = await client.post(
        "/v1/streams",
        json={"conversation": its_id, "messages": [_question(data_url(picture(99)))], "max_tokens": 400},
    )
    assert run.status_code == 201, run.text
    (live,) = house.service.generator.live
    expected = [(await _shown(picture(seed))).digest for seed in (*range(3, 18), 99)]
    assert list(live.record.attachments) == expected
    assert live.record.prompts[0].text.count("[image omitted]") == 3


async def test_the_limits_of_a_key_come_before_its_images(house: House) -> None:
    client = house.client(house.key("me", quota=Quota(requests_per_minute=1)))
    asked = {"messages": [_question(data_url(picture(1)))], "max_tokens": 1}
    assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
    cut = {"messages": [_question(data_url(picture(2)[:-3000]))], "max_tokens": 1}
    assert (await client.post("/v1/chat/completions", json=cut)).status_code == 429  # nobody has looked at the picture


async def test_adding_images_counts_as_a_request(house: House) -> None:
    """Each of the ways to add them. A refused one has read no image."""
    client = house.client(house.key("me", quota=Quota(requests_per_month=3)))
    its_id = await _new(client)
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(picture(1))}]}]
    path = f"/v1/conversations/{its_id}"
    cut, png = picture(2)[:-3000], {"content-type": "image/png"}
    assert (await client.post(f"{path}/images", content=picture(3), headers=png)).status_code == 200
    assert (await client.post(f"{path}/items", json={"items": items})).status_code == 200
    assert (await client.post(f"{path}/images", content=cut, headers=png)).status_code == 400
    assert (await client.post(f"{path}/images", content=cut, headers=png)).status_code == 429
    assert (await client.post("/v1/conversations", json={"items": items})).status_code == 429
    assert (await client.post(f"{path}/items", json={"items": [{"role": "user", "content": "?"}]})).status_code == 200
    file = (await client.get(f"{path}/export")).content
    found = await client.post("/v1/conversations/import", content=file, headers={"content-type": "application/json"})
    assert found.status_code == 429


async def test_counting_images_is_work_for_who_may_generate(house: House) -> None:
    picture_of = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(1)).decode()}
    messages = [{"role": "user", "content": [{"type": "image", "source": picture_of}]}]
    path, body = "/v1/messages/count_tokens", {"model": "default", "messages": messages}
    reader = house.client(house.key("me", scopes=("read",)))
    found = await reader.post(path, json=body)
    assert (found.status_code, "generate" in found.text) == (403, True)
    text = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
    assert (await reader.post(path, json=text)).status_code == 200
    assert (await house.client(house.key("me")).post(path, json=body)).status_code == 200


async def test_an_image_of_a_conversation_is_counted_by_its_id(house: House) -> None:
    client = house.client(house.key("me"))
    its_id = await _new(client)
    sent = await client.post(
        f"/v1/conversations/{its_id}/images", content=picture(1), headers={"content-type": "image/png"}
    )
    image_id = sent.json()["id"]

    async def count(url: str, by: httpx.AsyncClient = client) -> httpx.Response:
        block = {"type": "image", "source": {"type": "url", "url": url}}
        body = {"model": "default", "messages": [{"role": "user", "content": [block]}]}
        return await by.post("/v1/messages/count_tokens", json=body)

    found, whole = await count(image_id), await count(data_url(picture(1)))
    assert (found.status_code, found.json()) == (200, whole.json())
    for url, by in ((image_id, house.client(house.key("another"))), (f"img_{'0' * 64}", client)):
        assert (await count(url, by)).status_code == 400


async def test_images_of_earlier_turns_have_their_place_among_those_in_use(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = house.client(house.key())
    its_id = await _new(client)
    await _chat(client, its_id, _question(data_url(picture(1))))
    limits = house.service.generator.limits
    monkeypatch.setattr(house.service.generator, "limits", replace(limits, image_bytes=1000))
    assert "Too many images are in use" in await _chat(client, its_id, {"role": "user", "content": "?"}, status=429)
    monkeypatch.setattr(house.service.generator, "limits", limits)
    await _chat(client, its_id, {"role": "user", "content": "?"})
