"""openvino-genai's continuous batching: the default engine on a CPU.

What the library needs us to know (measured on 2026.4.1):

1. `step()` holds the interpreter's lock for the whole forward, which is why engines run in a process of their own.
2. A request's `rng_seed` defaults to 0, so that unseeded requests repeat each other: a seed is always set.
3. Running out of KV memory ends innocent neighbours as well (status IGNORED). Admission keeps that from happening; if
   it happens all the same, those sequences fail by name and never look finished.
4. Reading a handle that has nothing blocks for ever: `can_read()` comes first, always.
5. With `exact`, arithmetic is in float32 and no sequence ever decodes alone, since a lone sequence goes through other
   kernels than a batch does; keys are quantised by token, so that a prompt may be cut anywhere. Any batch of two or
   more then gives the same ids, whatever its make-up. Source: 25 prompts of 96 tokens, greedy and seeded, alone and in
   a batch, staggered, with neighbours that come and are aborted: 25 of 25, on Sapphire Rapids (2026-11-21). With
   bfloat16, which is the default there, 2 of 20. What it does not cover: a last piece of a long prompt that is one
   token long (9 of 12 the same). Without AVX-512 (AMD Zen 3), where a prompt is cut does change its bits, whatever the
   precision of the cache: answers to prompts of one step are the same there, others may not be, and nothing is claimed.
6. What the prefix cache gives back is not always what computing would have given: where it leaves one token of a prompt
   (6 of 12 the same), where the prefix was an answer (4 of 12), and between twins that are one step apart. With it the
   engine is repeatable mostly, and claims nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from tailrace.engine import Capabilities, Delta, Sequence
from tailrace.engines.openvino_model import BLOCK_TOKENS, COMPANION_TOKENS, has_tokenizer, load_pipeline
from tailrace.engines.protocol import EngineSpec
from tailrace.errors import ModelError, SequenceFailed
from tailrace.types import FinishReason, Grammar, Sampling

__all__ = ["PARAMETERS", "OpenVINOEngine"]

_COMPANION_ID = 2**63  # no sequence of the server's comes near it
_FINISH: dict[Any, FinishReason] = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


PARAMETERS = frozenset(
    (
        "frequency_penalty",
        "grammar",
        "ignore_eos",
        "logprobs",
        "max_tokens",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    )
)


class _Run:
    __slots__ = ("aborted", "count", "handle", "wants_logprobs")

    def __init__(self, handle: Any, wants_logprobs: bool) -> None:  # Any: the library's stubs do not hold up
        self.handle = handle
        self.wants_logprobs = wants_logprobs
        self.count = 0
        self.aborted = False


class OpenVINOEngine:
    """Keeps the `Engine` promise with a GGUF file or an OpenVINO directory."""

    def __init__(self, spec: EngineSpec) -> None:
        self._eos_token_ids = spec.eos_token_ids
        self._exact = spec.exact
        try:
            self._pipeline = load_pipeline(spec)
            self._warm_up()
            if has_tokenizer(spec):
                self._warm_up(Grammar("regex", "[ab]"))
        except (RuntimeError, LookupError, ValueError, MemoryError) as error:  # C++'s, as pybind11 translates them
            raise ModelError(_reason(error)) from error
        self._runs: dict[int, _Run] = {}
        self._companion: Any = None
        self._num_companions = 0
        self.capabilities = Capabilities(
            engine=f"openvino {genai.__version__}",
            context_tokens=spec.context_tokens,
            kv_tokens=spec.kv_tokens,
            block_tokens=BLOCK_TOKENS,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS if has_tokenizer(spec) else PARAMETERS - {"grammar"},
            exact=spec.exact and not spec.prefix_cache and _cuts_change_nothing(),
        )

    def submit(self, sequence: Sequence) -> None:
        wanted = len(sequence.prompt_ids) + (sequence.sampling.max_tokens or 0)
        if wanted > min(self.capabilities.context_tokens, self.capabilities.kv_tokens):
            raise SequenceFailed("the prompt is too long for this engine")
        try:
            handle = self._add(sequence.sequence_id, sequence.prompt_ids, self._config(sequence.sampling))
        except (RuntimeError, TypeError) as error:  # TypeError: a seed beyond 64 bits
            raise SequenceFailed(f"the engine refused it: {_reason(error)}") from error
        self._runs[sequence.sequence_id] = _Run(handle, sequence.sampling.logprobs)

    def abort(self, sequence_id: int) -> None:
        run = self._runs.get(sequence_id)
        if run is not None and not run.aborted:
            run.aborted = True

    def step(self) -> list[Delta]:
        for run in self._runs.values():
            if run.aborted:
                run.handle.cancel()
        if self._exact:
            self._keep_company(sum(not run.aborted for run in self._runs.values()))
        if not self._runs:
            self._drain()
            return []
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        deltas = []
        for sequence_id, run in list(self._runs.items()):
            delta = self._read(sequence_id, run)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    del self._runs[sequence_id]
        return deltas

    def close(self) -> None:
        for run in self._runs.values():
            run.handle.cancel()
        self._runs.clear()
        if self._pipeline is not None:
            self._keep_company(0)
            self._drain()  # it complains on stderr of whatever it had to end by itself
        self._pipeline = None

    def _drain(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _warm_up(self, grammar: Grammar | None = None) -> None:
        """Run once, so that it is known to work and the first request does not pay for it (0.3 s, and as much for the
        first grammar, for which all others would wait)."""
        config = self._config(Sampling(temperature=0.0, seed=0, max_tokens=2, ignore_eos=True, grammar=grammar))
        handle = self._add(_COMPANION_ID, (1, 2, 3), config)
        self._drain()
        handle.read_all()

    def _add(self, request_id: int, ids: tuple[int, ...], config: Any) -> Any:
        return self._pipeline.add_request(request_id, ov.Tensor(np.array([ids], dtype=np.int64)), config)

    def _config(self, sampling: Sampling) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = sampling.max_tokens
        self._set_end(config, ignore_eos=sampling.ignore_eos)
        config.rng_seed = sampling.seed
        if sampling.temperature > 0:
            config.do_sample = True
            config.temperature = sampling.temperature
            config.top_p = sampling.top_p
            config.min_p = sampling.min_p
            if sampling.top_k:
                config.top_k = sampling.top_k
        config.repetition_penalty = sampling.repetition_penalty
        config.presence_penalty = sampling.presence_penalty
        config.frequency_penalty = sampling.frequency_penalty
        if sampling.logprobs:
            config.logprobs = 1
        if sampling.grammar is not None:
            structure = genai.StructuredOutputConfig()
            setattr(structure, sampling.grammar.kind, sampling.grammar.source)
            config.structured_output_config = structure
        config.validate()
        return config

    def _set_end(self, config: Any, *, ignore_eos: bool) -> None:
        config.ignore_eos = ignore_eos
        if self._eos_token_ids:  # else the model directory's own
            config.stop_token_ids = set(self._eos_token_ids)
            config.eos_token_id = self._eos_token_ids[0]

    def _read(self, sequence_id: int, run: _Run) -> Delta | None:
        index = run.count
        if run.aborted:
            return Delta(sequence_id, index, (), (), "cancelled")
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
            config = genai.GenerationConfig()
            config.max_new_tokens = COMPANION_TOKENS
            self._set_end(config, ignore_eos=True)
            self._num_companions += 1
            self._companion = self._add(_COMPANION_ID + self._num_companions, (1, 2, 3), config)


def _cuts_change_nothing() -> bool:
    """Whether this processor is of the kind on which 5. was found to hold."""
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _reason(error: Exception) -> str:
    """What the library says, without the place in its source."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".")[:200] if lines else type(error).__name__
