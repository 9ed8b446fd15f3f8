"""`/-/metrics`: the front's metrics of every app, and the metrics of the apps' processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tailrace.errors import TailraceError
from tailrace_outer.apps.pool import HostedApp
from tailrace_outer.apps.process import ReplicaProcess
from tailrace_outer.serve.link import ChannelClosed

__all__ = ["AppMetrics"]

_SECONDS = tuple(0.001 * 2**power for power in range(20))
_TIMEOUT_S = 1.0  # a process that does not answer by then is left out


class AppMetrics:
    """Counts requests, and collects the processes' metrics. An ASGI application that serves both."""

    def __init__(self, apps: Callable[[], Iterable[HostedApp]], num_ended: Mapping[tuple[str, str], int]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it so
        self._apps = apps
        registry = self._registry = CollectorRegistry()
        registry.register(_PoolMetrics(apps, num_ended))
        self.requests = Counter("tailrace_app_requests", "Requests, by status.", ["app", "status"], registry=registry)
        self.first = Histogram(
            "tailrace_app_first_seconds",
            "Time to the start of the answer.",
            ["app"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.durations = Histogram(
            "tailrace_app_request_seconds",
            "Time to the end of the answer.",
            ["app"],
            registry=registry,
            buckets=_SECONDS,
        )

    def measure(self, app: str) -> Outcome:
        """Return a context manager that measures one request of an app."""
        return Outcome(self, app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sources: list[tuple[dict[str, str], ReplicaProcess]] = []
        for app in self._apps():
            for name, pool in app.pools.items():
                for number, replica in enumerate(pool.replicas):
                    sources.append(({"app": app.name, "deployment": name, "process": str(number)}, replica))
        texts = await asyncio.gather(*(_fetch(replica) for _, replica in sources))
        merged = CollectorRegistry()
        merged.register(_MergedMetrics([(labels, text) for (labels, _), text in zip(sources, texts, strict=True)]))
        body = generate_latest(self._registry) + generate_latest(merged)
        await Response(body, media_type=CONTENT_TYPE_PLAIN_0_0_4)(scope, receive, send)


async def _fetch(replica: ReplicaProcess) -> str:
    """Return a process's own metrics, or "" if it does not answer in time."""
    try:
        return (await replica.ask("metrics", within_s=_TIMEOUT_S)).decode("utf-8", "replace")
    except (TimeoutError, ChannelClosed):
        return ""


class _PoolMetrics(Collector):
    """The metrics of pools and streams."""

    def __init__(self, apps: Callable[[], Iterable[HostedApp]], num_ended: Mapping[tuple[str, str], int]) -> None:
        self._apps = apps
        self._num_ended = num_ended

    def collect(self) -> Iterable[Metric]:
        names = ["app", "deployment"]
        ongoing = GaugeMetricFamily("tailrace_app_ongoing", "Requests that are running.", labels=names)
        waiting = GaugeMetricFamily("tailrace_app_waiting", "Requests that are queued.", labels=names)
        processes = GaugeMetricFamily("tailrace_app_processes", "Processes that accept requests.", labels=names)
        restarts = CounterMetricFamily("tailrace_app_restarts", "Processes lost and replaced.", labels=names)
        streams = CounterMetricFamily("tailrace_app_streams", "Streams that have ended.", labels=["app", "status"])
        for app in self._apps():
            for name, pool in app.pools.items():
                ongoing.add_metric([app.name, name], pool.num_ongoing)
                waiting.add_metric([app.name, name], pool.num_waiting)
                processes.add_metric([app.name, name], len(pool.replicas))
                restarts.add_metric([app.name, name], pool.num_restarts)
        for (app_name, status), number in self._num_ended.items():
            streams.add_metric([app_name, status], number)
        return ongoing, waiting, processes, restarts, streams


class _MergedMetrics(Collector):
    """Merges the metrics of several processes: each family once, each sample labelled with its process."""

    def __init__(self, texts: list[tuple[Mapping[str, str], str]]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for labels, text in self._texts:
            try:
                parsed = list(text_string_to_metric_families(text))
            except ValueError:  # an app's own text may not be in the format
                continue
            for family in parsed:
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, **labels}))
        return families.values()


class Outcome:
    """Measures one request. A context manager around it."""

    __slots__ = ("_app", "_began_s", "_metrics", "_status")

    def __init__(self, metrics: AppMetrics, app: str) -> None:
        self._metrics = metrics
        self._app = app
        self._began_s = time.monotonic()
        self._status = 0

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        status = error.status if isinstance(error, TailraceError) else self._status
        self._metrics.requests.labels(self._app, str(status or "none")).inc()
        self._metrics.durations.labels(self._app).observe(time.monotonic() - self._began_s)

    def watched(self, send: Send) -> Send:
        """Wrap `send`, to see the start of the answer."""

        async def watching(message: Message) -> None:
            if not self._status and message["type"] in ("http.response.start", "websocket.http.response.start"):
                self._status = int(message["status"])
                self._metrics.first.labels(self._app).observe(time.monotonic() - self._began_s)
            elif not self._status and message["type"] == "websocket.accept":
                self._status = 101
            await send(message)

        return watching
