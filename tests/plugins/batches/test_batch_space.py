"""The space for files and results, notes in memory, and servers without batches."""

from __future__ import annotations

import contextlib
from pathlib import Path

import openai
import pytest
from tests.api.process import Server
from tests.plugins.batches.chat_rows import answers_of, chat_file, client_of, expected, run_batch, wait_ended

from tailrace.server import LocalNotes


def test_a_full_space_refuses_files_and_stops_rows_until_files_are_deleted() -> None:
    flags = ("--batch-bytes", "140000", "--batch-rows-at-once", "4")  # an owner has half of it
    with contextlib.closing(Server("scripted", *flags)) as server:
        client = client_of(server.wait_ready())
        first = wait_ended(client, run_batch(client, chat_file(50)))
        filler = client.files.create(file=("a", b"x" * 20_000), purpose="batch")
        second = run_batch(client, chat_file(50))
        server.wait_line("Rows of a batch wait for space")
        with pytest.raises(openai.APIStatusError) as full:
            client.files.create(file=("a", b"x" * 60_000), purpose="batch")
        assert full.value.status_code == 507
        counts = client.batches.retrieve(second.id).request_counts
        assert counts is not None
        assert 0 < counts.completed < 50
        client.files.delete(first.output_file_id or "")
        client.files.delete(filler.id)
        second = wait_ended(client, second)
        assert second.status == "completed"
        lines = answers_of(client, second.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"row-{number}" for number in range(50)]


def test_files_in_memory() -> None:
    with contextlib.closing(Server("scripted", "--journal", "memory")) as server:
        client = client_of(server.wait_ready())
        batch = wait_ended(client, run_batch(client, chat_file(20)))
        texts = [
            line["response"]["body"]["choices"][0]["message"]["content"]
            for line in answers_of(client, batch.output_file_id)
        ]
        assert texts == [expected(number) for number in range(20)]
        assert client.files.delete(batch.input_file_id).deleted


def test_encrypted_files_are_not_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a secret with more than 32 characters")
    flags = ("--data-dir", str(tmp_path / "data"), "--journal-key-file", str(tmp_path / "key"))
    with contextlib.closing(Server("scripted", *flags)) as server:
        client = client_of(server.wait_ready())
        batch = wait_ended(client, run_batch(client, chat_file(5)))
        content = client.files.content(batch.output_file_id or "").content
        shown = client.files.retrieve(batch.output_file_id or "")
        assert shown.bytes == len(content)
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / "data").iterdir())
    assert b"row-3" not in on_disk


def test_servers_without_batches() -> None:
    with contextlib.closing(Server("scripted", "--batch-bytes", "0")) as server:
        client = client_of(server.wait_ready())
        with pytest.raises(openai.APIStatusError) as refused:
            client.batches.list()
        assert refused.value.status_code == 501
        assert refused.value.code == "no_batches"


def test_notes_in_memory() -> None:
    notes = LocalNotes.in_memory("parrot")
    notes.add_all([(b"a/1", b"one"), (b"b", b"other"), (b"a/2", b"two")])
    notes.add(b"a/1", b"newer")
    assert notes.get(b"a/1") == b"newer"
    assert notes.get(b"a/") is None
    assert list(notes.sizes(b"a/").items()) == [(b"a/1", 5), (b"a/2", 3)]
    assert [(note.key, note.body) for note in notes.read(b"a/")] == [
        (b"a/1", b"one"),
        (b"a/2", b"two"),
        (b"a/1", b"newer"),
    ]
    notes.erase(b"a/1", b"b")
    assert [note.key for note in notes.read()] == [b"a/2"]
