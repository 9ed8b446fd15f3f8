"""Token streams for tests, and a model whose forward passes are counted and can be paused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from tests.waiting import LONG_S

from tailrace.serve.huggingface import TokenStream

__all__ = ["PROMPTS", "Gate", "alone", "bytes_of", "collect", "feed", "read_all", "rows_of"]

PROMPTS = ["Tell me a story about dogs.", "很久很久以前", "🐶", "Once upon a time there was a small dog who liked to"]


class Gate:
    """Counts the forward passes of a model, and blocks all that a test has not opened."""

    def __init__(self, num_open: int) -> None:
        self.num_begun = 0
        self._open = threading.Semaphore(num_open)

    def __call__(self) -> None:
        self.num_begun += 1
        assert self._open.acquire(timeout=LONG_S)

    def open(self, num: int) -> None:
        self._open.release(num)


def alone(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    """Return the answer of `model.generate`, decoded at once."""
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, pad_token_id=tokenizer.eos_token_id, **options)[0, inputs["input_ids"].shape[1] :]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


async def collect(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


def rows_of(steps: list[Any], num_rows: int) -> list[str]:
    """Return the text of each row. Checks that no row continues after its end."""
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


def bytes_of(tokenizer: Any) -> dict[int, int]:
    """Return the token of each byte."""
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
