"""What survives a death besides plain text: grammars, tools, choices, reasoning, adapters, logprobs, images, guesses.

Each answer of the real model is read once without a death. Then the same request is sent again, and something dies. The
events that its reader gets, and OpenAI's chunks of the whole answer, must be the same. Two things depend on time, also
without a death: in which order the events of several choices follow each other, and how many tokens an event has where
tokens are guessed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.api.process import Server
from tests.faults.features import FEATURES, SOURCES, Feature, choices_of
from tests.faults.house import Follower, House
from tests.faults.laws import seq_of, status_of
from tests.faults.team import Team, team
from tests.http.wire import as_json, sse_data

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1200)]

_LONG_S = 400.0  # servers of many tests share the processors
_PATH = "/v1/chat/completions"
_keys = itertools.count()


@dataclass(frozen=True)
class Answered:
    """An answer: the events of its stream, and its chunks on OpenAI's wire, by their choice. Both are without ids and
    times."""

    events: dict[bytes, list[bytes]]
    chunks: dict[bytes, list[bytes]]
    num_events: int
    continuity: str


@dataclass
class Ground:
    """Servers with one model: alone, or two with one Redis."""

    servers: House | Team[Server]
    undisturbed: dict[str, Answered] = field(default_factory=dict)

    @property
    def server(self) -> Server:
        return self.servers.server if isinstance(self.servers, House) else self.servers.servers[0]

    def kill_engine(self) -> None:
        self.server.worker().kill()

    def kill_server(self) -> None:
        """The next server on the same directory, or the others over the same Redis, continue its streams."""
        if isinstance(self.servers, House):
            self.servers.restart()
        else:
            self.servers.kill(self.server)
            self.servers.add()

    def begin(self, feature: Feature) -> Begun:
        key = f"key-{next(_keys)}"
        with self.server.wire() as wire:
            headers = {"idempotency-key": key, "x-tailrace-linger": "600"}
            wire.send("POST", _PATH, _sent(feature), headers)
            assert wire.head() == 200, wire.body()
            stream_id = wire.headers["x-stream-id"]
        return Begun(self, feature, key, stream_id, Follower(self.servers, stream_id))


@dataclass(frozen=True)
class Begun:
    """A request on OpenAI's wire whose client has left, and a reader of its stream."""

    ground: Ground
    feature: Feature
    key: str
    stream_id: str
    follower: Follower

    def wait_events(self, num_events: int) -> None:
        self.follower.wait_events(num_events, timeout_s=_LONG_S)

    def answered(self) -> Answered:
        """Wait for the end. Ask the same again, as a client does that was cut off, for the chunks."""
        self.follower.wait(timeout_s=_LONG_S)
        events = self.follower.events
        assert status_of(events[-1]) == "done", events[-1]
        assert [seq_of(event) for event in events] == list(range(1, len(events) + 1))
        found = re.search(rb',"continuity":"(\w+)"', events[-1])
        assert self.whole() == events  # what was delivered before a death is still in the log
        answer = self.ground.server.post(_PATH, _sent(self.feature), idempotency_key=self.key)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-stream-id"] == self.stream_id
        chunks = sse_data(answer.content)
        self.feature.check(choices_of([as_json(chunk) for chunk in chunks[:-1]]))
        return Answered(
            self._by_choice(events, rb'"choice":[0-9]+'),
            self._by_choice([chunk.encode() for chunk in chunks], rb'"index":[0-9]+'),
            len(events),
            found[1].decode() if found else "",
        )

    def whole(self) -> list[bytes]:
        """Read the whole stream again."""
        with self.ground.server.wire() as wire:
            wire.send("GET", f"/v1/streams/{self.stream_id}/events")
            assert wire.head() == 200
            return list(wire.events())

    def _by_choice(self, parts: list[bytes], choice: bytes) -> dict[bytes, list[bytes]]:
        found: dict[bytes, list[bytes]] = {}
        for part in parts:
            of = re.search(choice, part)
            found.setdefault(of[0] if of else b"", []).append(_plain(part, self.stream_id))
        return {of: [_joined(some)] for of, some in found.items()} if self.feature.has_guesses else found


def _sent(feature: Feature) -> dict[str, object]:
    return {**feature.body, "stream": True, "stream_options": {"include_usage": True}}


def _plain(part: bytes, stream_id: str) -> bytes:
    """An event or a chunk without what differs between two streams with the same answer."""
    part = re.sub(rb"^(id: .*|retry: .*)\n", b"", part, flags=re.MULTILINE).replace(stream_id.encode(), b"ID")
    return re.sub(rb',"continuity":"\w+"|"created":\d+,|,"prompt_tokens_details":\{[^}]*\}', b"", part)


_CONTENT = re.compile(rb'"(?:text|content)":"((?:[^"\\]|\\.)*)"')
_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')


def _joined(parts: list[bytes]) -> bytes:
    """All tokens and texts of events or chunks, and what else the last one has."""
    ids = b",".join(one for part in parts for one in _IDS.findall(part))
    text = b"".join(one for part in parts for one in _CONTENT.findall(part))
    return b"\n".join((ids, text, _IDS.sub(b"", _CONTENT.sub(b"", parts[-1]))))


# What dies


def _connection(begun: Begun, num_events: int) -> None:
    for at in range(1, num_events, 5):
        begun.wait_events(at)
        begun.follower.cut()


def _engine(begun: Begun, num_events: int) -> None:
    begun.wait_events(num_events // 3)
    begun.ground.kill_engine()


def _server(begun: Begun, num_events: int) -> None:
    begun.wait_events(num_events // 3)
    begun.ground.kill_server()


def _engine_in_prefill(begun: Begun, num_events: int) -> None:
    begun.ground.kill_engine()


def _engine_twice(begun: Begun, num_events: int) -> None:
    """The second time behind the place where it died first."""
    for at in (3, 3 + num_events // 4):
        begun.wait_events(at)
        begun.ground.kill_engine()


def _server_then_engine(begun: Begun, num_events: int) -> None:
    begun.wait_events(3)
    begun.ground.kill_server()
    begun.ground.kill_engine()


Death: TypeAlias = Callable[[Begun, int], None]
_DEATHS: tuple[Death, ...] = (_connection, _engine, _server)
_MORE_DEATHS: tuple[Death, ...] = (_engine_in_prefill, _engine_twice, _server_then_engine)
_HARD = ("schema", "n = 4")  # for which there are more deaths


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A server. The parameter is the name of its source."""
    directory = tmp_path_factory.mktemp("features")
    model, *flags = SOURCES[request.param](request, directory)
    with House(directory / "house", model, *flags) as house:
        yield Ground(house)


def _cases() -> list[object]:
    cases = list[object]()
    for name, feature in FEATURES.items():
        for die in (*_DEATHS, *(_MORE_DEATHS if name in _HARD else ())):
            cases.append(pytest.param(feature.source, name, die, id=f"{name}-{die.__name__[1:]}"))
    return cases


@pytest.mark.parametrize(("alone", "name", "die"), _cases(), indirect=["alone"])
def test_an_answer_is_the_one_without_a_death(alone: Ground, name: str, die: Death) -> None:
    feature = FEATURES[name]
    if name not in alone.undisturbed:
        alone.undisturbed[name] = alone.begin(feature).answered()
    expected = alone.undisturbed[name]
    assert not expected.continuity
    begun = alone.begin(feature)
    die(begun, expected.num_events)
    found = begun.answered()
    if not feature.has_guesses:  # a step with guesses is a batch, and which steps have some depends on time
        assert found.events == expected.events
        assert found.chunks == expected.chunks
    if die is not _engine_in_prefill:  # in which there may have been nothing to replay
        assert found.continuity == ("" if die is _connection else "replayed"), "it died too late"


@pytest.mark.parametrize("source", SOURCES)
def test_answers_are_the_same_on_the_server_that_takes_them_over(
    source: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """All features of a model at once: with one Redis, an answer does not depend on what runs beside it."""
    features = [feature for feature in FEATURES.values() if feature.source == source]
    model, *flags = SOURCES[source](request, tmp_path)
    with team(tmp_path, source=model, flags=flags) as (servers, _):
        ground = Ground(servers)
        expected = [begun.answered() for begun in [ground.begin(feature) for feature in features]]
        begun = [ground.begin(feature) for feature in features]
        for one in begun:
            one.wait_events(3)
        ground.kill_server()
        for one, undisturbed in zip(begun, expected, strict=True):
            found = one.answered()
            assert found.events == undisturbed.events
            assert found.chunks == undisturbed.chunks
            assert found.continuity == "replayed", "it died too late"
