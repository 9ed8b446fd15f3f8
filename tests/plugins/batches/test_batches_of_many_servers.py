"""Batches of servers that share a Redis: each is run by one server at a time, and each row has one result."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from openai import OpenAI
from tests.api.process import Server
from tests.faults.team import team
from tests.plugins.batches.chat_rows import answers_of, chat_file, client_of, expected, run_batch, wait_ended
from tests.waiting import until


def _num_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def _check_rows(client: OpenAI, file_id: str | None, num_rows: int, max_tokens: int) -> None:
    lines = answers_of(client, file_id)
    assert [line["custom_id"] for line in lines] == [f"row-{number}" for number in range(num_rows)]
    for number, line in enumerate(lines):
        text = line["response"]["body"]["choices"][0]["message"]["content"]
        assert text == expected(number, max_tokens=max_tokens)


def _run(path: Path, *, num_rows: int, num_kills: int, max_tokens: int) -> None:
    """A batch at each of three servers. One is killed again and again, and another one started."""
    with team(path, size=3, flags=("--batch-rows-at-once", "16")) as (servers, _):
        begun = [run_batch(client_of(server), chat_file(num_rows, max_tokens=max_tokens)) for server in servers.servers]
        for number in range(1, num_kills + 1):
            least = num_rows * number // (num_kills + 1)
            watching = client_of(servers.servers[-1])

            def have_come_so_far(watching: OpenAI = watching, least: int = least) -> bool:
                return all(_num_completed(watching, batch.id) >= least for batch in begun)

            until(have_come_so_far, timeout_s=600)
            servers.kill(servers.servers[0])
            servers.add()
        client = client_of(servers.servers[0])
        for batch in begun:
            ended = wait_ended(client, batch)
            assert ended.status == "completed"
            assert ended.error_file_id is None
            _check_rows(client, ended.output_file_id, num_rows, max_tokens)
        until(lambda: not any(server.http.get("/v1/streams").json()["data"] for server in servers.servers))


@pytest.mark.timeout(300)
def test_batches_go_on_when_their_servers_are_killed(tmp_path: Path) -> None:
    _run(tmp_path, num_rows=60, num_kills=1, max_tokens=20)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_many_kills(tmp_path: Path) -> None:
    _run(tmp_path, num_rows=600, num_kills=12, max_tokens=20)


def test_every_server_shows_and_stops_a_batch(tmp_path: Path) -> None:
    with team(tmp_path, flags=("--batch-rows-at-once", "4")) as (servers, _):
        first, second = map(client_of, servers.servers)
        batch = run_batch(first, chat_file(300, max_tokens=20))
        assert [one.id for one in second.batches.list().data] == [batch.id]
        assert [one.id for one in second.files.list().data] == [batch.input_file_id]
        until(lambda: _num_completed(second, batch.id) > 0)
        with pytest.raises(Exception, match="A batch in progress reads this file"):
            second.files.delete(batch.input_file_id)
        assert second.batches.cancel(batch.id).status == "cancelling"
        assert first.batches.retrieve(batch.id).status in ("cancelling", "cancelled")
        ended = wait_ended(second, batch)
        assert ended.status == "cancelled"
        assert ended.request_counts is not None
        assert 0 < ended.request_counts.completed < 300
        num_lines = [len(answers_of(first, file_id)) for file_id in (ended.output_file_id, ended.error_file_id)]
        assert num_lines == [ended.request_counts.completed, 300 - ended.request_counts.completed]
        for file in second.files.list().data:
            second.files.delete(file.id)
        assert not first.files.list().data


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_a_server_that_does_not_run_for_a_while_leaves_its_batch(tmp_path: Path) -> None:
    """The other server takes the batch. The first one comes back with results of its own, which are refused."""
    with team(tmp_path, flags=("--batch-rows-at-once", "8")) as (servers, _):
        first, second = servers.servers
        batch = run_batch(client_of(first), chat_file(200, max_tokens=20))
        client = client_of(second)
        until(lambda: _num_completed(client, batch.id) > 8)
        _freeze_until_taken(first, second)
        ended = wait_ended(client, batch)
        assert ended.status == "completed"
        assert ended.error_file_id is None, answers_of(client, ended.error_file_id)
        _check_rows(client_of(first), ended.output_file_id, 200, 20)


def _freeze_until_taken(first: Server, second: Server) -> None:
    first.send_signal(signal.SIGSTOP)
    second.wait_line("A server does not answer any more")
    first.send_signal(signal.SIGCONT)


@pytest.mark.deep
def test_a_server_with_other_models_leaves_a_batch(tmp_path: Path) -> None:
    with team(tmp_path, size=1, flags=("--batch-rows-at-once", "4")) as (servers, _):
        (first,) = servers.servers
        other = servers.launch("--model=other=scripted:tokens_per_s=100").wait_ready()
        with contextlib.closing(other):
            batch = run_batch(client_of(first), chat_file(60, max_tokens=20))
            client = client_of(other)
            until(lambda: _num_completed(client, batch.id) > 0)
            servers.kill(first)
            other.wait_line("A server does not answer any more")
            servers.add()
            ended = wait_ended(client, batch)
        assert ended.error_file_id is None
        _check_rows(client_of(servers.servers[0]), ended.output_file_id, 60, 20)
