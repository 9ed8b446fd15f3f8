"""A journal of an earlier version can be opened, and its streams continue.

`journals/2043e4d.sqlite` was left by `tailrace serve scripted:tokens_per_s=100` of that commit, which was stopped when
a stream of 100 tokens had 41. Before, one stream had ended, one was deleted, and a durable stream got two appends.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.faults.laws import Seen, check, read_journal

from tailrace.errors import StreamExpired
from tailrace.streams import open_sqlite
from tailrace.types import ANONYMOUS, TextDelta

_JOURNAL = Path(__file__).with_name("journals") / "2043e4d.sqlite"
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
