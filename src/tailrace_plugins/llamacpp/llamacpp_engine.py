"""llama.cpp, through xllamacpp: any GGUF file, and the fastest engine with one stream.

Properties of the library that matter here (measured on 2026.10.11549):

1. It runs llama.cpp's own server: a loop and a listener in C++ threads. It cannot be stepped, so `step()` waits briefly
   for streamed tokens. Its socket is a file in a private directory.
2. While an answer ends in the middle of a UTF-8 character, it streams nothing. Then it sends only the id of the last
   token. `ids` recovers the others: it found the exact tokens of all 885 such characters from SmolLM2 (Chinese, Arabic,
   emoji; temperatures 0 to 1.5). If the bytes are not valid UTF-8 (1 of 535 characters at temperature 1, 8 of 42 at
   1.5), it reports other tokens with the same text, always the same ones. If the text ends in the middle of a
   character, the answer ends without the tokens of that character.
3. A few more tokens than max_tokens are requested and dropped, so that max_tokens does not cut off a character.
4. Closing a connection ends its sequence, but with a delay. If the memory is full, all sequences end (according to its
   source). So a sequence waits until llama.cpp has closed the connections of the sequences whose memory it needs.
   Cached prompts of idle slots are dropped when the memory is needed.
5. Presence and frequency penalties also count the prompt, the logprobs of the tokens in 2. are not available, and
   no token can be banned for a part of an answer only. So these penalties, logprobs, `min_tokens` and `bad_words` are
   not supported. A grammar that it cannot parse, or that exceeds its budget, is ignored (with status 200):
   `grammars` checks the answer. After the end of a grammar, further tokens are cut off.
6. With `exact`, each sequence has its own memory, and one token is computed in the same way as several: weights are not
   repacked, and the KV cache has eight bits. With 16 bits, other kernels are used from 64 tokens on, and yet others for
   a single sequence with a context of 512. (With 16 bits, 21 of 149 replays differed on Zen 4, and 5 of 13 follow-up
   turns.) Only the tensor types of SmolLM2 in Q4_1 were tested.
7. Its threads wait for each other by spinning, about a hundred times per token. If another process needs a core,
   spinning wastes time: 32 tokens on two cores next to one busy process took more than 22 s. If threads sleep at once,
   this takes 0.7 s, but an idle machine gives 29 tokens/s instead of 84. So they spin briefly and then sleep: 84
   tokens/s, and 27 next to a busy process (38 if they sleep at once).
8. It tokenises a prompt with images itself: `llamacpp_eyes`.
"""

from __future__ import annotations

import os
import selectors
import time
from contextlib import ExitStack
from typing import Any

import msgspec

from tailrace.engines import ALL_EXCLUDED, Capabilities, Delta, EngineSpec, Prefill, Sequence, Sight
from tailrace.types import FinishReason
from tailrace_kit.scratch import scratch_directory
from tailrace_plugins.llamacpp.grammar_follower import GrammarFollower
from tailrace_plugins.llamacpp.llamacpp_model import (
    VERSION,
    context_tokens,
    has_grammars,
    num_slots,
    read_pieces,
    room_tokens,
    start_seeing_server,
)
from tailrace_plugins.llamacpp.llamacpp_sampling import PARAMETERS, SPARE_TOKENS, request_body
from tailrace_plugins.llamacpp.socket_requests import Exchange

__all__ = ["PARAMETERS", "LlamaCppEngine"]

_WAIT_S = 0.05
_LINGER_S = 0.001
_MEASURED_THREADS = 2  # with more threads, and on GPUs, 6. was not measured


class _Error(msgspec.Struct):
    message: str = ""


class _PromptProgress(msgspec.Struct):
    """Counts tokens of the prompt."""

    total: int = 0
    cache: int = 0  # found in the cache
    processed: int = 0  # includes the cached ones


class _Chunk(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    tokens_predicted: int = 0
    stop: bool = False
    stop_type: str = ""
    error: _Error | None = None
    prompt_progress: _PromptProgress | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class _Run:
    """A sequence, from `submit` to its last delta."""

    __slots__ = (
        "allowed",
        "body",
        "ends",
        "exchange",
        "follower",
        "held",
        "num_cached",
        "num_emitted",
        "num_reported",
        "progress",
        "sequence",
        "tokens",
    )

    def __init__(self, sequence: Sequence, body: bytes, ends: frozenset[int]) -> None:
        self.sequence = sequence
        self.body = body
        self.ends = ends  # tokens that end the answer
        self.allowed = frozenset(sequence.sampling.allowed_token_ids)
        self.tokens = len(sequence.prompt_ids) + (sequence.sampling.max_tokens or 0) + SPARE_TOKENS
        self.exchange: Exchange | None = None  # None until there is memory for it
        self.num_cached: int | None = None  # tokens of the prompt, until a delta has said it
        self.progress: Prefill | None = None
        self.num_reported = 0  # tokens of the answer that llama.cpp has reported
        self.num_emitted = 0  # tokens of the answer in deltas
        self.follower = None if sequence.sampling.grammar is None else GrammarFollower(sequence.sampling.grammar)
        self.held: tuple[int, ...] = ()  # a token without text, which may be the end


class LlamaCppEngine:
    """Implements `Engine` with a GGUF file."""

    def __init__(self, spec: EngineSpec) -> None:
        self._exits = ExitStack()
        self._socket_path = str(self._exits.enter_context(scratch_directory("tailrace-llamacpp-")) / "llama.sock")
        self._server: Any = None  # Any: the library has no stubs
        self._runs: dict[int, _Run] = {}
        self._aborted: set[int] = set()
        self._closing: dict[Exchange, int] = {}  # with the tokens of their slots, until llama.cpp frees them
        self._selector = selectors.DefaultSelector()
        self._eos_token_ids = frozenset(spec.eos_token_ids)
        self._prefix_cache = spec.prefix_cache
        self._room_tokens = room_tokens(spec)
        try:
            self._server, is_on_gpu, self._projector = start_seeing_server(spec, self._socket_path)
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
            reports_progress=True,
            exact=spec.exact
            and not is_on_gpu
            and self._projector is None  # its steps with images were not measured
            and (spec.threads or os.cpu_count() or 1) <= _MEASURED_THREADS,
            takes=frozenset({"token_ids"} if self._projector is None else {"token_ids", "image/png"}),
            sees=self._projector is not None,
        )

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        prompt: object = sequence.prompt_ids
        if sequence.images and self._projector is not None:
            prompt = self._projector.prompt(sequence)
        body = request_body(sequence.sampling, len(sequence.prompt_ids), len(self._pieces)) | {
            "prompt": prompt,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": self._prefix_cache,
            "return_progress": True,  # which also says how much of the prompt was cached
        }
        ends = frozenset(() if sequence.sampling.ignore_eos else self._eos_token_ids)
        ends |= frozenset(sequence.sampling.stop_token_ids)
        self._runs[sequence.sequence_id] = _Run(sequence, msgspec.json.encode(body), ends)

    def see(self, image: bytes) -> Sight:
        assert self._projector is not None
        return self._projector.see(image)

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._runs:
            self._aborted.add(sequence_id)

    def step(self) -> list[Delta]:
        deltas = []
        for sequence_id in self._aborted:
            run = self._runs[sequence_id]
            deltas.append(Delta(sequence_id, run.num_emitted, (), (), "cancelled"))
            self._end(run)
        self._aborted.clear()
        events_by_run: dict[_Run, list[bytes]] = {}
        if any(run.exchange is None for run in self._runs.values()):
            self._listen(0, events_by_run)  # ended sequences have freed memory
            self._begin()
        if not self._runs:
            return deltas
        if not deltas and not events_by_run:
            self._listen(_WAIT_S, events_by_run)
        if len(self._runs) > 1:
            time.sleep(_LINGER_S)  # wait for the other sequences' tokens of this step, to return them together
            self._listen(0, events_by_run)
        for run, events in events_by_run.items():
            delta = self._read(run, events)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def progress(self) -> list[Prefill]:
        return [run.progress for run in self._runs.values() if run.progress is not None and not run.num_reported]

    def close(self) -> None:
        for run in list(self._runs.values()):
            self._end(run)
        for exchange in self._closing:
            exchange.close()
        self._closing.clear()
        self._selector.close()
        self._server = None
        self._exits.close()

    def _begin(self) -> None:
        """Send the sequences to llama.cpp for which there is memory. Aborted sequences may still use some, and running
        out would end all sequences."""
        held = sum(self._closing.values()) + sum(run.tokens for run in self._runs.values() if run.exchange)
        for run in self._runs.values():
            if run.exchange is None:
                held += run.tokens
                if held > self._room_tokens:
                    break
                run.exchange = Exchange(self._socket_path, run.body)
                self._selector.register(run.exchange, _interest(run.exchange), run)

    def _listen(self, timeout_s: float, events_by_run: dict[_Run, list[bytes]]) -> None:
        """Wait for events, and add them to `events_by_run` by sequence."""
        for key, mask in self._selector.select(timeout_s):
            exchange: Exchange = key.fileobj  # type: ignore[assignment]
            if mask & selectors.EVENT_WRITE:
                exchange.send()
                self._selector.modify(exchange, _interest(exchange), key.data)
            if mask & selectors.EVENT_READ:
                events = exchange.receive()
                if exchange not in self._closing:
                    events_by_run.setdefault(key.data, []).extend(events)
                if exchange.is_over:
                    self._forget(exchange)

    def _read(self, run: _Run, events: list[bytes]) -> Delta | None:
        ids, run.held = run.held, ()
        finish: FinishReason | None = None
        for event in events:
            chunk = _decode_chunk(event)
            if chunk.error is not None:
                return self._fail(run, f"the engine rejected the request: {chunk.error.message}")
            if chunk.prompt_progress is not None:
                if chunk.prompt_progress.total != len(run.sequence.prompt_ids):
                    return self._fail(run, "the engine has read another prompt")
                run.num_cached = chunk.prompt_progress.cache
                run.progress = Prefill(run.sequence.sequence_id, chunk.prompt_progress.processed, run.num_cached)
            if chunk.stop:
                finish = "stop" if chunk.stop_type == "eos" else "length"
                break
            count, run.num_reported = chunk.tokens_predicted - run.num_reported, chunk.tokens_predicted
            if count == 1:
                if run.allowed and not run.allowed.issuperset(chunk.tokens):  # end tokens that it does not take
                    return self._fail(run, ALL_EXCLUDED, is_refused=True)
                ids += tuple(chunk.tokens)
            elif count > 1:
                ids += self._pieces.recover(chunk.content, count, chunk.tokens[-1])
        ids, finish = self._cut(run, ids, finish)
        if finish is None and run.exchange is not None and run.exchange.is_over:
            return self._fail(run, "the engine closed the connection")
        if finish is None and ids and not self._pieces[ids[-1]]:
            ids, run.held = ids[:-1], ids[-1:]
        if finish is None and not ids:
            return None
        if run.follower is not None:
            ids, finish = self._follow(run.follower, ids, finish)
            if finish == "error":
                return self._fail(run, "the engine did not follow the grammar")
        delta = Delta(run.sequence.sequence_id, run.num_emitted, ids, (), finish, num_cached_tokens=run.num_cached)
        run.num_cached = None
        run.num_emitted += len(ids)
        if finish is not None:
            self._end(run)
        return delta

    def _cut(
        self, run: _Run, ids: tuple[int, ...], finish: FinishReason | None
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Cut the answer at max_tokens or an end token, which llama.cpp does not check exactly."""
        left = (run.sequence.sampling.max_tokens or 0) - run.num_emitted
        for count, token_id in enumerate(ids[:left], 1):
            if token_id in run.ends:
                return ids[:count], "stop"
        return (ids[:left], "length") if len(ids) >= left else (ids, finish)

    def _follow(
        self, follower: GrammarFollower, ids: tuple[int, ...], finish: FinishReason | None
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Cut the answer at the end of the grammar. Returns "error" if llama.cpp did not follow the grammar."""
        for count, token_id in enumerate(ids, 1):
            if token_id not in self._eos_token_ids and not follower.take(token_id, self._pieces[token_id]):
                return (), "error"
            if follower.is_complete:
                return ids[:count], "stop"
        return ids, "error" if finish == "stop" and not follower.may_end else finish

    def _fail(self, run: _Run, why: str, *, is_refused: bool = False) -> Delta:
        self._end(run)
        return Delta(run.sequence.sequence_id, run.num_emitted, (), (), "error", why, is_refused=is_refused)

    def _end(self, run: _Run) -> None:
        del self._runs[run.sequence.sequence_id]
        if run.exchange is None:
            return
        if not run.exchange.is_over:
            run.exchange.leave()
            self._closing[run.exchange] = run.tokens

    def _forget(self, exchange: Exchange) -> None:
        self._closing.pop(exchange, None)
        self._selector.unregister(exchange)
        exchange.close()


def _interest(exchange: Exchange) -> int:
    return selectors.EVENT_READ if exchange.is_sent else selectors.EVENT_READ | selectors.EVENT_WRITE
