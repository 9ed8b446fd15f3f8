"""tailrace streams a local language model to clients over many APIs, and keeps each stream alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.packages import telemetry

if TYPE_CHECKING:
    from tailrace_outer.serve.model import Model

__all__ = ["DEFAULT_MODEL", "__version__", "engine"]

__version__ = "0.1.0"

DEFAULT_MODEL = "smollm2"  # of all commands; in models/catalogue.py

telemetry.switch_off()


def engine(model: str = DEFAULT_MODEL, **settings: Any) -> Model:  # Any: of each setting's type
    """Return a model for your own deployment: the built-in engine with continuous batching, in its own process.

    `model` and `settings` are as for `tailrace serve` (`max_sequences=32`). Call it on an event loop, for example in
    the constructor of a deployment. Loading starts at once; the deployment is ready when the model is loaded.

    Raises: TypeError for an unknown setting.
    """
    from tailrace_outer.serve.model import Model

    return Model(model, settings)
