"""Queues prompts for the pipeline, and splits them so that the split does not change the bits of an answer.

The library uses other kernels for a piece of one token than for a longer piece. For the same reason, the KV cache of an
answer's tokens differs from that of a prompt with the same tokens. By default, the library splits prompts anywhere, and
its prefix cache matches any equal tokens: a whole prompt except its last token, and also answers. It also marks a block
as complete when it begins to fill it, so that an aborted prompt corrupts the cache (6 of 6 repeated requests got wrong
answers). So, with the prefix cache:

- Prompts are split here, at block boundaries. Every piece except the last is a throw-away sequence, which the next
  piece finds in the cache.
- With `exact`, a prompt's ids are sent as `id - num_rows`. The model looks up the same embedding row, and the cache
  cannot confuse prompts with answers. In the tail, which starts at the last block boundary that leaves `_TAIL_TOKENS`,
  the bits of the prompt's number decide which ids are sent unchanged. So no tail is found in the cache, and the last
  piece never has one token.

Exception: a repetition penalty reads the prompt, where the library rejects such ids. Those prompts are sent unchanged,
and may match answers and tails in the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tailrace.engines.interface import Prefill

__all__ = ["Piece", "Prompts"]

_TAIL_TOKENS = 24  # enough bits for a prompt's number
_MIN_STEP_TOKENS = 64  # for prompts, however many sequences decode; no tail is longer


@dataclass(slots=True)
class _Prompt:
    sequence_id: int
    ids: tuple[int, ...]
    end: int  # the last position at which it may be split
    position: int = 0  # up to here it is in the cache
    num_found: int = 0  # tokens of them that an earlier prompt has put there
    key: int = 0  # hash of everything before `position`


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece for the pipeline. Without a `sequence_id` it is a throw-away sequence that fills the cache."""

    sequence_id: int | None
    ids: tuple[int, ...]


class Prompts:
    """A queue in which short prompts may overtake. `num_rows` is the number of embedding rows, 0 if unknown or unused.
    `num_blocks` is the size of the prefix cache, 0 without a cache: then prompts wait, so that a prompt that fits into
    a step is not split."""

    def __init__(self, *, step_tokens: int, block_tokens: int, num_blocks: int, num_rows: int) -> None:
        self._step_tokens = step_tokens
        self._block_tokens = block_tokens
        self._num_rows = num_rows
        self._waiting: dict[int, _Prompt] = {}
        self._known: OrderedDict[int, None] = OrderedDict()  # blocks in the cache, by the hash of everything up to them
        self._most_known = num_blocks // 2
        self._computing: list[int] = []  # blocks that the current step adds to the cache
        self._count = 0

    def add(self, sequence_id: int, ids: tuple[int, ...], *, unchanged: bool) -> None:
        self._count += 1
        end = max(0, len(ids) - _TAIL_TOKENS) // self._block_tokens * self._block_tokens
        if self._num_rows and not unchanged:
            ids = self._marked(ids, end)
        self._waiting[sequence_id] = _Prompt(sequence_id, ids, end)

    def drop(self, sequence_id: int) -> None:
        self._waiting.pop(sequence_id, None)

    def progress(self) -> list[Prefill]:
        """Return how much is computed of each waiting prompt, after a step."""
        return [Prefill(one.sequence_id, one.position, one.num_found) for one in self._waiting.values()]

    def take(self, num_decoding: int, *, is_prefilling: bool) -> list[Piece]:
        """Return the pieces that fit into the next step besides `num_decoding` sequences. Never empty while prompts
        wait, except while the library itself is splitting a prompt."""
        left = self._step_tokens - num_decoding
        pieces: list[Piece] = []
        if not self._most_known:
            while self._waiting and not is_prefilling:
                prompt = next(iter(self._waiting.values()))
                left -= len(prompt.ids)
                if left < 0 and pieces:
                    break
                pieces.append(self._whole(prompt))
            return pieces
        self._update_known()
        left = max(left, _MIN_STEP_TOKENS)
        # Half of the step is for the oldest prompt, so that it makes progress; the other half is for short later
        # prompts.
        room = left // 2 if left >= 2 * _MIN_STEP_TOKENS else 0
        for prompt in sorted([*self._waiting.values()][1:], key=self._rest):
            if (rest := self._rest(prompt)) > room:
                break
            room -= rest
            left -= rest
            pieces.append(self._whole(prompt))
        while self._waiting:
            prompt = next(iter(self._waiting.values()))
            rest = self._rest(prompt)
            if rest > left:
                size = min(left // self._block_tokens * self._block_tokens, prompt.end - prompt.position)
                if size:
                    pieces.append(self._part(prompt, size))
                break
            left -= rest
            pieces.append(self._whole(prompt))
        return pieces

    def _rest(self, prompt: _Prompt) -> int:
        """Return the number of tokens to compute. Blocks that the cache has dropped meanwhile are computed with the
        next piece."""
        while prompt.position < prompt.end and (key := self._next_key(prompt)) in self._known:
            self._known.move_to_end(key)
            prompt.position += self._block_tokens
            prompt.num_found += self._block_tokens
            prompt.key = key
        return len(prompt.ids) - prompt.position

    def _whole(self, prompt: _Prompt) -> Piece:
        if self._most_known:
            self._advance(prompt, prompt.end)
        del self._waiting[prompt.sequence_id]
        return Piece(prompt.sequence_id, prompt.ids)

    def _part(self, prompt: _Prompt, size: int) -> Piece:
        """Return the prompt up to a block boundary, followed by two unique tokens."""
        self._count += 1
        self._advance(prompt, prompt.position + size)
        return Piece(None, (*prompt.ids[: prompt.position], self._count % 1000, self._count // 1000 % 1000))

    def _marked(self, ids: tuple[int, ...], end: int) -> tuple[int, ...]:
        """Return ids as `id - num_rows`, except tail ids at the 1 bits of the prompt's number."""
        number = self._count << 1 | 1  # the first id is unchanged: a tail never equals part of a longer prompt
        rows = self._num_rows
        tail = (token_id - rows * (not number >> position & 1) for position, token_id in enumerate(ids[end:]))
        return (*(token_id - rows for token_id in ids[:end]), *tail)

    def _next_key(self, prompt: _Prompt) -> int:
        return hash((prompt.key, prompt.ids[prompt.position : prompt.position + self._block_tokens]))

    def _advance(self, prompt: _Prompt, stop: int) -> None:
        while prompt.position < stop:
            prompt.key = self._next_key(prompt)
            prompt.position += self._block_tokens
            self._computing.append(prompt.key)

    def _update_known(self) -> None:
        for key in self._computing:
            self._known[key] = None
            self._known.move_to_end(key)
        self._computing.clear()
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
