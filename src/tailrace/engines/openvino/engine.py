"""openvino-genai's continuous batching: the default engine on a CPU.

Properties of the library that matter here (measured on 2026.4.1):

1. `step()` holds the GIL during the whole forward, so engines run in a separate process.
2. `rng_seed` of a request defaults to 0, so that requests without a seed give equal answers: a seed is always set.
3. When the KV cache is full, other sequences end too (status IGNORED). Admission prevents this. If it happens, those
   sequences fail with an error.
4. Reading an empty handle blocks for ever: `can_read()` is always called first.
5. A decoding step with a single row uses other kernels than a batch, and takes 5 to 15 % less time than one with two.
   With `exact`, each delta says whether its step had a single row (`is_alone`), and a replay repeats this: `turns`
   lets it run alone, and a throw-away companion runs beside it where it was in a batch. With `never_alone`, a companion
   always runs beside a single sequence. The arithmetic is float32, and keys are quantised per token, so that a prompt
   can be split anywhere. On two threads, every batch of two or more rows then gives the same bits, and every prompt of
   two or more tokens counts as a batch: with the same alternation of single rows and batches of up to 7 random
   neighbours, none of 24 answers of 48 tokens, computed three times each, differed on Zen 5 (2026-11-24), greedy,
   seeded and with penalties, and all differed from those that never decoded alone. `docs/certify.md` has the other
   processors. Without AVX-512 (AMD Zen 3), the split of a prompt changes the bits: only answers to prompts of one step
   are the same, and `exact` is not claimed. It is not claimed with more than two threads either, where one companion
   may not be enough; this was not measured.
6. A prompt piece of one token gives other bits than a longer piece. The library's prefix cache creates such pieces, and
   also returns blocks that answers wrote. `prompts` prevents both. Without the cache, the library splits prompts that
   are longer than a step, and the last piece may have one token (1 to 2 of 5 prompts of 257 tokens gave other ids).
7. With `prompt_lookup_tokens`, a step also computes the speculative tokens, and its bits differ from a step of one
   token. The library looks up the ids of the prompt, so these are sent unchanged. Its other method, a draft model, does
   not sample from the model's distribution (in 1,200 answers at temperature 0.6, the second token had 87 values,
   without it fewer than 24), so it is not offered.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from tailrace.engines.grammars.automata import GrammarError
from tailrace.engines.interface import Capabilities, Delta, Prefill, Sequence
from tailrace.engines.openvino.memory import GrammarMemory, release_mapped
from tailrace.engines.openvino.model import BLOCK_TOKENS, COMPANION_TOKENS, has_tokenizer, load_pipeline
from tailrace.engines.openvino.prompts import Prompts
from tailrace.engines.openvino.sampling import PARAMETERS, library_config
from tailrace.engines.openvino.turns import Turns
from tailrace.engines.protocol import EngineSpec
from tailrace.engines.schedule import Schedule
from tailrace.errors import ModelError, SequenceFailed
from tailrace.types import FinishReason, Grammar, Sampling

__all__ = ["PARAMETERS", "OpenVINOEngine"]

_COMPANION_ID = 2**63  # far above the ids of the server's sequences
_FINISH: dict[Any, FinishReason] = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


class _Run:
    __slots__ = ("aborted", "config", "count", "failure", "handle", "schedule", "wants_logprobs")

    def __init__(
        self, config: Any, wants_logprobs: bool, schedule: Schedule
    ) -> None:  # Any: the library's stubs do not hold up
        self.config = config
        self.handle: Any = None  # until the prompt is in the pipeline
        self.failure = ""
        self.wants_logprobs = wants_logprobs
        self.schedule = schedule
        self.count = 0
        self.aborted = False


class OpenVINOEngine:
    """Implements `Engine` with a GGUF file or an OpenVINO directory."""

    def __init__(self, spec: EngineSpec) -> None:
        self._eos_token_ids = spec.eos_token_ids
        self._exact = spec.exact and not spec.prompt_lookup_tokens
        self._never_alone = spec.never_alone
        self._prompt_lookup_tokens = spec.prompt_lookup_tokens
        try:
            self._pipeline, rows = load_pipeline(spec)
            self._warm_up()
            if not (self._exact and spec.prefix_cache):
                rows = 0
            if rows and self._first((5, 6, 7, 8)) != self._first((5 - rows, 6 - rows, 7 - rows, 8 - rows)):
                rows = 0  # not every model maps `id - rows` to the same row as `id`
            if has_tokenizer(spec):
                self._warm_up(Grammar("regex", "[ab]"))
            release_mapped()
        except (
            RuntimeError,
            LookupError,
            ValueError,
            MemoryError,
        ) as error:  # exceptions of C++, as pybind11 translates them
            raise ModelError(_reason(error)) from error
        self._runs: dict[int, _Run] = {}
        self._turns = Turns()
        self._grammar_memory = GrammarMemory(spec.grammar_memory_bytes)
        self._companion: Any = None
        self._num_throwaway = 0
        self._parts: list[Any] = []  # handles of this step's pieces: the library drops requests without a handle
        self._prompts = Prompts(
            step_tokens=spec.max_step_tokens,
            block_tokens=BLOCK_TOKENS,
            num_blocks=spec.kv_tokens // BLOCK_TOKENS if spec.prefix_cache else 0,
            num_rows=rows,
        )
        self.capabilities = Capabilities(
            engine=f"openvino {genai.__version__}",
            context_tokens=spec.context_tokens,
            kv_tokens=spec.kv_tokens,
            block_tokens=BLOCK_TOKENS,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS if has_tokenizer(spec) else PARAMETERS - {"grammar"},
            exact=spec.exact and (not spec.prefix_cache or rows > 0) and _is_known_exact(spec),
            reports_progress=spec.prefix_cache,  # without the cache, the library splits the prompts
        )

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        sampling = sequence.sampling
        try:
            config = library_config(sampling, self._eos_token_ids, self._prompt_lookup_tokens)
        except GrammarError as error:
            raise SequenceFailed(f"the grammar cannot be used: {error}") from error
        except (RuntimeError, TypeError) as error:  # TypeError: a seed beyond 64 bits
            raise SequenceFailed(f"the engine rejected the request: {_reason(error)}") from error
        self._runs[sequence.sequence_id] = _Run(config, sampling.logprobs, sequence.schedule)
        self._turns.add(sequence)

    def abort(self, sequence_id: int) -> None:
        run = self._runs.get(sequence_id)
        if run is not None:
            run.aborted = True

    def step(self) -> list[Delta]:
        self._grammar_memory.check(is_idle=not self._runs)
        for sequence_id, run in self._runs.items():
            if run.aborted:
                self._end(sequence_id, run)
        self._start()
        live = [run for run in self._runs.values() if _is_live(run)]
        self._update_companion(is_needed=self._exact and len(live) == 1 and self._needs_companion(live[0]))
        has_single_row = len(live) == 1 and live[0].count > 0 and not self._parts and self._companion is None
        is_alone = self._exact and has_single_row
        if not self._runs:
            self._drain()
            return []
        began_s = time.monotonic()
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._parts.clear()
        deltas = []
        took_s = time.monotonic() - began_s
        if self._turns.is_compiling:
            self._grammar_memory.measure()
        for sequence_id, run in list(self._runs.items()):
            delta = self._read(sequence_id, run, is_alone=is_alone)
            if delta is not None:
                self._turns.on_delta(sequence_id, run.count, took_s)
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._turns.drop(sequence_id)
                    del self._runs[sequence_id]
        return deltas

    def progress(self) -> list[Prefill]:
        return self._prompts.progress()

    def close(self) -> None:
        for sequence_id, run in self._runs.items():
            self._end(sequence_id, run)
        self._runs.clear()
        if self._pipeline is not None:
            self._update_companion(is_needed=False)
            self._drain()  # else the library prints warnings about unfinished requests
        self._pipeline = None

    def _end(self, sequence_id: int, run: _Run) -> None:
        self._turns.drop(sequence_id)
        self._prompts.drop(sequence_id)
        if run.handle is not None:
            run.handle.cancel()

    def _start(self) -> None:
        """Add the prompts and pieces that fit into the next step to the pipeline."""
        for sequence in self._turns.take(is_alone=not any(_is_live(run) for run in self._runs.values())):
            unchanged = sequence.sampling.repetition_penalty != 1.0
            self._prompts.add(sequence.sequence_id, sequence.prompt_ids, unchanged=unchanged)
        live = [run for run in self._runs.values() if _is_live(run)]
        for piece in self._prompts.take(len(live), is_prefilling=any(not run.count for run in live)):
            if piece.sequence_id is None:
                self._parts.append(self._throw_away(piece.ids, 1))
                continue
            run = self._runs[piece.sequence_id]
            try:
                run.handle = self._add(piece.sequence_id, piece.ids, run.config)
            except RuntimeError as error:
                run.failure = f"the engine rejected the request: {_reason(error)}"

    def _throw_away(self, ids: tuple[int, ...], max_tokens: int) -> Any:  # Any: the library's handle
        self._num_throwaway += 1
        return self._add(_COMPANION_ID + self._num_throwaway, ids, self._greedy(max_tokens))

    def _drain(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _warm_up(self, grammar: Grammar | None = None) -> None:
        """Run a short sequence, to test the model and warm it up (0.3 s, and the same for the first grammar, for which
        all other sequences would wait)."""
        handle = self._add(_COMPANION_ID, (1, 2, 3), self._greedy(2, grammar=grammar))
        self._drain()
        handle.read_all()

    def _first(self, ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """Return the first token of an answer, and its logprob."""
        handle = self._add(_COMPANION_ID, ids, self._greedy(1, logprobs=True))
        self._drain()
        (output,) = handle.read_all()
        return output.generated_ids, output.generated_log_probs

    def _greedy(self, max_tokens: int, *, logprobs: bool = False, grammar: Grammar | None = None) -> Any:
        sampling = Sampling(
            temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, grammar=grammar
        )
        return library_config(sampling, self._eos_token_ids, self._prompt_lookup_tokens)

    def _add(self, request_id: int, ids: tuple[int, ...], config: Any) -> Any:
        return self._pipeline.add_request(request_id, ov.Tensor(np.array([ids], dtype=np.int64)), config)

    def _read(self, sequence_id: int, run: _Run, *, is_alone: bool) -> Delta | None:
        index = run.count
        if run.aborted:
            return Delta(sequence_id, index, (), (), "cancelled")
        if run.failure:
            return Delta(sequence_id, index, (), (), "error", run.failure)
        if run.handle is None:
            return None
        ids: list[int] = []
        logprobs: list[float] = []
        finish: FinishReason | None = None
        while run.handle.can_read():
            for output in run.handle.read().values():
                ids += output.generated_ids
                if run.wants_logprobs:  # otherwise the library sends zeros
                    logprobs += output.generated_log_probs
                finish = _FINISH.get(output.finish_reason, finish)
        run.count += len(ids)
        if finish is None and not ids:
            status = run.handle.get_status()
            if status == genai.GenerationStatus.RUNNING:
                return None
            return Delta(sequence_id, index, (), (), "error", f"the engine ended the sequence ({status.name})")
        return Delta(sequence_id, index, tuple(ids), tuple(logprobs), finish, is_alone=is_alone)

    def _needs_companion(self, run: _Run) -> bool:
        """Return whether the only live sequence must compute its next token in a batch."""
        return self._never_alone or run.schedule.is_alone(run.count) is False

    def _update_companion(self, *, is_needed: bool) -> None:
        """Start or cancel the throw-away companion. Both have an effect in the next step."""
        companion = self._companion
        if companion is not None:
            while companion.can_read():
                companion.read()
            if not is_needed or companion.get_status() != genai.GenerationStatus.RUNNING:
                companion.cancel()
                self._companion = None
        if is_needed and self._companion is None:
            self._companion = self._throw_away((1, 2, 3), COMPANION_TOKENS)


def _is_live(run: _Run) -> bool:
    return run.handle is not None and not run.aborted


def _is_known_exact(spec: EngineSpec) -> bool:
    """Return whether 5. was measured on this type of processor and number of threads."""
    if spec.device or spec.kv_precision or spec.prompt_lookup_tokens or spec.adapter:  # not measured
        return False
    has_avx512 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return has_avx512 and (spec.threads or os.cpu_count() or 1) <= 2


def _reason(error: Exception) -> str:
    """Return the library's message without the position in its source."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".")[:200] if lines else type(error).__name__
