"""Which requests are banned, and which callers are slowed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.streams.virtual_time import run as run_scenario

from tailrace.errors import PoisonRequest
from tailrace.generation.blame import Blame, Culprit
from tailrace.types import Prompt, Record, Sampling


def record(text: str = "Hi", caller: str = "192.0.2.1", *, seed: int = 1, max_tokens: int = 9) -> Record:
    sampling = Sampling(seed=seed, max_tokens=max_tokens)
    return Record("s", 0.0, prompts=(Prompt(text, (tuple(text.encode()),)),), sampling=sampling, caller=caller)


def test_a_ban_is_for_one_request_of_one_caller() -> None:
    blame = Blame()
    blame.add(Culprit.of_record(record()))
    for same in (record(), record(seed=2)):
        with pytest.raises(PoisonRequest):
            blame.check(same)
    for other in (record("Ho"), record(caller="192.0.2.2"), record(max_tokens=8)):
        blame.check(other)


def test_bans_and_kills_expire_after_ten_minutes() -> None:
    async def scenario() -> None:
        blame = Blame()
        for number in range(3):
            blame.add(Culprit.of_record(record(f"Hi {number}")))
        await asyncio.sleep(599)
        assert blame.is_slowed("192.0.2.1")
        with pytest.raises(PoisonRequest):
            blame.check(record("Hi 0"))
        await asyncio.sleep(2)
        assert not blame.is_slowed("192.0.2.1")
        blame.check(record("Hi 0"))

    run_scenario(scenario())


def test_a_caller_is_slowed_after_three_kills() -> None:
    blame = Blame()
    for number in range(3):
        assert not blame.is_slowed("192.0.2.1")
        blame.add(Culprit.of_record(record(f"Hi {number}")))
    assert blame.is_slowed("192.0.2.1")
    assert not blame.is_slowed("192.0.2.2")


def test_the_number_of_entries_is_limited() -> None:
    blame = Blame()
    for number in range(2_000):
        blame.add(Culprit(f"192.0.{number // 256}.{number % 256}", number.to_bytes(2, "big")))
    assert (len(blame.bans), len(blame.kills)) == (1_000, 1_000)


def test_old_records_can_be_read_and_ended_ones_have_no_caller() -> None:
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(record()))
    del kept["caller"]
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=Record)
    assert old == record(caller="")
    assert record().finished().caller == ""
