"""The streamer between the thread of `model.generate` and a reader on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from tailrace.packages.requirements import pip_install
from tailrace_outer.serve.closing import close_on_abort

__all__ = ["TokenStream", "ids_of", "library", "wake"]

# Models, tokenizers and tensors are Any: importing their types would import torch, and duck typing is enough.

_WINDOW_TOKENS = 16  # half of it is longer than any unfinished character
_MAX_UNFINISHED = 3  # U+FFFD in an unfinished character: some tokenizers decode each of its bytes to one


class TokenStream:
    """A streamer whose text is read on an event loop: `async for` yields pieces that never split a character.

    With one sequence, a piece is a non-empty `str`. With several, it is a list with a `str` for each sequence, "" if
    there is no new text, and the class `StopIteration` for sequences that have ended, as `@serve.batch` expects. Steps
    that change nothing are left out. A sequence ends after one of `eos_token_ids` (by default the tokenizer's) or when
    it is cancelled. Padding after the end is not text.

    A stream is for one call of `generate` and one reader. All methods except reading may be called in any thread.

    When the reader is `max_unread` pieces behind, `generate` blocks. A stream that will not be read needs `cancel`,
    because `generate` would block for ever. A reader that stops or is cancelled cancels the stream. Under `tailrace
    run`, the stream is also cancelled when the request that made it is aborted.
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
        self._is_prompt = True  # whether the next `put` is the prompt
        self._num_stopped = 0  # in the last piece
        # The fields below are shared by both threads, under the lock. The lock is reentrant, because the garbage
        # collector may call a reader's __del__ while this thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._unread: deque[Any] = deque()
        self._unwanted: set[int] = set()  # sequences that have ended
        self._waiting: asyncio.Future[None] | None = None  # the reader, when it has read everything
        self._is_over = False  # no more pieces will be added
        self._is_read = False
        self._error: BaseException | None = None
        close_on_abort(self)

    def put(self, value: Any) -> None:
        """Add the prompt (first call) or the tokens of a step: a tensor of shape (batch,) or (batch, tokens).

        Blocks while the reader is too far behind.

        *Raises:* ValueError for a wrong batch size, RuntimeError if it would block an event loop, and the tokenizer's
        exceptions. The reader gets these exceptions too.
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
        """End the stream. An unfinished character that was held back is delivered as it is."""
        if self._is_over:
            return
        rest = ["" if row in self._unwanted else text.flush() for row, text in enumerate(self._rows)]
        piece = self._collect(rest)
        with self._changed:
            if piece is not None and not self._is_over:
                self._unread.append(piece)
            self._finish()

    def fail(self, exception: BaseException) -> None:
        """Stop the model, and raise `exception` in the reader after the unread pieces."""
        with self._changed:
            if not self._is_over:
                self._error = exception
                self._finish()

    def cancel(self, row: int | None = None) -> None:
        """End all sequences, or one. The model stops them within one token. The reader still gets the unread pieces.

        *Raises:* IndexError for an invalid row.
        """
        if row is not None and not 0 <= row < len(self._rows):
            raise IndexError(f"row {row} of {len(self._rows)}")
        with self._changed:
            self._unwanted.update(range(len(self._rows)) if row is None else (row,))
            if len(self._unwanted) == len(self._rows):
                self._finish()

    async def aclose(self) -> None:
        """Cancel, and drop the unread pieces."""
        self._leave()

    @property
    def is_over(self) -> bool:
        """Whether no more pieces will be added: ended, failed, cancelled, or the reader has left."""
        return self._is_over

    @property
    def stopping_criteria(self) -> Any:
        """A `StoppingCriteriaList` that stops `generate` after `cancel` or when the reader has left.

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
            raise RuntimeError("this TokenStream has a reader already")
        self._is_read = True
        close_on_abort(self)  # from now on, the reading task's request owns it
        return _Reader(self)

    async def _next(self) -> Any:
        with self._changed:
            if self._waiting is not None:
                raise RuntimeError("another task waits for the next piece already")
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
            if row not in self._unwanted:  # else these are padding
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
        """Return the piece for the reader, or None if nothing has changed."""
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
                    raise RuntimeError("generate has to run in its own thread, not in that of an event loop")
                self._changed.wait_for(lambda: len(self._unread) < self._max_unread or self._is_over)
            if not self._is_over:
                self._unread.append(piece)
                self._wake()

    def _finish(self) -> None:
        self._is_over = True
        self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        # A reader that is not waiting checks for new pieces itself: the loop is called once for several pieces.
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            wake(waiting)


class _Reader:
    """The reader's iterator. Separate from the stream, which `generate` references, so that its deletion is noticed."""

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
    """Decodes one sequence incrementally.

    The last few tokens are decoded again together with the new ones, because a character may consist of several tokens,
    and because some tokenizers drop a leading space. Older tokens are not decoded again.
    """

    __slots__ = ("_decode", "_ids", "_shown")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window
        self._shown = ""  # of its text

    def push(self, ids: list[int]) -> str:
        """Return the text that these tokens complete. U+FFFD at the end is held back: it may become a character."""
        self._ids += ids
        text, num_shown = self._decode(self._ids), len(self._shown)
        num_open = min(len(text) - len(text.rstrip("\ufffd")), _MAX_UNFINISHED)
        # Some tokenizers decode a run of characters to U+FFFD until the last one is finished.
        is_broken = num_open > 0 and not text.startswith(self._shown)
        piece = "" if is_broken else text[num_shown : len(text) - num_open]
        if piece:
            self._shown = text[: num_shown + len(piece)]
        if len(self._ids) > _WINDOW_TOKENS * (4 if is_broken else 1):
            self._trim(text)
        return piece

    def _trim(self, text: str) -> None:
        """Keep half a window of tokens, from the start of a character if there is one."""
        num_held = len(text) - len(self._shown)
        half = len(self._ids) - _WINDOW_TOKENS // 2
        starts = (start for start in range(half, half - 4, -1) if text.endswith(self._decode(self._ids[start:])))
        self._ids = self._ids[next(starts, half) :]
        text = self._decode(self._ids)
        self._shown = text[: max(0, len(text) - num_held)]

    def flush(self) -> str:
        """Return the text that is held back, as it is."""
        piece = self._decode(self._ids)[len(self._shown) :]
        self._ids, self._shown = [], ""
        return piece


def ids_of(value: Any) -> Sequence[int]:
    """Normalise token ids of a config, which may be one, several or None."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"this needs {name}: {pip_install('torch', 'transformers')}") from error


def wake(waiting: asyncio.Future[None]) -> None:
    """Resolve a future, from any thread."""
    with contextlib.suppress(RuntimeError):  # the waiter's loop is closed
        waiting.get_loop().call_soon_threadsafe(_resolve, waiting)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
