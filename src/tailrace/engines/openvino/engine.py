"""openvino-genai's continuous batching: the default engine on a CPU.

What the library needs us to know (measured on 2026.4.1):

1. `step()` holds the interpreter's lock for the whole forward, which is why engines run in a process of their own.
2. A request's `rng_seed` defaults to 0, so that unseeded requests repeat each other: a seed is always set.
3. Running out of KV memory ends innocent neighbours as well (status IGNORED). Admission keeps that from happening; if
   it happens all the same, those sequences fail by name and never look finished.
4. Reading a handle that has nothing blocks for ever: `can_read()` comes first, always.
5. With `exact`, arithmetic is in float32 and no sequence ever decodes alone, since a lone sequence goes through other
   kernels than a batch does (fewer sequences than threads, to be precise); keys are quantised by token, so that a
   prompt may be cut anywhere. On two threads any batch of two or more then gives the same bits, whatever its make-up:
   0 of 160 answers of 48 tokens differed on Zen 4, 0 of 25 on Sapphire Rapids (2026-11-21), greedy and seeded, alone,
   in a batch, staggered, with neighbours that come and are aborted. With bfloat16, the default where a processor has
   it, 18 of 20 did. Without AVX-512 (AMD Zen 3), where a prompt is cut does change its bits: answers to prompts of one
   step are the same, and nothing is claimed. Nor is it on more than two threads, where a single companion should not
   be enough, which nobody has measured yet.
6. A piece of a prompt that is one token long has other bits than any longer one, and the library's own prefix cache
   leaves such pieces, and gives back what answers wrote. `prompts` keeps it from both. Without the cache, the
   library cuts prompts that are longer than a step, and may leave a last piece of one token (of prompts of 257 tokens,
   1 to 2 of 5 gave other ids).
7. With `prompt_lookup_tokens`, a step takes in the guesses as well, and its bits are others than those of a step of one
   token. The library guesses among the ids of the prompt, so those are sent as they are. Its other way to guess, with
   a draft model, does not sample from the model's distribution (of 1,200 answers at temperature 0.6, the second token
   was one in 87 that it was in fewer than 24 without), so it is not offered.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from tailrace.engines.grammars.automata import GrammarError
from tailrace.engines.openvino.memory import GrammarMemory
from tailrace.engines.openvino.model import BLOCK_TOKENS, COMPANION_TOKENS, has_tokenizer, load_pipeline, num_rows
from tailrace.engines.openvino.prompts import Prompts
from tailrace.engines.openvino.sampling import PARAMETERS, library_config
from tailrace.engines.openvino.turns import Turns
from tailrace.engines.promise import Capabilities, Delta, Sequence
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError, SequenceFailed
from tailrace.types import FinishReason, Grammar, Sampling

__all__ = ["PARAMETERS", "OpenVINOEngine"]

_COMPANION_ID = 2**63  # no sequence of the server's comes near it
_FINISH: dict[Any, FinishReason] = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


class _Run:
    __slots__ = ("aborted", "config", "count", "failure", "handle", "wants_logprobs")

    def __init__(self, config: Any, wants_logprobs: bool) -> None:  # Any: the library's stubs do not hold up
        self.config = config
        self.handle: Any = None  # until its prompt is on its way
        self.failure = ""
        self.wants_logprobs = wants_logprobs
        self.count = 0
        self.aborted = False


class OpenVINOEngine:
    """Keeps the `Engine` promise with a GGUF file or an OpenVINO directory."""

    def __init__(self, spec: EngineSpec) -> None:
        self._eos_token_ids = spec.eos_token_ids
        self._exact = spec.exact and not spec.prompt_lookup_tokens
        self._prompt_lookup_tokens = spec.prompt_lookup_tokens
        try:
            self._pipeline = load_pipeline(spec)
            self._warm_up()
            rows = num_rows(spec) if self._exact and spec.prefix_cache else 0
            if rows and self._first((5, 6, 7, 8)) != self._first((5 - rows, 6 - rows, 7 - rows, 8 - rows)):
                rows = 0  # no model promises it
            if has_tokenizer(spec):
                self._warm_up(Grammar("regex", "[ab]"))
        except (RuntimeError, LookupError, ValueError, MemoryError) as error:  # C++'s, as pybind11 translates them
            raise ModelError(_reason(error)) from error
        self._runs: dict[int, _Run] = {}
        self._turns = Turns()
        self._grammar_memory = GrammarMemory(spec.grammar_memory_bytes)
        self._companion: Any = None
        self._num_throwaway = 0
        self._parts: list[Any] = []  # handles of pieces in this step: what nobody holds is not computed
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
        )

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        sampling = sequence.sampling
        try:
            config = library_config(sampling, self._eos_token_ids, self._prompt_lookup_tokens)
        except GrammarError as error:
            raise SequenceFailed(f"the grammar cannot be used: {error}") from error
        except (RuntimeError, TypeError) as error:  # TypeError: a seed beyond 64 bits
            raise SequenceFailed(f"the engine refused it: {_reason(error)}") from error
        self._runs[sequence.sequence_id] = _Run(config, sampling.logprobs)
        self._turns.add(sequence)

    def abort(self, sequence_id: int) -> None:
        run = self._runs.get(sequence_id)
        if run is not None and not run.aborted:
            run.aborted = True

    def step(self) -> list[Delta]:
        self._grammar_memory.check(is_idle=not self._runs)
        for sequence_id, run in self._runs.items():
            if run.aborted:
                self._end(sequence_id, run)
        self._start()
        if self._exact:
            self._keep_company(sum(_is_live(run) for run in self._runs.values()))
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
            delta = self._read(sequence_id, run)
            if delta is not None:
                self._turns.spoke(sequence_id, took_s)
                deltas.append(delta)
                if delta.finish_reason is not None:
                    del self._runs[sequence_id]
        return deltas

    def close(self) -> None:
        for sequence_id, run in self._runs.items():
            self._end(sequence_id, run)
        self._runs.clear()
        if self._pipeline is not None:
            self._keep_company(0)
            self._drain()  # it complains on stderr of whatever it had to end by itself
        self._pipeline = None

    def _end(self, sequence_id: int, run: _Run) -> None:
        self._turns.drop(sequence_id)
        self._prompts.drop(sequence_id)
        if run.handle is not None:
            run.handle.cancel()

    def _start(self) -> None:
        """Give the pipeline what fits into the next step."""
        for sequence in self._turns.take(is_alone=not any(_is_live(run) for run in self._runs.values())):
            as_they_are = sequence.sampling.repetition_penalty != 1.0
            self._prompts.add(sequence.sequence_id, sequence.prompt_ids, as_they_are=as_they_are)
        live = [run for run in self._runs.values() if _is_live(run)]
        for piece in self._prompts.take(len(live), is_prefilling=any(not run.count for run in live)):
            if piece.sequence_id is None:
                self._parts.append(self._throw_away(piece.ids, 1))
                continue
            run = self._runs[piece.sequence_id]
            try:
                run.handle = self._add(piece.sequence_id, piece.ids, run.config)
            except RuntimeError as error:
                run.failure = f"the engine refused it: {_reason(error)}"

    def _throw_away(self, ids: tuple[int, ...], max_tokens: int) -> Any:  # Any: the library's handle
        self._num_throwaway += 1
        return self._add(_COMPANION_ID + self._num_throwaway, ids, self._greedy(max_tokens))

    def _drain(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _warm_up(self, grammar: Grammar | None = None) -> None:
        """Run once, so that it is known to work and the first request does not pay for it (0.3 s, and as much for the
        first grammar, for which all others would wait)."""
        handle = self._add(_COMPANION_ID, (1, 2, 3), self._greedy(2, grammar=grammar))
        self._drain()
        handle.read_all()

    def _first(self, ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """The first token of an answer, and its logprob."""
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

    def _read(self, sequence_id: int, run: _Run) -> Delta | None:
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
                if run.wants_logprobs:  # the library sends zeros otherwise
                    logprobs += output.generated_log_probs
                finish = _FINISH.get(output.finish_reason, finish)
        run.count += len(ids)
        if finish is None and not ids:
            status = run.handle.get_status()
            if status == genai.GenerationStatus.RUNNING:
                return None
            return Delta(sequence_id, index, (), (), "error", f"the engine ended it ({status.name})")
        return Delta(sequence_id, index, tuple(ids), tuple(logprobs), finish)

    def _keep_company(self, num_live: int) -> None:
        """Run a throw-away sequence beside a lone one, and only then. One that was aborted is no company."""
        companion = self._companion
        if companion is not None:
            while companion.can_read():
                companion.read()
            if num_live != 1 or companion.get_status() != genai.GenerationStatus.RUNNING:
                companion.cancel()
                self._companion = None
        if num_live == 1 and self._companion is None:
            self._companion = self._throw_away((1, 2, 3), COMPANION_TOKENS)


def _is_live(run: _Run) -> bool:
    return run.handle is not None and not run.aborted


def _is_known_exact(spec: EngineSpec) -> bool:
    """Whether the processor is of the kind on which 5. was found to hold, with no more threads."""
    if spec.device or spec.kv_precision or spec.prompt_lookup_tokens or spec.adapter:  # nobody has looked
        return False
    has_avx512 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return has_avx512 and (spec.threads or os.cpu_count() or 1) <= 2


def _reason(error: Exception) -> str:
    """What the library says, without the place in its source."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".")[:200] if lines else type(error).__name__
