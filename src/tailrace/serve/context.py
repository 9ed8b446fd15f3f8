"""Whose request is being answered, and how many this process takes at once: what the app's own code may ask for."""

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
    """Where a request came in. Outside of one, everything is empty."""

    route: str = ""
    request_id: str = ""
    app_name: str = ""


_NOBODY = RequestContext()
_request: ContextVar[RequestContext] = ContextVar("tailrace_request", default=_NOBODY)
_batch: ContextVar[list[RequestContext] | None] = ContextVar("tailrace_batch", default=None)
_max_ongoing_requests: int | None = None


def get_request_context() -> RequestContext:
    """The request that the running code answers. In a handler of `@serve.batch`, which answers several: empty."""
    return _request.get()


def set_request_context(context: RequestContext) -> None:
    """From here on, in this task and in those that it starts, `context` is what is answered."""
    _request.set(context)


def get_batch_request_contexts() -> list[RequestContext]:
    """In a handler of `@serve.batch`: the requests of its batch, in order. Elsewhere: none."""
    return list(_batch.get() or ())


def set_batch_request_contexts(contexts: list[RequestContext]) -> None:
    """From here on, in this task, these are answered together. The list may be changed as they come and go."""
    _batch.set(contexts)


def max_ongoing_requests() -> int | None:
    """How many requests this process takes at once; None where it is no replica."""
    return _max_ongoing_requests


def set_max_ongoing_requests(bound: int | None) -> None:
    """For the whole process."""
    global _max_ongoing_requests
    _max_ongoing_requests = bound
