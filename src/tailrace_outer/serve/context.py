"""The context of the current request, and the limit of concurrent requests, for the app's code."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

__all__ = [
    "RequestContext",
    "get_batch_request_contexts",
    "get_request_context",
    "max_ongoing_requests",
    "set_batch_request_contexts",
    "set_max_ongoing_requests",
    "set_request_context",
]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Route, id and app of a request. All fields are empty outside of a request."""

    route: str = ""
    request_id: str = ""
    app_name: str = ""


_NO_REQUEST = RequestContext()
_request: ContextVar[RequestContext] = ContextVar("tailrace_request", default=_NO_REQUEST)
_batch: ContextVar[list[RequestContext] | None] = ContextVar("tailrace_batch", default=None)
_max_ongoing_requests: int | None = None


def get_request_context() -> RequestContext:
    """Return the context of the current request. Empty in functions with `@serve.batch`, which answer several."""
    return _request.get()


def set_request_context(context: RequestContext) -> None:
    """Set the context of this task, and of the tasks that it starts."""
    _request.set(context)


def get_batch_request_contexts() -> list[RequestContext]:
    """Return the contexts of the batch's requests, in order. Empty outside of functions with `@serve.batch`."""
    return list(_batch.get() or ())


def set_batch_request_contexts(contexts: list[RequestContext]) -> None:
    """Set the contexts of this task's batch. The caller may change the list when requests join or leave."""
    _batch.set(contexts)


def max_ongoing_requests() -> int | None:
    """Return the limit of concurrent requests of this process, or None outside of a replica."""
    return _max_ongoing_requests


def set_max_ongoing_requests(bound: int | None) -> None:
    """Set the limit of concurrent requests for the whole process."""
    global _max_ongoing_requests
    _max_ongoing_requests = bound
