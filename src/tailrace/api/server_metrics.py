"""`/metrics`: metrics for Prometheus, with names of our own, and with the names and units of TGI and vLLM, so that
their dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import Response

from tailrace.api.vllm_metrics import VllmMetrics
from tailrace.dialects.wire import failure_of
from tailrace.errors import AdmissionError, EngineError, RequestError, TailraceError
from tailrace.generation import Generator, Observer, Times
from tailrace.streams import StreamLog
from tailrace.types import Arrival, Record

__all__ = ["Metrics"]

_Metric = TypeVar("_Metric", Gauge, Histogram)
_STATES: tuple[tuple[str, str, Callable[[Generator], float]], ...] = (
    ("tailrace_requests_waiting", "Requests in the queue.", lambda generator: generator.gate.num_waiting),
    ("tailrace_requests_running", "Requests on the engine.", lambda generator: generator.gate.num_running),
    (
        "tailrace_kv_cache_usage",
        "Share of the KV cache that running requests have reserved, 0 to 1.",
        lambda generator: generator.gate.kv_usage,
    ),
    ("tgi_queue_size", "Requests in the queue.", lambda generator: generator.gate.num_waiting),
    ("tgi_batch_current_size", "Requests on the engine.", lambda generator: generator.gate.num_running),
    ("tailrace_engine_restarts", "Engines that were lost and replaced.", lambda generator: generator.num_restarts),
    ("tailrace_ready", "Whether `/readyz` answers 200: requests may be sent.", lambda generator: generator.is_ready),
)

_SECONDS = tuple(0.0001 * 1.5**power for power in range(1, 36))  # TGI's bounds
_TOKENS = tuple(float(2**power) for power in range(18))


class Metrics(Observer):
    """The metrics of all generators. With several models, each metric has the label `model`. `families` are the names
    that are added to our own: tgi, vllm."""

    def __init__(self, *generators: Generator, families: Collection[str] = ("tgi",)) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library does not annotate it
        self._registry = CollectorRegistry()
        self._has_several = len(generators) > 1
        self._hidden = () if "tgi" in families else ("tgi_",)
        # Counters as gauges: the library would add `_total` to a counter's name, which TGI does not have.
        self._count = self._gauge("tgi_request_count", "Requests for a generation.")
        self._success = self._gauge("tgi_request_success", "Completed generations.")
        self._failure = self._gauge("tgi_request_failure", "Failed, refused or cancelled requests, by reason.", "err")
        self._durations = {
            name: self._histogram(f"tgi_request_{name}duration", text, _SECONDS)
            for name, text in (
                ("", "Seconds from a request to the end of its stream."),
                ("validation_", "Seconds from a request to the queue."),
                ("queue_", "Seconds in the queue."),
                ("inference_", "Seconds on the engine."),
                ("mean_time_per_token_", "Mean seconds per token of a stream."),
            )
        }
        self._first = self._histogram("tailrace_time_to_first_token_seconds", "Seconds to the first token.", _SECONDS)
        self._input = self._histogram("tgi_request_input_length", "Tokens of a prompt.", _TOKENS)
        self._generated = self._histogram("tgi_request_generated_tokens", "Tokens of an answer.", _TOKENS)
        self._outlived = self._gauge(
            "tailrace_streams_outlived",
            "Streams that survived the loss of an engine or a server: replayed or continued.",
            "continuity",
        )
        self._add_states(generators)
        if "vllm" in families:
            histograms = {
                "vllm:time_to_first_token_seconds": self._first,
                "vllm:e2e_request_latency_seconds": self._durations[""],
                "vllm:request_queue_time_seconds": self._durations["queue_"],
                "vllm:request_inference_time_seconds": self._durations["inference_"],
            }
            self._registry.register(VllmMetrics(generators, histograms, prompts=self._input, answers=self._generated))

    def _add_states(self, generators: Sequence[Generator]) -> None:
        store = generators[0].store
        streams = Gauge("tailrace_streams", "Readable streams, including finished ones.", registry=self._registry)
        streams.set_function(lambda: store.state.num_streams)
        servers = Gauge("tailrace_servers", "Servers that share the log store, with this one.", registry=self._registry)
        servers.set_function(lambda: store.state.num_servers)
        others = Gauge("tailrace_servers_other_models", "Those with other models.", registry=self._registry)
        others.set_function(lambda: store.state.num_with_other_models)
        offset = Gauge(
            "tailrace_clock_offset_seconds",
            "Seconds by which this server's clock is ahead of that of the machine that keeps the streams.",
            registry=self._registry,
        )
        offset.set_function(lambda: store.state.clock_offset_s)
        for name, text, value in _STATES:
            gauge = self._gauge(name, text)
            for generator in generators:
                self._of(gauge, generator.model).set_function(partial(value, generator))
        for generator in generators:
            generator.observers.add(self)
            for gauge in (self._count, self._success):
                self._of(gauge, generator.model)  # creates it, so that it is shown from the start
            for histogram in (self._first, self._input, self._generated, *self._durations.values()):
                self._of(histogram, generator.model)

    def on_arrival(self, arrival: Arrival) -> None:
        self._of(self._count, arrival.model).inc()

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        self._of(self._failure, arrival.model, _reason(error)).inc()

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        model, end = record.model, log.end
        assert end is not None
        if end.continuity is not None:
            self._of(self._outlived, model, end.continuity).inc()
        if end.status != "done":
            reason = "dropped" if end.status == "cancelled" else _reason(failure_of(end))
            self._of(self._failure, model, reason).inc()
            return
        assert times.entered_s is not None
        assert times.admitted_s is not None
        assert times.ended_s is not None
        self._of(self._success, model).inc()
        inference_s = times.ended_s - times.admitted_s
        num_tokens = end.usage.num_completion_tokens
        for name, seconds in (
            ("", times.ended_s - times.arrived_s),
            ("validation_", times.entered_s - times.arrived_s),
            ("queue_", times.admitted_s - times.entered_s),
            ("inference_", inference_s),
            ("mean_time_per_token_", inference_s / max(1, num_tokens)),
        ):
            self._of(self._durations[name], model).observe(seconds)
        if times.first_s is not None:
            self._of(self._first, model).observe(times.first_s - times.arrived_s)
        self._of(self._input, model).observe(end.usage.num_prompt_tokens)
        self._of(self._generated, model).observe(num_tokens)

    def answer(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, self._labels(*labels), registry=self._registry_of(name))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, self._labels(), buckets=bounds, registry=self._registry_of(name))

    def _registry_of(self, name: str) -> CollectorRegistry | None:
        return None if name.startswith(self._hidden) else self._registry

    def _labels(self, *labels: str) -> list[str]:
        return [*labels, "model"] if self._has_several else list(labels)

    def _of(self, metric: _Metric, model: str, *labels: str) -> _Metric:
        """Return a metric with its labels for a model."""
        given = (*labels, model) if self._has_several else labels
        return metric.labels(*given) if given else metric


def _reason(error: TailraceError) -> str:
    """Return TGI's label for an error."""
    for kind, reason in ((RequestError, "validation"), (AdmissionError, "overloaded"), (EngineError, "generation")):
        if isinstance(error, kind):
            return reason
    return "validation"
