"""`/metrics`: what Prometheus may know, under the names that dashboards for TGI ask for, and a few of our own.

TGI has no time to first token; `tailrace_time_to_first_token_seconds` is ours. Its durations are seconds, as there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import Response

from tailrace.dialects.wire import failure_of
from tailrace.errors import AdmissionError, EngineError, RequestError, TailraceError
from tailrace.generation import Generator, Run

__all__ = ["Metrics"]

_SECONDS = tuple(0.0001 * 1.5**power for power in range(1, 36))  # TGI's bounds
_TOKENS = tuple(float(2**power) for power in range(18))


class Metrics:
    """Counts what one generator does."""

    def __init__(self, generator: Generator) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it so
        self._registry = CollectorRegistry()
        # Gauges that only grow: a counter's name would get a `_total` that TGI's do not have.
        self._count = Gauge("tgi_request_count", "Requests that asked for a generation.", registry=self._registry)
        self._success = Gauge("tgi_request_success", "Generations that ended well.", registry=self._registry)
        self._failure = Gauge(
            "tgi_request_failure", "Generations that did not, and why.", ["err"], registry=self._registry
        )
        self._durations = {
            name: self._histogram(f"tgi_request_{name}duration", text, _SECONDS)
            for name, text in (
                ("", "Seconds from a request to the end of its stream."),
                ("validation_", "Seconds that a request was looked at."),
                ("queue_", "Seconds that it waited."),
                ("inference_", "Seconds that the engine had it."),
                ("mean_time_per_token_", "Seconds for each token, on average over a stream."),
            )
        }
        self._first = self._histogram("tailrace_time_to_first_token_seconds", "Seconds to the first token.", _SECONDS)
        self._input = self._histogram("tgi_request_input_length", "Tokens of a prompt.", _TOKENS)
        self._generated = self._histogram("tgi_request_generated_tokens", "Tokens of an answer.", _TOKENS)
        for name, text, value in (
            ("tgi_queue_size", "Requests that wait.", lambda: generator.gate.num_waiting),
            ("tgi_batch_current_size", "Requests that the engine has.", lambda: generator.gate.num_running),
            ("tailrace_streams", "Streams that can be read, finished ones too.", lambda: len(generator.store)),
            ("tailrace_engine_restarts", "Engines that were lost and replaced.", lambda: generator.num_restarts),
            ("tailrace_ready", "Whether requests are taken.", lambda: generator.state == "ready"),
        ):
            Gauge(name, text, registry=self._registry).set_function(value)
        self._outlived = Gauge(
            "tailrace_streams_outlived",
            "Streams that outlived an engine or a server, by how they went on: replayed, or continued.",
            ["continuity"],
            registry=self._registry,
        )
        generator.on_end = self.ended

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around a request for a generation, until its stream exists."""
        self._count.inc()
        try:
            yield
        except TailraceError as error:
            self._failure.labels(_reason(error)).inc()
            raise

    def ended(self, run: Run) -> None:
        """A stream has its terminal event."""
        end, times = run.log.end, run.times
        assert end is not None
        if end.continuity is not None:
            self._outlived.labels(end.continuity).inc()
        if end.status != "done":
            self._failure.labels("dropped" if end.status == "cancelled" else _reason(failure_of(end))).inc()
            return
        assert times.entered_s is not None
        assert times.admitted_s is not None
        assert times.ended_s is not None
        self._success.inc()
        inference_s = times.ended_s - times.admitted_s
        num_tokens = end.usage.num_completion_tokens
        for name, seconds in (
            ("", times.ended_s - times.asked_s),
            ("validation_", times.entered_s - times.asked_s),
            ("queue_", times.admitted_s - times.entered_s),
            ("inference_", inference_s),
            ("mean_time_per_token_", inference_s / max(1, num_tokens)),
        ):
            self._durations[name].observe(seconds)
        if times.first_s is not None:
            self._first.observe(times.first_s - times.asked_s)
        self._input.observe(end.usage.num_prompt_tokens)
        self._generated.observe(num_tokens)

    def answer(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self._registry)


def _reason(error: TailraceError) -> str:
    """The labels that TGI has."""
    for kind, reason in ((RequestError, "validation"), (AdmissionError, "overloaded"), (EngineError, "generation")):
        if isinstance(error, kind):
            return reason
    return "validation"
