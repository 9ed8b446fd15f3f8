"""Durable streams of real servers over one Redis: one is killed while clients write to both."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest
from tests.api.process import Server
from tests.plugins.durable_streams.durable_servers import TEXT, Pair
from tests.waiting import LONG_S

PATH = "/v1/durable/talk"
_BATCHES = 60


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair("scripted", "--durable-poll-s", "5")) as servers:
        yield servers.wait_ready()


class Producer(threading.Thread):
    """Writes numbered batches, each until a server has confirmed it. After an error it goes to the next server."""

    def __init__(self, name: str, servers: list[Server]) -> None:
        super().__init__(daemon=True)
        self.label = name
        self._servers = servers
        self.num_confirmed = 0

    def run(self) -> None:
        for seq in range(_BATCHES):
            stamp = {"producer-id": self.label, "producer-epoch": "0", "producer-seq": str(seq)}
            while not self._write(f"{self.label}{seq};", stamp):
                self._servers.append(self._servers.pop(0))
            self.num_confirmed = seq + 1

    def _write(self, text: str, stamp: dict[str, str]) -> bool:
        try:
            url = self._servers[0].url + PATH
            answer = httpx.post(url, content=text, headers=TEXT | stamp, timeout=LONG_S, trust_env=False)
        except httpx.TransportError:
            return False
        assert answer.status_code in (200, 204), answer.text
        return True


@pytest.mark.deep
def test_a_server_is_killed_while_both_are_written(pair: Pair) -> None:
    one, other = pair, pair.other
    assert one.http.put(PATH, headers=TEXT).status_code == 201
    producers = [Producer("a", [one, other]), Producer("b", [other, one]), Producer("c", [one, other])]
    with other.http.stream("GET", PATH, params={"offset": "-1", "live": "sse"}) as followed:
        for producer in producers:
            producer.start()
        lines = followed.iter_lines()
        seen = ""
        while seen.count(";") < 40:
            seen += _data(next(lines))
        one.process.send_signal(signal.SIGKILL)
        while seen.count(";") < 3 * _BATCHES:
            seen += _data(next(lines))
    for producer in producers:
        producer.join(LONG_S)
        assert producer.num_confirmed == _BATCHES
    whole = other.http.get(PATH).text
    assert seen == whole
    batches = whole.split(";")[:-1]
    for name in "abc":
        assert [batch for batch in batches if batch[0] == name] == [f"{name}{seq}" for seq in range(_BATCHES)]


def _data(line: str) -> str:
    return line.removeprefix("data:") if line.startswith("data:") and not line.startswith("data:{") else ""


def test_a_long_poll_sees_an_append_of_the_other_server(pair: Pair) -> None:
    one, other = pair, pair.other
    with httpx.Client(base_url=one.url, trust_env=False, timeout=LONG_S) as here:
        tail = here.put(PATH, headers={"content-type": "application/json"}).headers["stream-next-offset"]
        writer = threading.Timer(0.1, lambda: other.http.post(PATH, json={"n": 1}))
        writer.start()
        while (answer := here.get(PATH, params={"offset": tail, "live": "long-poll"})).status_code == 204:
            pass
        assert json.loads(answer.text) == [{"n": 1}]
        writer.join()
