"""Images in questions, on every wire, and what attackers send in their place."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
from tests.api.keyed import serving_with_keys
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.seeing import data_url, picture

from tailrace.dialects.images import image_of_base64
from tailrace.images.reader import ImageReader
from tailrace.types import Attachment, Image, Segment
from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS, read_ids

_PICTURE = picture(1)
_NUM_IMAGE_TOKENS = 90 * 50 // 1024
_QUESTION = "What is in it?"
_COUNT = 12
_BASE64 = base64.b64encode(_PICTURE).decode()
_URL = data_url(_PICTURE)
_MARKS = tuple(256 + CONTROL_TOKENS.index(f"<|{name}|>") for name in ("user", "assistant"))


def _shown(content: bytes = _PICTURE, num_tokens: int = _NUM_IMAGE_TOKENS) -> Attachment:
    (image,) = asyncio.run(ImageReader().read((Image(content),), as_sent=False))
    return Attachment(image.digest, "image/png", num_tokens)


def _answer(*parts: str | Attachment, seed: int = 5) -> Answer:
    """Return the answer to a user's message of these parts."""
    texts: list[Segment] = [one if isinstance(one, Attachment) else tuple(one.encode()) for one in parts]
    return Answer(read_ids(((_MARKS[0],), *texts, (10, _MARKS[1]))), _COUNT, seed)


def _openai(body: Any) -> tuple[str, int]:  # Any: JSON, here and below
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


_WIRES: dict[str, tuple[str, dict[str, Any], Callable[[Any], tuple[str, int]]]] = {
    "openai": (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": _URL, "detail": "low"}},
                        {"type": "text", "text": _QUESTION},
                    ],
                }
            ],
            "max_tokens": _COUNT,
            "seed": 5,
        },
        _openai,
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": _URL},
                        {"type": "input_text", "text": _QUESTION},
                    ],
                }
            ],
            "max_output_tokens": _COUNT,
            "seed": 5,
        },
        lambda body: (body["output"][-1]["content"][0]["text"], body["usage"]["input_tokens"]),
    ),
    "anthropic": (
        "/v1/messages",
        {
            "model": "default",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _BASE64}},
                        {"type": "text", "text": _QUESTION},
                    ],
                }
            ],
            "max_tokens": _COUNT,
        },
        lambda body: (body["content"][0]["text"], body["usage"]["input_tokens"]),
    ),
    "ollama chat": (
        "/api/chat",
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": _QUESTION, "images": [_BASE64]}],
            "stream": False,
            "options": {"num_predict": _COUNT, "seed": 5},
        },
        lambda body: (body["message"]["content"], body["prompt_eval_count"]),
    ),
    "ollama generate": (
        "/api/generate",
        {
            "model": "scripted",
            "prompt": _QUESTION,
            "images": [_BASE64],
            "stream": False,
            "options": {"num_predict": _COUNT, "seed": 5},
        },
        lambda body: (body["response"], body["prompt_eval_count"]),
    ),
}


@pytest.mark.parametrize("name", _WIRES)
def test_each_wire_has_images(name: str, server: Server) -> None:
    path, body, shown = _WIRES[name]
    found = server.http.post(path, json=body)
    assert found.status_code == 200, found.text
    answer = _answer(_shown(), _QUESTION)
    text, num_tokens = shown(found.json())
    assert num_tokens == len(answer.prompt_ids)
    assert text == "".join(answer.texts) or name == "anthropic"  # which has no seeds


def test_tgi_has_images_in_markdown(server: Server) -> None:
    parameters = {"max_new_tokens": _COUNT, "seed": 5, "do_sample": True}
    asked = {"inputs": f"Once ![]({_URL})and", "parameters": parameters}
    answer = Answer(read_ids((tuple(b"Once "), _shown(), tuple(b"and"))), _COUNT, 5)
    assert server.post("/generate", asked).json() == {"generated_text": "".join(answer.texts)}
    root = server.post("/", {**asked, "parameters": {**parameters, "return_full_text": True}}).json()
    assert root[0]["generated_text"] == "Once and" + "".join(answer.texts)
    for wrong in ("https://example.com/a.png", "data:image/png;base64,AAAA"):
        found = server.http.post("/generate", json={"inputs": f"![]({wrong})"})
        assert found.status_code == 422
        assert "inputs" in found.json()["error"]


def test_llama_server_has_images_at_markers(server: Server) -> None:
    parts = {"prompt_string": "Once <__media__>and <__media__>.", "multimodal_data": [_BASE64, _BASE64]}
    asked = {"prompt": parts, "n_predict": _COUNT, "seed": 5, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    answer = Answer(read_ids((tuple(b"Once "), _shown(), tuple(b"and "), _shown(), tuple(b"."))), _COUNT, 5)
    found = server.post("/completion", asked).json()
    assert (found["content"], found["tokens_evaluated"]) == ("".join(answer.texts), len(answer.prompt_ids))
    wrongs: list[dict[str, object]] = [
        {"multimodal_data": [_BASE64]},
        {"multimodal_data": [_BASE64, "AAAA"]},
        {"multimodal_data": []},
        {"prompt_string": ""},
    ]
    for wrong in wrongs:
        refused = server.http.post("/completion", json=asked | {"prompt": parts | wrong})
        assert (refused.status_code, "prompt" in refused.text) == (400, True), refused.text


def test_images_stand_where_they_are_in_the_text(server: Server) -> None:
    second = picture(2, 64, 64, kind="WEBP")
    parts = ["First: ", _URL, "second: ", data_url(second, "image/webp"), "once more: ", _URL, "."]
    shown = [_shown() if one == _URL else _shown(second, 4) if one.startswith("data") else one for one in parts]
    content = [
        {"type": "image_url", "image_url": one} if one.startswith("data") else {"type": "text", "text": one}
        for one in parts
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": _COUNT, "seed": 5}
    answer = _answer(*shown)
    assert _openai(server.post("/v1/chat/completions", body).json()) == ("".join(answer.texts), len(answer.prompt_ids))


def test_earlier_images_are_read_and_images_of_tools_are_not(server: Server) -> None:
    image = {"type": "image_url", "image_url": {"url": _URL}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": _QUESTION},
    ]
    body = {"messages": turns, "max_tokens": _COUNT, "seed": 5}
    user, assistant = _MARKS
    prompt = read_ids(((user,), _shown(), (*b"Look.\n", assistant, *b"Yes.\n", *chat_ids(_QUESTION))))
    assert _openai(server.post("/v1/chat/completions", body).json())[0] == "".join(Answer(prompt, _COUNT, 5).texts)


def test_images_are_counted_before_they_run(server: Server) -> None:
    body = {key: value for key, value in _WIRES["anthropic"][1].items() if key not in ("max_tokens", "seed")}
    counted = server.post("/v1/messages/count_tokens", body).json()
    assert counted == {"input_tokens": len(_answer(_shown(), _QUESTION).prompt_ids)}


def _ask(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


_REFUSED: Mapping[str, tuple[str, str]] = {
    "an address": ("https://example.com/a.png", "does not fetch"),
    "the address of a file": ("file:///etc/passwd", "must be a data URL"),
    "another scheme": ("ftp://example.com/a.png", "must be a data URL"),
    "a spelling of an address": ("HTTP://127.0.0.1/a.png", "does not fetch"),
    "no image": ("data:text/html;base64,PGI+", "none of"),
    "SVG": ("data:image/svg+xml;base64,PHN2Zy8+", "SVG is not supported"),
    "SVG under another name": (data_url(b"<svg/>"), "none of"),
    "not base64": ("data:image/png;base64,%%%", "not valid base64"),
    "not encoded": ("data:image/png,abc", "must be encoded as base64"),
    "nothing": ("data:image/png;base64,", "is empty"),
    "a cut picture": (data_url(_PICTURE[:-3000]), "damaged"),
    "a digest of a picture": ("attachment:" + "0" * 64, "must be a data URL"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_no_image_is_refused_by_name(name: str, server: Server) -> None:
    url, reason = _REFUSED[name]
    found = server.http.post("/v1/chat/completions", json=_ask(url))
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "messages[0].content[0].image_url")
    assert reason in error["message"]
    assert url not in found.text


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text,
        lambda text: "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76)),
        lambda text: text.rstrip("="),
        lambda text: text.replace("+", "-").replace("/", "_"),
        quote_plus,
    ],
    ids=["usual", "lines", "no padding", "alphabet of URLs", "percents"],
)
def test_base64_has_many_forms(form: Callable[[str], str]) -> None:
    content = bytes(range(256))
    image = image_of_base64(form(base64.b64encode(content).decode()), "here")
    assert image.content == content
    assert image.digest is image.digest  # of megabytes: computed once


def test_a_thousand_images_are_refused_at_once(server: Server) -> None:
    small = {"type": "image_url", "image_url": {"url": data_url(picture(1, 8, 8))}}
    body = {"messages": [{"role": "user", "content": [small] * 1000}], "max_tokens": 1}
    found = server.http.post("/v1/chat/completions", json=body)
    assert found.status_code == 400
    assert "at most 16 images" in found.text


def test_the_names_of_fields_are_those_of_each_wire(server: Server) -> None:
    bad = "AAAA"
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": bad}}
    by_url = {"type": "image", "source": {"type": "url", "url": "http://[::1]/a.png"}}
    by_file = {"type": "input_image", "file_id": "file-1"}
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/messages", {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": [anthropic]}]},
         "messages[0].content[0].source.data"),
        ("/v1/messages", {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": [by_url]}]},
         "messages[0].content[0].source.url"),
        ("/v1/responses", {"input": [{"role": "user", "content": [by_file]}]}, "input[0].content[0].file_id"),
        ("/api/chat", {"model": "scripted", "messages": [{"role": "user", "content": "Hi", "images": [bad]}]},
         "messages[0].images[0]"),
        ("/api/generate", {"model": "scripted", "prompt": "Hi", "images": [bad]}, "images[0]"),
        ("/api/generate", {"model": "scripted", "prompt": "Hi", "images": [bad], "raw": True}, "raw"),
    ]  # fmt: skip
    for path, body, name in asked:
        found = server.http.post(path, json=body)
        assert found.status_code == 400, found.text
        assert name in found.text


def test_a_model_without_eyes_refuses_an_image(serve: Callable[..., Server], tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"rules": [{"say": "Hello."}]}', encoding="utf-8")
    with contextlib.closing(serve(f"scripted:script={script}")) as blind:
        assert "vision" not in blind.post("/api/show", {"model": "default"}).json()["capabilities"]
        for path, body, _ in _WIRES.values():
            found = blind.http.post(path, json=body)
            assert found.status_code == 400, path
            assert "reads no image" in found.text


@pytest.mark.parametrize("kind", ["PNG", pytest.param("JPEG", marks=pytest.mark.deep)])
def test_an_upstream_server_gets_images_as_they_came(kind: str, server: Server, serve: Callable[..., Server]) -> None:
    sent = picture(3, kind=kind)
    front = serve(f"openai:{server.url}/v1").wait_ready()
    assert "vision" in front.post("/api/show", {"model": "default"}).json()["capabilities"]
    parts = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": data_url(sent)}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": _COUNT, "seed": 5}
    answer = _answer("Look: ", _shown(sent))
    assert _openai(front.post("/v1/chat/completions", body).json()) == ("".join(answer.texts), len(answer.prompt_ids))
    cut = {"messages": [{"role": "user", "content": [parts[1] | {"image_url": data_url(sent[:-2500])}]}]}
    assert front.http.post("/v1/chat/completions", json=cut).status_code == 400
    plain = front.http.post("/generate", json={"inputs": f"![]({_URL})"})
    assert (plain.status_code, "only in chats" in plain.text) == (422, True)


@pytest.mark.deep
def test_a_response_about_an_image_is_continued_where_no_database_was(serve: Callable[..., Server]) -> None:
    with contextlib.closing(serve("scripted")) as server:
        first = server.post("/v1/responses", _WIRES["responses"][1]).json()
        body = {"input": "More.", "previous_response_id": first["id"], "max_output_tokens": _COUNT, "seed": 5}
        user, assistant = _MARKS
        said = first["output"][-1]["content"][0]["text"]
        prompt = ((user,), _shown(), (*_QUESTION.encode(), 10, assistant, *said.encode(), 10, *chat_ids("More.")))
        text = _WIRES["responses"][2](server.post("/v1/responses", body).json())[0]
        assert text == "".join(Answer(read_ids(prompt), _COUNT, 5).texts)


def test_an_encrypted_journal_lets_no_database_have_an_image(serve: Callable[..., Server], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    with contextlib.closing(serve("scripted", "--journal-key-file", str(secret))) as server:
        first = server.post("/v1/responses", _WIRES["responses"][1]).json()
        found = server.http.post("/v1/responses", json={"input": "More.", "previous_response_id": first["id"]})
        assert (found.status_code, "images, which this server does not keep" in found.text) == (400, True)


def test_the_same_key_finds_the_same_stream_also_after_its_end(server: Server) -> None:
    _, body, shown = _WIRES["openai"]
    headers = {"idempotency-key": "an-image"}
    first, second = (server.http.post("/v1/chat/completions", json=body, headers=headers).json() for _ in range(2))
    assert first["id"] == second["id"]
    assert shown(first) == shown(second)


async def test_images_belong_to_their_owner(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        mine, other = (house.client(house.key(name)) for name in ("me", "you"))
        began = await mine.post("/v1/streams", json={**_ask(_URL), "max_tokens": 400})
        path = f"/v1/streams/{began.json()['id']}"
        assert (await other.get(path)).status_code == 404
        (run,) = house.service.generator.live
        (digest,) = run.record.attachments
        for url in (digest, f"sha256:{digest}", f"attachment:{digest}", f"data:image/png;base64,{digest}"):
            found = await other.post("/v1/chat/completions", json=_ask(url))
            assert found.status_code == 400
        await mine.delete(path)
        assert not run.log.record.attachments


async def test_images_of_all_streams_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_with_keys(tmp_path) as house:
        client = house.client(house.key())
        one = _shown_bytes()
        limits = house.service.generator.limits
        monkeypatch.setattr(house.service.generator, "limits", _with_room(limits, 2 * one))
        body = {**_ask(_URL), "max_tokens": 2000}
        streams = [await client.post("/v1/streams", json=body) for _ in range(3)]
        assert [found.status_code for found in streams] == [201, 201, 429]
        assert "retry-after" in streams[2].headers
        assert (await client.post("/v1/streams", json={"prompt": "Text.", "max_tokens": 1})).status_code == 201
        await client.delete(f"/v1/streams/{streams[0].json()['id']}")
        assert (await client.post("/v1/streams", json=body)).status_code == 201


def _shown_bytes() -> int:
    import io

    from PIL import Image as Pillow

    file = io.BytesIO()
    Pillow.open(io.BytesIO(_PICTURE)).save(file, "PNG", compress_level=3)
    return len(file.getvalue())


def _with_room(limits: Any, image_bytes: int) -> Any:
    from dataclasses import replace

    return replace(limits, image_bytes=image_bytes + 100)


def test_links_that_are_not_closed_are_read_once(server: Server) -> None:
    """A search that begins again at each of them takes minutes for a body like this."""
    answer = server.post("/generate", {"inputs": "![](data:" * 150_000, "parameters": {"max_new_tokens": 1}})
    assert answer.status_code == 422
    assert server.http.get("/readyz").status_code == 200
