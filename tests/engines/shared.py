"""One engine for all laws, since a real one takes long to load."""

from __future__ import annotations

from typing import cast

from tailrace.engines.interface import Engine, Reporting
from tailrace.testing import laws

__all__ = ["ON_ITS_OWN", "SHARED_LAWS", "Shared"]

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
