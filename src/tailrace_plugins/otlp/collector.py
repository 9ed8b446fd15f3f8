"""The collector, to which the OpenTelemetry SDK sends spans and metrics in batches, in a process of its own. Its
variables (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…,
OTEL_METRIC_EXPORT_INTERVAL, OTEL_METRICS_EXPORTER=none) have their effect."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tailrace import __version__
from tailrace_plugins.otlp.names import BOUNDS, MEASURED, VERSION
from tailrace_plugins.otlp.spans import Span, SpanRef

__all__ = ["Collector"]

_TIMEOUT_S = 5.0  # of an export


class Collector:
    """Takes spans that are over."""

    def __init__(self, address: str, *, server_pid: int) -> None:
        own = {
            "service.name": "tailrace",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{server_pid}",
        }
        self._resource = Resource.create(own).merge(OTELResourceDetector().detect())  # the variables go before these
        self._scope = InstrumentationScope("tailrace", __version__, attributes={"tailrace.conventions": VERSION})
        self._spans = BatchSpanProcessor(OTLPSpanExporter(f"{address}/v1/traces", timeout=_TIMEOUT_S))
        readers = []
        if os.environ.get("OTEL_METRICS_EXPORTER") != "none":  # Jaeger and Phoenix take no metrics
            exporter = OTLPMetricExporter(f"{address}/v1/metrics", timeout=_TIMEOUT_S)
            readers.append(PeriodicExportingMetricReader(exporter))
        self._meters = MeterProvider(readers, resource=self._resource)
        meter = self._meters.get_meter("tailrace", __version__)
        self._histograms: Mapping[str, Histogram] = {
            name: meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=bounds)
            for name, bounds in BOUNDS.items()
        }

    def add(self, span: Span) -> None:
        """Send a span, if its trace is sampled, and count its durations."""
        given = {name: value for name, value in span.attributes.items() if value is not None}
        for metric, seconds in span.durations.items():
            self._histograms[metric].record(seconds, {name: given[name] for name in MEASURED if name in given})
        if not span.ref.is_sampled:
            return
        ahead_ns = time.time_ns() - time.monotonic_ns()
        begun_ns, ended_ns = (ahead_ns + round(1e9 * at_s) for at_s in (span.begun_s, span.ended_s))
        readable = ReadableSpan(
            span.name,
            _context(span.ref),
            _context(span.parent) if span.parent is not None else None,
            self._resource,
            given,
            (),
            [Link(_context(link.ref), link.attributes) for link in span.links],
            SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=begun_ns,
            end_time=max(begun_ns, ended_ns),
            instrumentation_scope=self._scope,
        )
        self._spans.on_end(readable)

    def close(self) -> None:
        """Send what is left, for at most twice the timeout of an export."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]  # the library does not annotate it
        with contextlib.suppress(Exception):  # the SDK raises if the collector is gone
            self._meters.shutdown(timeout_millis=1000 * _TIMEOUT_S)


def _context(ref: SpanRef) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if ref.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(ref.trace_id, 16), int(ref.span_id, 16), is_remote=ref.is_remote, trace_flags=flags)
