"""A journal of an earlier version can be opened, and its streams continue.

`journals/2043e4d.sqlite` was left by `tailrace serve scripted:tokens_per_s=100` of that commit, which was stopped when
a stream of 100 tokens had 41. Before, one stream had ended, one was deleted, and a durable stream got two appends.

`journals/154832b-apps.sqlite` was left by `tailrace run` of that commit, which was killed when a `serve.stream` had two
items. Before, such a stream and two recorded answers had ended. That version kept their bytes as text.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.apps.process import AppServer, write
from tests.faults.laws import Seen, check, read_journal

from tailrace.errors import StreamExpired
from tailrace.streams import open_sqlite
from tailrace.types import ANONYMOUS, TextDelta

_JOURNAL = Path(__file__).with_name("journals") / "2043e4d.sqlite"
_OF_APPS = Path(__file__).with_name("journals") / "154832b-apps.sqlite"
_FINISHED, _DELETED, _RUNNING = "kbjQeLPFSWRm8Ko1u_QHbw", "1YzC5NjP6Wxsw-assiiryQ", "wGlCyzDjiRz0N016cv9Nfw"
_FOREVER_S = 1e9  # it was written long ago


def _events(server: Server, stream_id: str) -> list[bytes]:
    content = server.http.get(f"/v1/streams/{stream_id}/events").content
    return [event + b"\n\n" for event in content.split(b"\n\n") if event]


def test_streams_of_the_version_before_continue(tmp_path: Path) -> None:
    shutil.copy(_JOURNAL, tmp_path / "journal.sqlite")
    running, finished = Answer("Running.", 100, seed=1), Answer("Finished.", 9, seed=1)
    flags = ("--data-dir", str(tmp_path), "--retention-s", f"{_FOREVER_S:.0f}")
    for _ in range(2):  # and once more, from what this version made of it
        with contextlib.closing(Server("scripted:tokens_per_s=200", *flags)) as server:
            server.wait_ready()
            check(_RUNNING, running, [Seen(_events(server, _RUNNING))], None)
            assert b"".join(_events(server, _FINISHED)) == b"".join(finished.native(_FINISHED))
            assert server.http.get(f"/v1/streams/{_DELETED}").status_code == 410
            assert server.http.get("/v1/durable/notes").content == b"onetwo"
            for stream_id, answer in ((_RUNNING, running), (_FINISHED, finished)):
                body = {"prompt": answer.prompt, "max_tokens": answer.count, "seed": 1, "linger_s": 86400}
                key = str(answer.prompt).lower().rstrip(".")
                assert server.post("/v1/streams", body, idempotency_key=key).json()["id"] == stream_id
            server.send_signal(signal.SIGKILL)
            server.wait()
    kept = read_journal(tmp_path)
    assert set(kept.streams) == {_RUNNING, _FINISHED}
    check(_RUNNING, running, [], kept)


async def test_streams_of_the_version_before_are_anonymous(tmp_path: Path) -> None:
    shutil.copy(_JOURNAL, tmp_path / "journal.sqlite")
    async with open_sqlite(tmp_path, retention_s=_FOREVER_S) as store:
        assert store.epoch == 1
        (lease,) = await store.take_over()
        assert (lease.stream_id, lease.log.record.owner) == (_RUNNING, ANONYMOUS)
        ids = [i for event in lease.log.events if isinstance(event, TextDelta) for i in event.token_ids]
        assert ids == Answer("Running.", 41, seed=1).token_ids
        # Its events do not say whether a token was computed alone: a replay computes all of them in a batch, as then.
        assert not any(event.is_alone for event in lease.log.events if isinstance(event, TextDelta))
        assert (await store.read(ANONYMOUS, _FINISHED)).end is not None
        with pytest.raises(StreamExpired):
            await store.read(ANONYMOUS, _DELETED)


_ITEMS, _CUT_ITEMS = "esnLdd2HW3bwHaDDIp1Nwg", "Lc7dBhOvkqcfw-3868rC0g"
_EVENTS, _IMAGE = "MSwaJgcOtLK1bgVA2rWJhQ", "HXD20snYkwMqF99G0Nc9MA"
_ANY_APP = """
from tailrace import serve

@serve.deployment
class Any:
    async def __call__(self, request):
        return "any"

app = Any.bind()
"""


def test_streams_of_apps_of_the_version_before_can_be_read(tmp_path: Path) -> None:
    shutil.copy(_OF_APPS, tmp_path / "journal.sqlite")
    write(tmp_path, "any.py", _ANY_APP)
    items = [b'{"text":"Gr\\u00f6\\u00dfe \\u20ac"}', b'{"number":1,"text":"\\u65e5\\u672c"}']
    recorded = ["data: Größe €\n".encode(), b"event: x\ndata: 2\n"]
    flags = ("--data-dir", str(tmp_path), "--retention-s", f"{_FOREVER_S:.0f}")
    for _ in range(2):  # and once more, from what this version made of it
        with contextlib.closing(AppServer("any:app", *flags, directory=tmp_path)) as server:
            server.wait_ready()
            for stream_id, end in ((_ITEMS, "done"), (_CUT_ITEMS, "interrupted")):
                *found, last = _events(server, stream_id)
                assert found == [
                    b"retry: 1000\n" * (seq == 1) + b"data: %b\nid: %b-%d\n\n" % (item, stream_id.encode(), seq)
                    for seq, item in enumerate(items, 1)
                ]
                assert last.startswith(f"event: {end}\n".encode())
            assert server.http.get(f"/v1/streams/{_ITEMS}").json()["items"] == [
                {"text": "Größe €"}, {"number": 1, "text": "日本"}
            ]  # fmt: skip
            assert _events(server, _EVENTS) == [
                b"%bid: %b-%d\n\n" % (event, _EVENTS.encode(), seq) for seq, event in enumerate(recorded, 1)
            ]
            for after in (0, 3, 4):  # bytes, of which the first piece has four
                answer = server.http.get(f"/v1/streams/{_IMAGE}/events", params={"after": after})
                assert answer.content == b"\x89PNG\xff\x00"[after:]
            server.send_signal(signal.SIGKILL)
            server.wait()
