"""The streamer between the thread of `model.generate` and who reads on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from tailrace.requirements import pip_install
from tailrace.serve.closing import close_if_left

__all__ = ["TokenStream", "ids_of", "library", "wake"]

# Models, tokenizers and tensors are Any throughout: their types would have to be imported, and any that have the
# methods called here will do.

_WINDOW_TOKENS = 16  # half of which are more than any unfinished character has
_UNFINISHED = 3  # so many U+FFFD can an unfinished character be: some tokenizers show one for each of its bytes


class TokenStream:
    """A streamer whose text is read on an event loop: `async for` gives it in pieces, none with half a character.

    For one sequence a piece is a `str`, never empty. For more it is a list with a `str` for each, "" if nothing came;
    the class `StopIteration` takes the place of a sequence from when it has ended, as generators under `@serve.batch`
    yield it. Steps that change nothing are left out. A sequence has ended after one of `eos_token_ids` (by default the
    tokenizer's; what `generate` pads it with is no text), or when it was cancelled.

    It is for one call of `generate` and one reader. It may be made, fed, failed and cancelled in any thread.
    When the reader is `max_unread` pieces behind, `generate` waits for it. A stream that will not be read needs
    `cancel`, or its `generate` waits for ever; a reader that breaks off or is cancelled cancels it. So does a request
    under `tailrace run` that made it and is cut short, whether it has a reader by then or not.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        num_sequences: int = 1,
        skip_prompt: bool = True,
        skip_special_tokens: bool = True,
        max_unread: int = 256,
        eos_token_ids: Iterable[int] | None = None,
    ) -> None:
        if num_sequences < 1 or max_unread < 1:
            raise ValueError("num_sequences and max_unread are at least 1")

        def decode(ids: list[int]) -> str:
            text: str = tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            return text

        self._eos = frozenset(ids_of(tokenizer.eos_token_id) if eos_token_ids is None else eos_token_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {}) if skip_special_tokens else {}
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self._rows = [_Row(decode) for _ in range(num_sequences)]
        self._max_unread = max_unread
        self._skips_next = skip_prompt
        self._is_prompt = True  # what is put next
        self._num_stopped = 0  # in the last piece
        # Below is what both threads touch, under the lock. It may be entered anew by a reader that the garbage
        # collector finds in the middle, which is why it is one that can be.
        self._changed = threading.Condition(threading.RLock())
        self._unread: deque[Any] = deque()
        self._unwanted: set[int] = set()  # sequences that have ended
        self._waiting: asyncio.Future[None] | None = None  # the reader, which has read everything
        self._is_over = False  # nothing is added any more
        self._is_read = False
        self._error: BaseException | None = None
        close_if_left(self)

    def put(self, value: Any) -> None:
        """Take the prompt, on the first call, or the tokens of a step: a tensor of shape (batch,) or (batch, tokens).

        Blocks while the reader is too far behind.
        *Raises:* ValueError for another batch size, RuntimeError where blocking would block an event loop, and what the
        tokenizer raises. The reader gets these as well.
        """
        if self._is_over:
            return
        try:
            piece = self._piece(self._rows_of(value))
            if piece is not None:
                self._add(piece)
        except Exception as error:
            self.fail(error)
            raise

    def end(self) -> None:
        """Nothing more is generated. Text that was held back as an unfinished character is given as it is."""
        if self._is_over:
            return
        rest = ["" if row in self._unwanted else text.flush() for row, text in enumerate(self._rows)]
        piece = self._collect(rest)
        with self._changed:
            if piece is not None and not self._is_over:
                self._unread.append(piece)
            self._finish()

    def fail(self, exception: BaseException) -> None:
        """Have the reader get `exception` after what it has not read yet, and the model stopped if it still runs."""
        with self._changed:
            if not self._is_over:
                self._error = exception
                self._finish()

    def cancel(self, row: int | None = None) -> None:
        """End all sequences, or one: the model stops with them within a token. The reader gets what there is already.

        *Raises:* IndexError for a row that there is not.
        """
        if row is not None and not 0 <= row < len(self._rows):
            raise IndexError(f"row {row} of {len(self._rows)}")
        with self._changed:
            self._unwanted.update(range(len(self._rows)) if row is None else (row,))
            if len(self._unwanted) == len(self._rows):
                self._finish()

    async def aclose(self) -> None:
        """Cancel, and forget what has not been read."""
        self._leave()

    @property
    def is_over(self) -> bool:
        """Nothing is added any more: it has ended, failed or been cancelled, or the reader has left."""
        return self._is_over

    @property
    def stopping_criteria(self) -> Any:
        """A `StoppingCriteriaList` by which `generate` notices `cancel` and a reader that has left.

        *Raises:* ImportError when torch or transformers is missing.
        """
        torch, transformers = library("torch"), library("transformers")

        def ended(_: object, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            flags = [self._is_over or row in self._unwanted for row in range(input_ids.shape[0])]
            return torch.tensor(flags, dtype=torch.bool, device=input_ids.device)

        criterion = type("Unwanted", (transformers.StoppingCriteria,), {"__call__": ended})
        return transformers.StoppingCriteriaList([criterion()])

    def __aiter__(self) -> AsyncIterator[Any]:  # str or list, as `num_sequences` says, so that nobody has to narrow it
        if self._is_read:
            raise RuntimeError("a TokenStream has one reader, and it has begun already")
        self._is_read = True
        close_if_left(self)  # from now on it belongs to the task that reads it
        return _Reader(self)

    async def _next(self) -> Any:
        with self._changed:
            if self._waiting is not None:
                raise RuntimeError("somebody waits for the next piece already")
        while True:
            with self._changed:
                if self._unread:
                    self._changed.notify()
                    return self._unread.popleft()
                if self._is_over:
                    error, self._error = self._error, None
                    raise StopAsyncIteration if error is None else error
                self._waiting = waiting = asyncio.get_running_loop().create_future()
            try:
                await waiting
            finally:
                self._waiting = None

    def _leave(self) -> None:
        with self._changed:
            self.cancel()
            self._unread.clear()
            self._error = None

    def _rows_of(self, value: Any) -> list[list[int]]:
        ids = value.tolist() if hasattr(value, "tolist") else list(value)
        if not (ids and isinstance(ids[0], list)):
            ids = [ids] if len(self._rows) == 1 else [[token_id] for token_id in ids]
        if len(ids) != len(self._rows):
            raise ValueError(f"this stream is for num_sequences={len(self._rows)}, but the batch has {len(ids)}")
        rows: list[list[int]] = ids
        return rows

    def _piece(self, rows: list[list[int]]) -> Any:
        is_prompt, self._is_prompt = self._is_prompt, False
        if is_prompt and self._skips_next:
            return None
        texts = []
        for row, ids in enumerate(rows):
            text = ""
            if row not in self._unwanted:  # else these are what generate pads it with
                eos = (
                    len(ids) if is_prompt else next((i for i, token in enumerate(ids) if token in self._eos), len(ids))
                )
                text = self._rows[row].push([token for token in ids[: eos + 1] if token not in self._skipped])
                if eos < len(ids):
                    text += self._rows[row].flush()
                    self._unwanted.add(row)
            texts.append(text)
        return self._collect(texts)

    def _collect(self, texts: list[str]) -> Any:
        """What to hand over, or None when that would tell nobody anything."""
        if len(texts) == 1:
            return texts[0] or None
        piece = [text or (StopIteration if row in self._unwanted else "") for row, text in enumerate(texts)]
        num_stopped = sum(text is StopIteration for text in piece)
        if num_stopped == self._num_stopped and not any(texts):
            return None
        self._num_stopped = num_stopped
        return piece

    def _add(self, piece: Any) -> None:
        with self._changed:
            if len(self._unread) >= self._max_unread and not self._is_over:
                if asyncio._get_running_loop() is not None:
                    raise RuntimeError("generate has to run in a thread of its own, not in that of an event loop")
                self._changed.wait_for(lambda: len(self._unread) < self._max_unread or self._is_over)
            if not self._is_over:
                self._unread.append(piece)
                self._wake()

    def _finish(self) -> None:
        self._is_over = True
        self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        # A reader that is not waiting looks for itself, so that the loop is called once for all that has gathered.
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            wake(waiting)


class _Reader:
    """Who iterates. Apart from the stream, which `generate` holds, so that its going can be noticed."""

    __slots__ = ("__weakref__", "_stream")

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> Any:
        return await self._stream._next()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __del__(self) -> None:
        self._stream._leave()


class _Row:
    """The text of one sequence, as its tokens complete it.

    The last few tokens are decoded along with the new ones, since a character may be spread over several, and since
    some tokenizers drop a space at the beginning; those before them never again.
    """

    __slots__ = ("_decode", "_ids", "_shown")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window
        self._shown = ""  # of its text

    def push(self, ids: list[int]) -> str:
        """The text that these tokens complete. U+FFFD at its end may yet become a character, and is held back."""
        self._ids += ids
        text, num_shown = self._decode(self._ids), len(self._shown)
        num_open = min(len(text) - len(text.rstrip("\ufffd")), _UNFINISHED)
        # Some tokenizers show all characters in a row as broken, until the last of them is finished.
        is_broken = num_open > 0 and not text.startswith(self._shown)
        piece = "" if is_broken else text[num_shown : len(text) - num_open]
        if piece:
            self._shown = text[: num_shown + len(piece)]
        if len(self._ids) > _WINDOW_TOKENS * (4 if is_broken else 1):
            self._trim(text)
        return piece

    def _trim(self, text: str) -> None:
        """Keep half a window, from where a character begins; text of broken characters may have no such place."""
        num_held = len(text) - len(self._shown)
        half = len(self._ids) - _WINDOW_TOKENS // 2
        starts = (start for start in range(half, half - 4, -1) if text.endswith(self._decode(self._ids[start:])))
        self._ids = self._ids[next(starts, half) :]
        text = self._decode(self._ids)
        self._shown = text[: max(0, len(text) - num_held)]

    def flush(self) -> str:
        """What is held back, as it is."""
        piece = self._decode(self._ids)[len(self._shown) :]
        self._ids, self._shown = [], ""
        return piece


def ids_of(value: Any) -> Sequence[int]:
    """Token ids as configs have them: one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"this needs {name}: {pip_install('torch', 'transformers')}") from error


def wake(waiting: asyncio.Future[None]) -> None:
    """From any thread."""
    with contextlib.suppress(RuntimeError):  # its loop has been closed, with whoever waited
        waiting.get_loop().call_soon_threadsafe(_resolve, waiting)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
