"""Prompts of several segments: counted before they run, replayed as they were, refused where the engine has no eyes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.generation.engine_failures import KILL, ids_of, restart_engine
from tests.generation.harness import Harness, end_of, greedy, text_of
from tests.generation.harness import oracle as oracle_of

from tailrace.engines.interface import Sequence
from tailrace.errors import ContextLengthExceeded, SequenceFailed, UnsupportedParameter
from tailrace.types import (
    Attachment,
    GenerateRequest,
    Prompt,
    Record,
    Sampling,
    Segment,
    TextSegment,
    new_stream_id,
    num_tokens_of,
    with_ids,
)
from tailrace_outer.scripted.scripted_engine import read_ids

_IMAGE, _OTHER = (Attachment.of(content, "image/png", 7) for content in (b"an image", b"another"))
_PROMPT: tuple[Segment, ...] = ((72, 105), _IMAGE, (33,))


def _request(prompt: tuple[Segment, ...] = _PROMPT, sampling: Sampling | None = None) -> GenerateRequest:
    return GenerateRequest(prompts=(prompt,), sampling=sampling or greedy(20), on_disconnect="detach", linger_s=1e6)


def test_an_attachment_is_named_by_the_digest_of_its_bytes() -> None:
    assert _IMAGE.digest == "a5df3fde7b200c3fa2791144c7e05c5c2bced4c6ad863d3a4cf76c972c1712f9"
    assert Attachment.of(b"an image", "image/png", 7) == _IMAGE != _OTHER


def test_ids_join_the_ids_before_them() -> None:
    assert with_ids(((1, 2),), (3,)) == ((1, 2, 3),)
    assert with_ids(((1,), _IMAGE), (3,)) == ((1,), _IMAGE, (3,))
    assert num_tokens_of(with_ids(_PROMPT, (3, 4))) == 12


async def test_an_image_is_read_where_it_is_and_counted_before_it_runs() -> None:
    harness, found = Harness(), []
    for prompt in (_PROMPT, ((72, 105), _OTHER, (33,)), (_IMAGE, (72, 105, 33))):
        run = await harness.generator.create(_request(prompt))
        assert (run.record.num_prompt_tokens, run.record.prompts[0].text) == (10, "Hi!")
        assert run.record.prompts[0].segments == prompt
        harness.finish(run)
        assert text_of(run.log) == oracle_of(read_ids(prompt), 1, 20)
        assert end_of(run.log).usage == (10, 20)
        found.append(text_of(run.log))
    assert len(set(found)) == 3
    harness.check_idle()


async def test_a_prompt_with_an_image_is_replayed() -> None:
    harness = Harness()
    run = await harness.generator.create(_request())
    harness.engine.step(6)
    restart_engine(harness, KILL)
    harness.finish(run)
    assert text_of(run.log) == oracle_of(read_ids(_PROMPT), 1, 20)
    assert end_of(run.log).continuity == "replayed"


async def test_an_answer_is_continued_behind_the_same_segments() -> None:
    harness = Harness()
    run = await harness.generator.create(_request())
    harness.engine.step(6)
    before = ids_of(run)
    for offset in (5, 9):
        harness.engine.seed_offset = offset
        restart_engine(harness, KILL)
        harness.engine.step(2)
        assert harness.engine.submitted[-1].segments == ((72, 105), _IMAGE, (33, *before))
        before = ids_of(run)
    harness.finish(run)
    assert end_of(run.log).continuity == "continued"
    assert len(ids_of(run)) == 20


@pytest.mark.parametrize(
    ("segment", "kind"), [(Attachment.of(b"", "image/gif", 1), "image/gif"), (TextSegment("Hi", 1), "text")]
)
async def test_what_an_engine_does_not_take_is_refused(segment: Segment, kind: str) -> None:
    harness = Harness()
    with pytest.raises(UnsupportedParameter, match=kind):
        await harness.generator.create(_request(((72,), segment)))
    with pytest.raises(UnsupportedParameter, match=kind):
        harness.generator.count_tokens(_request(((72,), segment)))
    with pytest.raises(SequenceFailed):
        _ = Sequence(1, ((72,), segment), Sampling()).prompt_ids
    harness.check_idle()


async def test_an_image_that_does_not_fit_is_refused() -> None:
    harness = Harness(context_tokens=50)
    large = Attachment.of(b"an image", "image/png", 50)
    with pytest.raises(ContextLengthExceeded) as caught:
        await harness.generator.create(_request(((72, 105), large)))
    assert caught.value.num_prompt_tokens == 52
    with pytest.raises(UnsupportedParameter, match="truncated"):
        await harness.generator.create(GenerateRequest(prompts=(((72, 105), large),), truncate=5))
    harness.check_idle()


async def test_a_stream_whose_prompt_the_next_engine_does_not_take_is_interrupted() -> None:
    harness = Harness(max_sequences=1)
    running, waiting = [await harness.generator.create(_request()) for _ in range(2)]
    plain = await harness.create("Hi", greedy(20))
    harness.engine.step(6)
    harness.engine.fail(KILL)
    harness.engine.capabilities = replace(harness.engine.engine.capabilities, takes=frozenset({"token_ids"}))
    harness.engine.is_ready = True
    harness.generator.on_load()
    harness.finish(plain)
    assert [end_of(run.log).status for run in (running, waiting, plain)] == ["interrupted", "interrupted", "done"]
    failure = end_of(waiting.log).failure
    assert failure is not None
    assert failure.message == "The engine that runs now cannot continue this stream."
    harness.check_idle()


@pytest.mark.parametrize(("takes", "status"), [("image/png", "done"), ("image/gif", "interrupted")])
async def test_a_stream_of_an_earlier_process_needs_an_engine_that_takes_its_prompt(takes: str, status: str) -> None:
    harness = Harness()
    harness.engine.capabilities = replace(harness.engine.engine.capabilities, takes=frozenset({"token_ids", takes}))
    prompts = (Prompt("Hi!", _PROMPT),)
    record = Record(new_stream_id(), 1.0, "scripted", prompts=prompts, sampling=greedy(20), linger_s=1e6)
    lease = await harness.store.open(record)
    harness.generator.recover([lease])
    harness.finish(*harness.generator.live)
    assert end_of(lease.log).status == status
    assert text_of(lease.log) == (oracle_of(read_ids(_PROMPT), 1, 20) if status == "done" else "")
    harness.check_idle()
