"""Serves Inferless apps unchanged: a folder with `app.py`, `input_schema.py` and their settings.

`load_app` makes an ASGI app of such a folder.
"""

from __future__ import annotations

from tailrace_plugins.inferless.app import InferlessApp, load_app
from tailrace_plugins.inferless.errors import AppError, InferFailed, OutputError, StreamCancelled
from tailrace_plugins.inferless.output import StreamOutputHandler

__all__ = [
    "AppError",
    "InferFailed",
    "InferlessApp",
    "OutputError",
    "StreamCancelled",
    "StreamOutputHandler",
    "load_app",
]
