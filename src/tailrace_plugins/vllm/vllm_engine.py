"""vLLM: the engine for GPUs, and for CPUs where its CPU build is installed.

Properties of the library that matter here (0.25 to 0.32):

1. It computes in child processes of the worker, which do not notice when the worker is killed (`starts_processes` in
   kinds makes them end too). An asyncio loop receives their output. It runs inside `step` until there is output.
2. It checks a request when its first output is awaited. Here the parameters are checked in `submit`.
3. Unread outputs are merged: an item may contain several tokens. So tokens are counted, not items.
4. If the memory is full, it recomputes a sequence, whose tokens may then differ. Admission prevents this.
5. On a GPU, the KV cache is as large as the device allows, whatever `kv_tokens` says. On a CPU, it is `kv_tokens`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no telemetry

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import EngineInput, PromptType
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.v1.engine.async_llm import AsyncLLM

from tailrace.engines import GRAMMAR_TOO_COMPLEX, Capabilities, Delta, EngineSpec, Sequence, Sight, in_one_line
from tailrace.engines.grammars.guidance import to_guidance
from tailrace.errors import ModelError, SequenceFailed
from tailrace.types import FinishReason, Grammar, Sampling, TopLogprobs
from tailrace_kit.adapters import Adapter, read_adapters
from tailrace_kit.inner_loop import InnerLoop
from tailrace_kit.scratch import scratch_directory
from tailrace_plugins.vllm.vllm_adapters import RANKS, write_adapter
from tailrace_plugins.vllm.vllm_devices import seen_gpus
from tailrace_plugins.vllm.vllm_eyes import VllmEyes
from tailrace_plugins.vllm.vllm_names import REQUEST_ERRORS, set_bad_words

__all__ = ["PARAMETERS", "VllmEngine"]

logger = logging.getLogger("tailrace.engine")

PARAMETERS = frozenset((
    "allowed_token_ids", "bad_words", "frequency_penalty", "grammar", "ignore_eos", "logit_bias", "logprobs",
    "max_tokens", "min_p", "min_tokens", "presence_penalty", "repetition_penalty", "seed", "stop_token_ids",
    "temperature", "top_k", "top_logprobs", "top_p",
))  # fmt: skip
_BLOCK_TOKENS = 128  # the CPU build's block size; a multiple of the GPU's
_CPU_SHARE = 0.6  # limit, as a share of free memory; the number of blocks decides the actual use
_STEP_S = 0.05  # longest step
_CLOSE_S = 1.0  # for ended sequences to release resources
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop", "abort": "cancelled"}


class _Run:
    """One sequence, with its output since the last step."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence_id = sequence.sequence_id
        self.sampling = sequence.sampling
        self.count = 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[TopLogprobs] = []
        self.finish: FinishReason | None = None
        self.failure = ""
        self.num_cached: int | None = None  # tokens of the prompt, until a delta has said it
        self.is_aborted = False
        self.task: asyncio.Task[None]

    def on_output(self, output: Any) -> None:  # Any: the library's CompletionOutput
        self.ids += output.token_ids
        if self.sampling.logprobs and output.logprobs is not None:
            for token_id, likely in zip(output.token_ids, output.logprobs, strict=False):
                self.logprobs.append(likely[token_id].logprob)
                if self.sampling.top_logprobs:
                    best = sorted(likely.items(), key=lambda item: item[1].rank)[: self.sampling.top_logprobs]
                    self.top.append(tuple((top_id, entry.logprob) for top_id, entry in best))
        if output.finish_reason is not None:
            self.finish = _FINISH.get(output.finish_reason, "error")
            if self.finish == "error":
                # vLLM does not say why. A grammar whose states are too many for llguidance ends like this.
                self.failure = "the engine failed" if self.sampling.grammar is None else GRAMMAR_TOO_COMPLEX

    def take(self) -> Delta | None:
        start = self.count
        if self.is_aborted:
            return Delta(self.sequence_id, start, (), (), "cancelled")
        if self.failure:
            is_refused = self.failure == GRAMMAR_TOO_COMPLEX
            return Delta(self.sequence_id, start, (), (), "error", self.failure, is_refused=is_refused)
        if not self.ids and self.finish is None:
            return None
        delta = Delta(
            self.sequence_id,
            start,
            tuple(self.ids),
            tuple(self.logprobs),
            self.finish,
            "",
            tuple(self.top),
            num_cached_tokens=self.num_cached,
        )
        self.num_cached = None
        self.count += len(self.ids)
        self.ids.clear()
        self.logprobs.clear()
        self.top.clear()
        return delta


class VllmEngine:
    """Implements `Engine` with a Hugging Face model directory."""

    def __init__(self, spec: EngineSpec) -> None:
        _choose_device(spec)
        adapters = read_adapters(spec)
        with scratch_directory("tailrace-vllm-") as folder:
            self._adapters = {
                name: write_adapter(adapter, number, Path(spec.path), folder)
                for number, (name, adapter) in enumerate(adapters.items(), 1)
            }
            try:
                self._engine = AsyncLLM.from_engine_args(
                    _arguments(spec, list(adapters.values())), usage_context=UsageContext.OPENAI_API_SERVER
                )
            except Exception as error:  # the library raises whatever its models and platforms do
                raise ModelError(
                    f"vLLM cannot load {os.path.basename(spec.path.rstrip('/'))}: {in_one_line(error)}."
                ) from error
            self._loop: InnerLoop[_Run] = InnerLoop()
            self._eos_token_ids = list(spec.eos_token_ids)
            for adapter in self._adapters.values():
                self._loop.complete(self._engine.add_lora(adapter))
        self._eyes = _eyes(self._engine)
        cache = self._engine.vllm_config.cache_config
        self.capabilities = Capabilities(
            engine=f"vllm {vllm.__version__}",
            context_tokens=self._engine.vllm_config.model_config.max_model_len,
            kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            block_tokens=cache.block_size,
            max_sequences=spec.max_sequences,
            parameters=PARAMETERS,
            exact=False,
            waits=True,
            takes=frozenset({"token_ids"} if self._eyes is None else {"token_ids", "image/png"}),
            sees=self._eyes is not None,
        )
        self._warm_up()

    def return_for(self, descriptor: int) -> None:
        self._loop.return_for(descriptor)

    def submit(self, sequence: Sequence) -> None:
        self.capabilities.check_length(sequence)
        try:
            params = _params(sequence.sampling, self._eos_token_ids)
        except REQUEST_ERRORS as error:
            raise SequenceFailed(f"the engine rejected the request: {in_one_line(error)}") from error
        prompt: PromptType | EngineInput = {"prompt_token_ids": list(sequence.prompt_ids)}
        if sequence.images and self._eyes is not None:
            prompt = self._eyes.prompt(sequence)
        run = _Run(sequence)
        adapter = self._adapters.get(sequence.adapter)
        self._loop.begin(sequence.sequence_id, run, self._follow(run, prompt, params, adapter))

    def see(self, image: bytes) -> Sight:
        assert self._eyes is not None
        return self._eyes.see(image)

    def abort(self, sequence_id: int) -> None:
        self._loop.abort(sequence_id)

    def step(self) -> list[Delta]:
        if self._loop.runs and not self._loop.has_aborted:
            self._loop.run(_STEP_S)
            if self._engine.errored:
                raise self._engine.dead_error
        deltas = self._loop.take()
        self._loop.clean_up(_CLOSE_S)
        return deltas

    def close(self) -> None:
        if self._loop.is_closed:
            return
        self._loop.cancel_all(_CLOSE_S)
        self._engine.shutdown()
        self._loop.close()

    async def _follow(
        self, run: _Run, prompt: PromptType | EngineInput, params: SamplingParams, adapter: LoRARequest | None
    ) -> None:
        try:
            outputs = self._engine.generate(prompt, params, str(run.sequence_id), lora_request=adapter)
            async with contextlib.aclosing(outputs):  # closing aborts an unfinished request
                async for output in outputs:
                    if not run.count:
                        run.num_cached = output.num_cached_tokens
                    run.on_output(output.outputs[0])
                    self._loop.wake()
        except Exception as error:  # fails this sequence only; `step` detects a lost engine
            run.failure = f"the engine rejected the request: {in_one_line(error)}"
        self._loop.wake()

    def _warm_up(self) -> None:
        """Run a short sequence without and with a grammar, to test the model and load the grammar library."""
        for grammar in (None, Grammar("regex", "[ab]")):
            self.submit(Sequence(0, ((1, 2, 3),), Sampling(temperature=0.0, seed=0, max_tokens=2, grammar=grammar)))
            while self._loop.runs:
                for delta in self.step():
                    if delta.finish_reason == "error":
                        raise ModelError(f"vLLM cannot run this model: {delta.failure}.")


def _choose_device(spec: EngineSpec) -> None:
    """Its processes, which begin later, inherit what this one sees; in this one vLLM computes nothing. Raises:
    ModelError."""
    variable = current_platform.device_control_env_var
    seen = os.environ.get(variable, "")
    gpus = seen_gpus(spec.device, build=current_platform.device_name, num_gpus=spec.gpus, seen=seen)
    if gpus != seen:
        os.environ[variable] = gpus


def _eyes(engine: AsyncLLM) -> VllmEyes | None:
    """Return what reads images, if the model does."""
    if not engine.vllm_config.model_config.supports_multimodal_inputs:
        return None
    try:
        return VllmEyes(engine.renderer)
    except Exception as error:  # the library raises whatever its processors do
        logger.warning("The model reads no images, because its processor cannot be used (%s).", in_one_line(error))
        return None


def _arguments(spec: EngineSpec, adapters: list[Adapter]) -> AsyncEngineArgs:
    is_cpu = current_platform.is_cpu()
    more: dict[str, Any] = {}
    if is_cpu:
        memory = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)  # may be less than the machine's memory
        more = {
            "block_size": _BLOCK_TOKENS,
            "num_gpu_blocks_override": -(-spec.kv_tokens // _BLOCK_TOKENS),
            "gpu_memory_utilization": _CPU_SHARE * memory.available_memory / memory.total_memory,
        }
        if spec.threads:
            os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    elif spec.gpu_memory:
        more["gpu_memory_utilization"] = spec.gpu_memory
    if adapters:
        most = max(adapter.rank for adapter in adapters)
        more["enable_lora"] = True
        more["max_loras"] = len(adapters)  # all of them may be in one step
        more["max_lora_rank"] = next(rank for rank in RANKS if rank >= most)
    return AsyncEngineArgs(
        model=spec.path,
        dtype=spec.dtype or "auto",
        max_model_len=spec.context_tokens,
        max_num_seqs=spec.max_sequences,
        tensor_parallel_size=spec.gpus,
        max_num_batched_tokens=max(spec.max_step_tokens, spec.max_sequences) if spec.max_step_tokens else None,
        enable_prefix_caching=spec.prefix_cache,
        generation_config="vllm",  # tailrace sets the defaults of a request
        trust_remote_code=False,
        load_format="safetensors",
        disable_log_stats=True,
        limit_mm_per_prompt={"audio": 0, "video": 0},  # nothing is prepared for what no prompt has
        mm_processor_cache_gb=0,  # `VllmEyes` keeps images, and may read some that no prompt has in the end
        # The library that checks grammars first. vLLM's default allows line breaks inside of JSON strings.
        structured_outputs_config={"backend": "guidance"},
        **more,
    )


def _params(sampling: Sampling, eos_token_ids: list[int]) -> SamplingParams:
    """Convert sampling parameters. Raises: one of REQUEST_ERRORS for invalid values."""
    grammar = None
    if sampling.grammar is not None:
        grammar = StructuredOutputsParams(grammar=to_guidance(sampling.grammar))
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=(sampling.seed or 0) % 2**63,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        min_tokens=min(sampling.min_tokens, sampling.max_tokens or 0),  # vLLM refuses more than max_tokens
        stop_token_ids=[*sampling.stop_token_ids, *([] if sampling.ignore_eos else eos_token_ids)],
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        logprobs=max(sampling.top_logprobs, 1) if sampling.logprobs else None,
        logit_bias=dict(sampling.logit_bias) or None,
        structured_outputs=grammar,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    if sampling.bad_words:  # the ids that vLLM would make of texts, which are not known here
        set_bad_words(params, sampling.bad_words)
    return params
