"""Loads a model with transformers, whatever it is for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging as library_logging

from tailrace.engines import EngineSpec, in_one_line
from tailrace.errors import ModelError

__all__ = ["load_model", "named_errors"]

library_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as in all of the library
library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_model(spec: EngineSpec, kind: Any) -> Any:
    """Return a model on its device. Any: the library's classes. Raises: whatever the library raises."""
    model = kind.from_pretrained(
        spec.path,
        dtype=getattr(torch, spec.dtype) if spec.dtype else "auto",
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
    )
    return model.to(spec.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


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
