"""Text of Hugging Face models while they make it: whole characters, for a reader who may be slow or leave."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.serve.huggingface import TokenStream, generate, generate_batch

PROMPTS = ["Tell me a story about dogs.", "很久很久以前", "🐶", "Once upon a time there was a small dog who liked to"]

# Models and tokenizers are Any: transformers types neither well enough to be called under mypy's strict rules.


@pytest.fixture(scope="module")
def tokenizer(tiny_gpt2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_gpt2_dir)


@pytest.fixture(scope="module")
def loaded(tiny_gpt2_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir, dtype=torch.float32)


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    """The tiny model, without the hooks that a test has hung on it."""
    hooks: list[Any] = []
    loaded.hang = lambda hook: hooks.append(loaded.register_forward_pre_hook(lambda *_: hook()))
    yield loaded
    for hook in hooks:
        hook.remove()


class Gate:
    """Counts the forwards of a model, and lets through as many as are opened."""

    def __init__(self, num_open: int) -> None:
        self.num_begun = 0
        self._open = threading.Semaphore(num_open)

    def __call__(self) -> None:
        self.num_begun += 1
        assert self._open.acquire(timeout=30)

    def open(self, num: int) -> None:
        self._open.release(num)


def alone(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    """What `model.generate` answers, decoded in one go."""
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, pad_token_id=tokenizer.eos_token_id, **options)[0, inputs["input_ids"].shape[1] :]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


async def collect(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


def rows_of(steps: list[Any], num_rows: int) -> list[str]:
    """The text of each row, and that none goes on after its end."""
    texts = [""] * num_rows
    for row in range(num_rows):
        ended = False
        for step in steps:
            assert len(step) == num_rows
            if step[row] is StopIteration:
                ended = True
            else:
                assert not ended
                texts[row] += step[row]
    return texts


def feed(stream: TokenStream, ids: list[int]) -> None:
    stream.put([[0]])
    for token_id in ids:
        stream.put([token_id])
    stream.end()


def read_all(stream: TokenStream) -> list[Any]:
    return asyncio.run(collect(aiter(stream)))


# Without a library


def test_the_module_needs_neither_library() -> None:
    code = "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers']); import tailrace.serve.huggingface"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["torch", "transformers"])
async def test_a_missing_library_is_named(
    name: str, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"needs {name}: pip install torch transformers"):
        _ = TokenStream(tokenizer).stopping_criteria
    with pytest.raises(ImportError, match="pip install torch transformers"):
        await collect(generate(model, tokenizer, "Dogs"))


# Text


@pytest.mark.parametrize("text", ["Dogs are the best.", "很久很久以前", "🐕‍🦺🐶👩‍👩‍👧", "aé\u0301ß\ud7ff\U0010ffff z"])
def test_no_half_character_is_shown(tokenizer: Any, text: str) -> None:
    """Byte by byte, the most that a tokenizer can tear characters apart."""
    byte_ids = [tokenizer(character)["input_ids"] for character in map(chr, range(128))]
    assert all(len(ids) == 1 for ids in byte_ids)
    alphabet = bytes_of(tokenizer)
    stream = TokenStream(tokenizer)
    feed(stream, [alphabet[byte] for byte in text.encode()])
    pieces = read_all(stream)
    assert pieces == list(text)


def bytes_of(tokenizer: Any) -> dict[int, int]:
    """The token of each byte."""
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    alphabet: dict[int, int] = {}
    for number in (*range(0x80), *range(0x80, 0x800, 0x40), *range(0x800, 0x110000, 0x400)):
        if 0xD800 <= number < 0xE000:
            continue
        for character in (chr(number), chr(number | 0x3F)):
            [(shown, _)] = split.pre_tokenize_str(character)
            alphabet |= {byte: vocabulary[sign] for byte, sign in zip(character.encode(), shown, strict=True)}
    missing = sorted(set(range(256)) - alphabet.keys())  # bytes that no character has
    rest = [vocabulary[sign] for sign in pre_tokenizers.ByteLevel.alphabet()]
    return alphabet | dict(zip(missing, sorted(set(rest) - set(alphabet.values())), strict=True))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_pieces_add_up_to_the_whole(tokenizer: Any, data: st.DataObject) -> None:
    """Whatever the tokens are: text, torn characters, bytes that are none, special ones."""
    alphabet = bytes_of_cached(tokenizer)
    token = st.one_of(
        st.integers(0, len(tokenizer) - 1),
        st.sampled_from([alphabet[byte] for byte in (0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0x90, 0xFF, 0x41)]),
        st.just(tokenizer.eos_token_id),
    )
    runs = st.tuples(token, st.integers(1, 20)).map(lambda run: [run[0]] * run[1])
    ids = [token_id for run in data.draw(st.lists(runs, max_size=12)) for token_id in run]
    stream = TokenStream(tokenizer, eos_token_ids=())
    feed(stream, ids)
    pieces = read_all(stream)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "" not in pieces


@pytest.fixture(scope="module")
def falling_back() -> Any:
    """A tokenizer as Llama's: words begin with their space, the first one loses it, and the rest is bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "\u2581Dogs", "\u2581are", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw)  # type: ignore[no-untyped-call]  # as in all of transformers


@settings(deadline=None, max_examples=200)
@given(parts=st.lists(st.one_of(st.integers(1, 3), st.sampled_from("🐶é以a"), st.text(max_size=20)), max_size=20))
def test_bytes_among_words(falling_back: Any, parts: list[int | str]) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [4 + byte for byte in part.encode()]
    stream = TokenStream(falling_back)
    feed(stream, ids)
    pieces = read_all(stream)
    assert "".join(pieces) == falling_back.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in "".join(map(str, parts))


@pytest.mark.parametrize("num_bytes", range(10, 22))
def test_a_character_after_long_nonsense(tokenizer: Any, num_bytes: int) -> None:
    alphabet = bytes_of(tokenizer)
    stream = TokenStream(tokenizer)
    feed(stream, [alphabet[byte] for byte in b"\x80" * num_bytes + "🐶é".encode()])
    assert "".join(read_all(stream)) == "\ufffd" * num_bytes + "🐶é"


_alphabet: dict[int, int] = {}


def bytes_of_cached(tokenizer: Any) -> dict[int, int]:
    _alphabet.update(_alphabet or bytes_of(tokenizer))
    return _alphabet


@pytest.mark.parametrize("byte", [0x41, 0x80, None])
def test_the_work_grows_with_the_tokens(tokenizer: Any, byte: int | None) -> None:
    """For text, for bytes that never make any, and for tokens without any."""
    token_id = tokenizer.eos_token_id if byte is None else bytes_of(tokenizer)[byte]
    counting = Counting(tokenizer)
    stream = TokenStream(counting, max_unread=3000, eos_token_ids=())
    feed(stream, [token_id] * 2000)
    assert counting.num_decoded < 2000 * 40
    read_all(stream)


class Counting:
    eos_token_id = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: Any) -> Any:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, **options)


@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_what_is_skipped(tokenizer: Any, skip_prompt: bool, skip_special_tokens: bool) -> None:
    stream = TokenStream(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=skip_special_tokens)
    prompt, answer = tokenizer("Dogs<|endoftext|>")["input_ids"], tokenizer(" are")["input_ids"]
    stream.put([prompt])
    for token_id in [*answer, tokenizer.eos_token_id]:
        stream.put([token_id])
    stream.end()
    eos = "" if skip_special_tokens else "<|endoftext|>"
    assert "".join(read_all(stream)) == ("" if skip_prompt else f"Dogs{eos}") + " are" + eos


def test_several_tokens_at_a_time(tokenizer: Any) -> None:
    """As assisted generation gives them."""
    import torch

    ids = tokenizer("很久很久以前")["input_ids"]
    stream = TokenStream(tokenizer)
    stream.put(torch.tensor([[1, 2]]))
    for start in range(0, len(ids), 2):
        stream.put(torch.tensor([ids[start : start + 2]]))
    stream.end()
    assert "".join(read_all(stream)) == "很久很久以前"


def test_a_row_ends_at_its_eos(tokenizer: Any) -> None:
    import torch

    a, b, c = (tokenizer(sign)["input_ids"][0] for sign in "abc")
    eos, wolf = tokenizer.eos_token_id, bytes_of(tokenizer)[0xF0]
    stream = TokenStream(tokenizer, num_sequences=3)
    stream.put(torch.tensor([[eos, a], [b, c], [eos, eos]]))
    for step in ([a, b, c], [eos, b, wolf], [a, wolf, wolf], [eos, eos, a], [eos, a, eos], [eos, a, eos]):
        stream.put(torch.tensor(step))
    stream.end()
    assert read_all(stream) == [
        ["a", "b", "c"],
        [StopIteration, "b", ""],
        [StopIteration, "\ufffd", "\ufffd\ufffda"],  # the step before showed nothing, and is left out
        [StopIteration, StopIteration, StopIteration],
    ]


# The reader


async def test_the_loop_is_called_once_for_all_that_gathers(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    called: list[Callable[..., object]] = []
    real = loop.call_soon_threadsafe

    def call(callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.Handle:
        called.append(callback)
        return real(callback, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", call)
    stream = TokenStream(tokenizer)
    reading = asyncio.create_task(collect(aiter(stream)))
    await asyncio.sleep(0)  # it waits
    feed(stream, tokenizer("a b c d")["input_ids"])
    assert len(called) == 1
    assert "".join(await reading) == "a b c d"


def test_a_slow_reader_is_waited_for(tokenizer: Any) -> None:
    [token_id] = tokenizer("a")["input_ids"]
    stream = TokenStream(tokenizer, max_unread=4)
    num_put, is_full = 0, threading.Event()

    def produce() -> None:
        nonlocal num_put
        stream.put([[0]])
        for _ in range(50):
            stream.put([token_id])
            num_put += 1
            if num_put == 4:
                is_full.set()
        stream.end()

    thread = threading.Thread(target=produce)
    thread.start()
    assert is_full.wait(30)
    thread.join(0.2)  # without a bound it would be through by now
    assert (num_put, thread.is_alive()) == (4, True)

    async def read() -> None:
        num_read = 0
        async for piece in stream:
            num_read += 1
            assert piece == "a"
            assert num_put <= num_read + 5  # four unread, and one being put
        assert num_read == 50

    asyncio.run(read())
    thread.join()


@pytest.mark.parametrize("leave", ["aclose", "cancel", "fail"])
async def test_a_blocked_producer_is_let_go(tokenizer: Any, leave: str) -> None:
    stream = TokenStream(tokenizer, max_unread=1)
    thread = threading.Thread(target=feed, args=(stream, tokenizer("a b c d")["input_ids"]))
    thread.start()
    if leave == "aclose":
        await stream.aclose()
    elif leave == "cancel":
        stream.cancel()
    else:
        stream.fail(OSError())
    await asyncio.to_thread(thread.join)
    assert stream.is_over


async def test_an_event_loop_is_not_blocked(tokenizer: Any) -> None:
    stream = TokenStream(tokenizer, max_unread=1)
    with pytest.raises(RuntimeError, match="thread of its own"):
        feed(stream, tokenizer("a b c d")["input_ids"])
    reader = aiter(stream)
    assert await anext(reader) == "a"
    with pytest.raises(RuntimeError, match="thread of its own"):
        await anext(reader)


async def test_a_failure_comes_after_what_was_there(tokenizer: Any) -> None:
    stream = TokenStream(tokenizer)
    stream.put([[0]])
    stream.put(tokenizer("a")["input_ids"])
    stream.fail(OSError("no more"))
    stream.end()  # too late
    reader = aiter(stream)
    assert await anext(reader) == "a"
    with pytest.raises(OSError, match="no more"):
        await anext(reader)
    assert await collect(reader) == []


async def test_another_batch_size_is_refused(tokenizer: Any) -> None:
    stream = TokenStream(tokenizer, num_sequences=2)
    with pytest.raises(ValueError, match="num_sequences=2, but the batch has 3"):
        stream.put([[1], [2], [3]])
    with pytest.raises(ValueError, match="num_sequences=2, but the batch has 3"):
        await collect(aiter(stream))


async def test_one_reader(tokenizer: Any) -> None:
    stream = TokenStream(tokenizer)
    reader = aiter(stream)
    with pytest.raises(RuntimeError, match="has one reader"):
        aiter(stream)
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="waits for the next piece already"):
        await anext(reader)
    waiting.cancel()
    assert await asyncio.wait([waiting])
    feed(stream, tokenizer("a")["input_ids"])
    assert await collect(reader) == ["a"]  # who waited was cancelled; the stream was not


@pytest.mark.parametrize("options", [{"num_sequences": 0}, {"max_unread": 0}])
def test_senseless_numbers(tokenizer: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TokenStream(tokenizer, **options)


# Leaving


@pytest.mark.parametrize("leave", ["break", "cancel", "cancel both", "aclose", "garbage", "task"])
async def test_the_criterion_notices(tokenizer: Any, leave: str) -> None:
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
        await asyncio.sleep(0)
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
    for _ in range(5):  # the loop's own turns, in which what was left behind is closed
        await asyncio.sleep(0)
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
    for _ in range(5):
        await asyncio.sleep(0)
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


@pytest.mark.parametrize("num_tokens", [3, 12, 30])
async def test_a_row_of_a_batch_has_the_text_that_it_has_alone(model: Any, tokenizer: Any, num_tokens: int) -> None:
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
    with pytest.raises(TypeError, match="not one"):
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


async def test_a_generation_config_is_taken_and_left_as_it_is(model: Any, tokenizer: Any) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    before = config.to_dict()
    assert await num_forwards(model, tokenizer, "Dogs", generation_config=config) == 6
    assert config.to_dict() == before


async def test_a_prompt_that_does_not_fit(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the prompt has 200 tokens, but the model's context is 128"):
        await collect(generate(model, tokenizer, "<|endoftext|>" * 200))


async def test_an_empty_prompt_begins_a_text(model: Any, tokenizer: Any) -> None:
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
