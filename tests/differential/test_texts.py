"""Every client returns every text as the engine generated it, byte for byte, however it arrives.

What a client is known to do to a text stands in `ALTERED`, with the reason, and is asserted like the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from tests.api.process import Server
from tests.differential.all_drivers import DRIVERS
from tests.differential.drivers import Driver, Outcome, params
from tests.differential.proxy import Cut, Proxy

from tailrace_outer.scripted.scripted_engine import TEXTS

PROMPTS = {name: f"Recite {number}." for number, name in enumerate(TEXTS)}


@dataclass(frozen=True)
class Altered:
    """Texts that one client changes, and how it shows them."""

    driver: str
    texts: tuple[str, ...]
    shows: Callable[[str], str]
    reason: str


_WITH_END = tuple(name for name in TEXTS if name != "broken characters")  # there the end token shows the held half

ALTERED = (
    Altered(
        "hub text stream",
        _WITH_END,
        lambda text: text + "<|end|>",
        "without details it shows the name of every special token, as text-generation-inference sends it",
    ),
    Altered(
        "js hub 2.5.0 as documented",
        _WITH_END,
        lambda text: text + "<|end|>",
        "the documented loop prints every token, special ones too",
    ),
    Altered(
        "js fetch text",
        ("byte order marks",),
        lambda text: text.removeprefix("\ufeff"),
        "Response.text() takes a byte order mark at the very beginning for one of the encoding",
    ),
)


def expected(driver: Driver) -> dict[str, Outcome]:
    texts: dict[str, Outcome] = {**TEXTS}
    for altered in ALTERED:
        if altered.driver == driver.name:
            for name in altered.texts:
                texts[name] = altered.shows(TEXTS[name])
    return texts


def read(driver: Driver, url: str) -> dict[str, Outcome]:
    return dict(zip(PROMPTS, driver.read_all(url, list(PROMPTS.values())), strict=True))


def check(driver: Driver, url: str) -> None:
    texts, wanted = read(driver, url), expected(driver)
    wrong = {name: (texts[name], wanted[name]) for name in TEXTS if texts[name] != wanted[name]}
    assert not wrong, "\n".join(
        f"{name}:\n  {str(a)[:500]!r} is not\n  {str(b)[:500]!r}" for name, (a, b) in wrong.items()
    )


def _one_of_each_wire() -> list[Driver]:
    """Return the clients for `make test`. A wire has one way to write a heartbeat; test_between_many_heartbeats has all
    clients."""
    beating = [driver for driver in DRIVERS.values() if driver.streams and driver.wire != "plain" and not driver.deep]
    return list({driver.wire: driver for driver in beating}.values())


BEATING = params(driver for driver in DRIVERS.values() if driver.streams and driver.wire != "plain")
RESUMING = params(driver for driver in DRIVERS.values() if driver.resumes)


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """A server that sends heartbeats between tokens, with short timeouts."""
    with contextlib.closing(Server("scripted:text=-1,tokens_per_s=400", "--heartbeat-s", "0.001")) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:text=-1,tokens_per_s=40", "--heartbeat-s", "0.01")) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def bytewise(reciting: Server) -> Iterator[Proxy]:
    with Proxy(reciting.port) as proxy:
        yield proxy


@pytest.mark.parametrize("driver", params(DRIVERS.values()))
def test_unchanged(driver: Driver, reciting: Server) -> None:
    check(driver, reciting.url)


@pytest.mark.parametrize("driver", params(_one_of_each_wire()))
def test_between_heartbeats(driver: Driver, hasty: Server) -> None:
    check(driver, hasty.url)


@pytest.mark.deep
@pytest.mark.parametrize("driver", BEATING)
def test_between_many_heartbeats(driver: Driver, slow: Server) -> None:
    check(driver, slow.url)


@pytest.mark.deep
@pytest.mark.parametrize("driver", params(DRIVERS.values()))
def test_byte_by_byte(driver: Driver, bytewise: Proxy) -> None:
    check(driver, bytewise.url)


def _cut(where: str, cut: Cut, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(cut, id=where, marks=marks)


CUTS = [
    _cut("now and then", Cut(5, range(0, 120, 7))),
    _cut("behind every event", Cut(1), pytest.mark.deep),
    _cut("somewhere in every event", Cut(1, range(120)), pytest.mark.deep),
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("driver", RESUMING)
def test_cut_and_resumed(driver: Driver, cut: Cut, reciting: Server) -> None:
    with Proxy(reciting.port, cut) as proxy:
        check(driver, proxy.url)
        assert proxy.num_cuts > 2 * len(TEXTS)


@pytest.mark.deep
@pytest.mark.parametrize("driver", RESUMING)
def test_cut_before_the_very_last_newline(driver: Driver, reciting: Server) -> None:
    with Proxy(reciting.port, Cut(5, None)) as proxy:
        if driver.name != "js fetch-event-source":
            check(driver, proxy.url)
            return
        # It takes an event for seen once it has its id, and shows it only with the blank line. The id is the last line
        # of our events, so that this is the only place where it loses one.
        lost = read(driver, proxy.url)["JSON"]
        assert isinstance(lost, Exception)
        assert "event 6 of" in str(lost)


def test_there_are_heartbeats(hasty: Server) -> None:
    with hasty.wire() as wire:
        _, body = wire.request("POST", "/v1/streams", {"prompt": PROMPTS["JSON"]}, {"accept": "text/event-stream"})
    assert b"\n: hb\n" in body
