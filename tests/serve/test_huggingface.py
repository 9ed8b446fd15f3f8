"""Hugging Face models stream their text, and stop when the reader leaves."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.missing import needs
from tests.serve.tokens import PROMPTS, Gate, alone, collect, rows_of
from tests.waiting import idle

from tailrace.serve.huggingface import TokenStream, generate, generate_batch

pytestmark = needs("torch", "transformers")

# Without a library


def test_the_module_can_be_imported_without_the_libraries() -> None:
    code = "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers']); import tailrace.serve.huggingface"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["torch", "transformers"])
async def test_a_missing_library_is_named(
    name: str, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"needs {name}: {sys.executable} -m pip install torch transformers"):
        _ = TokenStream(tokenizer).stopping_criteria
    with pytest.raises(ImportError, match="pip install torch transformers"):
        await collect(generate(model, tokenizer, "Dogs"))


# Leaving


@pytest.mark.parametrize("leave", ["break", "cancel", "cancel both", "aclose", "garbage", "task"])
async def test_the_stopping_criterion(tokenizer: Any, leave: str) -> None:
    import torch

    stream = TokenStream(tokenizer, num_sequences=2)
    [criterion] = stream.stopping_criteria
    [a] = tokenizer("a")["input_ids"]
    ids = torch.zeros((2, 3), dtype=torch.long)
    stream.put([[0], [0]])
    stream.put([a, a])
    stops = criterion(ids, None)
    assert (stops.tolist(), stops.dtype) == ([False, False], torch.bool)
    if leave == "break":
        async for _ in stream:
            break
    elif leave == "cancel":
        stream.cancel()
        assert await collect(aiter(stream)) == [["a", "a"]]
    elif leave == "cancel both":
        stream.cancel(0)
        assert criterion(ids, None).tolist() == [True, False]
        stream.cancel(1)
        assert await collect(aiter(stream)) == [["a", "a"]]
    elif leave == "aclose":
        await stream.aclose()
        assert await collect(aiter(stream)) == []
    elif leave == "garbage":
        aiter(stream)
        gc.collect()
    else:
        reading = asyncio.create_task(collect(aiter(stream)))
        await idle()
        reading.cancel()
        await asyncio.wait([reading])
        del reading
        gc.collect()
    assert criterion(ids, None).tolist() == [True, True]
    with pytest.raises(IndexError):
        stream.cancel(2)


async def test_one_row_is_cancelled(model: Any, tokenizer: Any) -> None:
    gate = Gate(20)
    model.hang(gate)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": -1}
    stream = TokenStream(tokenizer, num_sequences=2, eos_token_ids=())
    criteria = stream.stopping_criteria
    inputs = tokenizer(["D", "C"], return_tensors="pt") | options
    call = asyncio.to_thread(model.generate, **inputs, pad_token_id=0, streamer=stream, stopping_criteria=criteria)
    running = asyncio.create_task(call)
    reader = aiter(stream)
    steps = [await anext(reader)]
    stream.cancel(0)
    gate.open(1000)
    steps += await collect(reader)
    await running
    assert gate.num_begun == 60
    texts = rows_of(steps, 2)
    assert steps[-1][0] is StopIteration
    assert alone(model, tokenizer, "C", **options) == texts[1]
    whole = alone(model, tokenizer, "D", **options)
    assert whole.startswith(texts[0])
    assert whole != texts[0]


@pytest.mark.parametrize("leave", ["aclose", "break", "cancelled"])
async def test_leaving_stops_the_model_within_a_token(model: Any, tokenizer: Any, leave: str) -> None:
    gate = Gate(20)
    model.hang(gate)
    begun = threading.Event()

    async def read() -> None:
        pieces = generate(model, tokenizer, "Dogs", max_new_tokens=100, eos_token_id=-1, do_sample=False)
        async for _ in pieces:
            begun.set()
            if leave == "break":
                break
            if leave == "aclose":
                await pieces.aclose()

    reading = asyncio.create_task(read())
    await asyncio.to_thread(begun.wait)
    if leave == "cancelled":
        reading.cancel()
    await idle()  # what was left behind is closed
    num_begun = gate.num_begun
    gate.open(1000)
    await asyncio.wait([reading])
    await no_thread_is_left()
    assert 0 < gate.num_begun <= max(num_begun, 20) + 1


async def no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name == "tailrace-generate":
            await asyncio.to_thread(thread.join)


async def test_closing_waits_for_the_thread(model: Any, tokenizer: Any) -> None:
    gate = Gate(20)
    model.hang(gate)
    pieces = generate(model, tokenizer, "Dogs", max_new_tokens=100, eos_token_id=-1, do_sample=False)
    await anext(pieces)
    closing = asyncio.ensure_future(pieces.aclose())
    await idle()
    assert not closing.done()  # and yet this goes on
    gate.open(1000)
    await closing
    assert gate.num_begun <= 22


# Models


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_text_is_that_of_generate(model: Any, tokenizer: Any, prompt: str) -> None:
    options = {"max_new_tokens": 50, "do_sample": False}
    pieces = await collect(generate(model, tokenizer, prompt, **options))
    assert "".join(pieces) == alone(model, tokenizer, prompt, **options)
    assert len(pieces) > 5
    assert "" not in pieces


def test_a_loop_that_ends_stops_the_model(model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    left: list[Any] = []

    async def leave() -> None:
        left.append(generate(model, tokenizer, "Dogs", max_new_tokens=100, eos_token_id=-1, do_sample=False))
        await anext(left[0])

    asyncio.run(leave())
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    for thread in threading.enumerate():
        if thread.name == "tailrace-generate":
            thread.join()


@pytest.mark.parametrize(
    "num_tokens", [pytest.param(3, marks=pytest.mark.deep), 12, pytest.param(30, marks=pytest.mark.deep)]
)
async def test_a_row_of_a_batch_has_the_same_text_as_alone(model: Any, tokenizer: Any, num_tokens: int) -> None:
    inputs = tokenizer(PROMPTS[1], return_tensors="pt")
    eos = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, -1]
    options: dict[str, Any] = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": [0, eos.item()]}
    assert tokenizer.pad_token is None
    steps = await collect(generate_batch(model, tokenizer, PROMPTS, **options))
    texts = rows_of(steps, len(PROMPTS))
    assert texts == ["".join(await collect(generate(model, tokenizer, prompt, **options))) for prompt in PROMPTS]
    assert texts == [alone(model, tokenizer, prompt, **options) for prompt in PROMPTS]
    assert len(set(map(len, texts))) > 1
    assert any(StopIteration in step for step in steps)
    assert (tokenizer.pad_token, tokenizer.padding_side) == (None, "right")  # it is the caller's


async def test_batches_of_one_and_none(model: Any, tokenizer: Any) -> None:
    options = {"max_new_tokens": 9, "do_sample": False}
    steps = await collect(generate_batch(model, tokenizer, ["Dogs"], **options))
    assert [step[0] for step in steps] == await collect(generate(model, tokenizer, "Dogs", **options))
    assert await collect(generate_batch(model, tokenizer, [])) == []
    with pytest.raises(TypeError, match="not a single string"):
        await collect(generate_batch(model, tokenizer, "Dogs"))


async def test_an_error_of_generate_reaches_the_reader(model: Any, tokenizer: Any) -> None:
    num_begun = 0

    def fail_at_last() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun > 20:
            raise OSError("the model broke")

    model.hang(fail_at_last)
    pieces = generate(model, tokenizer, "Dogs", max_new_tokens=100, eos_token_id=-1, do_sample=False)
    assert await anext(pieces)
    with pytest.raises(OSError, match="the model broke"):
        await collect(pieces)
    await no_thread_is_left()


@pytest.mark.parametrize("option", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"max_new": 3}])
async def test_options_that_cannot_be(model: Any, tokenizer: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_beams|num_sequences=1|max_new"):
        await collect(generate(model, tokenizer, "Dogs", **option))


async def test_options_that_are_set_already(model: Any, tokenizer: Any) -> None:
    with pytest.raises(TypeError, match="input_ids"):
        await collect(generate(model, tokenizer, "Dogs", input_ids=[[1]]))


async def num_forwards(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> int:
    gate = Gate(1000)
    model.hang(gate)
    await collect(generate(model, tokenizer, prompt, eos_token_id=-1, do_sample=False, **options))
    return gate.num_begun


async def test_how_many_tokens(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    num_prompt_tokens = len(tokenizer("Dogs")["input_ids"])
    assert await num_forwards(model, tokenizer, "Dogs") == 128 - num_prompt_tokens  # fewer than 256
    assert await num_forwards(model, tokenizer, "Dogs", max_length=10_000) == 128 - num_prompt_tokens
    assert await num_forwards(model, tokenizer, "Dogs", max_length=30) == 30 - num_prompt_tokens
    assert await num_forwards(model, tokenizer, "Dogs", max_new_tokens=5, max_length=30) == 5
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 7)
    assert await num_forwards(model, tokenizer, "Dogs") == 7
    assert await num_forwards(model, tokenizer, "Dogs", max_new_tokens=3) == 3
    monkeypatch.setattr(model.config, "n_positions", 100_000)  # the model would not notice before 128
    monkeypatch.setattr(model.generation_config, "max_new_tokens", None)
    with pytest.raises(IndexError):  # as it is without the limit
        await collect(generate(model, tokenizer, "Dogs", eos_token_id=-1, do_sample=False))


async def test_a_generation_config_is_used_and_not_changed(model: Any, tokenizer: Any) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    before = config.to_dict()
    assert await num_forwards(model, tokenizer, "Dogs", generation_config=config) == 6
    assert config.to_dict() == before


async def test_a_prompt_that_does_not_fit(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the prompt has 200 tokens, but the model's context has only 128"):
        await collect(generate(model, tokenizer, "<|endoftext|>" * 200))


async def test_an_empty_prompt_starts_a_text(model: Any, tokenizer: Any) -> None:
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = alone(model, tokenizer, "<|endoftext|>", **options)
    assert "".join(await collect(generate(model, tokenizer, "", **options))) == expected


async def test_the_messages_of_a_chat(model: Any, tokenizer: Any) -> None:
    options = {"max_new_tokens": 20, "do_sample": False}
    chat = [{"role": "user", "content": "Dogs"}, {"role": "assistant", "content": "are"}]
    expected = alone(model, tokenizer, "Dogs\nare\n", **options)
    assert "".join(await collect(generate(model, tokenizer, chat, **options))) == expected


async def test_own_stopping_criteria_and_strings(model: Any, tokenizer: Any) -> None:
    import torch

    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    whole = "".join(await collect(generate(model, tokenizer, "Dogs", **options)))
    pieces = generate(model, tokenizer, "Dogs", stop_strings=[whole[8:10]], **options)
    stopped = "".join(await collect(pieces))
    assert len(stopped) < len(whole)
    assert whole.startswith(stopped)

    def at_once(ids: Any, scores: Any) -> Any:
        return torch.ones(len(ids), dtype=torch.bool)

    assert await num_forwards(model, tokenizer, "Dogs", stopping_criteria=[at_once]) == 1


@pytest.mark.deep
async def test_several_at_once(model: Any, tokenizer: Any) -> None:
    options = {"max_new_tokens": 30, "do_sample": False}
    reading = [collect(generate(model, tokenizer, prompt, **options)) for prompt in PROMPTS * 3]
    texts = ["".join(pieces) for pieces in await asyncio.gather(*reading)]
    assert texts == [alone(model, tokenizer, prompt, **options) for prompt in PROMPTS] * 3


@pytest.mark.deep
@pytest.mark.timeout(400)
async def test_the_real_model(smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = alone(model, tokenizer, prompt, do_sample=False, max_length=10_000)
    pieces = await collect(generate(model, tokenizer, chat, do_sample=False))
    assert "".join(pieces) == expected
    assert "Paris" in expected
    assert len(pieces) > 3
    story = await collect(generate_batch(model, tokenizer, [prompt, "Once upon a time"], do_sample=False))
    texts = rows_of(story, 2)
    assert texts[0] == expected
    assert len(tokenizer(texts[1])["input_ids"]) <= 40  # the model's own limit goes before `max_length`
    assert texts[1] == alone(model, tokenizer, "Once upon a time", do_sample=False, max_length=10_000)
