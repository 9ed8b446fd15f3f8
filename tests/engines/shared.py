"""One engine for all laws, since a real one takes long to load."""

from __future__ import annotations

from typing import cast

from tailrace.engines.interface import Delta, Engine, Reporting, Sequence
from tailrace.testing import laws

__all__ = ["ON_ITS_OWN", "SHARED_LAWS", "Shared", "run_all"]

ON_ITS_OWN = "closing_twice_is_harmless"  # the engine that the other laws share must not be closed
SHARED_LAWS = [law for law in laws if law.name != ON_ITS_OWN]


class Shared:
    """Returns the same engine for each call. Its fixture closes it."""

    def __init__(self, engine: Engine) -> None:
        self.capabilities = engine.capabilities
        self.submit = engine.submit
        self.abort = engine.abort
        self.step = engine.step
        if engine.capabilities.reports_progress:
            self.progress = cast("Reporting", engine).progress

    def __call__(self) -> Engine:
        return self

    def close(self) -> None:
        pass


def run_all(engine: Engine | Shared, *sequences: Sequence) -> dict[int, list[Delta]]:
    """Run sequences to their ends. Returns the deltas of each, by its id."""
    deltas: dict[int, list[Delta]] = {sequence.sequence_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.submit(sequence)
    num_open = len(deltas)
    while num_open:
        for delta in engine.step():
            deltas[delta.sequence_id].append(delta)
            num_open -= delta.finish_reason is not None
    return deltas
