"""`/-/metrics`: what the front counts of every app, and what the apps' processes count themselves."""

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

from tailrace.apps.pool import HostedApp
from tailrace.apps.process import ReplicaProcess
from tailrace.errors import TailraceError
from tailrace.serve.link import ChannelClosed

__all__ = ["AppMetrics"]

_SECONDS = tuple(0.001 * 2**power for power in range(20))
_ANSWER_S = 1.0  # a process that is busy for longer is left out this time


class AppMetrics:
    """Counts requests, and asks the processes. An ASGI application that shows it all."""

    def __init__(self, apps: Callable[[], Iterable[HostedApp]], num_ended: Mapping[tuple[str, str], int]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it so
        self._apps = apps
        registry = self._registry = CollectorRegistry()
        registry.register(_Known(apps, num_ended))
        self.requests = Counter("tailrace_app_requests", "Requests, by status.", ["app", "status"], registry=registry)
        self.first = Histogram(
            "tailrace_app_first_seconds", "Time to the head of an answer.", ["app"], registry=registry, buckets=_SECONDS
        )
        self.durations = Histogram(
            "tailrace_app_request_seconds", "Time to its end.", ["app"], registry=registry, buckets=_SECONDS
        )

    def asking(self, app: str) -> Outcome:
        """A request of an app, while it is answered."""
        return Outcome(self, app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked: list[tuple[dict[str, str], ReplicaProcess]] = []
        for app in self._apps():
            for name, pool in app.pools.items():
                for number, replica in enumerate(pool.replicas):
                    asked.append(({"app": app.name, "deployment": name, "process": str(number)}, replica))
        told = await asyncio.gather(*(_told(replica) for _, replica in asked))
        merged = CollectorRegistry()
        merged.register(_Merged([(labels, text) for (labels, _), text in zip(asked, told, strict=True)]))
        body = generate_latest(self._registry) + generate_latest(merged)
        await Response(body, media_type=CONTENT_TYPE_PLAIN_0_0_4)(scope, receive, send)


async def _told(replica: ReplicaProcess) -> str:
    """A process's own metrics; nothing where it does not answer in time."""
    try:
        return (await replica.ask("metrics", within_s=_ANSWER_S)).decode("utf-8", "replace")
    except (TimeoutError, ChannelClosed):
        return ""


class _Known(Collector):
    """What pools and streams know of themselves."""

    def __init__(self, apps: Callable[[], Iterable[HostedApp]], num_ended: Mapping[tuple[str, str], int]) -> None:
        self._apps = apps
        self._num_ended = num_ended

    def collect(self) -> Iterable[Metric]:
        names = ["app", "deployment"]
        ongoing = GaugeMetricFamily("tailrace_app_ongoing", "Requests that processes have.", labels=names)
        waiting = GaugeMetricFamily("tailrace_app_waiting", "Requests that wait.", labels=names)
        processes = GaugeMetricFamily("tailrace_app_processes", "Processes that can be asked.", labels=names)
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


class _Merged(Collector):
    """Several processes' metrics as one exposition: each family once, each sample with where it comes from."""

    def __init__(self, texts: list[tuple[Mapping[str, str], str]]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for labels, text in self._texts:
            try:
                parsed = list(text_string_to_metric_families(text))
            except ValueError:  # an app's own, and not in the format
                continue
            for family in parsed:
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, **labels}))
        return families.values()


class Outcome:
    """How one request is going. A context manager around it."""

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
        """The same, telling us of the head of the answer."""

        async def watching(message: Message) -> None:
            if not self._status and message["type"] in ("http.response.start", "websocket.http.response.start"):
                self._status = int(message["status"])
                self._metrics.first.labels(self._app).observe(time.monotonic() - self._began_s)
            elif not self._status and message["type"] == "websocket.accept":
                self._status = 101
            await send(message)

        return watching
