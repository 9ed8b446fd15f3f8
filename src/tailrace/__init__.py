"""tailrace streams a local language model to whoever asks, and keeps each stream alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace import telemetry

if TYPE_CHECKING:
    from tailrace.serve.model import Model

__all__ = ["__version__", "engine"]

__version__ = "0.1.0"

telemetry.switch_off()


def engine(model: str = "smollm2", **settings: Any) -> Model:  # Any: of each setting's type
    """A model for a deployment of your own: the built-in engine with its continuous batching, in a process beside.

    `model` is what `tailrace serve` takes, `settings` are its settings (`max_sequences=32`). To be called on an event
    loop, as constructors of deployments are; loading begins at once, and a deployment is not ready before it is done.

    Raises: TypeError for a setting that there is not.
    """
    from tailrace.serve.model import Model

    return Model(model, settings)
