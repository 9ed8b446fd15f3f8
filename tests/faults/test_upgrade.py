"""docs/upgrade.md, walked: what the version before has kept is used by this one, and the way back."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server, environment
from tests.faults.test_versions import VersionedServer, code_of
from tests.waiting import LONG_S

_BEFORE = "5a6d94d"  # journals of version 4, databases of version 6
_COUNT = 120
_SLOW = "scripted:tokens_per_s=60"  # so that a stream does not end before its server


class Installation:
    """A data directory, and one server after the other on it, of two versions."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.data.mkdir()
        self._code = code_of(_BEFORE, folder / "code")
        self.key = "none"

    def command(self, *words: str, is_old: bool) -> subprocess.CompletedProcess[str]:
        command = [*VersionedServer.command_of(self._code if is_old else None), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=environment())

    @contextlib.contextmanager
    def server(self, data: Path | None = None, *, is_old: bool) -> Iterator[Server]:
        data = data or self.data
        flags = ("--data-dir", str(data), "--database", f"sqlite:///{data}/records.sqlite")
        server = VersionedServer(_SLOW, *flags, source_path=self._code if is_old else None)
        try:
            server.wait_ready()
            server.http.headers["Authorization"] = f"Bearer {self.key}"
            yield server
        finally:
            server.close()

    def refused(self, *, is_old: bool) -> str:
        """Start a server that does not start. Returns what it says."""
        server = VersionedServer(
            _SLOW, "--data-dir", str(self.data), "--database", f"sqlite:///{self.data}/records.sqlite",
            source_path=self._code if is_old else None,
        )  # fmt: skip
        assert server.wait() != 0
        server.close()
        return server.log


def _text(server: Server, stream_id: str) -> str:
    server.wait_state(stream_id, "done")
    return str(server.state(stream_id)["text"])


def _items(server: Server, its_id: str) -> list[str]:
    answer = server.http.get(f"/v1/conversations/{its_id}/items", params={"order": "asc"})
    assert answer.status_code == 200, answer.text
    return [item["content"][0]["text"] for item in answer.json()["data"]]


@pytest.mark.deep
def test_an_upgrade_and_the_way_back(tmp_path: Path) -> None:
    place = Installation(tmp_path)
    database = f"sqlite:///{place.data}/records.sqlite"
    made = place.command("keys", "create", "ada", "--database", database, is_old=True)
    assert made.returncode == 0, made.stderr
    (place.key,) = (word for word in made.stdout.split() if word.startswith("tr_"))

    finished, unfinished = Answer("Finished", 12, 1), Answer("Unfinished", _COUNT, 2)
    with place.server(is_old=True) as old:
        body = {"prompt": finished.prompt, "max_tokens": finished.count, "seed": finished.seed}
        first = old.create(body)
        assert _text(old, first) == finished.text
        talk = old.post("/v1/conversations", {}).json()["id"]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "conversation": talk, "seed": 3, "max_tokens": 5}
        assert old.post("/v1/chat/completions", chat).status_code == 200
        body = {"prompt": unfinished.prompt, "max_tokens": unfinished.count, "seed": unfinished.seed, "linger_s": 600}
        second = old.create(body)
        old.wait_state(second, "running")
        old.process.kill()
        old.wait()
    said = Answer(chat_ids("Hi"), 5, 3).text
    before = tmp_path / "before"  # the page says: keep a copy
    shutil.copytree(place.data, before)

    with place.server(is_old=False) as new:
        assert _text(new, second) == unfinished.text
        assert _text(new, first) == finished.text
        assert _items(new, talk) == ["Hi", said]
        chat |= {"messages": [{"role": "user", "content": "And now?"}]}
        assert new.post("/v1/chat/completions", chat).status_code == 200
        assert len(_items(new, talk)) == 4
        assert new.http.get("/v1/models", headers={"Authorization": "Bearer tr_wrong"}).status_code == 401

    # The way back: the version before does not touch what this one has migrated.
    kept = {path.name: path.read_bytes() for path in place.data.glob("*.sqlite")}
    assert "newer version" in place.refused(is_old=True)
    assert {path.name: path.read_bytes() for path in place.data.glob("*.sqlite")} == kept
    with place.server(before, is_old=True) as old:
        assert _text(old, first) == finished.text
        assert _text(old, second) == unfinished.text
        assert _items(old, talk) == ["Hi", said]
    with place.server(is_old=False) as new:  # and forward again
        assert len(_items(new, talk)) == 4


@pytest.mark.deep
def test_the_conversations_alone_can_go_back(tmp_path: Path) -> None:
    """The way back without a copy: a new journal and a new database, and conversations by export and import."""
    place = Installation(tmp_path)
    with place.server(is_old=False) as new:
        talk = new.post("/v1/conversations", {}).json()["id"]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "conversation": talk, "seed": 3, "max_tokens": 5}
        assert new.post("/v1/chat/completions", chat).status_code == 200
        exported = new.http.get("/v1/conversations/export").content
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with place.server(fresh, is_old=True) as old:
        answer = old.http.post(
            "/v1/conversations/import", content=exported, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 200, answer.text
        (listed,) = old.http.get("/v1/conversations").json()["data"]
        assert _items(old, listed["id"]) == ["Hi", Answer(chat_ids("Hi"), 5, 3).text]
