"""An answer about an image in a conversation outlives its engine, its server and its machine; the image stays in the
conversation, and the next turn has it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.faults.team import team
from tests.processes import wait_ended
from tests.records.databases import own_database
from tests.seeing import data_url, picture
from tests.waiting import until

from tailrace.images.reader import ImageReader
from tailrace.types import Attachment, Image, Segment
from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS, read_ids

_COUNT = 80
_LOOK = "What is in it?"
_USER, _ASSISTANT = (256 + CONTROL_TOKENS.index(f"<|{name}|>") for name in ("user", "assistant"))


def _canonical(content: bytes) -> bytes:
    (image,) = asyncio.run(ImageReader().read((Image(content),), as_sent=False))
    return image.content


class _Talk:
    """A conversation about a picture."""

    def __init__(self, server: Server, seed: int) -> None:
        sent = picture(seed, kind="JPEG")
        self.seed = seed
        self.canonical = _canonical(sent)
        shown = Attachment.of(self.canonical, "image/png", 90 * 50 // 1024)
        self._asked: tuple[Segment, ...] = ((_USER,), shown, (*_LOOK.encode(), 10, _ASSISTANT))
        self.answer = Answer(read_ids(self._asked), _COUNT, seed)
        self.id = str(server.post("/v1/conversations", {}).json()["id"])
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(sent, "image/jpeg")}},
            {"type": "text", "text": _LOOK},
        ]
        messages = [{"role": "user", "content": parts}]
        body = {"messages": messages, "conversation": self.id, "max_tokens": _COUNT, "seed": seed}
        self.stream_id = server.create(body)

    def items(self, server: Server) -> list[dict[str, Any]]:  # Any: of JSON
        answer = server.http.get(f"/v1/conversations/{self.id}/items", params={"order": "asc"})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])

    def wait_begun(self, server: Server) -> None:
        until(lambda: len(server.state(self.stream_id)["text"]) > 8)

    def check(self, server: Server) -> None:
        """Wait for the answer; it and the image are whole, and the model has both in the next turn."""
        until(lambda: [item["status"] for item in self.items(server)][1:] not in ([], ["in_progress"]))
        question, answer = self.items(server)
        assert answer["content"][0]["text"] == self.answer.text
        image, text = question["content"]
        assert text["text"] == _LOOK
        found = server.http.get(f"/v1/conversations/{self.id}/images/{image['file_id']}")
        assert (found.status_code, found.content) == (200, self.canonical)
        body = {"messages": [{"role": "user", "content": "And?"}], "conversation": self.id, "max_tokens": 9, "seed": 1}
        more = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        said = (*self.answer.text.encode(), 10, *chat_ids("And?"))
        assert more == Answer(read_ids((*self._asked, said)), 9, 1).text


class _House:
    """Servers one after the other, over one directory."""

    def __init__(self, directory: Path) -> None:
        self._flags = ("--data-dir", str(directory), "--database", f"sqlite:///{directory / 'records.sqlite'}")
        self.server = self._start()

    def _start(self) -> Server:
        return Server("scripted:tokens_per_s=100", *self._flags).wait_ready()

    def restart(self) -> None:
        """Kill the server; its engine dies with it."""
        children = psutil.Process(self.server.process.pid).children()
        self.server.process.kill()
        self.server.wait()
        self.server.close()
        wait_ended(children)
        self.server = self._start()


@contextlib.contextmanager
def _house(directory: Path) -> Iterator[_House]:
    house = _House(directory)
    try:
        yield house
    finally:
        house.server.close()


@pytest.mark.parametrize(
    "what", [pytest.param("engine", marks=pytest.mark.deep), "server", pytest.param("both", marks=pytest.mark.deep)]
)
def test_an_answer_about_an_image_is_finished(tmp_path: Path, what: str) -> None:
    with _house(tmp_path) as house:
        talks = [_Talk(house.server, seed) for seed in (1, 2)]
        for talk in talks:
            talk.wait_begun(house.server)
        if what != "server":
            house.server.worker().kill()
        if what != "engine":
            house.restart()
        for talk in talks:
            talk.check(house.server)
            assert house.server.http.delete(f"/v1/conversations/{talk.id}").status_code == 200
        with contextlib.closing(sqlite3.connect(tmp_path / "records.sqlite")) as records:
            for table in ("images", "image_uses"):
                assert records.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


@pytest.mark.deep
def test_a_server_that_dies_at_once_loses_no_image(tmp_path: Path) -> None:
    """The image is in the database before the stream begins, and the next server writes the turn."""
    with _house(tmp_path) as house:
        talk = _Talk(house.server, 3)
        house.restart()
        talk.check(house.server)


@pytest.mark.deep
def test_another_server_finishes_an_answer_about_an_image(tmp_path: Path) -> None:
    with (
        own_database("postgresql", tmp_path) as url,
        team(tmp_path, flags=("--database", url)) as (servers, _),
    ):
        first, second = servers.servers
        talks = [_Talk(first, seed) for seed in (4, 5)]
        for talk in talks:
            talk.wait_begun(first)
        servers.kill(first)
        for talk in talks:
            talk.check(second)
