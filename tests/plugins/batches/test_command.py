"""`tailrace batch` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.api.forks import run_text
from tests.api.process import TAILRACE, Server, environment
from tests.plugins.batches.chat_rows import chat_file, chat_row, client_of, expected
from tests.plugins.terminal_chat.pty_process import Terminal, terminal
from tests.waiting import LONG_S, until


def _command(server: Server, *arguments: str) -> list[str]:
    return [TAILRACE, "batch", *arguments, "--url", server.url]


def _run(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_text(_command(server, *arguments), environment())


def _texts(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]


def test_it_writes_results_and_errors_and_knows_the_file_again(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(chat_file(5) + json.dumps(chat_row(5, temperature=-1)).encode())
    with contextlib.closing(Server("scripted")) as server:
        for _ in range(2):
            done = _run(server.wait_ready(), str(rows))
            results, errors = tmp_path / "rows.jsonl.results.jsonl", tmp_path / "rows.jsonl.errors.jsonl"
            assert f"5 of 6 rows have an answer: {results}\n" in done.stderr
            assert f"1 of 6 rows have an error: {errors}\n" in done.stderr
            assert done.returncode == 1
            assert _texts(results) == [expected(number) for number in range(5)]
            assert json.loads(errors.read_text())["custom_id"] == "row-5"
        assert len(client_of(server).batches.list().data) == 1
        assert _run(server, str(rows), "--new", "--output", str(tmp_path / "new")).returncode == 1
        assert _texts(tmp_path / "new") == _texts(results)
        assert len(client_of(server).batches.list().data) == 2


def test_bad_files(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with contextlib.closing(Server("scripted")) as server:
        server.wait_ready()
        for content, message in ((b"", "not a row"), (b"[1]", "not a row"), (b'{"url": "/v1/admin/keys"}', "endpoint")):
            rows.write_bytes(content)
            done = _run(server, str(rows))
            assert done.returncode == 1
            assert message in done.stderr
        rows.write_bytes(chat_file(1) * 2)
        done = _run(server, str(rows))
        assert "Line 2: Another line has the same custom_id. (duplicate_custom_id)" in done.stderr
        assert "The batch is failed." in done.stderr
        rows.write_bytes(chat_file(1))
        assert "no batch of this file" in _run(server, str(rows), "--cancel").stderr
    done = _run(server, str(rows))
    assert "there is no server" in done.stderr
    assert not list(tmp_path.glob("*.results.jsonl"))


def test_a_batch_without_results_leaves_the_files_of_earlier_runs(tmp_path: Path) -> None:
    rows, earlier = tmp_path / "rows.jsonl", [tmp_path / f"rows.jsonl.{name}.jsonl" for name in ("results", "errors")]
    rows.write_bytes(chat_file(1) * 2)
    for path in earlier:
        path.write_text("earlier")
    with contextlib.closing(Server("scripted")) as server:
        assert "The batch is failed." in _run(server.wait_ready(), str(rows)).stderr
        link, other = tmp_path / "link", tmp_path / "hard"
        link.symlink_to(rows)
        other.hardlink_to(rows)
        for output in (rows, f"{tmp_path}/../{tmp_path.name}/rows.jsonl", link, other, earlier[1]):
            done = _run(server, str(rows), "--output", str(output))
            assert done.returncode == 2
            assert "Results need another file." in done.stderr
    assert [path.read_text() for path in earlier] == ["earlier", "earlier"]
    assert rows.read_bytes() == chat_file(1) * 2
    assert link.is_symlink()


def test_it_waits_for_a_server_that_was_killed_and_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(chat_file(80, max_tokens=40))
    source, flags = "scripted:tokens_per_s=60", ("--data-dir", str(tmp_path / "data"), "--batch-rows-at-once", "4")
    server = Server(source, *flags).wait_ready()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_following(server, rows))
        until(lambda: _num_done(server) > 0)
        first.send_signal(signal.SIGINT)
        assert first.stderr is not None
        assert "goes on in the server" in first.stderr.read()
        assert first.wait(LONG_S) == 130
        second = stack.enter_context(_following(server, rows))
        server.send_signal(signal.SIGKILL)
        server.close()
        assert second.stderr is not None
        assert "does not answer" in second.stderr.readline()
        again = Server(source, *flags, "--port", str(server.port)).wait_ready()
        stack.callback(again.close)
        assert second.wait(LONG_S) == 0
        assert _texts(tmp_path / "rows.jsonl.results.jsonl") == [expected(one, max_tokens=40) for one in range(80)]
        assert len(client_of(again).batches.list().data) == 1


@pytest.mark.deep
def test_the_bar_at_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C leaves the terminal as it was. The death of a server is told above the bar, which goes on."""
    rows, num_rows = tmp_path / "rows.jsonl", 80
    rows.write_bytes(chat_file(num_rows, max_tokens=20))
    source, flags = "scripted:tokens_per_s=60", ("--data-dir", str(tmp_path / "data"), "--batch-rows-at-once", "4")
    server = Server(source, *flags).wait_ready()

    def counts(shown: Terminal) -> list[int]:
        return [int(count) for count in re.findall(rf"(\d+)/{num_rows}\b", shown.text)]

    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(terminal("batch", str(rows), "--url", server.url))
        until(lambda: any(counts(shown)))
        shown.type("\x03")
        assert shown.wait() == 130
        assert "goes on in the server" in shown.text
        _check_cursor(shown)
        shown = stack.enter_context(terminal("batch", str(rows), "--url", server.url))
        until(lambda: any(counts(shown)))
        server.send_signal(signal.SIGKILL)
        server.close()
        shown.wait_for("The server does not answer. The batch goes on when it is there again.\r\n")
        again = Server(source, *flags, "--port", str(server.port)).wait_ready()
        stack.callback(again.close)
        assert shown.wait() == 0
        assert counts(shown)[-1] == num_rows
        assert 0 < counts(shown)[0] < num_rows
        assert shown.text.count("does not answer") == 1
        assert f"{num_rows} of {num_rows} rows have an answer" in shown.text
        _check_cursor(shown)


def _check_cursor(shown: Terminal) -> None:
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    assert 0 <= shown.raw.rfind(hidden) < shown.raw.rfind(visible)


def test_results_into_a_directory_that_is_missing(server: Server, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(chat_file(2))
    done = _run(server, str(rows), "--output", str(tmp_path / "missing" / "results.jsonl"))
    assert done.returncode == 2
    assert f"There is no directory {tmp_path / 'missing'}." in done.stderr
    assert not client_of(server).batches.list().data  # before anything was sent


def _following(server: Server, rows: Path) -> subprocess.Popen[str]:
    """Start the command, and return when it follows its batch."""
    command = _command(server, str(rows))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True)
    assert process.stderr is not None
    assert "runs the rows as batch_" in process.stderr.readline()
    return process


def _num_done(server: Server) -> int:
    return sum(one.request_counts.completed for one in client_of(server).batches.list() if one.request_counts)
