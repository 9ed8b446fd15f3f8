"""A collector: a real receiver of OTLP over HTTP, which keeps what it gets."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Receiver", "attributes_of"]


class Receiver:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.instances: set[str] = set()
        self.metrics: dict[str, int] = {}  # by name: the last count
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found = attributes_of(resource.resource.attributes)
                self.services.add(str(found["service.name"]))
                self.instances.add(str(found["service.instance.id"]))
                for scope in resource.scope_spans:
                    self.spans += scope.spans
        else:
            assert path == "/v1/metrics"
            for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for one in (metric for scope in measured.scope_metrics for metric in scope.metrics):
                    self.metrics[one.name] = sum(point.count for point in one.histogram.data_points)

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes_of(pairs: list[KeyValue]) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        many = [one.string_value for one in pair.value.array_value.values]
        found[pair.key] = many or (getattr(pair.value, kind) if kind else None)
    return found
