"""`tailrace.engine` accepts what the wires accept, and refuses the rest before the engine."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.dialects.fake_server import FakeServer

import tailrace
from tailrace.dialects import native
from tailrace.errors import ModelError, RequestError, StorageError, TailraceError, UnsupportedParameter
from tailrace.streams import StreamLog
from tailrace.types import GenerateRequest
from tailrace_outer.serve.model import Model

_WRONG: list[dict[str, Any]] = [  # Any: of types that they should not have
    {"temperature": "hot"},
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": True},
    {"top_p": 5},
    {"top_p": -1},
    {"top_k": 1.5},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": "x"},
    {"seed": "abc"},
    {"stop": 5},
    {"stop": ["a"] * 33},
    {"ignore_eos": "yes"},
]


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    one = await tailrace.engine("scripted")
    yield one
    await one.aclose()


async def test_refusals_have_the_same_message_as_on_the_wire(model: Model) -> None:
    for sampling in _WRONG:
        with pytest.raises(RequestError) as wire:
            native.parse_body({"prompt": "A river is", **sampling}, FakeServer())
        for ask in (model.stream, model.chat):
            with pytest.raises(RequestError) as here:  # at the call, before there is an answer to write to
                ask("A river is", **sampling)
            assert (str(here.value), here.value.param) == (str(wire.value), wire.value.param), sampling
            assert (here.value.param or "").startswith(next(iter(sampling)))
    assert model.stream("A river is").end is None
    assert await model.stream("A river is", max_tokens=2).text()


async def test_unknown_parameters(model: Model) -> None:
    for sampling, line in (
        ({"max_token": 4}, "There is no sampling parameter max_token. Did you mean max_tokens?"),
        ({"frobnicate": 1}, "There is no sampling parameter frobnicate."),
        ({"messages": []}, "There is no sampling parameter messages."),
        ({"n": 2}, "n is not supported here."),
        ({"logprobs": True}, "logprobs is not supported here."),
    ):
        with pytest.raises(UnsupportedParameter) as refused:
            model.stream("A river is", **sampling)
        assert (str(refused.value), refused.value.param) == (line, next(iter(sampling)))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (5, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": "<|im_end|>", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "half a pair: \ud800"}], "messages"),
    ],
)
async def test_messages_are_checked_like_on_the_wire(model: Model, messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        model.chat(messages)
    assert refused.value.param == param


@pytest.mark.parametrize("prompt", [5, None, "half a pair: \ud800"])
async def test_a_prompt_is_text(model: Model, prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        model.stream(prompt)
    assert refused.value.param == "prompt"


async def test_accepted_parameters(model: Model) -> None:
    answer = model.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_completion_tokens=3, temperature=0, top_p=None, n=1, stop=("never said", "nor this"),
    )  # fmt: skip
    pieces = [piece async for piece in answer]
    assert all(isinstance(piece, str) and piece for piece in pieces)
    assert answer.end is not None
    assert (answer.end.status, answer.end.usage.num_completion_tokens) == ("done", 3)


async def test_reasoning_is_part_of_the_text() -> None:
    """Apps get one text; there is no separate reasoning."""
    thinking = await tailrace.engine("scripted:thinks=4")
    try:
        text = await thinking.chat("hi", max_tokens=30, temperature=0, seed=1).text()
    finally:
        await thinking.aclose()
    assert text == Answer(chat_ids("hi"), 30, 1, 4).text


class _Seen(Model):
    """Keeps the logs of its streams."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:  # Any: as of `Model`
        super().__init__(name, settings)
        self.logs: list[StreamLog] = []

    async def begin(self, request: GenerateRequest) -> StreamLog:
        self.logs.append(await super().begin(request))
        return self.logs[-1]


@pytest.mark.parametrize("end", ["released", "cancelled"])
async def test_half_an_answer_is_an_error(end: str) -> None:
    """The stream goes on elsewhere, or was cancelled, by nobody who iterates."""
    model = _Seen("scripted:tokens_per_s=50", {})
    stream = await model.stream("A river is", max_tokens=5_000)
    pieces = []
    (log,) = model.logs

    async def read() -> None:
        async for piece in stream:
            pieces.append(piece)
            if end == "released":
                log.release(StorageError("The log store cannot be reached."))
            else:
                log.cancel()

    with pytest.raises(TailraceError) as cut:
        await read()
    assert pieces
    assert cut.value.code == {"released": "journal_unavailable", "cancelled": "cancelled"}[end]
    log.cancel()
    await model.aclose()


async def test_closing_an_answer_ends_its_iteration(model: Model) -> None:
    stream = await model.stream("A river is", max_tokens=5_000)
    async for _ in stream:
        await stream.aclose()
    assert stream.end is not None
    assert stream.end.status == "cancelled"


async def test_an_unknown_setting() -> None:
    with pytest.raises(TypeError, match=r"There is no setting max_sequence\. Did you mean max_sequences\?"):
        tailrace.engine("scripted", max_sequence=2)


async def test_an_unknown_model() -> None:
    model = tailrace.engine("smolm2")
    with pytest.raises(ModelError, match="Did you mean smollm2"):
        await model
    await model.aclose()
