"""`/metrics` under vLLM's names, for the dashboards, autoscalers and endpoint pickers that read them.

Everything is derived from other metrics when somebody asks; requests pay nothing. Differences from vLLM: running and
waiting are requests, also those with several choices; token counts are those of answers that ended well; the KV cache's
usage includes what running requests have reserved for the rest of their answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.generation import Generator

__all__ = ["VllmMetrics"]

_LABELS = ("model_name", "engine")


class VllmMetrics(Collector):
    """Reads the generators and our histograms. `histograms` has vLLM's names; `prompts` and `answers` count tokens."""

    def __init__(
        self,
        generators: Sequence[Generator],
        histograms: Mapping[str, Histogram],
        *,
        prompts: Histogram,
        answers: Histogram,
    ) -> None:
        self._generators = generators
        self._histograms = histograms
        self._sums = {
            "vllm:prompt_tokens": (prompts, "Tokens of prompts."),
            "vllm:generation_tokens": (answers, "Tokens of answers."),
        }

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests on the engine.", labels=_LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the queue.", labels=_LABELS)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the KV cache that running requests have reserved.", labels=_LABELS
        )
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache.", labels=(*_LABELS, "block_size", "num_gpu_blocks")
        )
        for generator in self._generators:
            gate, labels = generator.gate, (generator.model, "0")
            running.add_metric(labels, gate.num_running)
            waiting.add_metric(labels, gate.num_waiting)
            usage.add_metric(labels, gate.kv_usage)
            num_blocks = gate.capacity_tokens // gate.block_tokens
            cache.add_metric((*labels, str(gate.block_tokens), str(num_blocks)), 1)
        yield from (running, waiting, usage, cache)
        for name, (histogram, text) in self._sums.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for sample in _one(histogram).samples:
                if sample.name.endswith("_sum"):
                    counter.add_metric((self._model(sample.labels), "0"), sample.value)
            yield counter
        for name, histogram in self._histograms.items():
            yield self._copy(name, histogram)

    def _copy(self, name: str, histogram: Histogram) -> Metric:
        ours = _one(histogram)
        copy = Metric(name, ours.documentation, ours.type)
        for sample in ours.samples:
            labels = {key: text for key, text in sample.labels.items() if key != "model"}
            labels |= {"model_name": self._model(sample.labels), "engine": "0"}
            copy.add_sample(name + sample.name.removeprefix(ours.name), labels, sample.value)
        return copy

    def _model(self, labels: Mapping[str, str]) -> str:
        """Return the model of a sample. With one model, our metrics have no label for it."""
        return labels.get("model", self._generators[0].model)


def _one(histogram: Histogram) -> Metric:
    (metric,) = histogram.collect()
    return metric
