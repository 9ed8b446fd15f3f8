"""Grammars are compiled in a process of their own before an engine sees them.

What compiles there is what the engine compiles with: xgrammar with the model's vocabulary for OpenVINO, which alone
needs seconds or dies of some; llguidance for the others, which computes what it needs token by token, within a budget
(at most 5 ms a token for whatever was tried, llguidance 1.9 with 49,152 tokens).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
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
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from tailrace.engines.grammars import trial as grammar_trial
from tailrace.engines.grammars.guidance import to_guidance
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import EngineLost, QueueFull, RequestError
from tailrace.types import Grammar

__all__ = ["GrammarCheck"]

MOST_KEPT = 1024
_PATIENCE_S = 20.0  # far beyond the processor's time that a trial may take: the machine is overloaded
_LOADING_S = 60.0
_MOST_ASKED = 200  # of one process: the library never forgets what it compiled

MOST_WAITING = 64  # different grammars that are being checked or wait for that
MOST_OF_ONE = 16  # of them for one caller
TOO_MUCH_S = 60.0  # how long a refusal for `_TOO_MUCH` is remembered: the machine may have been overloaded

_TOO_MUCH = "compiling it takes too much time or memory"
_REASONS = {
    0: "",
    3: "no answer could conform to it",
    4: "it cannot be compiled",
    5: _TOO_MUCH,
}


class _Trial(Protocol):
    at_once: int

    def close(self) -> None:
        """End what runs. It may be asked again."""

    def __call__(self, grammar: Grammar) -> str:
        """Why a grammar cannot be used; "" if it can. Blocks. Raises: EngineLost where that cannot be found out."""


class GrammarCheck:
    """Refuses grammars that do not compile, or not within limits. To be used on one event loop, which never waits."""

    def __init__(self, spec: EngineSpec) -> None:
        self._trial: _Trial = _Staying(spec) if spec.engine == "openvino" else _Passing()
        # By what was checked, lately used last: the reason, and until when it holds (monotonic).
        self._reasons: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._places = asyncio.Semaphore(self._trial.at_once)
        self._waiting: list[tuple[str, bytes]] = []  # caller and key of each request whose grammar is not known yet

    async def check(self, grammar: Grammar, *, caller: str = "", within_s: float = 60.0) -> None:
        """Waits for at most `within_s` seconds until the check begins.

        Raises: RequestError if it cannot be used, QueueFull if too many others wait, EngineLost if it cannot be found
        out now.
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
        """Count a request among those that wait. Raises: QueueFull."""
        all_keys = {waiting for _, waiting in self._waiting}
        own_keys = {waiting for other, waiting in self._waiting if other == caller}
        if (key not in all_keys and len(all_keys) >= MOST_WAITING) or (
            key not in own_keys and len(own_keys) >= MOST_OF_ONE
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
                await self._places.acquire()
        except TimeoutError:
            raise _queue_full() from None
        reason = self._known(key)  # from a request that came before this one
        if reason is None:
            return await self._try(key, grammar)
        self._places.release()
        return reason

    async def _try(self, key: bytes, grammar: Grammar) -> str:
        """Try it in a thread. The place is given back when the thread ends, also of a cancelled request."""
        trial = asyncio.ensure_future(asyncio.to_thread(self._trial, grammar))
        trial.add_done_callback(functools.partial(self._tried, key))
        return await asyncio.shield(trial)

    def _tried(self, key: bytes, trial: asyncio.Future[str]) -> None:
        self._places.release()
        if trial.cancelled() or trial.exception() is not None:
            return
        until_s = time.monotonic() + (TOO_MUCH_S if trial.result() == _TOO_MUCH else math.inf)
        self._reasons[key] = (trial.result(), until_s)
        self._reasons.move_to_end(key)
        if len(self._reasons) > MOST_KEPT:
            self._reasons.popitem(last=False)

    def close(self) -> None:
        """End the process that compiles, if one runs. The next grammar begins another."""
        self._trial.close()


class _Passing:
    """A process for each grammar, with llguidance and nothing else: 0.06 s of a processor."""

    at_once = 2

    def close(self) -> None:
        pass

    def __call__(self, grammar: Grammar) -> str:
        command = [sys.executable, "-I", str(Path(grammar_trial.__file__))]
        text = to_guidance(grammar).encode()
        try:
            done = subprocess.run(command, input=text, capture_output=True, timeout=_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            raise EngineLost("Grammars cannot be checked just now.", retry_after_s=1.0) from None
        return _REASONS.get(done.returncode, _TOO_MUCH)


class _Staying:
    """A process with OpenVINO's library and the model's tokenizer: 170 MB, begun when the first grammar comes, and
    another one when one dies of a grammar."""

    at_once = 1

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = msgspec.json.encode(spec) + b"\n"
        self._processes: list[subprocess.Popen[bytes]] = []  # at most one
        self._is_ready = False
        self._num_asked = 0
        self._lock = threading.Lock()  # held while a thread uses the process
        weakref.finalize(self, _end, self._processes)

    def close(self) -> None:
        if self._lock.acquire(blocking=False):
            _end(self._processes)
            self._lock.release()
            return
        for process in list(self._processes):  # its pipes are in use; the thread that reads them closes them
            process.kill()

    def __call__(self, grammar: Grammar) -> str:
        with self._lock:
            return self._run(grammar)

    def _run(self, grammar: Grammar) -> str:
        for _ in range(2):  # it may have ended by itself, because nobody had asked for long
            process = self._begin()
            if not self._is_ready:
                if self._read(process, _LOADING_S) != b'""\n':
                    _end(self._processes)
                    raise EngineLost("Grammars cannot be checked just now.", retry_after_s=1.0)
                self._is_ready = True
            answer = self._ask(process, msgspec.json.encode(grammar) + b"\n")
            if answer.endswith(b"\n"):
                self._num_asked += 1
                return msgspec.json.decode(answer, type=str)
            _end(self._processes)
            if process.returncode == -signal.SIGKILL:  # which no grammar does: it was closed, or did not answer in time
                break
            if process.returncode != -signal.SIGALRM:
                self._begin()  # so that whoever asks next does not wait for all of its loading
                return _TOO_MUCH
        raise EngineLost("Grammars cannot be checked just now.", retry_after_s=1.0)

    def _begin(self) -> subprocess.Popen[bytes]:
        if self._num_asked >= _MOST_ASKED or any(process.poll() is not None for process in self._processes):
            _end(self._processes)
        if not self._processes:
            self._is_ready, self._num_asked = False, 0
            command = [sys.executable, "-m", "tailrace.engines.openvino.trial", str(os.getpid())]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            self._processes.append(process)
            _write(process, self._spec)
        return self._processes[0]

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        return self._read(process, _PATIENCE_S) if _write(process, line) else b""

    def _read(self, process: subprocess.Popen[bytes], within_s: float) -> bytes:
        """A line; what came of it where the process ended, or did not answer in time."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], within_s)[0]:
            return b""
        return process.stdout.readline()


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
        with process:  # which closes its pipes, and waits
            process.kill()
