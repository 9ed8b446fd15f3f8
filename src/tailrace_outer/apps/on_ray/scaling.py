"""Autoscaling by the requests in the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

__all__ = ["by_requests"]


def by_requests(
    context: AutoscalingContext,
) -> tuple[float, dict[str, Any]]:  # Any: a policy's state
    """Return how many replicas there should be: the running and waiting requests of all servers, and those that wait in
    Ray's queues, divided by `target_ongoing_requests`.

    Ray's own policy counts connections. That would count idle WebSockets, and miss streams without readers.
    """
    measured = (context.aggregated_metrics or {}).get("requests", {})
    if not measured:  # no replica has reported yet, for example after a restart of the controller
        return context.target_num_replicas, {}
    num_requests = sum(measured.values()) + context.total_queued_requests
    return num_requests / context.config.get_target_ongoing_requests(), {}
