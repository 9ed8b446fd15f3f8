"""A stream about an image survives its engine, its server and its machine; then its image is gone."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.faults.house import Follower, House, Servers, Stream
from tests.faults.team import team
from tests.seeing import data_url, picture
from tests.waiting import until

from tailrace.images.reader import ImageReader
from tailrace.types import Attachment, Image
from tailrace_outer.scripted.scripted_engine import CRASH_SIZE, read_ids

_COUNT = 400  # on a busy machine the second stream begins seconds after the first one
_QUESTION = "What is in it?"
_NUM_TOKENS = 90 * 50 // 1024


def _canonical(content: bytes) -> Image:
    (image,) = asyncio.run(ImageReader().read((Image(content),), as_sent=False))
    return image


def _begin(house: Servers, server: Server, seed: int) -> tuple[Stream, Image]:
    """Begin a stream about a picture. Returns it, and the picture as the model gets it."""
    sent = picture(seed, kind="JPEG")
    image = _canonical(sent)
    shown = Attachment(image.digest, "image/png", _NUM_TOKENS)
    user, *text = chat_ids(_QUESTION)
    answer = Answer(read_ids(((user,), shown, tuple(text))), _COUNT, seed)
    parts = [{"type": "image_url", "image_url": {"url": data_url(sent, "image/jpeg")}}]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": _QUESTION}]}
    stream_id = server.create({"messages": [message], "max_tokens": _COUNT, "seed": seed})
    return Stream(stream_id, answer, [Follower(house, stream_id), Follower(house, stream_id)]), image


def _num_kept(directory: Path, image: Image) -> int:
    """Return how many streams have an image in the journal, as whoever takes them over finds it."""
    (file,) = directory.glob("*.sqlite")
    query = "SELECT count(*) FROM streams WHERE instr(record, ?)"
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
        (number,) = connection.execute(query, (image.content,)).fetchone()
    connection.close()
    return int(number)


def test_a_stream_about_an_image_survives_engine_and_server(tmp_path: Path) -> None:
    with House(tmp_path / "data", "scripted:tokens_per_s=100") as house:
        begun = [_begin(house, house.server, seed) for seed in (1, 2)]
        house.streams += [stream for stream, _ in begun]
        for stream in house.streams:
            stream.seen(8)
        assert [_num_kept(house.directory, image) for _, image in begun] == [1, 1]
        house.kill_engine()
        for stream in house.streams:
            stream.seen(20)
        house.restart()
        for stream in house.streams:
            stream.wait()
        until(lambda: not any(_num_kept(house.directory, image) for _, image in begun))


@pytest.mark.deep
def test_an_image_that_kills_engines_ends_no_stream_and_is_refused(tmp_path: Path) -> None:
    with House(tmp_path / "data", "scripted:tokens_per_s=50") as house:
        stream, _ = _begin(house, house.server, 1)
        house.streams.append(stream)
        image = {"type": "image_url", "image_url": data_url(picture(2, *CRASH_SIZE))}
        body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        answers = [house.server.http.post("/v1/chat/completions", json=body) for _ in range(3)]
        assert [one.status_code for one in answers] == [503, 503, 422]
        assert answers[2].json()["error"]["code"] == "poison_request"
        stream.wait()


@pytest.mark.deep
def test_a_stream_about_an_image_survives_its_machine(tmp_path: Path) -> None:
    with team(tmp_path) as (servers, redis):
        first, _ = servers.servers
        stream, image = _begin(servers, first, 3)
        servers.streams.append(stream)
        stream.seen(8)
        with redis.client() as client:
            kept = [client.hget(key, "record") or b"" for key in client.scan_iter("*:stream:*", _type="hash")]
            assert [image.content in record for record in kept].count(True) == 1
            servers.kill(first)
            stream.wait()

            def is_gone() -> bool:
                rows = [client.hget(key, "record") or b"" for key in client.scan_iter("*:stream:*", _type="hash")]
                return bool(rows) and not any(image.content in record for record in rows)

            until(is_gone)
