"""Prompts on their way into the pipeline, cut so that no piece of one changes the bits of an answer.

The library computes a piece of one token by other means than a longer one; for the same reason an answer's own tokens
leave something else in memory than a prompt of the same tokens does. Left to itself it cuts prompts anywhere, and its
prefix cache gives back whatever has the same tokens: all of a prompt but the last token, and out of answers too. It
also files a block as complete when it begins to fill it, so that a prompt that is aborted in between spoils the cache
for the next (6 of 6 that were asked again got wrong answers). Hence, with the cache on:

- Prompts are cut here, at whole blocks. Every piece but the last is a throw-away sequence, which the next one finds in
  the cache.
- With `exact`, a prompt's ids are written as `id - num_rows`. The model looks up the same row, and what an answer wrote
  is never mistaken for it. In the tail, from the last block boundary that leaves `_TAIL_TOKENS`, the prompt's number
  decides which ids stay as they are: nothing finds its tail in the cache, so the last piece is never one token.

Divergence: a repetition penalty looks at the prompt, and the library refuses such ids there. Those prompts are sent as
they are, and may find each other's answers and tails.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["Piece", "Prompts"]

_TAIL_TOKENS = 24  # enough places for the number of a prompt
_LEAST_TOKENS = 64  # in a step, however many sequences decode: no rest of a prompt that may not be cut is longer


@dataclass(slots=True)
class _Prompt:
    sequence_id: int
    ids: tuple[int, ...]
    end: int  # the last place at which it may be cut
    position: int = 0  # up to which it is in the cache
    key: int = 0  # stands for all before that


@dataclass(frozen=True, slots=True)
class Piece:
    """What the pipeline is to run next. Without a `sequence_id` it is a throw-away one, for the cache to keep."""

    sequence_id: int | None
    ids: tuple[int, ...]


class Prompts:
    """A queue, in which short prompts overtake. `num_rows` is how many tokens the model has a row for, 0 if unknown or
    not wanted; `num_blocks` how much the cache holds, 0 without one: then prompts are held back so that none is cut
    which fits into a step."""

    def __init__(self, *, step_tokens: int, block_tokens: int, num_blocks: int, num_rows: int) -> None:
        self._step_tokens = step_tokens
        self._block_tokens = block_tokens
        self._num_rows = num_rows
        self._waiting: dict[int, _Prompt] = {}
        self._known: OrderedDict[int, None] = OrderedDict()  # blocks that are in the cache, by what leads up to them
        self._most_known = num_blocks // 2
        self._computing: list[int] = []  # blocks that will be there after the next step
        self._count = 0

    def add(self, sequence_id: int, ids: tuple[int, ...], *, as_they_are: bool) -> None:
        self._count += 1
        end = max(0, len(ids) - _TAIL_TOKENS) // self._block_tokens * self._block_tokens
        if self._num_rows and not as_they_are:
            ids = self._marked(ids, end)
        self._waiting[sequence_id] = _Prompt(sequence_id, ids, end)

    def drop(self, sequence_id: int) -> None:
        self._waiting.pop(sequence_id, None)

    def take(self, num_decoding: int, *, is_prefilling: bool) -> list[Piece]:
        """What fits into the next step beside so many decoding sequences. Something always does, except while the
        library is still cutting a prompt by itself."""
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
        self._learn()
        left = max(left, _LEAST_TOKENS)
        # Half of the step is the oldest's, so that it gets there; into the other half go short ones from behind it.
        room = left // 2 if left >= 2 * _LEAST_TOKENS else 0
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
        """How many of its tokens are to be computed. What the cache has lost since is computed with the next piece,
        which is then a long one."""
        while prompt.position < prompt.end and (key := self._next_key(prompt)) in self._known:
            self._known.move_to_end(key)
            prompt.position += self._block_tokens
            prompt.key = key
        return len(prompt.ids) - prompt.position

    def _whole(self, prompt: _Prompt) -> Piece:
        if self._most_known:
            self._go(prompt, prompt.end)
        del self._waiting[prompt.sequence_id]
        return Piece(prompt.sequence_id, prompt.ids)

    def _part(self, prompt: _Prompt, size: int) -> Piece:
        """The prompt up to a block's end, and two tokens behind it that no other has."""
        self._count += 1
        self._go(prompt, prompt.position + size)
        return Piece(None, (*prompt.ids[: prompt.position], self._count % 1000, self._count // 1000 % 1000))

    def _marked(self, ids: tuple[int, ...], end: int) -> tuple[int, ...]:
        """The ids in their other form, but for those of the tail where the prompt's number has a one."""
        number = self._count << 1 | 1  # the first one stays: a tail is no part of a longer prompt
        rows = self._num_rows
        tail = (token_id - rows * (not number >> place & 1) for place, token_id in enumerate(ids[end:]))
        return (*(token_id - rows for token_id in ids[:end]), *tail)

    def _next_key(self, prompt: _Prompt) -> int:
        return hash((prompt.key, prompt.ids[prompt.position : prompt.position + self._block_tokens]))

    def _go(self, prompt: _Prompt, stop: int) -> None:
        while prompt.position < stop:
            prompt.key = self._next_key(prompt)
            prompt.position += self._block_tokens
            self._computing.append(prompt.key)

    def _learn(self) -> None:
        for key in self._computing:
            self._known[key] = None
            self._known.move_to_end(key)
        self._computing.clear()
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
