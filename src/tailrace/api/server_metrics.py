"""`/metrics`: metrics for Prometheus, with names of our own (docs/observe.md).

A token costs nothing here: requests are counted at their stages, running streams are asked when somebody reads the
metrics, and stalls are looked for four times a second.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from tailrace.errors import TailraceError
from tailrace.generation import Generator, Observer, Observers, Times
from tailrace.generation.stalls import STALL_CAUSES, StallCause
from tailrace.streams import LogStore, StreamLog
from tailrace.types import Arrival, Record

__all__ = ["MAX_KEYS", "Metrics"]

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
MAX_KEYS = 100  # with series of their own; the rest is `other`
_STATES: tuple[tuple[str, str, Callable[[Generator], float]], ...] = (
    ("requests_waiting", "Requests in the queue.", lambda generator: generator.gate.num_waiting),
    ("requests_running", "Requests on the engine.", lambda generator: generator.gate.num_running),
    (
        "kv_cache_usage",
        "Share of the KV cache that running requests have reserved, 0 to 1.",
        lambda generator: generator.gate.kv_usage,
    ),
    (
        "readers",
        "Clients that read streams which have not ended.",
        lambda generator: sum(run.log.num_readers for run in generator.live),
    ),
    ("engine_restarts", "Engines that were lost and replaced.", lambda generator: generator.num_restarts),
    ("ready", "Whether `/readyz` answers 200: requests may be sent.", lambda generator: generator.is_ready),
)

_SECONDS = tuple(0.0001 * 1.5**power for power in range(1, 36))  # TGI's bounds
_TOKENS = tuple(float(2**power) for power in range(18))


class _States(Collector):
    """The state of each model, when somebody asks."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, text, of in _STATES:
            gauge = GaugeMetricFamily(f"tailrace_{name}", text, labels=("model",))
            for generator in self._generators:
                gauge.add_metric((generator.model,), of(generator))
            yield gauge


class Metrics(Observer):
    """The metrics of all models. `generators` are those that the server has at the time. `shows_keys`: there are also
    series for each key."""

    def __init__(self, generators: Sequence[Generator], observers: Observers, *, shows_keys: bool = True) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library does not annotate it
        self.registry = CollectorRegistry()
        self.generators = generators
        self._children: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}  # by metric and labels
        self._known: set[str] = set()  # models with series
        self._num_decoded: Tally[str] = Tally()  # of ended streams, by model
        self._num_counted: Tally[str] = Tally()  # of all streams, as they are shown
        self._shows_keys = shows_keys
        self._keys: set[str] = set()

        self.requests = self._counter("requests", "Requests for a generation.")
        self.refusals = self._counter("refusals", "Requests that were refused, by the code of the error.", "reason")
        self.ended = self._counter(
            "streams_ended", "Ended streams, by status and code of the error.", "status", "reason"
        )
        self.finished = self._counter("answers", "Complete answers, by why they ended.", "finish_reason")
        self.tokens = self._counter(
            "tokens",
            "Tokens of prompts that were read (prefill) or found in a prefix cache (cached), and of answers (decode).",
            "phase",
        )
        self.reasoning = self._counter("reasoning_tokens", "Tokens of answers that are reasoning.")
        self.unread = self._counter("unread_tokens", "Tokens that no client had read when their stream ended.")
        self.followed = self._counter(
            "follows", "Reads of streams that had begun, from their start or later.", "position"
        )
        self.ignored = self._counter("ignored_fields", "Fields of requests without effect.", "wire", "field")
        self.taken_over = self._counter("streams_taken_over", "Streams of dead servers that continued here.")
        self.replays = self._counter("replays", "Streams that ran again from their prompts.")
        self.replayed = self._counter(
            "replayed_tokens", "Tokens that were read or generated again by replays.", "phase"
        )
        self.preemptions = self._counter(
            "preemptions", "Streams in the background that left the engine to others, and began again."
        )
        self.stalls = self._counter("stalls", "Gaps of over a second in running streams.", "cause")
        self.stalled = self._counter("stalled_seconds", "Seconds of these gaps.", "cause")
        self.of_keys = self._counter("key_requests", "Requests of a key.", "key")
        self.tokens_of_keys = self._counter("key_tokens", "Tokens of a key's requests.", "key", "phase")
        self.refusals_of_keys = self._counter("key_refusals", "Refused requests of a key.", "key", "reason")
        self.unread_of_keys = self._counter("key_unread_tokens", "Tokens of a key that no client had read.", "key")
        self.outlived = self._gauge(
            "streams_outlived",
            "Streams that survived the loss of an engine or a server: replayed or continued.",
            "continuity",
        )

        self.total_s = self._seconds("request_seconds", "Seconds from a request to the end of its complete answer.")
        self.validation_s = self._seconds("validation_seconds", "Seconds from a request to the queue.")
        self.queue_s = self._seconds("queue_seconds", "Seconds in the queue, without requests in the background.")
        self.prefill_s = self._seconds("prefill_seconds", "Seconds from the engine to the first token.")
        self.first_s = self._seconds("time_to_first_token_seconds", "Seconds to the first token.")
        self.inference_s = self._seconds("inference_seconds", "Seconds on the engine of complete answers.")
        self.decode_s = self._seconds("decode_seconds", "Seconds from the first token to the end of complete answers.")
        self.itl_s = self._seconds("inter_token_seconds", "Mean seconds between two tokens of a stream.")
        self.silence_s = self._seconds("replay_silence_seconds", "Seconds without a new token after a loss.")
        self.prompt_tokens = self._histogram("prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer_tokens = self._histogram("answer_tokens", "Tokens of a complete answer.", _TOKENS)
        self.max_tokens = self._histogram("max_tokens", "The most tokens that a request may get.", _TOKENS)

        self._add_states(generators[0].store)
        self._show_models()
        observers.add(self)

    def _add_states(self, store: LogStore) -> None:
        for name, text, value in (
            ("streams", "Readable streams, including finished ones.", lambda: store.state.num_streams),
            ("servers", "Servers that share the log store, with this one.", lambda: store.state.num_servers),
            ("servers_other_models", "Those with other models.", lambda: store.state.num_with_other_models),
            (
                "clock_offset_seconds",
                "Seconds by which this server's clock is ahead of that of the machine that keeps the streams.",
                lambda: store.state.clock_offset_s,
            ),
            ("commit_seconds", "Seconds for which commits held up the server.", lambda: store.state.commit_s),
        ):
            Gauge(f"tailrace_{name}", text, registry=self.registry).set_function(value)
        self.registry.register(_States(self.generators))

    def _show_models(self) -> None:
        for generator in self.generators:
            if generator.model not in self._known:
                self._known.add(generator.model)
                self._show(generator.model)

    def _show(self, model: str) -> None:
        """Create series that are there from the start: a rate is only known from the second value on."""
        counters = (self.requests, self.reasoning, self.unread, self.taken_over, self.replays, self.preemptions)
        for counter in counters:
            self._of(counter, model)
        for phase in ("prefill", "cached", "decode"):
            self._of(self.tokens, model, phase)
        for phase in ("prefill", "decode"):
            self._of(self.replayed, model, phase)
        for position in ("start", "later"):
            self._of(self.followed, model, position)
        for cause in STALL_CAUSES:
            self._of(self.stalls, model, cause)
            self._of(self.stalled, model, cause)
        self._of(self.ended, model, "done", "")
        for histogram in self._histograms:
            self._of(histogram, model)

    # The stages of a request

    def on_arrival(self, arrival: Arrival) -> None:
        self._of(self.requests, arrival.model).inc()
        if arrival.key_id and self._shows_keys:
            self._of(self.of_keys, arrival.model, self._key(arrival.key_id)).inc()

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        self._of(self.refusals, arrival.model, error.code).inc()
        if arrival.key_id and self._shows_keys:
            self._of(self.refusals_of_keys, arrival.model, self._key(arrival.key_id), error.code).inc()

    def on_turned_away(self, error: TailraceError) -> None:
        """A request was refused by its Host, Origin or key, before anybody knew its model."""
        self._of(self.refusals, "", error.code).inc()

    def on_ignored(self, record: Record, fields: Sequence[str]) -> None:
        for field in dict.fromkeys(fields):
            self._of(self.ignored, record.model, record.wire, field).inc()

    def on_begun(self, record: Record) -> None:
        self._of(self.max_tokens, record.model).observe(record.sampling.max_tokens or 0)

    def on_admitted(self, record: Record, times: Times) -> None:
        if times.entered_s is not None and times.admitted_s is not None and not record.is_background:
            self._of(self.queue_s, record.model).observe(times.admitted_s - times.entered_s)

    def on_first_token(self, record: Record, times: Times) -> None:
        assert times.first_s is not None
        assert times.admitted_s is not None
        self._of(self.prefill_s, record.model).observe(times.first_s - times.admitted_s)
        self._of(self.first_s, record.model).observe(times.first_s - times.arrived_s)

    def on_followed(self, record: Record, after: int) -> None:
        self._of(self.followed, record.model, "later" if after else "start").inc()

    def on_taken_over(self, record: Record, num_tokens: int) -> None:
        self._of(self.taken_over, record.model).inc()
        self._num_decoded[record.model] -= num_tokens  # another server has counted them

    def on_replay(self, record: Record, num_tokens: int) -> None:
        self._of(self.replays, record.model).inc()
        self._of(self.replayed, record.model, "prefill").inc(record.num_prompt_tokens)
        self._of(self.replayed, record.model, "decode").inc(num_tokens)

    def on_caught_up(self, record: Record, silent_s: float) -> None:
        self._of(self.silence_s, record.model).observe(silent_s)

    def on_readmitted(self, record: Record, waited_s: float) -> None:
        self._of(self.preemptions, record.model).inc()

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        model, end = record.model, log.end
        assert end is not None
        self._of(self.ended, model, end.status, end.failure.code if end.failure is not None else "").inc()
        if end.continuity is not None and (times.num_losses or not times.num_preemptions):
            self._of(self.outlived, model, end.continuity).inc()
        num_tokens, num_unread = end.usage.num_completion_tokens, log.num_unread_tokens
        self._num_decoded[model] += num_tokens
        cached = end.num_cached_tokens or 0
        read = end.usage.num_prompt_tokens - cached if times.admitted_s is not None else 0
        for phase, count in (("prefill", read), ("cached", cached)):
            self._of(self.tokens, model, phase).inc(max(0, count))
        if record.key_id and self._shows_keys:
            key = self._key(record.key_id)
            for phase, count in (("prefill", read), ("cached", cached), ("decode", num_tokens)):
                self._of(self.tokens_of_keys, model, key, phase).inc(max(0, count))
            self._of(self.unread_of_keys, model, key).inc(num_unread)
        self._of(self.reasoning, model).inc(end.num_reasoning_tokens)
        self._of(self.unread, model).inc(num_unread)
        if times.first_s is not None and times.ended_s is not None and num_tokens > record.num_choices:
            gaps = num_tokens / record.num_choices - 1
            self._of(self.itl_s, model).observe((times.ended_s - times.first_s) / gaps)
        if end.status == "done":
            self._on_done(record, log, times)

    def _on_done(self, record: Record, log: StreamLog, times: Times) -> None:
        model, end = record.model, log.end
        assert end is not None
        assert times.entered_s is not None
        assert times.admitted_s is not None
        assert times.ended_s is not None
        self._of(self.total_s, model).observe(times.ended_s - times.arrived_s)
        self._of(self.validation_s, model).observe(times.entered_s - times.arrived_s)
        self._of(self.inference_s, model).observe(times.ended_s - times.admitted_s)
        if times.first_s is not None:
            self._of(self.decode_s, model).observe(times.ended_s - times.first_s)
        self._of(self.prompt_tokens, model).observe(end.usage.num_prompt_tokens)
        self._of(self.answer_tokens, model).observe(end.usage.num_completion_tokens)
        for reason in log.finish_reasons():
            self._of(self.finished, model, reason).inc()

    def on_stall(self, model: str, cause: StallCause, stalled_s: float, *, is_new: bool) -> None:
        self._of(self.stalls, model, cause).inc(is_new)
        self._of(self.stalled, model, cause).inc(stalled_s)

    def answer(self) -> Response:
        self._show_models()
        self._count_tokens()
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _count_tokens(self) -> None:
        """Count the tokens of running streams, which nobody counts as they come."""
        now = Tally(self._num_decoded)
        for generator in self.generators:
            for run in generator.live:
                now[run.record.model] += run.usage.num_completion_tokens
        for model, num_tokens in now.items():
            if (num_new := num_tokens - self._num_counted[model]) > 0:
                self._of(self.tokens, model, "decode").inc(num_new)
                self._num_counted[model] = num_tokens

    # Names and labels

    @property
    def _histograms(self) -> Iterable[Histogram]:
        return [one for one in vars(self).values() if isinstance(one, Histogram)]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tailrace_{name}", text, (*labels, "model"), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"tailrace_{name}", text, (*labels, "model"), registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, _SECONDS)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"tailrace_{name}", text, ("model",), buckets=bounds, registry=self.registry)

    def _of(self, metric: _Metric, model: str, *labels: str) -> _Metric:
        """Return a metric with its labels for a model. Looking up the labels takes the library a microsecond."""
        key = (metric, model, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels, model)
        return cast(_Metric, child)

    def _key(self, key_id: str) -> str:
        """Return a key's label. There is a limit, so that keys do not make any number of series."""
        if key_id not in self._keys:
            if len(self._keys) >= MAX_KEYS:
                return "other"
            self._keys.add(key_id)
        return key_id
