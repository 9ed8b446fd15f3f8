"""An engine reads an image: innocent streams are not blamed for its death, and the image is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

import pytest
from msgspec.structs import replace
from tests.generation.engine_failures import CRASH, restart_engine
from tests.generation.harness import Harness, end_of, greedy
from tests.seeing import picture
from tests.waiting import turn, wait_until

from tailrace.errors import ContextLengthExceeded, Draining, EngineLost, PoisonRequest, QueueFull, QueueTimeout
from tailrace.generation import Limits, Run
from tailrace.generation.blame import Blame
from tailrace.generation.prompts import PromptEncoder
from tailrace.images.reader import ImageReader
from tailrace.streams import Lease, MemoryLogStore
from tailrace.types import IMAGE_MARK, GenerateRequest, Image, KeptImage, Message, Record
from tailrace_plugins.upstream.upstream_text import ByteTokenizer, MessageEncoder

_LONG_ENOUGH_S = 1.0  # to decode an image and ask the engine, if nothing keeps it from that


def _about(content: bytes) -> GenerateRequest:
    message = Message("user", f"What is it? {IMAGE_MARK}", images=(Image(content),))
    return GenerateRequest(messages=(message,), sampling=greedy(5), on_disconnect="detach", linger_s=1e6)


def _begin(asking: Coroutine[Any, Any, Run]) -> asyncio.Task[Run]:  # Any: of what nobody sends to it
    return asyncio.create_task(asking)


async def test_an_image_is_read_only_when_no_stream_is_tried_alone() -> None:
    harness = Harness()
    innocent = await harness.create("Hi", greedy(20))
    harness.engine.step(3)
    restart_engine(harness, CRASH)  # its trial begins
    harness.engine.death_of_image = CRASH
    asking = _begin(harness.generator.create(_about(picture(1))))
    await asyncio.wait([asking], timeout=_LONG_ENOUGH_S)
    assert not harness.engine.asked
    assert innocent.log.end is None
    while harness.generator.recovery.is_trying:
        harness.engine.step()
    harness.engine.step()
    with pytest.raises(EngineLost):
        await asking
    harness.engine.restart()
    harness.finish(innocent)
    assert end_of(innocent.log).status == "done"


async def test_an_image_that_two_engines_died_of_is_refused() -> None:
    harness = Harness()
    innocent = await harness.create("Hi", greedy(200))
    harness.engine.death_of_image = CRASH
    for _ in range(2):
        with pytest.raises(EngineLost):
            await harness.generator.create(_about(picture(1)))
        harness.engine.restart()
        while harness.generator.recovery.is_trying:
            harness.engine.step()
        harness.engine.step()
    with pytest.raises(PoisonRequest, match="This image"):
        await harness.generator.create(_about(picture(1)))
    assert len(harness.engine.asked) == 2
    harness.engine.death_of_image = None
    other = await harness.generator.create(_about(picture(2)))
    harness.finish(innocent, other)
    assert [end_of(run.log).status for run in (innocent, other)] == ["done", "done"]


async def test_an_engine_is_asked_about_an_image_once() -> None:
    harness = Harness()
    harness.engine.death_of_image = CRASH
    with pytest.raises(EngineLost):
        await harness.generator.create(_about(picture(1)))
    harness.engine.restart()
    harness.engine.death_of_image = None
    first = await harness.generator.create(_about(picture(1)))
    harness.engine.death_of_image = CRASH
    harness.engine.loop = asyncio.get_running_loop()
    counted = await asyncio.to_thread(harness.generator.count_tokens, _about(picture(1)))
    assert counted == first.record.num_prompt_tokens
    second = await harness.generator.create(_about(picture(1)))
    assert len(harness.engine.asked) == 2
    harness.finish(first, second)
    assert first.record.prompts == second.record.prompts


class _Keeper:
    """Keeps the images of all requests that ask for it."""

    def keeps(self, request: GenerateRequest) -> bool:
        return request.keep

    async def find_images(self, owner: str, images: tuple[Image, ...]) -> list[Image]:
        return list(images)

    async def keep_images(self, record: Record) -> None:
        assert record.images

    async def forget(self, owner: str, stream_id: str) -> None:
        raise AssertionError("the stream has begun")


async def test_what_is_kept_are_pixels_also_where_another_server_gets_files_as_they_came() -> None:
    harness, sent = Harness(context_tokens=3_000), picture(1, kind="JPEG")
    harness.generator.observers.keeper = _Keeper()
    takes = frozenset({"text", "image/jpeg", "image/png"})
    harness.engine.capabilities = dataclasses.replace(harness.engine.engine.capabilities, sees=False, takes=takes)
    harness.generator.prompts = PromptEncoder(
        tokenizer=ByteTokenizer(), chat=MessageEncoder(continues=False), context_tokens=3_000, add_bos=False
    )
    passed_on = await harness.generator.create(_about(sent))
    assert list(passed_on.record.attachments.values()) == [sent]
    kept = await harness.generator.create(replace(_about(sent), keep=True))
    (canonical,) = await ImageReader().read([Image(sent)], as_sent=False)
    assert list(kept.record.attachments.values()) == [canonical.content]
    assert kept.record.images == (KeptImage(canonical.digest, "image/png", len(canonical.content)),)


async def test_an_image_waits_for_the_engine_for_a_limited_time() -> None:
    harness = Harness(limits=Limits(queue_s=0.2))
    harness.engine.fail(CRASH)
    with pytest.raises(QueueTimeout):
        await harness.generator.create(_about(picture(1)))
    harness.engine.restart()
    harness.finish(await harness.generator.create(_about(picture(1))))


async def test_a_server_that_stops_lets_no_image_wait() -> None:
    harness = Harness()
    harness.engine.fail(CRASH)
    async with asyncio.timeout(60):
        waiting = asyncio.create_task(harness.gate.wait_open())
        await turn(1)
        harness.gate.drain(1.0)
        with pytest.raises(Draining):
            await waiting


def test_few_images_are_kept_in_mind() -> None:
    blame = Blame()
    for number in range(1200):
        blame.add_image(str(number), str(number))
    assert len(blame.images) == len(blame.image_kills) == 1000
    blame.add_image("1199", "1199")
    with pytest.raises(PoisonRequest):
        blame.check_image("1199", "another")
    blame.check_image("1", "1199")


async def test_ever_new_images_that_kill_engines_are_those_of_their_caller() -> None:
    harness = Harness()
    seen = await harness.generator.create(replace(_about(picture(99)), caller="bad"))
    harness.finish(seen)
    harness.engine.death_of_image = CRASH
    for number in range(4):
        with pytest.raises(EngineLost):
            await harness.generator.create(replace(_about(picture(number)), caller="bad"))
        harness.engine.restart()
    with pytest.raises(PoisonRequest, match="Your images"):
        await harness.generator.create(replace(_about(picture(5)), caller="bad"))
    assert len(harness.engine.asked) == 5
    harness.engine.death_of_image = None
    known = await harness.generator.create(replace(_about(picture(99)), caller="bad"))
    other = await harness.generator.create(replace(_about(picture(5)), caller="good"))
    again = await harness.generator.create(replace(_about(picture(5)), caller="bad"))  # an engine has read it now
    harness.finish(known, other, again)


class _SlowStore(MemoryLogStore):
    """Keeps streams when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.may_open = asyncio.Event()

    async def open(self, record: Record) -> Lease:
        self.num_asked += 1
        await self.may_open.wait()
        return await super().open(record)


async def test_images_of_requests_that_are_no_streams_yet_have_their_place() -> None:
    store = _SlowStore()
    requests = [_about(picture(seed)) for seed in range(3)]
    harness = Harness(limits=Limits(image_bytes=len(picture(0)) * 5 // 2), store=store)
    asking = [_begin(harness.generator.create(request)) for request in requests[:2]]
    await wait_until(lambda: store.num_asked == 2)
    async with asyncio.timeout(100):
        with pytest.raises(QueueFull, match="Too many images"):
            await harness.generator.create(requests[2])
    store.may_open.set()
    harness.finish(*await asyncio.gather(*asking))
    with pytest.raises(ContextLengthExceeded):  # after its image was read
        await harness.generator.create(replace(requests[0], sampling=greedy(2000), may_shorten=False))
    harness.finish(*[await harness.generator.create(request) for request in requests[:2]])
