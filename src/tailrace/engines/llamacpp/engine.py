"""llama.cpp, as xllamacpp packs it: any GGUF file, and the quickest way with one stream.

What the library needs us to know (measured on 2026.10.11549):

1. It runs llama.cpp's own server: a loop and a listener in threads of C++. Nothing can step it, so `step()` waits a
   moment for what has been streamed. Its socket is a file in a folder that nobody else may enter.
2. While an answer ends in the middle of a UTF-8 character it streams nothing, and then the id of the last token only.
   `ids` finds the others: 885 such characters that SmolLM2 made (Chinese, Arabic, emoji; temperatures 0 to 1.5)
   were all split into the tokens that had made them. Where the bytes are no UTF-8 at all, as of 1 in 535 at temperature
   1 and of 8 in 42 at 1.5, other tokens of the same look are told, the same ones each time. An end of text in the
   middle of a character hides what began it: such an answer ends without those tokens.
3. So that a character is complete where max_tokens cuts it, a few tokens more are asked for and not told.
4. Closing a connection ends its sequence, but not at once, and where the memory is full it ends every sequence (so its
   source says). A sequence therefore waits until llama.cpp has closed the connections of those whose memory it takes.
   What idle slots remember of earlier prompts is no burden: it is thrown away when the memory is needed.
5. Presence and frequency penalties count the prompt too, and the logprobs of the tokens of 2. are told nowhere. So
   these are left out. A grammar that it cannot read, or runs out of its budget with, is ignored (with status 200):
   `grammars` reads along. Where a grammar allows no more, what comes is cut here, end of text or not.
6. With `exact`, each sequence has memory of its own, and nothing is left that computes one token in another way than
   many: weights are not packed anew, and keys and values are kept in eight bits, since those in 16 go through other
   kernels from 64 tokens on, and through yet others where a lone sequence has 512 behind it. (In 16 bits 21 of 149
   replays differed on Zen 4, of follow-up turns 5 of 13.) Kinds of tensors other than those of SmolLM2 in Q4_1 have
   not been tried.
7. Its threads wait for one another by spinning, some hundred times a token. Where anything else wants a core they spin
   in vain: 32 tokens on two cores beside one busy process took 22 s and more. Where they sleep at once it is 0.7 s, but
   on a quiet machine 29 tokens/s instead of 84. So they spin for a moment, and then sleep: 84 and 27 (beside a busy
   process, where sleeping at once has 38).
"""

from __future__ import annotations

import os
import selectors
import time
from contextlib import ExitStack
from typing import Any

import msgspec

from tailrace.engines.llamacpp.grammars import GrammarFollower
from tailrace.engines.llamacpp.model import (
    VERSION,
    context_tokens,
    has_grammars,
    num_slots,
    read_pieces,
    room_tokens,
    start_server,
)
from tailrace.engines.llamacpp.sampling import PARAMETERS, SPARE_TOKENS, request_body
from tailrace.engines.llamacpp.wire import Exchange
from tailrace.engines.promise import Capabilities, Delta, Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.scratch import scratch_directory
from tailrace.types import FinishReason

__all__ = ["PARAMETERS", "LlamaCppEngine"]

_WAIT_S = 0.05
_LINGER_S = 0.001
_KNOWN_THREADS = 2  # with more, nobody has looked whether 6. holds


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    tokens_predicted: int = 0
    stop: bool = False
    stop_type: str = ""
    error: _Error | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class _Run:
    """A sequence, from submit() to its last delta."""

    __slots__ = ("body", "exchange", "follower", "held", "num_reported", "num_told", "sequence", "tokens")

    def __init__(self, sequence: Sequence, body: bytes) -> None:
        self.sequence = sequence
        self.body = body
        self.tokens = len(sequence.prompt_ids) + (sequence.sampling.max_tokens or 0) + SPARE_TOKENS
        self.exchange: Exchange | None = None  # until there is room for it
        self.num_reported = 0  # tokens of the answer that llama.cpp has told of
        self.num_told = 0  # and that deltas were made of
        self.follower = None if sequence.sampling.grammar is None else GrammarFollower(sequence.sampling.grammar)
        self.held: tuple[int, ...] = ()  # a token without text, until it is known whether it is the end


class LlamaCppEngine:
    """Keeps the `Engine` promise with a GGUF file."""

    def __init__(self, spec: EngineSpec) -> None:
        self._exits = ExitStack()
        self._socket_path = str(self._exits.enter_context(scratch_directory("tailrace-llamacpp-")) / "llama.sock")
        self._server: Any = None  # Any: the library has no stubs
        self._runs: dict[int, _Run] = {}
        self._aborted: set[int] = set()
        self._leaving: dict[Exchange, int] = {}  # and what their slots hold until llama.cpp has let go of them
        self._selector = selectors.DefaultSelector()
        self._eos_token_ids = frozenset(spec.eos_token_ids)
        self._prefix_cache = spec.prefix_cache
        self._room_tokens = room_tokens(spec)
        try:
            self._server = start_server(spec, self._socket_path)
            self._pieces = read_pieces(self._socket_path)
            longest_tokens = context_tokens(spec, self._socket_path)
            parameters = PARAMETERS if has_grammars(self._socket_path) else PARAMETERS - {"grammar"}
        except BaseException:
            self.close()
            raise
        self.capabilities = Capabilities(
            engine=f"llamacpp {VERSION}",
            context_tokens=longest_tokens,
            kv_tokens=spec.kv_tokens,
            block_tokens=1,
            max_sequences=num_slots(spec),
            parameters=parameters,
            exact=spec.exact and (spec.threads or os.cpu_count() or 1) <= _KNOWN_THREADS,
        )

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        body = request_body(sequence.sampling, len(sequence.prompt_ids), len(self._pieces)) | {
            "prompt": sequence.prompt_ids,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": self._prefix_cache,
        }
        self._runs[sequence.sequence_id] = _Run(sequence, msgspec.json.encode(body))

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._runs:
            self._aborted.add(sequence_id)

    def step(self) -> list[Delta]:
        deltas = []
        for sequence_id in self._aborted:
            run = self._runs[sequence_id]
            deltas.append(Delta(sequence_id, run.num_told, (), (), "cancelled"))
            self._end(run)
        self._aborted.clear()
        heard: dict[_Run, list[bytes]] = {}
        if any(run.exchange is None for run in self._runs.values()):
            self._listen(0, heard)  # who has left has made room
            self._begin()
        if not self._runs:
            return deltas
        if not deltas and not heard:
            self._listen(_WAIT_S, heard)
        if len(self._runs) > 1:
            time.sleep(_LINGER_S)  # the others' tokens of this step are on their way: woken once, not by each of them
            self._listen(0, heard)
        for run, events in heard.items():
            delta = self._read(run, events)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def close(self) -> None:
        for run in list(self._runs.values()):
            self._end(run)
        for exchange in self._leaving:
            exchange.close()
        self._leaving.clear()
        self._selector.close()
        self._server = None
        self._exits.close()

    def _begin(self) -> None:
        """Ask llama.cpp for what there is room for: what was aborted may still hold some, and running out of it would
        end every sequence."""
        held = sum(self._leaving.values()) + sum(run.tokens for run in self._runs.values() if run.exchange)
        for run in self._runs.values():
            if run.exchange is None:
                held += run.tokens
                if held > self._room_tokens:
                    break
                run.exchange = Exchange(self._socket_path, run.body)
                self._selector.register(run.exchange, _interest(run.exchange), run)

    def _listen(self, timeout_s: float, heard: dict[_Run, list[bytes]]) -> None:
        """Add what arrived for which sequence, waiting until something has."""
        for key, mask in self._selector.select(timeout_s):
            exchange: Exchange = key.fileobj  # type: ignore[assignment]
            if mask & selectors.EVENT_WRITE:
                exchange.send()
                self._selector.modify(exchange, _interest(exchange), key.data)
            if mask & selectors.EVENT_READ:
                events = exchange.receive()
                if exchange not in self._leaving:
                    heard.setdefault(key.data, []).extend(events)
                if exchange.is_over:
                    self._forget(exchange)

    def _read(self, run: _Run, events: list[bytes]) -> Delta | None:
        ids, run.held = run.held, ()
        finish: FinishReason | None = None
        for event in events:
            chunk = _decode_chunk(event)
            if chunk.error is not None:
                return self._fail(run, f"the engine refused it: {chunk.error.message}")
            if chunk.stop:
                finish = "stop" if chunk.stop_type == "eos" else "length"
                break
            count, run.num_reported = chunk.tokens_predicted - run.num_reported, chunk.tokens_predicted
            if count == 1:
                ids += tuple(chunk.tokens)
            elif count > 1:
                ids += self._pieces.recover(chunk.content, count, chunk.tokens[-1])
        ids, finish = self._cut(run, ids, finish)
        if finish is None and run.exchange is not None and run.exchange.is_over:
            return self._fail(run, "the engine broke off")
        if finish is None and ids and not self._pieces[ids[-1]]:
            ids, run.held = ids[:-1], ids[-1:]
        if finish is None and not ids:
            return None
        if run.follower is not None:
            ids, finish = self._follow(run.follower, ids, finish)
            if finish == "error":
                return self._fail(run, "the engine left the grammar")
        delta = Delta(run.sequence.sequence_id, run.num_told, ids, (), finish)
        run.num_told += len(ids)
        if finish is not None:
            self._end(run)
        return delta

    def _cut(
        self, run: _Run, ids: tuple[int, ...], finish: FinishReason | None
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Where the answer ends by our own count, which llama.cpp does not know."""
        sampling = run.sequence.sampling
        left = (sampling.max_tokens or 0) - run.num_told
        if not sampling.ignore_eos:
            for place, token_id in enumerate(ids[:left], 1):
                if token_id in self._eos_token_ids:
                    return ids[:place], "stop"
        return (ids[:left], "length") if len(ids) >= left else (ids, finish)

    def _follow(
        self, follower: GrammarFollower, ids: tuple[int, ...], finish: FinishReason | None
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """As far as the grammar goes, which llama.cpp may not have kept to."""
        for place, token_id in enumerate(ids, 1):
            if token_id not in self._eos_token_ids and not follower.take(self._pieces[token_id]):
                return (), "error"
            if follower.is_complete:
                return ids[:place], "stop"
        return ids, "error" if finish == "stop" and not follower.may_end else finish

    def _fail(self, run: _Run, why: str) -> Delta:
        self._end(run)
        return Delta(run.sequence.sequence_id, run.num_told, (), (), "error", why)

    def _end(self, run: _Run) -> None:
        del self._runs[run.sequence.sequence_id]
        if run.exchange is None:
            return
        if not run.exchange.is_over:
            run.exchange.leave()
            self._leaving[run.exchange] = run.tokens

    def _forget(self, exchange: Exchange) -> None:
        self._leaving.pop(exchange, None)
        self._selector.unregister(exchange)
        exchange.close()


def _interest(exchange: Exchange) -> int:
    return selectors.EVENT_READ if exchange.is_sent else selectors.EVENT_READ | selectors.EVENT_WRITE
