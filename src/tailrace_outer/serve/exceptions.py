"""The exceptions that deployments and their callers may catch, with Ray Serve's names."""

from __future__ import annotations

__all__ = [
    "BackPressureError",
    "DeploymentUnavailableError",
    "RayServeException",
    "RequestCancelledError",
    "ServeError",
]


class ServeError(Exception):
    """Base class of failures between the deployments of an app."""


RayServeException = ServeError  # the name that apps written for Ray catch


class BackPressureError(ServeError):
    """The queue is full. Over HTTP this is 429 with Retry-After, unless `backpressure_config` says otherwise."""

    def __init__(self, message: str, *, status: int = 429, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _back_pressure, (self.message, self.status, self.retry_after_s)


class DeploymentUnavailableError(ServeError):
    """The called deployment has no running process, or its process died during the call."""


class RequestCancelledError(ServeError):
    """The call was cancelled."""


def _back_pressure(message: str, status: int, retry_after_s: float) -> BackPressureError:
    return BackPressureError(message, status=status, retry_after_s=retry_after_s)
