"""The collector, to which the OpenTelemetry SDK sends spans and metrics in batches, from threads of its own. Its
variables (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…,
OTEL_METRIC_EXPORT_INTERVAL, OTEL_METRICS_EXPORTER=none) have their effect."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from tailrace import __version__
from tailrace_plugins.otlp.names import BOUNDS, VERSION

__all__ = ["Collector"]

_TIMEOUT_S = 5.0  # of an export


class Collector:
    """Takes spans that are over."""

    def __init__(self, address: str) -> None:
        own = {
            "service.name": "tailrace",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
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

    def add_span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        begun_ns: int,
        ended_ns: int,
        *,
        attributes: Mapping[str, AttributeValue],
        is_server: bool = False,
        links: Sequence[Link] = (),
        events: Sequence[Event] = (),
        error: str = "",
    ) -> None:
        """Send a span, if its trace is sampled. Times are nanoseconds since the epoch."""
        if not context.trace_flags.sampled:
            return
        span = ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            dict(attributes),
            events,
            links,
            SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=begun_ns,
            end_time=max(begun_ns, ended_ns),
            instrumentation_scope=self._scope,
        )
        self._spans.on_end(span)

    def record(self, metric: str, seconds: float, attributes: Mapping[str, AttributeValue]) -> None:
        self._histograms[metric].record(seconds, dict(attributes))

    def close(self) -> None:
        """Send what is left, for at most twice the timeout of an export. Call it in a thread."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]  # the library does not annotate it
        with contextlib.suppress(Exception):  # the SDK raises if the collector is gone
            self._meters.shutdown(timeout_millis=1000 * _TIMEOUT_S)
