"""What a deployment, or whoever calls one, may have to catch, under the names that Ray Serve has for it."""

from __future__ import annotations

__all__ = [
    "BackPressureError",
    "DeploymentUnavailableError",
    "RayServeException",
    "RequestCancelledError",
    "ServeError",
]


class ServeError(Exception):
    """Anything that goes wrong between the parts of an app."""


RayServeException = ServeError  # the name that apps from there catch


class BackPressureError(ServeError):
    """More is waiting than may. Over HTTP this is 429 with Retry-After, unless `backpressure_config` says otherwise."""

    def __init__(self, message: str, *, status: int = 429, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _back_pressure, (self.message, self.status, self.retry_after_s)


class DeploymentUnavailableError(ServeError):
    """The deployment that was called has no process that could answer, or lost it on the way."""


class RequestCancelledError(ServeError):
    """Whoever waits for this call has cancelled it."""


def _back_pressure(message: str, status: int, retry_after_s: float) -> BackPressureError:
    return BackPressureError(message, status=status, retry_after_s=retry_after_s)
