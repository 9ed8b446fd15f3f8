"""Metrics of a process of user code: batches, and the app's own prometheus_client metrics. The front exports them."""

from __future__ import annotations

from prometheus_client import REGISTRY, Histogram, disable_created_metrics, generate_latest

__all__ = ["batch_began", "batch_ended", "exposition"]

_SECONDS = tuple(0.001 * 2**power for power in range(18))
_SIZES = tuple(float(2**power) for power in range(11))

disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it so
_size = Histogram("tailrace_batch_size", "Calls in a batch when it begins.", ["function"], buckets=_SIZES)
_waited = Histogram("tailrace_batch_wait_seconds", "Wait of a batch's oldest call.", ["function"], buckets=_SECONDS)
_ran = Histogram("tailrace_batch_seconds", "Seconds that a batch ran.", ["function"], buckets=_SECONDS)


def batch_began(function: str, *, size: int, waited_s: float) -> None:
    _size.labels(function).observe(size)
    _waited.labels(function).observe(waited_s)


def batch_ended(function: str, *, ran_s: float) -> None:
    _ran.labels(function).observe(ran_s)


def exposition() -> bytes:
    """Return all metrics of this process, in Prometheus' text format."""
    return generate_latest(REGISTRY)
