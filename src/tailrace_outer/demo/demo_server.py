"""The demo's server: `tailrace serve` with the simulated engine, the real model and the routes of the page.

Started by `keeper` as `python -m tailrace_outer.demo.demo_server PARENT DIRECTORY PORT MODEL`; with an empty MODEL
there is only the simulated engine.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import click

from tailrace.api.lifecycle import RunningServer, serve
from tailrace.assembly.source import find_source
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.directories import prepared_path
from tailrace.settings import Settings
from tailrace.system import eventloop
from tailrace.system.child import begin_child
from tailrace.transport.addresses import bind
from tailrace_outer.demo.demo_routes import DemoRoutes
from tailrace_outer.demo.keeper import FETCH_FILE

__all__ = ["SIMULATED", "main"]

SIMULATED = "scripted:tokens_per_s=24,utf8=0"
_MAX_SEQUENCES = 8  # the batch that the page shows; a ninth stream waits in the queue


def main() -> None:
    """Serve until SIGTERM. Exits with status 1 and a message if the server cannot start."""
    parent, directory, port, model = sys.argv[1:]
    begin_child(int(parent))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the event loop takes it over
    logging.basicConfig(level=logging.WARNING, format="tailrace: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    settings = Settings(
        port=int(port), data_dir=directory, max_sequences=_MAX_SEQUENCES, drain_s=0.0, default_max_tokens=200
    )
    try:
        eventloop.run(_serve(settings, Path(directory), model))
    except* ModelError as group:
        click.echo(f"tailrace: {eventloop.first_error(group)}", err=True)
        sys.exit(1)


async def _serve(settings: Settings, directory: Path, model: str) -> None:
    try:
        sock = bind(settings)
    except OSError as error:
        raise ModelError(f"Cannot listen on {settings.host}:{settings.port} ({error.strerror}).") from None
    simulated = find_source(SIMULATED, NoProgress())
    real = [find_source(model, NoProgress(), settings)] if model else []
    if any(source.card.chat_template is None for source in real):
        raise ModelError("The demo needs a model with a chat template.")

    def on_ready(running: RunningServer) -> None:
        service = running.service
        for served in list(service.models)[1:]:
            service.models.preload(served)
        on = {0: "", 1: " 1 stream goes on."}.get(service.num_recovered, f" {service.num_recovered} streams go on.")
        click.echo(f"Server {os.getpid()} is ready: http://127.0.0.1:{settings.port}/demo{on}", err=True)

    with sock:
        await serve(
            simulated,
            settings,
            sock,
            data_path=directory,
            cache_path=prepared_path(),
            more=real,
            on_ready=on_ready,
            own_routes=lambda service: DemoRoutes(service, settings, directory / FETCH_FILE).table(),
        )


if __name__ == "__main__":
    main()
