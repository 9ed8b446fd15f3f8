"""Streamed text of Hugging Face models: whole characters, also for slow readers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.missing import needs
from tests.serve.tokens import bytes_of, collect, feed, read_all
from tests.waiting import LONG_S, idle

from tailrace.serve.huggingface import TokenStream

pytestmark = needs("torch", "transformers")

# Text


@pytest.mark.parametrize("text", ["Dogs are the best.", "很久很久以前", "🐕‍🦺🐶👩‍👩‍👧", "aé\u0301ß\ud7ff\U0010ffff z"])
def test_incomplete_characters_are_not_shown(tokenizer: Any, text: str) -> None:
    """The text is put byte by byte, so that every character is split."""
    byte_ids = [tokenizer(character)["input_ids"] for character in map(chr, range(128))]
    assert all(len(ids) == 1 for ids in byte_ids)
    alphabet = bytes_of(tokenizer)
    stream = TokenStream(tokenizer)
    feed(stream, [alphabet[byte] for byte in text.encode()])
    pieces = read_all(stream)
    assert pieces == list(text)


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_pieces_add_up_to_the_whole(tokenizer: Any, data: st.DataObject) -> None:
    """For any tokens: text, split characters, invalid bytes and special tokens."""
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
    """Return a tokenizer like Llama's: words begin with their space, the first word has none, and unknown characters
    are bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "\u2581Dogs", "\u2581are", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw)  # type: ignore[no-untyped-call]  # as in all of transformers


@settings(deadline=None, max_examples=examples(200))
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
def test_a_character_after_many_invalid_bytes(tokenizer: Any, num_bytes: int) -> None:
    alphabet = bytes_of(tokenizer)
    stream = TokenStream(tokenizer)
    feed(stream, [alphabet[byte] for byte in b"\x80" * num_bytes + "🐶é".encode()])
    assert "".join(read_all(stream)) == "\ufffd" * num_bytes + "🐶é"


_alphabet: dict[int, int] = {}


def bytes_of_cached(tokenizer: Any) -> dict[int, int]:
    _alphabet.update(_alphabet or bytes_of(tokenizer))
    return _alphabet


@pytest.mark.parametrize("byte", [0x41, 0x80, None])
def test_the_time_is_linear_in_the_tokens(tokenizer: Any, byte: int | None) -> None:
    """For text, for bytes that never form text, and for tokens without text."""
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
def test_skipped_tokens(tokenizer: Any, skip_prompt: bool, skip_special_tokens: bool) -> None:
    stream = TokenStream(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=skip_special_tokens)
    prompt, answer = tokenizer("Dogs<|endoftext|>")["input_ids"], tokenizer(" are")["input_ids"]
    stream.put([prompt])
    for token_id in [*answer, tokenizer.eos_token_id]:
        stream.put([token_id])
    stream.end()
    eos = "" if skip_special_tokens else "<|endoftext|>"
    assert "".join(read_all(stream)) == ("" if skip_prompt else f"Dogs{eos}") + " are" + eos


def test_several_tokens_at_a_time(tokenizer: Any) -> None:
    """Assisted generation puts several tokens at a time."""
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


async def test_the_event_loop_is_woken_once_for_waiting_text(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    called: list[Callable[..., object]] = []
    real = loop.call_soon_threadsafe

    def call(callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.Handle:
        called.append(callback)
        return real(callback, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", call)
    stream = TokenStream(tokenizer)
    reading = asyncio.create_task(collect(aiter(stream)))
    await idle()  # it waits
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
    assert is_full.wait(LONG_S)
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
async def test_a_blocked_producer_is_released(tokenizer: Any, leave: str) -> None:
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
    with pytest.raises(RuntimeError, match="its own thread"):
        feed(stream, tokenizer("a b c d")["input_ids"])
    reader = aiter(stream)
    assert await anext(reader) == "a"
    with pytest.raises(RuntimeError, match="its own thread"):
        await anext(reader)


async def test_a_failure_comes_after_earlier_text(tokenizer: Any) -> None:
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
    with pytest.raises(RuntimeError, match="has a reader already"):
        aiter(stream)
    waiting = asyncio.ensure_future(anext(reader))
    await idle()
    with pytest.raises(RuntimeError, match="waits for the next piece already"):
        await anext(reader)
    waiting.cancel()
    assert await asyncio.wait([waiting])
    feed(stream, tokenizer("a")["input_ids"])
    assert await collect(reader) == ["a"]  # who waited was cancelled; the stream was not


@pytest.mark.parametrize("options", [{"num_sequences": 0}, {"max_unread": 0}])
def test_invalid_numbers(tokenizer: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TokenStream(tokenizer, **options)
