"""Large bodies: for images, where a model reads them, and for nothing else."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.own_keys import key_of
from tests.api.process import Server
from tests.clients.json_socket import open_socket, receive_json, send_json
from tests.seeing import data_url, picture

from tailrace.dialects.images import len_without_images

_LIMIT = 2_000_000
_PHOTO = picture(1, 1600, 1200)  # 5.8 MB of noise
_URL = data_url(_PHOTO)
_ZEROS = "data:image/png;base64,iVBORw0KGgo" + "A" * 20_000_000


def _chat(*parts: object, **more: object) -> dict[str, Any]:  # Any: of JSON
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, **more}


def _image(url: str = _URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


_LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", _chat(_image(), {"type": "text", "text": "Look: ü"})),
    "native": ("/v1/streams", _chat(_image())),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": _URL}]}], "max_output_tokens": 1},
    ),
    "anthropic": (
        "/v1/messages/count_tokens",
        {
            "model": "default",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": base64.b64encode(_PHOTO).decode(),
                            },
                        }
                    ],
                }
            ],
        },
    ),
    "ollama": (
        "/api/generate",
        {
            "model": "default",
            "prompt": "Look",
            "images": [base64.b64encode(_PHOTO).decode()],
            "stream": False,
            "options": {"num_predict": 1},
        },
    ),
    "tgi": ("/generate", {"inputs": f"Look: ![]({_URL}) and tell", "parameters": {"max_new_tokens": 1}}),
    "llama-server": (
        "/completion",
        {
            "prompt": {"prompt_string": "<__media__>", "multimodal_data": [base64.b64encode(_PHOTO).decode()]},
            "n_predict": 1,
        },
    ),
    "conversations": (
        "/v1/conversations",
        {"items": [{"role": "user", "content": [{"type": "input_image", "image_url": _URL}]}]},
    ),
}


_ALIKE = ("ollama", "tgi", "llama-server", "conversations")  # the limit is of all routes that may have images


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name in _ALIKE else ()) for name in _LARGE]
)
def test_a_photo_fits_where_a_model_reads_it(name: str, server: Server) -> None:
    path, body = _LARGE[name]
    found = server.http.post(path, json=body)
    assert found.status_code in (200, 201), found.text
    assert int(found.request.headers["content-length"]) > 3 * _LIMIT


@pytest.mark.deep
def test_a_photo_fits_on_the_socket_of_responses(server: Server) -> None:
    path, body = _LARGE["responses"]
    with open_socket(server, path) as socket:
        send_json(socket, type="response.create", model="default", **body)
        ends = ("error", "response.failed", "response.completed", "response.incomplete")
        while (event := receive_json(socket))["type"] not in ends:
            pass
        assert event["type"] in ends[2:], event
        for text in ("word " * 500_000, _LONG):
            more = body | {"instructions": text}
            send_json(socket, type="response.create", model="default", **more)
            refused = receive_json(socket)
            assert refused["error"]["code"] == "body_too_large", refused


_REFUSED: dict[str, Callable[[], bytes]] = {
    "text": lambda: json.dumps(_chat({"type": "text", "text": "word " * 500_000})).encode(),
    "text beside an image": lambda: json.dumps(_chat(_image(), {"type": "text", "text": "word " * 500_000})).encode(),
    "letters": lambda: json.dumps(_chat({"type": "text", "text": "A" * 2_500_000})).encode(),
    "lists": lambda: b'{"x": [' + b"[]," * 5_000_000 + b"1]}",
    "empty texts": lambda: b'{"x": [' + b'"",' * 5_000_000 + b"1]}",
    "an image that is a text": lambda: json.dumps(_chat(_image(_ZEROS[:9_000_000] + "😀"))).encode(),
    "more than that": lambda: json.dumps(_chat(_image(_ZEROS))).encode(),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_a_large_body_has_images_and_little_else(name: str, server: Server) -> None:
    for path in ("/v1/chat/completions", "/v1/conversations"):
        found = server.http.post(path, content=_REFUSED[name](), headers={"content-type": "application/json"})
        assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")


_LONG = base64.b64encode(_PHOTO[:12]).decode() + "a" * _LIMIT  # begins as an image
_UNSEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("/v1/chat/completions", _chat({"type": "text", "text": _LONG})),
    "message beside an image": ("/v1/chat/completions", _chat(_image(), {"type": "text", "text": _LONG})),
    "schema": (
        "/v1/chat/completions",
        _chat(
            {"type": "text", "text": "Hi"},
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": _LONG}}},
        ),
    ),
    "counted": ("/v1/messages/count_tokens", {"model": "default", "messages": [{"role": "user", "content": _LONG}]}),
    "ollama": ("/api/generate", {"model": "default", "prompt": _LONG}),
    "tgi": ("/generate", {"inputs": _LONG}),
    "conversation": ("/v1/conversations", {"items": [{"role": "user", "content": _LONG}]}),
    "metadata": ("/v1/conversations", {"items": [], "unknown": _LONG}),
    "file": ("/v1/conversations/import", {"conversations": [{"from": "human", "value": _LONG}]}),
}


@pytest.mark.parametrize("name", _UNSEEN)
def test_a_text_that_looks_like_base64_is_no_image(name: str, server: Server) -> None:
    path, body = _UNSEEN[name]
    found = server.http.post(path, json=body)
    assert found.status_code == 413
    assert "larger than 2000000 bytes" in found.text


def test_where_nothing_reads_images_bodies_are_small(serve: Callable[..., Server], tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"rules": [{"say": "Hello."}]}', encoding="utf-8")
    with contextlib.closing(serve(f"scripted:script={script}")) as blind:
        for path, body in _LARGE.values():
            assert blind.http.post(path, json=body).status_code == 413


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    database = f"sqlite:///{tmp_path_factory.mktemp('sizes') / 'records.sqlite'}"
    key = key_of(database, "reader", "read")
    with contextlib.closing(Server("scripted", "--database", database)) as server:
        yield server.wait_ready(), key


def test_a_key_that_may_not_generate_sends_no_photo(keyed: tuple[Server, str]) -> None:
    server, key = keyed
    path, body = _LARGE["anthropic"]
    assert server.http.post(path, json=body, headers={"authorization": f"Bearer {key}"}).status_code == 413


@given(st.binary(max_size=2**16), st.integers(0, 3), st.booleans())
def test_images_do_not_count_and_everything_else_does(content: bytes, num_images: int, is_escaped: bool) -> None:
    encoded = base64.b64encode(b"\x89PNG\r\n\x1a\n" + content * (1 + 6000 // max(1, len(content)))).decode()
    parts: list[object] = [_image(f"data:image/png;base64,{encoded}") for _ in range(num_images)]
    text = json.dumps(_chat({"type": "text", "text": "so (it) is " * 1000}, *parts))
    if is_escaped:
        text = text.replace("/", "\\/")  # as PHP writes it
    slashes = encoded.count("/") if is_escaped else 0
    others = len(text) - num_images * (len(encoded) + slashes)
    if content:
        assert others - 40 * num_images <= len_without_images(text.encode()) <= others
