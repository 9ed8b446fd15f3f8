"""An engine without a model: token *i* is a function of prompt, seed and *i*, so that tests know every answer.

The vocabulary contains the 256 bytes, a few control tokens, some words, and pieces of the texts that it can recite.
Prompts are tokenised to bytes. Answers are words; with `utf8`, every eighth position starts a four-byte character, so
that characters are split over tokens. A control token in a prompt causes a fault after `fault_after` tokens of that
sequence: `<|crash|>` kills the worker, `<|stall|>` hangs it, `<|fail|>` fails the sequence, `<|garbage|>` raises.

Options: `tokens_per_s` (per sequence; 0: unlimited), `prefill_tokens_per_s` (how fast it reads a prompt; without it, a
prompt is read at once, and nothing is said about it), `utf8` (0 or 1), `fault_after` (tokens), `eos_after` (tokens; 0:
never), `thinks` (tokens between `<think>` and `</think>` before the answer, unless the chat template disables it),
`text` (the index of the text in `TEXTS` to recite; -1 takes the index from the prompt, and larger indexes are the
faults in the order above, for wires that do not parse control tokens), `caches` (how many earlier prompts count as
cached; without it, the engine does not say how much of a prompt was cached), `drift` (how many of a thousand tokens
differ between processes, so that a replay differs), `embeds` and `ranks` (`vectors`). `script=FILE` says what a script
says (`script`).

An adapter changes the words of an answer by its name; its files are not read. An image is read as equal token ids,
which depend on its digest: one for each 1,024 pixels. Images of two sizes kill or hang the worker (`CRASH_SIZE`,
`STALL_SIZE`).
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import struct
import time
import zlib
from collections import deque
from functools import lru_cache
from pathlib import Path

from tailrace.engines.interface import Capabilities, Delta, Prefill, Sequence, Sight
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError, SequenceFailed
from tailrace.types import Attachment, FinishReason, Segment, ids_of
from tailrace_outer.scripted.script import read_script
from tailrace_outer.scripted.texts import PIECES, TEXTS, cut

__all__ = [
    "CHAT_TEMPLATE",
    "CONTROL_TOKENS",
    "CRASH_ID",
    "CRASH_SIZE",
    "EOS_ID",
    "OPTIONS",
    "PLACEHOLDER",
    "STALL_ID",
    "STALL_SIZE",
    "TEXTS",
    "THINKING_TEMPLATE",
    "VOCAB_SIZE",
    "ScriptedEngine",
    "read_ids",
    "recited_tokens",
    "scripted_token",
    "tokenizer_json",
]

CONTROL_TOKENS = (
    "<|end|>",
    "<|crash|>",
    "<|stall|>",
    "<|fail|>",
    "<|garbage|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
OPTIONS = (
    "caches", "drift", "embeds", "eos_after", "fault_after", "prefill_tokens_per_s", "ranks", "text", "thinks",
    "tokens_per_s", "utf8",
)  # fmt: skip
EOS_ID, CRASH_ID, STALL_ID, FAIL_ID, GARBAGE_ID = range(256, 261)
_FIRST_WORD_ID = 256 + len(CONTROL_TOKENS)
PLACEHOLDER = "<|image|>"  # of an image, in a chat
_LAST_TOKENS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", PLACEHOLDER)  # the last ids; no answer has them
_WORDS = [
    "the", "river", "runs", "over", "stones", "and", "under", "old", "bridges", "while", "a", "dog", "sleeps", "in",
    "warm", "light", "near", "water", "mills", "turn", "slow", "wheels", "send", "clear", "songs", "down", "to",
    "green", "fields", "where", "children", "count", "boats", "fish", "birds", "clouds", "hours", "stars",
]  # fmt: skip
VOCAB_SIZE = _FIRST_WORD_ID + len(_WORDS) + len(PIECES) + len(_LAST_TOKENS)
_FIRST_IMAGE_ID = 1 << 32  # of those that stand for the digests of images
_PIXELS = 1024  # for each token of an image
CRASH_SIZE = (13, 13)  # an image of this size kills the worker that reads it
STALL_SIZE = (17, 17)  # and one of this size hangs it
_CHARACTERS = "🌊🐕🌉🌲🐟🛶🎣🌾"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_THINK_OPEN, _THINK_CLOSE = b"<think>\n", b"\n</think>\n\n"


def scripted_token(
    prompt_ids: tuple[int, ...], seed: int, index: int, *, utf8: bool = True, thinks: int = 0, adapter: str = ""
) -> int:
    """Return token `index` of the answer to `prompt_ids`. Tests compare with it."""
    return _token_at(_prompt_hash(prompt_ids, seed, adapter), index, utf8, thinks if _may_think(prompt_ids) else 0)


def read_ids(segments: tuple[Segment, ...]) -> tuple[int, ...]:
    """Return a prompt as the engine reads it, for `scripted_token`."""
    read = ((_ids_of_image(one),) if isinstance(one, Attachment) else (one,) for one in segments)
    return ids_of(tuple(one for ones in read for one in ones))


def _ids_of_image(image: Attachment) -> tuple[int, ...]:
    return (_FIRST_IMAGE_ID + int(image.digest[:8], 16),) * image.num_tokens


def _may_think(prompt_ids: tuple[int, ...]) -> bool:
    return prompt_ids[-len(_THINK_CLOSE) :] != tuple(_THINK_CLOSE)


def _token_at(key: int, index: int, utf8: bool, thinks: int) -> int:
    """Like `_token`, after `thinks` tokens of reasoning between their markers."""
    if thinks:
        index -= len(_THINK_OPEN)
        if index < 0:
            return _THINK_OPEN[index]
        if thinks <= index < thinks + len(_THINK_CLOSE):
            return _THINK_CLOSE[index - thinks]
        index -= len(_THINK_CLOSE) if index >= thinks else 0
    return _token(key, index, utf8)


def _prompt_hash(prompt_ids: tuple[int, ...], seed: int, adapter: str = "") -> int:
    return zlib.crc32(adapter.encode(), zlib.crc32(repr((prompt_ids, seed)).encode()))


def _token(key: int, index: int, utf8: bool) -> int:
    phase = index % 8
    if utf8 and phase >= 4:
        return _CHARACTERS[((key ^ (index >> 3)) * 2654435761 >> 7) % len(_CHARACTERS)].encode()[phase - 4]
    return _FIRST_WORD_ID + ((key + index * 40503) * 2654435761 >> 9) % len(_WORDS)


@lru_cache(maxsize=len(TEXTS))
def recited_tokens(number: int) -> tuple[int, ...]:
    """Return the tokens of one of `TEXTS` and the end token. Tests of the option `text` compare with them."""
    words = [f" {word}".encode() for word in _WORDS]
    ids = {bytes([byte]): byte for byte in range(256)}
    ids |= {piece: _FIRST_WORD_ID + offset for offset, piece in enumerate((*words, *PIECES))}
    return (*(ids[piece] for piece in cut(number, words)), EOS_ID)


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """Return the engine's vocabulary in the format of the `tokenizers` library."""
    characters = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    vocabulary |= {token: 256 + offset for offset, token in enumerate(CONTROL_TOKENS)}
    for offset, word in enumerate(_WORDS):
        vocabulary["Ġ" + word] = _FIRST_WORD_ID + offset
    for offset, piece in enumerate(PIECES, _FIRST_WORD_ID + len(_WORDS)):
        vocabulary["".join(characters[byte] for byte in piece)] = offset
    vocabulary |= {token: len(vocabulary) + offset for offset, token in enumerate(_LAST_TOKENS)}
    added = [
        {"id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for token in (*CONTROL_TOKENS, *_LAST_TOKENS)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, object] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocabulary, "merges": []}  # fmt: skip
    return json.dumps(
        {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
         "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    )  # fmt: skip


def _byte_characters() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary: the byte if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _number_in(prompt_ids: tuple[int, ...]) -> int:
    found = re.search(rb"[0-9]+", bytes(token_id for token_id in prompt_ids if token_id < 256))
    return int(found[0]) if found else 0


def _text_of(prompt_ids: tuple[int, ...]) -> str:
    """Return a prompt as text, with its control tokens."""
    spelled = {256 + offset: token.encode() for offset, token in enumerate(CONTROL_TOKENS)}
    words = {_FIRST_WORD_ID + offset: f" {word}".encode() for offset, word in enumerate(_WORDS)}
    words |= {_FIRST_WORD_ID + len(_WORDS) + offset: piece for offset, piece in enumerate(PIECES)}
    pieces = (bytes((one,)) if one < 256 else spelled.get(one) or words.get(one, b"") for one in prompt_ids)
    return b"".join(pieces).decode("utf-8", "replace")


def _num_equal(ids: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Return the length of the common beginning, without the last token, which every prompt has to compute."""
    pairs = zip(ids[:-1], others, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(ids) - 1, len(others)))


class _Run:
    __slots__ = (
        "aborted", "count", "due_s", "eos_after", "fault", "key", "limit", "logprobs", "num_cached",
        "num_prompt", "num_read", "script", "sequence_id", "thinks",
    )  # fmt: skip

    def __init__(
        self, sequence: Sequence, ids: tuple[int, ...], limit: int, eos_after: int, script: tuple[int, ...], thinks: int
    ) -> None:
        self.sequence_id = sequence.sequence_id
        self.key = _prompt_hash(ids, sequence.sampling.seed or 0, sequence.adapter)
        self.limit = limit
        self.eos_after = eos_after
        self.script = script
        self.thinks = thinks if _may_think(ids) else 0
        self.num_cached: int | None = None
        self.num_prompt = len(ids)
        self.num_read = 0  # tokens of the prompt
        self.count = 0
        self.due_s = time.monotonic()
        self.aborted = False
        self.logprobs = (-0.5,) if sequence.sampling.logprobs else ()
        self.fault = next((i for i in ids if CRASH_ID <= i <= GARBAGE_ID), None)


class ScriptedEngine:
    """Implements `Engine` without a model."""

    def __init__(self, spec: EngineSpec) -> None:
        options = spec.options
        self._interval_s = 1 / options["tokens_per_s"] if options.get("tokens_per_s") else 0.0
        speed = options.get("prefill_tokens_per_s")
        self._read_interval_s = 1 / speed if speed else 0.0
        self._utf8 = bool(options.get("utf8", 1))
        self._drift = int(options.get("drift", 0))
        self._thinks = int(options.get("thinks", 0))
        self._fault_after = int(options.get("fault_after", 3))
        self._eos_after = int(options.get("eos_after", 0))
        self._script = read_script(Path(spec.path)) if spec.path not in ("", ".") else None
        self._text = int(options["text"]) if "text" in options else None
        if self._text is not None and not -1 <= self._text < len(TEXTS):
            raise ModelError(
                f"The scripted engine has {len(TEXTS)} texts: the option `text` should be an index from 0, or -1."
            )
        self._cached: deque[tuple[int, ...]] | None = None
        if "caches" in options:
            self._cached = deque(maxlen=int(options["caches"]))
        self._runs: dict[int, _Run] = {}
        self.capabilities = Capabilities(
            engine="scripted 1",
            context_tokens=spec.context_tokens,
            kv_tokens=spec.kv_tokens if self._script is None else max(spec.kv_tokens, spec.context_tokens),
            block_tokens=1,
            max_sequences=spec.max_sequences,
            parameters=frozenset({"seed", "max_tokens", "ignore_eos", "temperature", "logprobs"}),
            exact=not self._drift,
            reports_progress=self._read_interval_s > 0,
            takes=frozenset({"token_ids", "image/png"}),
            sees=True,
        )

    def see(self, image: bytes) -> Sight:
        width, height = struct.unpack(">II", image[16:24])  # in the header of a PNG
        if (width, height) == CRASH_SIZE:
            os.kill(os.getpid(), signal.SIGSEGV)
        if (width, height) == STALL_SIZE:
            time.sleep(3600)
        return Sight(PLACEHOLDER, PLACEHOLDER * max(1, width * height // _PIXELS))

    def submit(self, sequence: Sequence) -> None:
        limit = sequence.sampling.max_tokens or 1
        ids = read_ids(sequence.segments)
        if len(ids) + limit > self.capabilities.context_tokens:
            raise SequenceFailed("the prompt is too long for this engine")
        number = self._text if self._text != -1 else _number_in(ids)
        script = () if number is None else recited_tokens(number if number < len(TEXTS) else 0)
        if self._script is not None:
            script = (*self._script.answer(_text_of(ids)).encode(), EOS_ID)
        eos_after = 0 if sequence.sampling.ignore_eos else len(script) or self._eos_after
        if eos_after:
            limit = min(limit, eos_after)
        run = _Run(sequence, ids, limit, eos_after, script, self._thinks)
        if number is not None and number >= len(TEXTS):
            run.fault = CRASH_ID + (number - len(TEXTS)) % 4
        if self._cached is not None:
            run.num_cached = max((_num_equal(ids, others) for others in self._cached), default=0)
            self._cached.append(ids)
        run.num_read = run.num_cached or 0
        run.due_s += (run.num_prompt - run.num_read) * self._read_interval_s
        self._runs[sequence.sequence_id] = run

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._runs:
            self._runs[sequence_id].aborted = True

    def step(self) -> list[Delta]:
        if not self._runs:
            return []
        if self._interval_s or self._read_interval_s:
            self._wait()
        now_s = time.monotonic()
        deltas = []
        for run in list(self._runs.values()):
            if run.aborted:
                deltas.append(Delta(run.sequence_id, run.count, (), (), "cancelled"))
            elif run.fault is not None and run.count >= self._fault_after:
                deltas.append(self._fault(run))
            elif run.due_s <= now_s:
                deltas.append(self._next(run))
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._runs[delta.sequence_id]
        return deltas

    def progress(self) -> list[Prefill]:
        now_s = time.monotonic()
        reading = [run for run in self._runs.values() if self._read_interval_s and not run.count]
        for run in reading:
            num_left = max(0, math.ceil((run.due_s - now_s) / self._read_interval_s))
            run.num_read = max(run.num_read, run.num_prompt - num_left)
        return [Prefill(run.sequence_id, run.num_read, run.num_cached or 0) for run in reading]

    def close(self) -> None:
        self._runs.clear()

    def _next(self, run: _Run) -> Delta:
        index = run.count
        run.count = index + 1
        run.due_s += self._interval_s
        num_cached = run.num_cached if index == 0 else None
        if run.count == run.eos_after:
            return Delta(run.sequence_id, index, (EOS_ID,), run.logprobs, "stop", num_cached_tokens=num_cached)
        script = run.script
        token_id = script[index % len(script)] if script else self._written(run, index)
        finish_reason: FinishReason | None = "length" if run.count == run.limit else None
        ids = (token_id,)
        return Delta(run.sequence_id, index, ids, run.logprobs, finish_reason, num_cached_tokens=num_cached)

    def _written(self, run: _Run, index: int) -> int:
        return _token_at(self._key(run, index), index, self._utf8, run.thinks)

    def _key(self, run: _Run, index: int) -> int:
        drifts = self._drift and zlib.crc32(b"%d %d %d" % (run.key, index, os.getpid())) % 1000 < self._drift
        return run.key + os.getpid() if drifts else run.key

    def _wait(self) -> None:
        """Sleep until a sequence is due, at most 20 ms so that aborts are not delayed."""
        due_s = min(run.due_s for run in self._runs.values())
        time.sleep(min(0.02, max(0.0, due_s - time.monotonic())))

    def _fault(self, run: _Run) -> Delta:
        if run.fault == CRASH_ID:
            os.kill(os.getpid(), signal.SIGSEGV)
        if run.fault == STALL_ID:
            time.sleep(3600)
        if run.fault == GARBAGE_ID:
            raise RuntimeError("the script says so")
        return Delta(run.sequence_id, run.count, (), (), "error", "the script says so")
