"""Loads a model with transformers, whatever it is for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging as library_logging

from tailrace.engines import EngineSpec, in_one_line
from tailrace.errors import ModelError

__all__ = ["device_of", "load_model", "named_errors"]

_PRESENT: dict[str, Callable[[], bool]] = {
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "xpu": torch.xpu.is_available,
}

library_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as in all of the library
library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def device_of(name: str) -> str:
    """Return a device by torch's name. Raises: ModelError if this machine does not have it."""
    kind, _, number = name.partition(":")
    present = [one for one, has in _PRESENT.items() if has()]
    if not kind:
        return "cuda" if "cuda" in present else "cpu"
    theirs = {"rocm": "cuda", "metal": "mps", "gpu": present[0] if present else ""}.get(kind, kind)
    if theirs != "cpu" and theirs not in present:
        raise ModelError(f"torch has no {kind} on this machine. --device can be {', '.join([*present, 'cpu'])}.")
    return f"{theirs}:{number}" if number else theirs


def load_model(spec: EngineSpec, kind: Any) -> Any:
    """Return a model on its device. Any: the library's classes. Raises: whatever the library raises."""
    model = kind.from_pretrained(
        spec.path,
        dtype=getattr(torch, spec.dtype) if spec.dtype else "auto",
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
    )
    return model.to(device_of(spec.device)).eval()


@contextmanager
def named_errors(spec: EngineSpec) -> Iterator[None]:
    """Convert the library's exceptions to a ModelError of one line that names the model."""
    name = os.path.basename(spec.path.rstrip("/"))
    try:
        yield
    except ModelError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit into the device's memory. Try a smaller --kv-tokens.") from error
    except Exception as error:  # the library raises whatever its models and loaders do
        text = in_one_line(error)
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            text = "it needs its own code, which tailrace does not run. Only architectures built into transformers work"
        raise ModelError(f"transformers cannot load {name}: {text}.") from error
