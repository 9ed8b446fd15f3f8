"""An Inferless app as a folder that `tailrace run` serves."""

from __future__ import annotations

from pathlib import Path

from tailrace import serve
from tailrace.serve.folders import AppFolder, FolderApp

__all__ = ["FOLDER", "load_folder"]

_CHECK_S = 2.0  # short, since one hanging `infer` blocks the whole app

FOLDER = AppFolder(
    "inferless",
    "an Inferless app",
    "app.py",
    "tailrace_plugins.inferless.folder:load_folder",
    wire_prefix="/v2/",  # Triton's
)


def load_folder(folder: Path, *, concurrency: int, queue_s: float | None) -> FolderApp:
    """Raises: AppError, and the exceptions of the app's own code."""
    from tailrace_plugins.inferless.app import load_app  # imported late: the front needs none of it

    app = load_app(folder, concurrency=concurrency, queue_s=queue_s)
    body = type("InferlessApp", (), {"check_health": lambda _: app.check_health()})
    deploy = serve.deployment(
        name=app.name, max_ongoing_requests=app.max_ongoing_requests, health_check_period_s=_CHECK_S
    )
    return FolderApp(deploy(serve.ingress(app)(body)).bind(), tuple(app.notes))
