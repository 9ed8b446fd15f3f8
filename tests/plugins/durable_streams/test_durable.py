"""Durable streams over real sockets. The protocol's own test suite runs in
tests/clients/test_durable_conformance.py."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.process import Server
from tests.plugins.durable_streams.durable_servers import JSON, KINDS, TEXT, durable_server, new_path
from tests.waiting import LONG_S

PAGE = Path(__file__).parents[3] / "docs" / "durable-streams.md"


@pytest.fixture
def path() -> str:
    return new_path()


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = durable_server(
        request.param,
        source="scripted:tokens_per_s=100",
        flags=("--durable-poll-s", "0.3", "--allowed-origins", "https://app.example"),
    )
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def door(target: Server) -> httpx.Client:
    return target.http


def test_appended_data_can_be_read_from_any_offset(door: httpx.Client, path: str) -> None:
    made = door.put(path, headers=TEXT, content="one")
    assert (made.status_code, made.headers["location"]) == (201, str(door.base_url.join(path)))
    offsets = [made.headers["stream-next-offset"]]
    for text in ("two", "three"):
        appended = door.post(path, headers=TEXT, content=text)
        assert (appended.status_code, appended.content) == (204, b"")
        offsets.append(appended.headers["stream-next-offset"])
    assert offsets == sorted(offsets)
    for offset, rest in zip(["-1", *offsets], ["onetwothree", "twothree", "three", ""], strict=True):
        answer = door.get(path, params={"offset": offset})
        assert (answer.status_code, answer.text) == (200, rest)
        assert answer.headers["stream-next-offset"] == offsets[-1]
        assert answer.headers["stream-up-to-date"] == "true"
    assert door.put(path, headers=TEXT).status_code == 200
    assert door.put(path, headers=JSON).status_code == 409
    assert door.head(path).headers["stream-next-offset"] == offsets[-1]
    assert door.delete(path).status_code == 204
    assert door.get(path).status_code == 404


def test_a_long_stream_is_read_in_pages(path: str, paced: Server) -> None:
    roomy = paced.http
    roomy.put(path, headers=TEXT)
    sent = b""
    for n in range(6):
        piece = str(n).encode() * 400_000
        roomy.post(path, headers=TEXT, content=piece)
        sent += piece
    received, offset, num_pages, is_done = b"", "-1", 0, False
    while not is_done:
        answer = roomy.get(path, params={"offset": offset})
        received += answer.content
        offset, num_pages, is_done = (
            answer.headers["stream-next-offset"],
            num_pages + 1,
            "stream-up-to-date" in answer.headers,
        )
    assert received == sent
    assert num_pages == 2


def test_json_messages_stay_separate(door: httpx.Client, path: str) -> None:
    door.put(path, headers=JSON, content=b"[]")
    for body in (b'{"a": 1}', b"[2, [3]]", b'[ "four" ]'):
        assert door.post(path, headers=JSON, content=body).status_code == 204
    assert door.get(path).content == b'[{"a": 1},2,[3],"four"]'
    assert door.get(path, params={"offset": "now"}).content == b"[]"


def test_line_ends_of_unicode_are_escaped_in_json(door: httpx.Client, path: str) -> None:
    """Some clients split lines at them."""
    door.put(path, headers=JSON, content=b"[]")
    texts = ["a\u2028b", "\u2029", "\u0085 \\", "\u4e28\u00e9"]
    body = json.dumps(texts, ensure_ascii=False).encode()
    assert door.post(path, headers=JSON, content=body).status_code == 204
    kept = door.get(path).content
    assert json.loads(kept) == texts
    assert len(kept.decode().splitlines()) == 1
    assert "\u4e28\u00e9".encode() in kept, "all else is kept as it is"


def test_a_producer_writes_once_and_is_fenced(door: httpx.Client, path: str) -> None:
    door.put(path, headers=TEXT)

    def write(text: str, epoch: int, seq: int) -> httpx.Response:
        stamp = {"producer-id": "p", "producer-epoch": str(epoch), "producer-seq": str(seq)}
        return door.post(path, headers=TEXT | stamp, content=text)

    assert [write("a", 0, 0).status_code, write("a", 0, 0).status_code, write("b", 0, 1).status_code] == [200, 204, 200]
    gap = write("d", 0, 3)
    assert (gap.status_code, gap.headers["producer-expected-seq"], gap.headers["producer-received-seq"]) == (
        409,
        "2",
        "3",
    )
    assert write("c", 1, 0).status_code == 200
    fenced = write("z", 0, 2)
    assert (fenced.status_code, fenced.headers["producer-epoch"], fenced.json()["error"]["code"]) == (
        403,
        "1",
        "stale_epoch",
    )
    assert door.get(path).text == "abc"


def test_a_fork_is_independent(door: httpx.Client, path: str) -> None:
    at = door.put(path, headers=TEXT, content="one").headers["stream-next-offset"]
    door.post(path, headers=TEXT, content="two")
    for source in (path, path.removeprefix("/v1/durable")):
        fork = f"{path}/{len(source)}"
        made = door.put(fork, headers={"stream-forked-from": source, "stream-fork-offset": at})
        assert made.status_code == 201
        door.post(fork, headers=TEXT, content="other")
        assert door.get(fork).text == "oneother"
    assert door.get(path).text == "onetwo"


def test_cached_pages_are_304_except_when_the_stream_is_closed(door: httpx.Client, path: str) -> None:
    door.put(path, headers=TEXT, content="one")
    known = {"if-none-match": door.get(path).headers["etag"]}
    again = door.get(path, headers=known)
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", known["if-none-match"])
    door.post(path, headers={"stream-closed": "true"})
    assert door.get(path, headers=known).headers["stream-closed"] == "true"
    door.delete(path)
    door.put(path, headers=TEXT, content="two")
    assert door.get(path, headers=known).text == "two"


# Browsers


def test_pages_of_other_origins_are_refused(door: httpx.Client, path: str) -> None:
    door.put(path, headers={"content-type": "text/html"}, content="<script>alert(1)</script>")
    foreign = {"origin": "https://elsewhere.example"}
    for method in ("GET", "PUT", "POST", "DELETE", "OPTIONS"):
        assert door.request(method, path, headers=foreign).status_code == 403
    let_in = door.get(path, headers={"origin": "https://app.example"})
    assert let_in.headers["access-control-allow-origin"] == "https://app.example"
    assert "Stream-Next-Offset".lower() in let_in.headers["access-control-expose-headers"]
    asked = {"origin": "https://app.example", "access-control-request-method": "PUT",
             "access-control-request-headers": "producer-id"}  # fmt: skip
    assert door.options(path, headers=asked).status_code == 200
    assert let_in.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert let_in.headers["cross-origin-resource-policy"] == "same-origin"
    assert let_in.headers["x-content-type-options"] == "nosniff"


def test_the_page_is_as_printed(server: Server) -> None:
    """The commands run from top to bottom, because later ones use streams of earlier ones."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        lines = block.replace("localhost:8000", f"127.0.0.1:{server.port}").splitlines()
        script = "\n".join(f"{line[2:]}; echo" for line in lines if line.startswith("$ "))
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == " ".join(line for line in lines if not line.startswith("$ ")).split()
