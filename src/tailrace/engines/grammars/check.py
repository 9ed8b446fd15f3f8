"""Compiles each grammar in a separate process before an engine gets it.

The process uses the engine's library. For OpenVINO this is xgrammar with the model's vocabulary, which takes seconds
for some grammars and crashes on others. For other engines it is llguidance, which compiles token by token within a
budget (at most 5 ms per token in all measurements, llguidance 1.9 with 49,152 tokens).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from tailrace.engines.grammars import compile_one
from tailrace.engines.grammars.automata import NO_ANSWER, NOT_COMPILED, TOO_MUCH
from tailrace.engines.grammars.guidance import to_guidance
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import EngineLost, QueueFull, RequestError
from tailrace.types import Grammar

__all__ = ["GrammarCheck"]

logger = logging.getLogger("tailrace.engine")

MAX_CACHED = 1024
_COMPILE_TIMEOUT_S = 20.0  # much longer than the limit of CPU time: reached only on an overloaded machine
_LOAD_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 2.0
_MAX_COMPILED = 200  # per process: the library never frees a compiled grammar

MAX_WAITING = 64  # different grammars that wait or are being checked
MAX_WAITING_PER_CALLER = 16  # of them for a single caller
TOO_MUCH_S = 60.0  # cache time of `TOO_MUCH`: the machine may have been overloaded

_REASONS = {0: "", 3: NO_ANSWER, 4: NOT_COMPILED, 5: TOO_MUCH}  # by the exit status of `grammars.compile_one`


class _Compiler(Protocol):
    at_once: int

    def close(self) -> None:
        """End the running process. Later calls start another."""

    def __call__(self, grammar: Grammar) -> str:
        """Return why a grammar cannot be used, or "". Blocks. Raises: EngineLost if the check itself fails."""


class GrammarCheck:
    """Refuses grammars that do not compile within limits. For one event loop, which it never blocks."""

    def __init__(self, spec: EngineSpec) -> None:
        self._compiler: _Compiler = _OpenVINOProcess(spec) if spec.engine == "openvino" else _ProcessPerGrammar()
        # LRU cache by the hash of the grammar: the reason, and when it expires (monotonic).
        self._reasons: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._slots = asyncio.Semaphore(self._compiler.at_once)
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
        compiling = asyncio.ensure_future(asyncio.to_thread(self._compiler, grammar))
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

    def close(self) -> None:
        """End the compiling process, if one runs. The next grammar starts another."""
        self._compiler.close()


class _ProcessPerGrammar:
    """A process for each grammar, with only llguidance: 0.06 s of CPU time."""

    at_once = 2

    def close(self) -> None:
        pass

    def __call__(self, grammar: Grammar) -> str:
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
        return _REASONS[done.returncode]


class _OpenVINOProcess:
    """A long-running process with OpenVINO's library and the model's tokenizer: 200 MB. Starts with the first grammar,
    and again after a grammar has crashed it."""

    at_once = 1

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = msgspec.json.encode(spec) + b"\n"
        self._processes: list[subprocess.Popen[bytes]] = []  # at most one
        self._is_ready = False
        self._num_compiled = 0
        self._lock = threading.Lock()  # held while a thread uses the process
        weakref.finalize(self, _end, self._processes)

    def close(self) -> None:
        if self._lock.acquire(blocking=False):
            _end(self._processes)
            self._lock.release()
            return
        for process in list(self._processes):  # the thread that reads its pipes closes them
            process.kill()

    def __call__(self, grammar: Grammar) -> str:
        try:
            with self._lock:
                return self._run(grammar)
        except OSError:  # no process can be started
            raise _check_failed() from None

    def _run(self, grammar: Grammar) -> str:
        for _ in range(2):  # retry once: an idle process ends by itself
            process = self._begin()
            if not self._is_ready:
                if self._read(process, _LOAD_TIMEOUT_S) != b'""\n':
                    _end(self._processes)
                    raise _check_failed()
                self._is_ready = True
            answer = self._ask(process, msgspec.json.encode(grammar) + b"\n")
            if answer.endswith(b"\n"):
                self._num_compiled += 1
                return msgspec.json.decode(answer, type=str)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_TIMEOUT_S)  # its answers may have ended before it has
            _end(self._processes)
            if process.returncode == -signal.SIGALRM:
                continue
            if process.returncode >= 0 or process.returncode == -signal.SIGKILL:
                break  # it failed by itself (see its messages), or was killed by `close` or a timeout
            self._begin()  # load the next process early
            return TOO_MUCH
        raise _check_failed()

    def _begin(self) -> subprocess.Popen[bytes]:
        if self._num_compiled >= _MAX_COMPILED or any(process.poll() is not None for process in self._processes):
            _end(self._processes)
        if not self._processes:
            self._is_ready, self._num_compiled = False, 0
            command = [sys.executable, "-m", "tailrace.engines.openvino.compile_grammars", str(os.getpid())]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            self._processes.append(process)
            _write(process, self._spec)
        return self._processes[0]

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        return self._read(process, _COMPILE_TIMEOUT_S) if _write(process, line) else b""

    def _read(self, process: subprocess.Popen[bytes], within_s: float) -> bytes:
        """Read a line. Returns an incomplete line if the process ended or did not answer in time."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], within_s)[0]:
            return b""
        return process.stdout.readline()


def _check_failed() -> EngineLost:
    return EngineLost("Grammars cannot be checked at the moment.", retry_after_s=1.0)


def _queue_full() -> QueueFull:
    return QueueFull("Too many new grammars are waiting to be checked.", retry_after_s=1.0)


def _write(process: subprocess.Popen[bytes], line: bytes) -> bool:
    assert process.stdin is not None
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[process.stdin.write(rest) :]
    except BrokenPipeError:
        return False
    return True


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        process = processes.pop()
        with process:  # closes its pipes and waits for its end
            process.kill()
