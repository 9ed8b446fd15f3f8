"""`/metrics` under the names of TGI and vLLM, for the dashboards, autoscalers and endpoint pickers that read them.

Everything is derived from our own metrics when somebody asks; requests pay nothing. Differences: running and waiting
are requests, also those with several choices; the KV cache's usage includes what running requests have reserved for the
rest of their answers; the time between tokens is the mean of a stream, and counted once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TypeAlias

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.admission import Gate
from tailrace.api.server_metrics import Metrics
from tailrace.errors import KINDS, AdmissionError, EngineError, RequestError, StreamError

__all__ = ["add_families"]

Labels: TypeAlias = dict[str, str]
States: TypeAlias = tuple[tuple[str, str, Callable[[Gate], float]], ...]

_TGI_STATES: States = (
    ("tgi_queue_size", "Requests in the queue.", lambda gate: gate.num_waiting),
    ("tgi_batch_current_size", "Requests on the engine.", lambda gate: gate.num_running),
    ("tgi_batch_current_max_tokens", "Tokens reserved on the engine.", lambda gate: gate.used_tokens),
)
_VLLM_STATES: States = (
    ("vllm:num_requests_running", "Requests on the engine.", lambda gate: gate.num_running),
    ("vllm:num_requests_waiting", "Requests in the queue.", lambda gate: gate.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV cache that requests have reserved.", lambda gate: gate.kv_usage),
    ("vllm:gpu_cache_usage_perc", "As kv_cache_usage_perc, its name until 0.10.", lambda gate: gate.kv_usage),
)


def add_families(families: Collection[str], metrics: Metrics) -> None:
    """Show metrics under more names. `families` are those of tgi and vllm, or one of them."""
    for family, collector in (("tgi", TgiMetrics), ("vllm", VllmMetrics)):
        if family in families:
            metrics.registry.register(collector(metrics))


class TgiMetrics(Collector):
    """The names of TGI's router. Its counters have no `_total`, so they are gauges here."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._histograms: tuple[tuple[str, Histogram, Labels], ...] = (
            ("tgi_request_duration", metrics.total_s, {}),
            ("tgi_request_validation_duration", metrics.validation_s, {}),
            ("tgi_request_queue_duration", metrics.queue_s, {}),
            ("tgi_request_inference_duration", metrics.inference_s, {}),
            ("tgi_request_mean_time_per_token_duration", metrics.itl_s, {}),
            ("tgi_request_input_length", metrics.prompt_tokens, {}),
            ("tgi_request_generated_tokens", metrics.answer_tokens, {}),
            ("tgi_request_max_new_tokens", metrics.max_tokens, {}),
            ("tgi_batch_inference_duration", metrics.prefill_s, {"method": "prefill"}),
            ("tgi_batch_inference_duration", metrics.itl_s, {"method": "decode"}),
            ("tgi_batch_forward_duration", metrics.prefill_s, {"method": "prefill"}),
            ("tgi_batch_forward_duration", metrics.itl_s, {"method": "decode"}),
        )

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._gauge("tgi_request_count", "Requests for a generation.", _values(metrics.requests))
        done = [(labels, value) for labels, value in _values(metrics.ended) if labels.pop("status") == "done"]
        for labels, _ in done:
            del labels["reason"]
        yield self._gauge("tgi_request_success", "Complete generations.", done)
        yield self._gauge("tgi_request_failure", "Failed, refused or cancelled requests.", self._failures())
        for name, text, of in _TGI_STATES:
            values = [({"model": generator.model}, of(generator.gate)) for generator in metrics.generators]
            yield self._gauge(name, text, values)
        families: dict[str, Metric] = {}
        for name, histogram, labels in self._histograms:
            family = families.setdefault(name, Metric(name, _one(histogram).documentation, "histogram"))
            _copy(histogram, family, partial(_with, labels))
        yield from families.values()

    def _failures(self) -> list[tuple[Labels, float]]:
        sums: dict[tuple[tuple[str, str], ...], float] = {}
        ended = [(labels, value) for labels, value in _values(self._metrics.ended) if labels["status"] != "done"]
        for labels, value in (*_values(self._metrics.refusals), *ended):
            is_cancelled = labels.pop("status", "") == "cancelled"
            labels["err"] = "dropped" if is_cancelled else _reason(labels["reason"])
            del labels["reason"]
            key = tuple(labels.items())
            sums[key] = sums.get(key, 0.0) + value
        return [(dict(key), value) for key, value in sums.items()]

    def _gauge(self, name: str, text: str, values: list[tuple[Labels, float]]) -> Metric:
        family = Metric(name, text, "gauge")
        for labels, value in values:
            family.add_sample(name, labels, value)
        return family


class VllmMetrics(Collector):
    """The names of vLLM, 0.9 to 0.32."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._histograms = {
            "vllm:time_to_first_token_seconds": metrics.first_s,
            "vllm:inter_token_latency_seconds": metrics.itl_s,
            "vllm:time_per_output_token_seconds": metrics.itl_s,  # its name until 0.11
            "vllm:request_time_per_output_token_seconds": metrics.itl_s,
            "vllm:e2e_request_latency_seconds": metrics.total_s,
            "vllm:request_queue_time_seconds": metrics.queue_s,
            "vllm:request_prefill_time_seconds": metrics.prefill_s,
            "vllm:request_decode_time_seconds": metrics.decode_s,
            "vllm:request_inference_time_seconds": metrics.inference_s,
            "vllm:request_prompt_tokens": metrics.prompt_tokens,
            "vllm:request_generation_tokens": metrics.answer_tokens,
            "vllm:request_params_max_tokens": metrics.max_tokens,
            "vllm:request_max_num_generation_tokens": metrics.answer_tokens,
        }

    def collect(self) -> Iterator[Metric]:
        for name, text, of in _VLLM_STATES:
            gauge = Metric(name, text, "gauge")
            for generator in self._metrics.generators:
                gauge.add_sample(gauge.name, self._labels({"model": generator.model}), of(generator.gate))
            yield gauge
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the KV cache.",
            labels=("model_name", "engine", "block_size", "num_gpu_blocks"),
        )
        for generator in self._metrics.generators:
            gate = generator.gate
            num_blocks = gate.capacity_tokens // gate.block_tokens
            cache.add_metric((generator.model, "0", str(gate.block_tokens), str(num_blocks)), 1)
        yield cache
        yield from self._counters()
        for name, histogram in self._histograms.items():
            family = Metric(name, _one(histogram).documentation, "histogram")
            _copy(histogram, family, self._labels)
            yield family

    def _counters(self) -> Iterator[Metric]:
        for name, text, phases in (
            ("prompt_tokens", "Tokens of prompts.", ("prefill", "cached")),
            ("generation_tokens", "Tokens of answers.", ("decode",)),
            ("prefix_cache_queries", "Tokens that were looked up in a prefix cache.", ("prefill", "cached")),
            ("prefix_cache_hits", "Tokens that were found in it.", ("cached",)),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=("model_name", "engine"))
            sums: dict[str, float] = {}
            for labels, value in _values(self._metrics.tokens):
                model = self._labels(labels)["model_name"]
                sums[model] = sums.get(model, 0.0) + value * (labels["phase"] in phases)
            for model, value in sums.items():
                counter.add_metric((model, "0"), value)
            yield counter
        finished = Metric("vllm:request_success", "Complete answers.", "counter")
        for labels, value in _values(self._metrics.finished):
            reason = {"finished_reason": labels.pop("finish_reason")}
            finished.add_sample("vllm:request_success_total", self._labels(labels) | reason, value)
        yield finished

    def _labels(self, ours: Mapping[str, str]) -> Labels:
        others = {name: text for name, text in ours.items() if name == "le"}
        return {"model_name": ours["model"], "engine": "0", **others}


def _one(metric: Counter | Histogram) -> Metric:
    (family,) = metric.collect()
    return family


def _values(counter: Counter) -> list[tuple[Labels, float]]:
    return [(dict(sample.labels), sample.value) for sample in _one(counter).samples]


def _copy(histogram: Histogram, family: Metric, labels: Callable[[Labels], Labels]) -> None:
    ours = _one(histogram)
    for sample in ours.samples:
        name = family.name + sample.name.removeprefix(ours.name)
        family.add_sample(name, labels(dict(sample.labels)), sample.value)


def _with(more: Labels, given: Labels) -> Labels:
    return given | more


def _reason(code: str) -> str:
    """Return TGI's label for an error."""
    kind = KINDS.get(code, EngineError)
    if issubclass(kind, AdmissionError):
        return "overloaded"
    return "validation" if issubclass(kind, RequestError | StreamError) else "generation"
