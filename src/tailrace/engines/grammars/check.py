"""Compiles each grammar in a separate process before an engine gets it.

llguidance compiles token by token within a budget (at most 5 ms per token in all measurements, llguidance 1.9 with
49,152 tokens). The process is for what exceeds it: 0.06 s of CPU time, with limits of time and memory.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.engines.grammars import compile_one
from tailrace.engines.grammars.guidance import to_guidance
from tailrace.errors import EngineLost, QueueFull, RequestError
from tailrace.types import Grammar

__all__ = ["NOT_COMPILED", "NO_ANSWER", "TOO_MUCH", "GrammarCheck"]

logger = logging.getLogger("tailrace.engine")

NO_ANSWER = "no answer could conform to it"
NOT_COMPILED = "it cannot be compiled"
TOO_MUCH = "compiling it takes too much time or memory"
MAX_CACHED = 1024
_COMPILE_TIMEOUT_S = 20.0  # much longer than the limit of CPU time: reached only on an overloaded machine
_AT_ONCE = 2

MAX_WAITING = 64  # different grammars that wait or are being checked
MAX_WAITING_PER_CALLER = 16  # of them for a single caller
TOO_MUCH_S = 60.0  # cache time of `TOO_MUCH`: the machine may have been overloaded

_REASONS = {0: "", 3: NO_ANSWER, 4: NOT_COMPILED, 5: TOO_MUCH}  # by the exit status of `grammars.compile_one`


class GrammarCheck:
    """Refuses grammars that do not compile within limits. For one event loop, which it never blocks."""

    def __init__(self) -> None:
        # LRU cache by the hash of the grammar: the reason, and when it expires (monotonic).
        self._reasons: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._waiting: list[tuple[str, bytes]] = []  # caller and key of each waiting request

    async def check(self, grammar: Grammar, *, caller: str = "", within_s: float = 60.0) -> None:
        """Check a grammar. Waits at most `within_s` seconds until the check begins.

        Raises: RequestError if the grammar cannot be used, QueueFull if too many checks wait, EngineLost if the check
        fails.
        """
        key = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        reason = self._known(key)
        if reason is None:
            with self._wait(caller, key):
                reason = await self._queue(key, grammar, within_s)
        if reason:
            raise RequestError(f"The grammar of this request cannot be used: {reason}.", param="grammar")

    def _known(self, key: bytes) -> str | None:
        reason, until_s = self._reasons.get(key, (None, 0.0))
        if reason is None or time.monotonic() >= until_s:
            return None
        self._reasons.move_to_end(key)
        return reason

    @contextmanager
    def _wait(self, caller: str, key: bytes) -> Iterator[None]:
        """Count a waiting request. Raises: QueueFull."""
        all_keys = {waiting for _, waiting in self._waiting}
        own_keys = {waiting for other, waiting in self._waiting if other == caller}
        if (key not in all_keys and len(all_keys) >= MAX_WAITING) or (
            key not in own_keys and len(own_keys) >= MAX_WAITING_PER_CALLER
        ):
            raise _queue_full()
        self._waiting.append((caller, key))
        try:
            yield
        finally:
            self._waiting.remove((caller, key))

    async def _queue(self, key: bytes, grammar: Grammar, within_s: float) -> str:
        try:
            async with asyncio.timeout(within_s):
                await self._slots.acquire()
        except TimeoutError:
            raise _queue_full() from None
        reason = self._known(key)  # an earlier request may have had the same grammar
        if reason is None:
            return await self._compile(key, grammar)
        self._slots.release()
        return reason

    async def _compile(self, key: bytes, grammar: Grammar) -> str:
        """Compile in a thread. The slot is released when the thread ends, even if the request is cancelled."""
        compiling = asyncio.ensure_future(asyncio.to_thread(_compile, grammar))
        compiling.add_done_callback(functools.partial(self._on_compiled, key))
        return await asyncio.shield(compiling)

    def _on_compiled(self, key: bytes, compiling: asyncio.Future[str]) -> None:
        self._slots.release()
        if compiling.cancelled() or compiling.exception() is not None:
            return
        until_s = time.monotonic() + (TOO_MUCH_S if compiling.result() == TOO_MUCH else math.inf)
        self._reasons[key] = (compiling.result(), until_s)
        self._reasons.move_to_end(key)
        if len(self._reasons) > MAX_CACHED:
            self._reasons.popitem(last=False)


def _compile(grammar: Grammar) -> str:
    """Compile in a process. Returns why a grammar cannot be used, or "". Blocks. Raises: EngineLost if the check itself
    fails."""
    command = [sys.executable, "-I", str(Path(compile_one.__file__))]
    text = to_guidance(grammar, as_text=True).encode()
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        raise _check_failed() from None
    if done.returncode < 0:  # a signal: its limits, or a crash of the library
        return TOO_MUCH
    if done.returncode not in _REASONS:
        logger.error("a grammar cannot be checked: %s", done.stderr.decode(errors="replace")[-2000:])
        raise _check_failed()
    reason = _REASONS[done.returncode]
    if reason == NOT_COMPILED and grammar.kind == "lark" and done.stdout:
        line = int(done.stdout) - text.count(b"\n") + grammar.source.count("\n")  # of what the client has sent
        return f"{reason}: line {max(line, 1)} is wrong"
    return reason


def _check_failed() -> EngineLost:
    return EngineLost("Grammars cannot be checked at the moment.")


def _queue_full() -> QueueFull:
    return QueueFull("Too many new grammars are waiting to be checked.", retry_after_s=1.0)
