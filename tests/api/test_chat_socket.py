"""The codes that close the socket of a chat."""

from __future__ import annotations

import pytest

from tailrace.api.chat_socket import close_for
from tailrace.dialects.wire import failure_of
from tailrace.errors import (
    ContextLengthExceeded,
    Draining,
    EngineLost,
    QueueFull,
    RequestError,
    StorageError,
    TailraceError,
    UnsupportedParameter,
)
from tailrace.types import End, Failure, Released, Usage


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("No."), 1008),
        (UnsupportedParameter("No."), 1008),
        (ContextLengthExceeded(9, 5), 1009),
        (EngineLost("Gone.", retry_after_s=1), 1011),
        (TailraceError("A defect."), 1011),
        (Draining("Stopping."), 1012),
        (QueueFull("Full.", retry_after_s=1), 1013),
        (failure_of(End("error", Usage(1, 1), Failure("engine_stalled", "It hung."))), 1011),
        (failure_of(End("error", Usage(1, 1), Failure("queue_timeout", "Too busy."))), 1013),
        (failure_of(End("interrupted", Usage(1, 1), Failure("interrupted", "Stopped."))), 1012),
        (failure_of(End("cancelled", Usage(1, 1))), 1011),
        (failure_of(Released("s", 1, Failure("draining", "Stopping."))), 1012),
        (failure_of(Released("s", 1, Failure("lease_lost", "Taken over."))), 1012),
        (failure_of(Released("s", 1, Failure("journal_unavailable", "Away."))), 1013),
        (StorageError("Away."), 1013),
    ],
    ids=lambda value: value.code if isinstance(value, TailraceError) else str(value),
)
def test_an_error_closes_the_socket_with_its_reason(error: TailraceError, code: int) -> None:
    assert close_for(error) == (code, error.message)


def test_a_reason_fits_its_frame() -> None:
    close = close_for(RequestError("é" * 200))
    assert close.reason == "é" * 61
